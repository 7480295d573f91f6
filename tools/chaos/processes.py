"""The processes of a play: the service and its agents, each marked so that none of their children can hide."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from attrs import define, field
from tools.chaos.stages import Stage

from areal_actors.lib.child_process import kill_with_pipe

__all__ = ["ADMIN_KEY", "MARK", "ROOT", "Child", "Failed", "Stages", "fork", "marked", "spawn", "wait_for"]

ROOT = Path(__file__).parents[2]
ADMIN_KEY = "admin-key-of-the-chaos-test"
MARK = "CHAOS_DIRECTORY"
"""Each process of a play has this in its environment, with the directory of the play; so do all that it starts."""


class Failed(Exception):
    """A play went wrong before it could be judged."""


@define(eq=False)
class Child:
    """A process that was started. ``began`` is when, by the monotonic clock."""

    name: str
    process: subprocess.Popen[str] | ForkedProcess
    log: Path
    _lifeline: int
    """The writing end of a pipe. When this process ends and it closes, the kernel kills the child's group."""
    began: float = field(factory=time.monotonic)

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    def kill(self) -> bool:
        """End it with SIGKILL; returns whether it was alive."""
        was_alive = self.is_alive
        self.process.kill()
        self.process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        return was_alive

    def interrupt(self, number: signal.Signals, seconds: float) -> int:
        """Send a signal and wait for the exit code. Raises ``Failed``."""
        self.process.send_signal(number)
        return self.wait(seconds)

    def wait(self, seconds: float) -> int:
        """The exit code. Raises ``Failed``."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Failed(f"{self.name} did not end within {seconds:g} s; see {self.log}") from None

    def output_tail(self, num_lines: int = 30) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])


def spawn(name: str, arguments: Sequence[str], *, directory: Path, variables: Mapping[str, str]) -> Child:
    """Start a Python in a session of its own, with everything that it prints in ``<name>.log``."""
    log = directory / f"{name}.log"
    environment = os.environ | _environment(directory)
    reader, writer = os.pipe()
    with log.open("a") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=environment | dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
            pass_fds=(reader,),
        )
    return Child(name, process, log, _tie(process.pid, reader, writer))


def fork(name: str, function: Callable[[], None], *, directory: Path, variables: Mapping[str, str]) -> Child:
    """Run ``function`` in a copy of this process, which has imported everything, as ``spawn`` does."""
    log = directory / f"{name}.log"
    reader, writer = os.pipe()

    def run() -> None:
        os.close(writer)
        os.setsid()
        kill_with_pipe(os.getpid(), reader)
        os.environ.update(_environment(directory) | dict(variables))
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        function()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    os.close(reader)
    return Child(name, ForkedProcess(process), log, writer)


@define(eq=False)
class ForkedProcess:
    """A copy of this process, with the methods of ``subprocess.Popen`` that a child needs."""

    _process: Any

    @property
    def pid(self) -> int:
        """Its id."""
        return int(self._process.pid)

    @property
    def returncode(self) -> int | None:
        """Its exit code, if it has ended; that of a signal is negative."""
        return self.poll()

    def poll(self) -> int | None:
        """The same."""
        code: int | None = self._process.exitcode
        return code

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._process.kill()

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises ``subprocess.TimeoutExpired``."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("fork", timeout or 0.0)
        return int(self._process.exitcode)


def _tie(group: int, reader: int, writer: int) -> int:
    """Return ``writer``, with whose end the group of a process is killed, which has inherited ``reader``."""
    with suppress(ProcessLookupError):
        kill_with_pipe(group, reader)
    os.close(reader)
    return writer


def _environment(directory: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        MARK: str(directory),
    }


def marked(directory: Path) -> Iterator[psutil.Process]:
    """The processes of this play that run, whoever started them; not the one that asks."""
    for process in psutil.process_iter():
        try:
            is_other = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            if is_other and process.environ().get(MARK) == str(directory):
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


class Stages:
    """Reads what the service says of itself."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "stage"
        self._path.touch()
        self._file = os.open(self._path, os.O_RDONLY)

    def read(self, life: int) -> frozenset[Stage]:
        """What the given life of the service does; nothing before it has said anything."""
        words = os.pread(self._file, 200, 0).decode().split()
        return frozenset(map(Stage, words[1:])) if words and words[0] == str(life) else frozenset()

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until ``condition()`` holds. Raises ``Failed``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise Failed(f"waited {seconds:g} s for {what}")
        time.sleep(0.05)
