"""The interface of sandboxes: a box is opened for an episode, runs commands, and takes and returns files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from attrs import field, frozen

from areal_actors.sandbox.config import SandboxConfig

__all__ = ["BoxRequest", "Completed", "Output", "Sandbox", "SandboxBackend"]

Output = Callable[[bytes], None]
"""Receives the chunks of a stream as they arrive."""

KEPT_OUTPUT_BYTES = 1024 * 1024
"""Of each stream of a command, this much is kept: its end."""
_MAX_WORDS_BYTES = 4096


@frozen(kw_only=True)
class Completed:
    """The end of a command."""

    status: int
    """Its exit status; the negative number of the signal that killed it; 127 if there is no such program."""
    stdout: bytes = field(repr=False)
    """The end of its output, at most 1 MiB."""
    stderr: bytes = field(repr=False)

    @property
    def is_successful(self) -> bool:
        """Whether it exited with status 0."""
        return self.status == 0

    def describe(self) -> str:
        """Describe how it ended, with the last 4 KiB of its output."""
        how = f"exited with status {self.status}" if self.status >= 0 else f"was killed by signal {-self.status}"
        for name, output in (("stderr", self.stderr), ("stdout", self.stdout)):
            words = output[-_MAX_WORDS_BYTES:].decode(errors="replace").strip()
            if words:
                return f"It {how}. The end of its {name}:\n{words}"
        return f"It {how}."


@frozen(kw_only=True)
class BoxRequest:
    """One box: its settings, and what differs from box to box."""

    config: SandboxConfig
    proxy_url: str | None = None
    """The base URL that is reachable inside, with ``network: proxy``."""
    readable: tuple[Path, ...] = ()
    """Files of the host that this box sees, in addition to those of its settings."""
    mounts: Mapping[str, Path] = field(factory=dict)
    """Directories of the host that this box sees, read-only, by their paths inside."""
    directories: tuple[str, ...] = ()
    """Directories inside that can be written, in addition to the working directory and /tmp; empty at first."""
    work_directory: str = "/workspace"
    """The directory inside that commands start in."""


class Sandbox(Protocol):
    """An open box. Everything that was started in it ends, and everything written in it is removed, when it closes."""

    @property
    def work_directory(self) -> str:
        """The directory inside that commands start in; it is empty at first."""
        ...

    @property
    def proxy_url(self) -> str | None:
        """``BoxRequest.proxy_url`` as it has to be written inside."""
        ...

    async def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        directory: str | None = None,
        timeout_seconds: float | None = None,
        on_stdout: Output | None = None,
        on_stderr: Output | None = None,
    ) -> Completed:
        """Run a command to its end. Commands may run at the same time, and see each other's processes and files.

        ``environment`` is added to that of the box; ``directory`` is relative to ``work_directory``; processes that
        the command leaves running go on until the box closes. If this is cancelled, the command is killed.

        Raises:
            SandboxLimit: the command took longer than ``timeout_seconds`` (by default, the time limit of the settings),
                or exceeded another limit; then the box has ended.
            SandboxError: the box has ended.
        """
        ...

    async def copy_in(self, source: Path, target: str) -> None:
        """Copy a file of the host, or the contents of a directory, into the directory ``target`` of the box.

        Raises ``SandboxError`` if it cannot be written, and ``OSError`` if ``source`` cannot be read.
        """
        ...

    async def copy_out(self, source: str, target: Path) -> tuple[str, ...]:
        """Copy a file of the box, or the contents of a directory, into the directory ``target`` of the host.

        Nothing outside of ``target`` is written, whatever is in the box. Returns the names that were left out: devices,
        and symbolic links that lead out of the tree. Where the box has a PID namespace, its processes are stopped
        meanwhile. Raises ``SandboxError`` for what does not exist, and for more
        bytes than the disk limit.
        """
        ...


class SandboxBackend(Protocol):
    """Opens boxes of one kind."""

    def check(self, config: SandboxConfig) -> str:
        """Return a description of what was found here. Raises ``SandboxError`` that says what to install or to allow.

        Blocks: it opens a box.
        """
        ...

    def open(self, request: BoxRequest) -> AbstractAsyncContextManager[Sandbox]:
        """Open a box for a block. Raises ``SandboxError`` if it cannot be opened."""
        ...
