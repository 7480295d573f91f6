"""Child processes that leave nothing behind: each leads a process group, and the group ends with it, and with us.

A child is given the reading end of a pipe that nobody ever writes to, the lifeline. It closes when this process ends,
in whichever way, and then the kernel of Linux kills the child's whole group; elsewhere it is up to the child to watch
it (``workflows.worker`` does). What a child says goes to a ``BoundedLog``.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from typing import IO, Any

import anyio
from anyio.abc import ByteReceiveStream, Process

__all__ = ["LAST_WORDS_SECONDS", "BoundedLog", "Child", "read_all"]

GRACE_SECONDS = 2.0
"""How long a process may take to leave after SIGTERM."""

_TAIL_BYTES = 4096
LAST_WORDS_SECONDS = 1.0
"""How long is waited for the end of what an ended process said; a daemon that it left may hold the pipe for ever."""
_REAP_SECONDS = 10.0
"""How long is waited for the status of a process that has been killed."""


class BoundedLog:
    """What one process after another says: at most two files of ``max_bytes``, and the last words in memory.

    A full file is renamed to ``<name>.1``, in the place of the one before. Without a ``path`` only the last words are
    kept.
    """

    def __init__(self, path: Path | None = None, *, max_bytes: int = 4 * 1024 * 1024) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._last = b""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def begin(self) -> None:
        """Another process begins to speak."""
        self._last = b""

    def write(self, chunk: bytes, *, is_last_words: bool = True) -> None:
        """Keep what was said, on disk and, if they may become its last words, in memory."""
        if is_last_words:
            self._last = (self._last + chunk)[-_TAIL_BYTES:]
        if self._path is not None:
            with suppress(OSError):  # a full disk must not cost the episode; whatever matters on disk will say so
                self._append(self._path, chunk[-self._max_bytes :])

    def _append(self, path: Path, chunk: bytes) -> None:
        with path.open("ab") as file:
            is_full = file.tell() + len(chunk) > self._max_bytes
            if not is_full:
                file.write(chunk)
        if is_full:
            path.rename(path.with_name(f"{path.name}.1"))
            path.write_bytes(chunk)

    @property
    def last_words(self) -> str:
        """The end of what the present process said."""
        return self._last.decode(errors="replace").strip()


class Child:
    """One process, the leader of its own group. Make it with ``start``; whoever did so ends it with ``kill``."""

    def __init__(self, process: Process, *, lifeline: int, log: BoundedLog) -> None:
        self.process = process
        self.log = log
        self._lifeline = lifeline
        self._is_silent = anyio.Event()

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
    ) -> Child:
        """Start what ``create_command`` makes of the lifeline's descriptor. Raises ``OSError`` for no program.

        It works in ``directory``, or where this process does. One that is gated reads a line from the lifeline, once,
        before it does anything that would have to be ended.
        """
        reader, writer = os.pipe()
        try:
            # Cancelled half-way, both event loops end what they have started.
            process = await anyio.open_process(
                create_command(reader),
                stdin=stdin,
                env=environment,
                cwd=directory,
                pass_fds=(reader,),
                start_new_session=True,
            )
            _kill_with_us(reader, group=process.pid, gate=writer if is_gated else None)
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        log.begin()
        return cls(process, lifeline=writer, log=log)

    @property
    def is_alive(self) -> bool:
        """Whether the leader is, as far as we have heard."""
        return self.process.returncode is None

    async def listen(self) -> None:
        """Log what the child says on stderr, until nobody can say anything there any more."""
        assert self.process.stderr is not None
        await read_all(self.process.stderr, self.log.write)
        self._is_silent.set()

    async def wait_for_leader(self) -> None:
        """Until the leader has ended, whoever of its group may still hold its pipes.

        ``asyncio`` before Python 3.12 waits for those, too, and so for ever if a command leaves a server running.
        """
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

    async def kill(self, *, grace_seconds: float = GRACE_SECONDS) -> None:
        """End the whole group: it is asked to leave, and after ``grace_seconds`` made to. Cannot be cancelled.

        Of a group that has been ended nothing is left to be ended: its number may be another's by now.
        """
        if self._lifeline < 0:
            return
        with anyio.CancelScope(shield=True):
            self._signal(signal.SIGTERM)
            if grace_seconds > 0:
                with anyio.move_on_after(grace_seconds):
                    await self.wait_for_leader()
            self.kill_rest()
            with anyio.move_on_after(LAST_WORDS_SECONDS):
                await self._is_silent.wait()
            await self._close()

    async def reap(self) -> None:
        """Wait, not for ever, until it is known how the leader ended: on a busy machine that is heard of late."""
        with anyio.move_on_after(_REAP_SECONDS):
            while self.process.returncode is None:
                with anyio.move_on_after(_REAP_SECONDS / 100):
                    await self.process.wait()

    def describe_end(self) -> str:
        """How the process ended, with its last words."""
        words = self.log.last_words
        return _describe_exit(self.process.returncode) + (f" The end of its stderr:\n{words}" if words else "")

    def kill_rest(self) -> None:
        """End what is left of the group, now."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """The group outlives its leader while it has members, and so long nobody else can have its id."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    async def _close(self) -> None:
        """Free what we hold of it. While a daemon that left the group keeps its end of the pipes, we keep ours."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        await self.reap()
        is_over = False
        with anyio.move_on_after(LAST_WORDS_SECONDS):
            await self.process.wait()
            is_over = True
        if is_over:
            with suppress(OSError):
                await self.process.aclose()


async def read_all(stream: ByteReceiveStream, write: Callable[[bytes], None]) -> None:
    """Pass on what comes, until the end of the stream, or until somebody closes it."""
    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError, OSError):
        async for chunk in stream:
            write(chunk)


def _kill_with_us(lifeline: int, *, group: int, gate: int | None) -> None:
    """Have the kernel kill ``group`` when the pipe loses its writer: that works while a child is deep in C code, too.

    The usual PR_SET_PDEATHSIG will not do: it acts when the *thread* that forked ends, and trio forks in a thread that
    it lets go. What is written to the pipe would be a signal as well, so that the ``gate`` is opened just before.
    """
    with suppress(ProcessLookupError, BrokenPipeError):  # it may be over already
        if sys.platform == "linux":
            fcntl.fcntl(lifeline, fcntl.F_SETOWN, -group)
            fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        if gate is not None:
            os.write(gate, b"\n")
        if sys.platform == "linux":
            fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "It has not ended."
    if code >= 0:
        return f"It exited with status {code}."
    hint = " (kill -9, or the system was out of memory)" if code == -signal.SIGKILL else ""
    return f"It was killed by {signal.Signals(-code).name}{hint}."
