"""Commands without isolation, as child processes in a temporary directory: ``sandbox: none``.

Only the time limit is enforced. Processes end with the run, except those that leave their process group.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryFile

import anyio
from anyio import to_thread
from attrs import frozen

from areal_actors.errors import SandboxError, SandboxLimit
from areal_actors.lib.child_process import LAST_WORDS_SECONDS, BoundedLog, Child, read_all
from areal_actors.lib.scratch import scratch_directory
from areal_actors.sandbox.base import BoxRequest, Completed, Output, Sandbox
from areal_actors.sandbox.config import SandboxConfig
from areal_actors.sandbox.environment import passed_environment
from areal_actors.sandbox.inside import pack, unpack
from areal_actors.sandbox.output import Tail

__all__ = ["PlainSandbox"]

_GATE = 'read -r _ < /dev/fd/{} && exec "$@"'
"""Delays the command until it is certain that its processes end with this one."""


@frozen(kw_only=True)
class PlainSandbox:
    """Opens boxes that are directories."""

    def check(self, config: SandboxConfig) -> str:
        """Return a description. Raises nothing: child processes are possible everywhere."""
        return f"no isolation; of the limits, only timeout_seconds ({config.timeout_seconds}) is enforced"

    @asynccontextmanager
    async def open(self, request: BoxRequest) -> AsyncIterator[Sandbox]:
        """Open a box for a block."""
        with scratch_directory() as directory:
            box = _Directory(request, directory)
            try:
                yield box
            finally:
                for child in box.children:
                    await child.kill(grace_seconds=0)


class _Log(BoundedLog):
    """Passes the output of a child on."""

    def __init__(self, tail: Tail) -> None:
        super().__init__()
        self._tail = tail

    def write(self, chunk: bytes, *, is_last_words: bool = True) -> None:
        super().write(chunk, is_last_words=is_last_words)
        self._tail.write(chunk)


class _Directory:
    """An open box."""

    def __init__(self, request: BoxRequest, directory: Path) -> None:
        self.work_directory = str(directory)
        self.proxy_url = request.proxy_url
        self.children: list[Child] = []
        self._config = request.config

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
        """Run a command to its end, as ``Sandbox.run`` says."""
        outputs = (Tail(on_stdout), Tail(on_stderr))
        where = Path(self.work_directory, directory or ".")
        await anyio.Path(where).mkdir(parents=True, exist_ok=True)
        given = passed_environment(self._config) | {"HOME": str(Path.home())} | dict(environment or {})
        if shutil.which(command[0], path=given.get("PATH", os.defpath)) is None:
            return Completed(status=127, stdout=b"", stderr=f"there is no program {command[0]}".encode())
        with TemporaryFile() as file:
            file.write(stdin)
            file.seek(0)
            child = await Child.start(
                lambda lifeline: ["/bin/sh", "-c", _GATE.format(lifeline), "sh", *command],
                log=_Log(outputs[1]),
                environment=given,
                stdin=file,
                directory=where,
                is_gated=True,
            )
        self.children.append(child)
        seconds = timeout_seconds or self._config.timeout_seconds
        has_ended = False
        assert child.process.stdout is not None
        try:
            with anyio.move_on_after(seconds):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(child.listen)
                    tasks.start_soon(read_all, child.process.stdout, outputs[0].write)
                    await child.wait_for_leader()
                    # Processes that it left running may hold the pipes open.
                    tasks.cancel_scope.deadline = anyio.current_time() + LAST_WORDS_SECONDS
                has_ended = True
        finally:
            if not has_ended:
                child.kill_rest()
        if not has_ended:
            raise SandboxLimit(f"{command[0]} took longer than {seconds:g} s.", limit="timeout_seconds")
        await child.reap()
        status = child.process.returncode
        assert status is not None
        return Completed(status=status, stdout=outputs[0].text, stderr=outputs[1].text)

    async def copy_in(self, source: Path, target: str) -> None:
        """Copy files into the directory, as ``Sandbox.copy_in`` says."""
        if not await anyio.Path(source).exists():
            raise FileNotFoundError(f"there is no {source} to copy into the sandbox")
        await self._copy(source, Path(self.work_directory, target), keeps_links=True)

    async def copy_out(self, source: str, target: Path) -> tuple[str, ...]:
        """Copy files out of the directory, as ``Sandbox.copy_out`` says."""
        return await self._copy(Path(self.work_directory, source), target, keeps_links=False)

    async def _copy(self, source: Path, target: Path, *, keeps_links: bool) -> tuple[str, ...]:
        def copy() -> tuple[str, ...]:
            max_bytes = None if keeps_links else 2 * self._config.disk_mib * 1024 * 1024
            with TemporaryFile() as archive:
                pack(str(source), archive)
                archive.seek(0)
                return unpack(archive, str(target), keeps_links=keeps_links, max_bytes=max_bytes)

        try:
            return await to_thread.run_sync(copy)
        except (OSError, OverflowError) as error:
            raise SandboxError(f"{source} cannot be copied to {target}: {error}") from error
