"""``areal-actors`` in processes that are copies of one that has imported everything.

A new Python spends 8 s of CPU time on imports before it does what a test is about; a copy spends half a second. It runs
the same command line with its own environment, gets signals and ends as any process. Tests of what happens until
modules are imported, and of what a process has in ``/proc``, start a new Python.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Self

from attrs import define
from tools.chaos.processes import ForkedProcess

__all__ = ["COPIES", "Command", "start_command", "start_server"]

COPIES = multiprocessing.get_context("forkserver")
COPIES.set_forkserver_preload(
    [
        "areal_actors.cli.commands",
        "areal_actors.run.training",
        "areal_actors.run.serving",
        "areal_actors.run.evaluation",
        "areal_actors.generation.torch.engine",
        "areal_actors.training.trainer",
        "transformers.models.llama.modeling_llama",
    ]
)


@define(eq=False)
class Command(ForkedProcess):
    """A command that runs, with the methods of ``subprocess.Popen`` that tests need."""

    stdout: IO[str]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End it with SIGKILL, unless it has ended."""
        self.kill()
        self.wait()
        self.stdout.close()

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait for the end, and return what it has printed. Raises ``subprocess.TimeoutExpired``."""
        self.wait(timeout)
        with self.stdout:
            return self.stdout.read(), None


def start_command(*arguments: str, log: Path, variables: Mapping[str, str] | None = None) -> Command:
    """Start ``areal-actors`` with this environment and ``variables``; ``log`` gets its standard error."""
    start_server()
    reader, writer = COPIES.Pipe(duplex=False)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    process = COPIES.Process(target=_run, args=(arguments, writer, log, environment))
    process.start()
    writer.close()
    stdout = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
    reader.close()
    return Command(process, stdout)


def start_server() -> None:
    """Start the process that is copied, unless it runs. OpenMP reads the number of threads while it is loaded."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _run(arguments: tuple[str, ...], output: Connection, log: Path, environment: Mapping[str, str]) -> None:
    from areal_actors.cli import main

    os.environ.clear()
    os.environ.update(environment)
    os.dup2(output.fileno(), 1)
    output.close()
    errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(errors, 2)
    os.close(errors)
    sys.argv = ["areal-actors", *arguments]
    main()
