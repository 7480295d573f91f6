"""Child processes that are always cleaned up: each leads a process group, which is killed when this process ends.

A child inherits the reading end of a pipe that carries no data, the lifeline. The pipe closes when this process ends,
for any reason, and the Linux kernel then kills the child's whole group; on other systems the child has to watch the
pipe itself (``workflows.worker`` does). The child's stderr goes to a ``BoundedLog``.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import IO, Any

import anyio
from anyio.abc import ByteReceiveStream, Process

GRACE_SECONDS = 2.0
"""Time that a process has to exit after SIGTERM."""

_TAIL_BYTES = 4096
STOPPED_SECONDS = 5.0
"""Time after which a process that a signal has stopped counts as hung. A debugger that attaches stops it for less."""
LAST_WORDS_SECONDS = 1.0
"""Time to wait for the rest of an ended process's stderr, which a daemon that it left behind may hold open forever."""
_REAP_SECONDS = 10.0
"""Time to wait for the exit status of a process that has been killed."""


class BoundedLog:
    """The output of successive processes: at most two files of ``max_bytes``, and the last 4096 bytes in memory.

    A full file is renamed to ``<name>.1``, which replaces the previous one. Without a ``path`` only the last bytes in
    memory are kept.
    """

    def __init__(self, path: Path | None = None, *, max_bytes: int = 4 * 1024 * 1024) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._last = b""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def begin(self) -> None:
        """Start the output of another process: clear ``output_tail``."""
        self._last = b""

    def write(self, chunk: bytes, *, is_last_words: bool = True) -> None:
        """Append ``chunk`` to the file and, if ``is_last_words``, to the tail that is kept in memory."""
        if is_last_words:
            self._last = (self._last + chunk)[-_TAIL_BYTES:]
        if self._path is None:
            return
        chunk = chunk[-self._max_bytes :]
        # A full disk must not fail the episode; writes that matter report it themselves.
        with suppress(OSError):
            with self._path.open("ab") as file:
                is_full = file.tell() + len(chunk) > self._max_bytes
                if not is_full:
                    file.write(chunk)
            if is_full:
                # One rotation, so that the log never takes more than two files.
                self._path.rename(self._path.with_name(f"{self._path.name}.1"))
                self._path.write_bytes(chunk)

    @property
    def output_tail(self) -> str:
        """The end of the output of the present process."""
        return self._last.decode(errors="replace").strip()


class Child:
    """A process that leads its own process group. Create it with ``start``; the caller must end it with ``kill``."""

    def __init__(self, process: Process, *, lifeline: int, log: BoundedLog) -> None:
        self.process = process
        self.log = log
        self._lifeline = lifeline
        self._is_silent = anyio.Event()
        self._stopped_seconds = 0.0

    @classmethod
    async def start(
        cls,
        create_command: Callable[[int], list[str]],
        *,
        log: BoundedLog,
        environment: Mapping[str, str] | None = None,
        stdin: int | IO[Any] = PIPE,
        directory: Path | None = None,
        is_gated: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Start the command that ``create_command`` returns for the descriptor of the lifeline.

        The process runs in ``directory``, by default the current directory. A gated process (``is_gated``) reads one
        line from the lifeline before it does anything that would have to be ended. It inherits ``pass_fds``, too.

        Raises:
            OSError: the program cannot be started.
        """
        reader, writer = os.pipe()
        try:
            # If this is cancelled half-way, both event loops end the process that they have started.
            process = await anyio.open_process(
                create_command(reader),
                stdin=stdin,
                env=environment,
                cwd=directory,
                pass_fds=(reader, *pass_fds),
                # The child leads a new process group, which can be killed as a whole.
                start_new_session=True,
            )
            # A write to the pipe would raise the signal as well, so the gate is written before. The process may have
            # ended already.
            with suppress(ProcessLookupError, BrokenPipeError):
                if is_gated:
                    os.write(writer, b"\n")
                kill_with_pipe(process.pid, reader)
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        log.begin()
        return cls(process, lifeline=writer, log=log)

    @property
    def is_alive(self) -> bool:
        """True if the leader runs, as far as is known: its exit status has not been collected yet."""
        return self.process.returncode is None

    async def listen(self) -> None:
        """Log the child's stderr until every process that holds the pipe has closed it."""
        assert self.process.stderr is not None
        await read_all(self.process.stderr, self.log.write)
        self._is_silent.set()

    async def drain(self) -> None:
        """Log the child's stdout, where libraries print, until its pipe is closed; a full one would block the child."""
        assert self.process.stdout is not None
        await read_all(self.process.stdout, partial(self.log.write, is_last_words=False))

    async def wait_for_leader(self) -> None:
        """Wait until the leader has ended, even if other processes of its group still hold its pipes.

        On Python before 3.12, ``asyncio`` also waits for the pipes to close, so that it waits forever if a command
        leaves a server running. Hence the wait on a pidfd, where the system has them.
        """
        # Only Linux has pidfds.
        if not hasattr(os, "pidfd_open"):
            await self.process.wait()
            return
        try:
            descriptor = os.pidfd_open(self.process.pid)
        except ProcessLookupError:
            return
        try:
            await anyio.wait_readable(descriptor)
        finally:
            os.close(descriptor)

    async def kill_when_stopped(self, *, seconds: float = STOPPED_SECONDS) -> None:
        """Wait until the leader has been stopped by a signal (SIGSTOP) for ``seconds``, and kill the group.

        A stopped process neither exits nor closes its connections, so callers would wait until their deadlines. SIGKILL
        also ends a stopped process, which then cannot be continued. Waits forever on systems without ``/proc``.
        """
        while True:
            await anyio.sleep(seconds / 5)
            # 'T' is stopped by a signal. Not 't', which is a debugger's, nor 'D', which is waiting for a disk.
            is_stopped = self.is_alive and _read_state(self.process.pid) == "T"
            # Counted instead of measured: time during which this process was stopped itself does not count.
            self._stopped_seconds = self._stopped_seconds + seconds / 5 if is_stopped else 0.0
            if self._stopped_seconds >= 0.99 * seconds and self._lifeline >= 0:
                self.kill_rest()
                return

    async def kill(self, *, grace_seconds: float = GRACE_SECONDS) -> None:
        """End the whole group: send SIGTERM, and after ``grace_seconds`` SIGKILL. Shielded from cancellation.

        Later calls do nothing: once the group has ended, the system may have given its number to another one.
        """
        if self._lifeline < 0:
            return
        with anyio.CancelScope(shield=True):
            self._signal(signal.SIGTERM)
            if grace_seconds > 0:
                with anyio.move_on_after(grace_seconds):
                    await self.wait_for_leader()
            # Also after a clean exit of the leader: other members of the group may still run.
            self.kill_rest()
            with anyio.move_on_after(LAST_WORDS_SECONDS):
                await self._is_silent.wait()
            # Another task may have closed it while this one waited: a scheduler stops a worker that it is following.
            if self._lifeline >= 0:
                os.close(self._lifeline)
                self._lifeline = -1
            await self.reap()
            # A daemon that left the group may still hold the pipes; then keep ours open.
            with anyio.move_on_after(LAST_WORDS_SECONDS) as patience:
                await self.process.wait()
            if not patience.cancelled_caught:
                with suppress(OSError):
                    await self.process.aclose()

    async def reap(self) -> None:
        """Wait up to 10 s for the exit status of the leader, which can arrive late on a busy machine."""
        with anyio.move_on_after(_REAP_SECONDS):
            while self.process.returncode is None:
                with anyio.move_on_after(_REAP_SECONDS / 100):
                    await self.process.wait()

    def describe_end(self) -> str:
        """Return a message that says how the process ended, with the end of its stderr."""
        code, words = self.process.returncode, self.log.output_tail
        if code is None:
            how = "It has not ended."
        elif self._stopped_seconds and code == -signal.SIGKILL:
            how = f"A signal (SIGSTOP) had stopped it for {self._stopped_seconds:.0f} s, so it was killed."
        elif code >= 0:
            how = f"It exited with status {code}."
        else:
            hint = " (kill -9, or the system was out of memory)" if code == -signal.SIGKILL else ""
            how = f"It was killed by {signal.Signals(-code).name}{hint}."
        return how + (f" The end of its stderr:\n{words}" if words else "")

    def kill_rest(self) -> None:
        """Kill the remaining processes of the group at once."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """Send ``number`` to the group.

        Its id stays reserved as long as it has members, even after its leader has ended.
        """
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def _read_state(pid: int) -> str:
    """Return the state of a process in one letter, as ``ps`` shows it; empty if it is unknown."""
    try:
        # The name of the program, in parentheses, may contain spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def kill_with_pipe(group: int, reader: int) -> None:
    """Have the kernel kill a process group when a pipe loses its last writer, even while a process is deep in C code.

    A process of the group inherits ``reader`` and keeps it open. Does nothing on systems other than Linux.

    PR_SET_PDEATHSIG does not work here: it acts when the *thread* that forked ends, and trio forks in a worker thread
    that it releases.

    Raises:
        ProcessLookupError: the group has ended.
    """
    if sys.platform == "linux":
        fcntl.fcntl(reader, fcntl.F_SETOWN, -group)
        fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_ASYNC)


async def read_all(stream: ByteReceiveStream, write: Callable[[bytes], None]) -> None:
    """Pass each chunk of ``stream`` to ``write`` until the stream ends or is closed."""
    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError, OSError):
        async for chunk in stream:
            write(chunk)
