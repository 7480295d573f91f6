"""The runner's side of a box: it talks to the program inside (``inside``), and forwards the model's address.

A backend only supplies the command line that starts the program in namespaces or in a container.
"""

from __future__ import annotations

import fcntl
import marshal
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit, urlunsplit

import anyio
from anyio import to_thread
from anyio.abc import ByteStream, SocketListener, UNIXSocketStream
from attrs import define, field, frozen

from areal_actors.errors import SandboxError, SandboxLimit
from areal_actors.lib.child_process import BoundedLog, Child
from areal_actors.lib.task_groups import open_tasks
from areal_actors.sandbox import BoxRequest, Completed, Network, Output, Tail
from areal_actors_sandbox import inside

START_SECONDS = 60.0
"""How long a box may take to start: a container's image may have to be unpacked."""
COPY_SECONDS = 300.0
"""How long a copy into or out of a box may take: processes that a command left running can stop the one that copies."""
FAST_OUTPUT_BYTES = 64 * 1024 * 1024
"""Output of a command that is read as fast as it comes. The rest is read slowly, so that the runner has time for other
episodes: a command that writes without end would take two thirds of a core."""
_SLOW_BYTES_PER_SECOND = 16 * 1024 * 1024
_END_SECONDS = 10.0
_LAST_OUTPUT_SECONDS = 1.0
"""Time to wait for the end of a command's output, which a process that it left running may hold open."""
_MAX_CONNECTIONS = 64
"""Connections to the model at the same time. More wait, so that a box cannot use up the runner's open files."""
_CHUNK_BYTES = 256 * 1024
_FIRST_PORT = 1024
_DEFAULT_PORT = 8080
_WORDS = {
    "memory_mib": "{} MiB of memory",
    "max_processes": "{} processes",
    "cpu_seconds": "{} s of processor time",
    "disk_mib": "{} MiB of files",
}
_boxes = count()


@frozen(kw_only=True)
class Start:
    """How a backend starts a box: a command line whose process reads ``descriptors``."""

    command: Sequence[str]
    descriptors: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(factory=dict)
    """The environment of commands in the box."""
    own_environment: Mapping[str, str] = field(factory=dict)
    """The environment of the process that the command line starts."""
    disks: tuple[str, ...] = ()
    """Directories inside whose number of files is limited."""


@cache
def program() -> str:
    """Return the source of the program inside, for an interpreter of any version."""
    return Path(inside.__file__).read_text(encoding="utf-8")


@cache
def code() -> bytes:
    """Return the compiled program inside, for this interpreter. It saves 10 ms per box."""
    return marshal.dumps(compile(program(), "<sandbox>", "exec"))


@define
class _Running:
    """A command that has not ended yet."""

    ended: anyio.Event = field(factory=anyio.Event)
    status: int | None = None


class Box:
    """An open box. It is a ``Sandbox``."""

    def __init__(self, request: BoxRequest, start: Start, child: Child, control: UNIXSocketStream) -> None:
        self.work_directory = request.work_directory
        self.proxy_url: str | None = None
        self._config = request.config
        self._environment = start.environment
        self._child = child
        self._control = control
        self._lock = anyio.Lock()
        self._ids = count(1)
        self._running: dict[int, _Running] = {}
        self._is_over = False
        self._exceeded: str | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        request: BoxRequest,
        prepare: Callable[[list[Any]], Start],
        log: BoundedLog,
        *,
        server: socket.socket | None = None,
    ) -> AsyncIterator[Box]:
        """Open a box for a block.

        ``prepare`` gets the arguments of ``inside.main`` with the control socket's descriptor, and returns how to start
        it. With a ``server``, the program inside connects to that instead.
        """
        upstream, inner_url = (
            (None, None) if request.config.network is not Network.PROXY else _upstream(request.proxy_url)
        )
        config = request.config
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        settings = {
            "memory_mib": config.memory_mib,
            "max_processes": config.max_processes,
            "cpu_seconds": config.cpu_seconds,
            "disk_mib": config.disk_mib,
            "cpus": config.cpus,
            "first_cpu": next(_boxes) * (config.cpus or 1),
            # Since Linux 5.14, RLIMIT_NPROC counts per user namespace, and so per box; it exempts root.
            "counts_processes": os.geteuid() != 0 and linux_version() >= (5, 14),
            "port": None if inner_url is None else urlsplit(inner_url).port,
            "disks": (),
        }
        try:
            start = prepare([theirs.fileno(), settings])
            try:
                child = await Child.start(
                    lambda _: list(start.command),
                    log=log,
                    environment=start.own_environment,
                    pass_fds=(theirs.fileno(), *start.descriptors),
                )
            finally:
                for descriptor in start.descriptors:
                    os.close(descriptor)
        except OSError as error:
            ours.close()
            raise SandboxError(f"The sandbox cannot be started: {error}") from error
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        async with open_tasks() as tasks:
            tasks.start_soon(child.listen)
            box = cls(request, start, child, await UNIXSocketStream.from_socket(ours))
            try:
                listener = await box._receive_ready(server)
                tasks.start_soon(box._listen)
                if listener is not None and upstream is not None:
                    tasks.start_soon(_forward, listener, *upstream)
                box.proxy_url = inner_url if config.network is Network.PROXY else request.proxy_url
                yield box
            finally:
                box._is_over = True
                with anyio.CancelScope(shield=True):
                    # Process 1 ends with its socket, the kernel ends all others, and then its parent, the leader, ends.
                    with suppress(OSError):
                        await box._control.aclose()
                    with anyio.move_on_after(_END_SECONDS):
                        await child.wait_for_leader()
                    await child.kill(grace_seconds=0)
                tasks.cancel_scope.cancel()

    @property
    def pid(self) -> int:
        """The process that was started for the box, seen from the host."""
        return self._child.process.pid

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
        request = {
            "command": list(command),
            "environment": {**self._environment, **(environment or {})},
            "directory": self._path(directory or "."),
        }
        seconds = timeout_seconds or self._config.timeout_seconds
        with memory_file(stdin) as source:
            with anyio.move_on_after(seconds):
                return await self._execute(inside.RUN, request, source, on_stdout=on_stdout, on_stderr=on_stderr)
        raise SandboxLimit(
            f"{command[0]} took longer than {seconds:g} s in the sandbox; raise timeout_seconds of the sandbox if it "
            "needs more.",
            limit="timeout_seconds",
        )

    async def copy_in(self, source: Path, target: str) -> None:
        """Copy files into the box, as ``Sandbox.copy_in`` says."""
        if not await anyio.Path(source).exists():
            raise FileNotFoundError(f"there is no {source} to copy into the sandbox")
        reader, writer = os.pipe()

        def send() -> None:
            # The box may end or refuse the files before it has read all of them.
            with suppress(BrokenPipeError), os.fdopen(writer, "wb") as stream:
                inside.pack(str(source), stream)

        completed, error = await self._copy(send, inside.UNPACK, target, reader)
        if error is not None:
            raise error
        if not completed.is_successful:
            raise SandboxError(f"{source} cannot be copied to {target}: {_text(completed.stderr)}")

    async def copy_out(self, source: str, target: Path) -> tuple[str, ...]:
        """Copy files out of the box, as ``Sandbox.copy_out`` says."""
        reader, writer = os.pipe()
        left_out: list[str] = []
        max_bytes = 2 * self._config.disk_mib * 1024 * 1024

        def receive() -> None:
            with os.fdopen(reader, "rb") as stream:
                left_out.extend(inside.unpack(stream, str(target), max_bytes=max_bytes))

        completed, error = await self._copy(receive, inside.PACK, source, writer)
        if error is not None or not completed.is_successful:
            # If the copy was refused here, the program inside only says that its pipe was closed.
            reason = error if isinstance(error, OverflowError) else _text(completed.stderr) or error
            raise SandboxError(f"{source} cannot be copied out of the sandbox: {reason}") from error
        return tuple(left_out)

    async def _copy(
        self, work: Callable[[], None], kind: bytes, path: str, descriptor: int
    ) -> tuple[Completed, Exception | None]:
        """Carry out a copy inside, by the pipe ``descriptor``, while a thread works on the other end of the pipe.

        Returns the end of the copy inside, and the error of ``work``. Raises ``SandboxLimit`` after ``COPY_SECONDS``,
        and ``SandboxError`` if the box has ended.
        """
        failures: list[Exception] = []
        ended: list[Completed | SandboxError] = []

        def attempt() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - returned to the caller; tarfile raises errors of many kinds
                failures.append(error)

        async with anyio.create_task_group() as tasks:
            # It ends when the other end of its pipe closes; if this is cancelled, it is not waited for.
            tasks.start_soon(partial(to_thread.run_sync, attempt, abandon_on_cancel=True))
            with memory_file(b"") as nothing:
                stdin, stdout = (descriptor, None) if kind == inside.UNPACK else (nothing, descriptor)
                try:
                    with anyio.move_on_after(COPY_SECONDS):
                        ended.append(await self._execute(kind, {"path": self._path(path)}, stdin, stdout=stdout))
                except SandboxError as error:
                    # The task group would wrap the error.
                    ended.append(error)
                finally:
                    os.close(descriptor)
                    # The thread waits for the other end of the pipe.
                    if not ended:
                        tasks.cancel_scope.cancel()
        if not ended:
            message = f"{path} took longer than {COPY_SECONDS:g} s to copy; its processes may have stopped the copy."
            raise SandboxLimit(message, limit="timeout_seconds")
        if isinstance(ended[0], SandboxError):
            raise ended[0]
        return ended[0], next(iter(failures), None)

    # ---------------------------------------------------------------------------------------------- commands

    def _path(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.work_directory}/{path}"

    async def _execute(
        self,
        kind: bytes,
        request: Mapping[str, Any],
        stdin: int,
        *,
        stdout: int | None = None,
        on_stdout: Output | None = None,
        on_stderr: Output | None = None,
    ) -> Completed:
        """Carry out a request in a process of the box, with its output read until it has ended."""
        outputs = (Tail(on_stdout), Tail(on_stderr))
        out_reader, out_writer = os.pipe()
        err_reader, err_writer = os.pipe()
        running, number = _Running(), next(self._ids)
        self._running[number] = running
        try:
            try:
                await self._send(
                    kind,
                    number,
                    marshal.dumps(dict(request)),
                    stdin,
                    out_writer if stdout is None else stdout,
                    err_writer,
                )
            finally:
                os.close(out_writer)
                os.close(err_writer)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_drain, out_reader, outputs[0].write)
                tasks.start_soon(_drain, err_reader, outputs[1].write)
                await running.ended.wait()
                tasks.cancel_scope.deadline = anyio.current_time() + _LAST_OUTPUT_SECONDS
        finally:
            if running.status is None and not self._is_over:
                with anyio.move_on_after(_LAST_OUTPUT_SECONDS, shield=True), suppress(SandboxError):
                    await self._send(inside.KILL, number, b"")
            self._running.pop(number, None)
            os.close(out_reader)
            os.close(err_reader)
        if running.status is None:
            raise self._end_error()
        return Completed(status=running.status, stdout=outputs[0].text, stderr=outputs[1].text)

    async def _send(self, kind: bytes, number: int, body: bytes, *descriptors: int) -> None:
        if self._is_over:
            raise self._end_error()
        header = inside.REQUEST.pack(kind, number, len(body))
        try:
            # Shielded: after a part of a frame, the box would take the next one for the rest of it.
            with anyio.CancelScope(shield=True):
                async with self._lock:
                    if descriptors:
                        await self._control.send_fds(header, descriptors)
                    else:
                        await self._control.send(header)
                    if body:
                        await self._control.send(body)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            raise self._end_error() from None

    def _end_error(self) -> SandboxError:
        if self._exceeded is not None:
            limit = getattr(self._config, self._exceeded)
            return SandboxLimit(
                f"The sandbox was ended, because its processes used more than {_WORDS[self._exceeded].format(limit)}; "
                f"raise {self._exceeded} of the sandbox if they need more.",
                limit=self._exceeded,
            )
        return SandboxError(f"The sandbox has ended. {self._child.describe_end()}".strip())

    # ------------------------------------------------------------------------------------------------- start

    async def _receive_ready(self, server: socket.socket | None) -> socket.socket | None:
        """Wait until the box is ready. Returns the socket on which it expects the model, if it has one."""
        reply: bytes = b""
        descriptors: list[int] = []
        with anyio.move_on_after(START_SECONDS), suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            if server is not None:
                # The program inside connects, unless it cannot be started.
                async with await SocketListener.from_socket(server) as listener, anyio.create_task_group() as tasks:

                    async def watch() -> None:
                        await self._child.wait_for_leader()
                        tasks.cancel_scope.cancel()

                    tasks.start_soon(watch)
                    accepted = await listener.accept()
                    await self._control.aclose()
                    self._control = cast("UNIXSocketStream", accepted)
                    tasks.cancel_scope.cancel()
            reply, descriptors = await self._control.receive_fds(inside.REPLY.size, 1)
        if len(reply) == inside.REPLY.size and reply[:1] == inside.READY:
            return socket.socket(fileno=descriptors[0]) if descriptors else None
        with anyio.move_on_after(_LAST_OUTPUT_SECONDS):
            await self._child.reap()
        raise SandboxError(
            f"The sandbox cannot be started, or not in {START_SECONDS:g} s. {self._child.describe_end()}"
        )

    async def _listen(self) -> None:
        """Receive the ends of commands, until the box ends."""
        buffered = b""
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            while True:
                buffered += await self._control.receive()
                while len(buffered) >= inside.REPLY.size:
                    kind, number, value = inside.REPLY.unpack_from(buffered)
                    buffered = buffered[inside.REPLY.size :]
                    if kind == inside.ENDED and number in self._running:
                        self._running[number].status = value
                        self._running[number].ended.set()
                    elif kind == inside.EXCEEDED and 0 <= value < len(inside.LIMITS):
                        self._exceeded = inside.LIMITS[value]
        self._is_over = True
        await self._child.reap()
        for running in self._running.values():
            running.ended.set()


def linux_version() -> tuple[int, int]:
    """Return the version of the Linux kernel, or (0, 0) on another system."""
    major, minor, *_ = os.uname().release.split(".") if sys.platform == "linux" else ("0", "0")
    return int(major), int(minor)


# --------------------------------------------------------------------------------------------------- network


def _upstream(url: str | None) -> tuple[tuple[str, int] | None, str | None]:
    """Return the address that a URL names, and the URL under which the same is reachable inside."""
    if url is None:
        return None, None
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        raise SandboxError(f"A sandbox can reach a proxy at an http:// address only, not {url}; use network: host.")
    port = parts.port or 80
    inner_port = port if port >= _FIRST_PORT else _DEFAULT_PORT
    return (parts.hostname, port), urlunsplit(parts._replace(netloc=f"127.0.0.1:{inner_port}"))


async def _forward(listener: socket.socket, host: str, port: int) -> None:
    """Accept connections inside the box and forward each to the model's address, until cancelled."""
    places = anyio.Semaphore(_MAX_CONNECTIONS)

    async def serve(stream: ByteStream) -> None:
        try:
            async with stream:
                with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
                    async with await anyio.connect_tcp(host, port) as model, anyio.create_task_group() as pumps:
                        pumps.start_soon(_pump, stream, model)
                        pumps.start_soon(_pump, model, stream)
        finally:
            places.release()

    async with await SocketListener.from_socket(listener) as accepting, anyio.create_task_group() as connections:
        while True:
            await places.acquire()
            try:
                stream = await accepting.accept()
            except BaseException:
                places.release()
                raise
            connections.start_soon(serve, stream)


async def _pump(source: ByteStream, target: ByteStream) -> None:
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        async for chunk in source:
            await target.send(chunk)
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        await target.send_eof()


# --------------------------------------------------------------------------------------------------- streams


async def _drain(reader: int, write: Output) -> None:
    """Read a pipe to its end. Both event loops read pipes of child processes only, hence the descriptor."""
    os.set_blocking(reader, False)
    num_bytes = 0
    while True:
        await anyio.wait_readable(reader)
        try:
            chunk = os.read(reader, _CHUNK_BYTES)
        except BlockingIOError:
            continue
        if not chunk:
            return
        write(chunk)
        num_bytes += len(chunk)
        if num_bytes > FAST_OUTPUT_BYTES:
            await anyio.sleep(len(chunk) / _SLOW_BYTES_PER_SECOND)


@contextmanager
def memory_file(content: bytes) -> Iterator[int]:
    """A descriptor from which ``content`` can be read, for a block."""
    descriptor = create_memory_file(content)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def create_memory_file(content: bytes) -> int:
    """Return a new descriptor from which ``content`` can be read. The caller closes it."""
    descriptor = os.memfd_create("areal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    # A box could otherwise write to its stdin, which is memory of the runner's machine that no limit counts.
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _text(output: bytes) -> str:
    return output.decode(errors="replace").strip()
