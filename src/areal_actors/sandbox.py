"""Sandboxes: boxes in which the commands of an episode run. The backend ``none`` is here, the others are plug-ins.

A box is opened for an episode, runs commands, and takes and returns files. ``none`` isolates nothing: commands are
child processes in a temporary directory, and only the time limit is enforced. Backends that isolate are in the
entry-point group ``PluginGroup.SANDBOXES`` (``areal-actors-sandbox``: bubblewrap, docker, podman, apptainer).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import ClassVar, Protocol

import anyio
from anyio import to_thread
from attrs import Attribute, field, fields, frozen
from attrs.validators import deep_iterable, ge, gt, in_, matches_re, optional

from areal_actors.errors import SandboxError, SandboxLimit
from areal_actors.lib.child_process import LAST_WORDS_SECONDS, BoundedLog, Child, read_all
from areal_actors.lib.plugins import PluginGroup, install_advice, load_plugin, plugin_names
from areal_actors.lib.scratch import scratch_directory

NO_SANDBOX = "none"
_WITHOUT_IMAGE = (NO_SANDBOX, "bubblewrap")

Output = Callable[[bytes], None]
"""Receives the chunks of a stream as they arrive."""

KEPT_OUTPUT_BYTES = 1024 * 1024
"""Of each stream of a command, this much is kept: its end."""
_MAX_WORDS_BYTES = 4096

_GATE = 'read -r _ < /dev/fd/{} && exec "$@"'
"""Delays the command until it is certain that its processes end with this one."""
_PASSED = re.compile(r"PATH|LANG|LANGUAGE|LC_\w+|TZ|TERM")


class Network(StrEnum):
    """The network that the processes in a sandbox can reach."""

    PROXY = "proxy"
    """The model's address, and nothing else."""
    NONE = "none"
    """Nothing."""
    HOST = "host"
    """Whatever the host can reach."""


def _check_backend(config: object, attribute: Attribute[str], name: str) -> None:
    """Raise ``ValueError`` for a backend that is not installed, with the line that installs a known one."""
    if advice := install_advice(PluginGroup.SANDBOXES, name):
        raise ValueError(f"{name} {advice}")
    in_((NO_SANDBOX, *plugin_names(PluginGroup.SANDBOXES)))(config, attribute, name)


@frozen(kw_only=True)
class SandboxConfig:
    """The sandbox of agents that are commands, its limits, and what they see inside; or only the name of its backend.

    A limit that is exceeded ends the sandbox, and with it the episode.
    """

    short_form: ClassVar[str] = "backend"

    backend: str = field(default=NO_SANDBOX, validator=_check_backend)
    """The program that isolates: none, or bubblewrap, docker, podman, apptainer of the plug-in areal-actors-sandbox."""
    image: str | None = None
    """The image of docker or podman, or the file or directory of apptainer. It needs python3."""
    network: Network = Network.PROXY
    """What can be reached: proxy is the model's address and nothing else; none is nothing; host is all that the host
    can."""
    timeout_seconds: float | None = field(default=None, validator=optional(gt(0)))
    """How long a command may run in it; by default as long as the episode."""
    cpus: int | None = field(default=None, validator=optional(ge(1)))
    """Processor cores; by default all."""
    cpu_seconds: float | None = field(default=None, validator=optional(gt(0)))
    """Processor time of all its processes together; by default not limited."""
    memory_mib: int = field(default=2048, validator=ge(16))
    """Memory of all its processes together."""
    max_processes: int = field(default=256, validator=ge(4))
    """Processes and threads at the same time."""
    disk_mib: int = field(default=1024, validator=ge(1))
    """Size of the working directory, which is in memory; /tmp may take as much again."""
    readable: tuple[Path, ...] = ()
    """Files and directories of the host that can be read inside, in addition to its programs and libraries."""
    writable: tuple[Path, ...] = ()
    """Directories of the host that can be written inside. They are shared by all episodes, and outlive them."""
    environment: tuple[str, ...] = field(default=(), validator=deep_iterable(matches_re(r"[A-Za-z_][A-Za-z0-9_]*")))
    """Names of variables that are passed on from the run's environment, of which only PATH, LANG and the like are
    passed otherwise."""

    def __attrs_post_init__(self) -> None:
        """Raise ``ValueError`` for limits that nothing would enforce, and for a container without an image."""
        is_container = self.backend not in _WITHOUT_IMAGE
        if is_container and self.image is None:
            raise ValueError(f"the sandbox {self.backend} needs an image")
        if self.image is not None and not is_container:
            raise ValueError(f"an image is for docker, podman and apptainer, and the backend is {self.backend}")
        changed = [part.name for part in fields(SandboxConfig) if getattr(self, part.name) != part.default]
        inert = sorted(set(changed) - {"backend", "timeout_seconds", "environment"})
        if not self.is_isolated and inert:
            raise ValueError(f"without a sandbox, nothing enforces {', '.join(inert)}; name a backend: bubblewrap")

    @property
    def is_isolated(self) -> bool:
        """Whether the backend separates the box from the host."""
        return self.backend != NO_SANDBOX


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


def create_sandbox(name: str, *, log: Path | None = None) -> SandboxBackend:
    """Return the backend of this name; a plug-in gets ``log``, a file for what its program itself says.

    Raises ``ConfigError`` for one that is not installed.
    """
    if name == NO_SANDBOX:
        return _PlainSandbox()
    create: Callable[..., SandboxBackend] = load_plugin(PluginGroup.SANDBOXES, name)
    return create(log=log)


def passed_environment(config: SandboxConfig, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of the run that commands in a sandbox get: those that hold no secrets, and those named."""
    passed = {
        name: value for name, value in environment.items() if _PASSED.fullmatch(name) or name in config.environment
    }
    if "PATH" in passed:
        # A relative entry would let a grader find programs that the agent left in its working directory.
        passed["PATH"] = os.pathsep.join(entry for entry in passed["PATH"].split(os.pathsep) if entry.startswith("/"))
    return passed


class Tail:
    """Passes chunks of output on, and keeps the end of the stream."""

    def __init__(self, on_chunk: Output | None) -> None:
        self._on_chunk = on_chunk
        self._chunks: list[bytes] = []
        self._num_bytes = 0

    def write(self, chunk: bytes) -> None:
        """Append a chunk."""
        if self._on_chunk is not None:
            self._on_chunk(chunk)
        self._chunks.append(chunk)
        self._num_bytes += len(chunk)
        while self._num_bytes - len(self._chunks[0]) >= KEPT_OUTPUT_BYTES:
            self._num_bytes -= len(self._chunks.pop(0))

    @property
    def text(self) -> bytes:
        """The end of the stream."""
        return b"".join(self._chunks)[-KEPT_OUTPUT_BYTES:]


# ------------------------------------------------------------------------------------------- without isolation


class _PlainSandbox:
    """Opens boxes that are directories; processes end with the run, except those that leave their process group."""

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
        try:
            return await to_thread.run_sync(partial(_copy_tree, source, target, keeps_links=keeps_links))
        except OSError as error:
            raise SandboxError(f"{source} cannot be copied to {target}: {error}") from error


def _copy_tree(source: Path, target: Path, *, keeps_links: bool) -> tuple[str, ...]:
    """Copy a file, or the contents of a directory, into ``target``; return the names that were left out.

    Left out are devices, files that cannot be read, and links that lead out of the tree unless ``keeps_links``.
    """
    root = Path(os.path.realpath(source))
    left_out: list[str] = []

    def leave_out(directory: str, names: list[str]) -> set[str]:
        found = {name for name in names if not _is_copied(Path(directory, name), root, keeps_links=keeps_links)}
        left_out.extend(str(Path(directory, name).relative_to(source)) for name in found)
        return found

    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, ignore=leave_out, copy_function=shutil.copy, dirs_exist_ok=True)
    else:
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    return tuple(left_out)


def _is_copied(path: Path, root: Path, *, keeps_links: bool) -> bool:
    """Return whether ``path`` is a directory, a file that can be read, or a link that stays below ``root``."""
    if path.is_symlink():
        is_inside = not path.readlink().is_absolute() and Path(os.path.realpath(path)).is_relative_to(root)
        return keeps_links or is_inside
    return path.is_dir() or (path.is_file() and os.access(path, os.R_OK))
