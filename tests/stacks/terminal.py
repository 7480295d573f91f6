"""``areal-actors`` at a pseudo-terminal whose screen is emulated: what a person sees, after all lines were redrawn."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Mapping
from typing import Self

import pyte
from tests.stacks.commands import COPIES, start_server

__all__ = ["Terminal"]


class Terminal:
    """``areal-actors`` at a pseudo-terminal, and the screen that a person sees. Leaving the block kills the command."""

    def __init__(self, *arguments: str, variables: Mapping[str, str] | None = None, size: tuple[int, int] = (100, 30)):
        start_server()
        self._screen = pyte.HistoryScreen(*size, history=10_000)
        self._stream = pyte.ByteStream(self._screen)
        self._fd, tty = os.openpty()
        fcntl.ioctl(tty, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **(variables or {})}
        self._process = COPIES.Process(target=_run, args=(arguments, os.ttyname(tty), environment))
        self._process.start()
        # Kept open: the terminal would end with its last writer, before its last output was read.
        self._tty = tty

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        os.close(self._fd)
        os.close(self._tty)

    @property
    def text(self) -> str:
        """What has scrolled off the screen, and the screen."""
        above = (
            "".join(line[column].data for column in range(self._screen.columns)) for line in self._screen.history.top
        )
        return "\n".join(line.rstrip() for line in (*above, *self._screen.display)).rstrip()

    def type(self, keys: str) -> None:
        """Type ``keys``."""
        os.write(self._fd, keys.encode())

    def wait_for(self, *words: str, seconds: float = 120.0) -> str:
        """Wait until the screen has all ``words``, and return its text. Raises ``AssertionError`` with the text."""
        deadline = time.monotonic() + seconds
        while not all(word in self.text for word in words):
            ready, _, _ = select.select(
                [self._fd, self._process.sentinel], [], [], max(0.0, deadline - time.monotonic())
            )
            assert ready, f"{words} did not appear:\n{self.text}"
            if self._fd in ready:
                self._stream.feed(os.read(self._fd, 65536))
            else:
                assert all(word in self.text for word in words), f"the command ended without {words}:\n{self.text}"
        return self.text

    def wait(self, seconds: float = 120.0) -> int:
        """Wait for the end, and return the exit code."""
        deadline = time.monotonic() + seconds
        while ready := select.select([self._fd, self._process.sentinel], [], [], max(0.0, deadline - time.monotonic()))[
            0
        ]:
            if self._fd not in ready:
                self._process.join()
                return self._process.exitcode
            self._stream.feed(os.read(self._fd, 65536))
        raise AssertionError(f"the command did not end:\n{self.text}")


def _run(arguments: tuple[str, ...], tty: str, environment: Mapping[str, str]) -> None:
    from areal_actors.cli import main

    os.environ.clear()
    os.environ.update(environment)
    os.setsid()
    # The first terminal that a session opens becomes its controlling terminal, from which Ctrl-C is a signal.
    for number in range(3):
        opened = os.open(tty, os.O_RDWR)
        os.dup2(opened, number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["areal-actors", *arguments]
    main()
