"""Weights sent to servers over the network: the version that was published last, and the groups that receive it.

``WeightStore`` holds the weights. The tensors that the trainer lends change in its next step, so each publication is
copied, in the engine's dtype and to the memory of the host. ``WeightStoreActor`` runs in the trainer's process, and
sends them to servers by broadcast, or writes them as a directory.

The servers of all engines that ask for a version receive it in one broadcast, a *round*. Communicators are not elastic:
if a server is lost or joins, the next round has another group. A round that loses a server fails for all engines; those
whose servers live ask again, and the next round is without the lost one. Waiting for servers happens on threads that
end when their group is closed; files are written on one further thread.

A ``BroadcastGroup`` is one process group: this process is its first rank, the others are those of servers. One
broadcast serves all of them, in a tree or a ring between them. The others join through ``torch.distributed``, as an
inference server does that is given a host, a port and a name. On this side the group is not registered: it is not the
default group, which belongs to the gang, and does not end with it. Every method except ``cancel`` blocks, but not
beyond its timeout: waits are polled, so that ``cancel`` ends them from any thread. The only exception is the connection
setup of ``gloo``, which has a separate timeout.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import anyio
import torch
import torch.distributed as dist
from anyio import CapacityLimiter, to_thread
from attrs import define, field, frozen
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

from areal_actors.domain import Snapshot
from areal_actors.errors import EngineError
from areal_actors.kernel import Actor, BackgroundTasks, Context, OwnThread
from areal_actors.kernel.remote.sockets import is_loopback, own_address
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.lib.checkpoint_tensors import checkpoint_buckets, pack_names
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import (
    DescribeWeights,
    GroupPlace,
    Receiver,
    SendWeights,
    TensorBucket,
    Weights,
    WriteWeights,
)
from areal_actors.training.config import GangConfig
from areal_actors.training.gang import open_store
from areal_actors.training.publication import DiskPublisher, Publishable, weights_of

_POLL_SECONDS = 0.0005
_MAX_POLL_SECONDS = 0.01
_LEAVING_POLL_SECONDS = 0.05
_MEETING_SECONDS = 60.0
"""Time for the processes that joined to connect to each other."""


@define(eq=False, kw_only=True)
class BroadcastGroup:
    """One group. Tensors are sent from ``source``. Created by ``open``.

    After any error it cannot be used again; it always has to be closed.
    """

    name: str
    host: str
    backend: str
    source: torch.device
    timeout_seconds: float
    num_ranks: int
    _store: TCPStore | None = field(alias="store")
    port: int
    _group: Any = None
    _works: deque[tuple[list[Tensor], list[Any]]] = field(factory=deque)
    """The buckets that are being sent: their tensors, which have to stay alive, and their broadcasts."""
    _is_closed: bool = False

    @classmethod
    def open(
        cls,
        name: str,
        *,
        machines: Sequence[str],
        device: str,
        source: torch.device,
        num_ranks: int,
        timeout_seconds: float,
    ) -> BroadcastGroup:
        """Listen for the ``num_ranks`` processes of servers on ``machines``, whose tensors are on ``device``.

        Weights are sent from ``source``; by nccl if both are on GPUs, otherwise by gloo. Raises ``EngineError`` if
        there is no address to listen on.
        """
        is_fast = device == "cuda" and source.type == "cuda" and dist.is_nccl_available()
        # An address that other machines reach is reached from this one, too, but not the reverse.
        host = address_towards(next((each for each in machines if not _is_here(each)), "localhost"))
        config = GangConfig(num_processes=num_ranks + 1, timeout_seconds=timeout_seconds)
        try:
            store = open_store(host, config)
        except (OSError, RuntimeError) as error:
            raise EngineError(f"No process can join {host}: {error}. Publish by disk, or mend the network.") from error
        return cls(
            name=name,
            host=host,
            backend="nccl" if is_fast else "gloo",
            source=source if is_fast else torch.device("cpu"),
            timeout_seconds=timeout_seconds,
            num_ranks=num_ranks,
            store=store,
            port=store.port,
        )

    def join(self) -> None:
        """Connect to the others. Raises ``EngineError`` if not all of them join in time."""
        store = self._store
        if store is None:
            raise self._closed()
        with self._guard():
            # The first key counts the clients; each rank of gloo adds one. gloo's own setup cannot be cancelled, so it
            # begins when all ranks are there. That of nccl does not wait.
            num_keys = 1 + (self.num_ranks if self.backend == "gloo" else 0)
            missing = f"Not all of {self.num_ranks} processes have joined {self.name} at {self.host}:{self.port}"
            self._wait(lambda: store.num_keys() >= num_keys, missing)
            prefixed = PrefixStore(f"{self.name}/", PrefixStore(self.name, store))
            # torch uses this prefix: it creates one backend for all devices and names it after the first.
            device = dist.Backend.backend_capability[self.backend][0]
            prefixed = PrefixStore(f"{device}/", prefixed)
            size, longest = self.num_ranks + 1, timedelta(seconds=self.timeout_seconds)
            if self.backend == "nccl":
                nccl = dist.ProcessGroupNCCL.Options()
                nccl._timeout = 2 * longest  # noqa: SLF001 - its watchdog ends the process, so our wait must end first
                with torch.cuda.device(self.source):
                    self._group = dist.ProcessGroupNCCL(prefixed, 0, size, nccl)
            else:
                gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
                gloo._timeout = min(longest, timedelta(seconds=_MEETING_SECONDS))  # noqa: SLF001
                gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=self.host)]  # noqa: SLF001
                self._group = dist.ProcessGroupGloo(prefixed, 0, size, gloo)
            if self._is_closed:
                raise self._closed()

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Begin to broadcast ``tensors``, and return when the tensors of the previous call were received.

        Preparing the next tensors thus overlaps with sending these; the tensors of at most two calls are on the device.
        Raises ``EngineError`` if the previous ones were not received in time.
        """
        group = self._group
        if self._is_closed or group is None:
            raise self._closed()
        with self._guard(), torch.no_grad():
            sent = [tensor.to(self.source, non_blocking=True) for tensor in tensors]
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            options.timeout = timedelta(seconds=2 * self.timeout_seconds)  # our own wait ends first
            works: list[Any] = []
            self._works.append((sent, works))
            for tensor in sent:
                works.append(group.broadcast([tensor], options))  # noqa: PERF401 - those before an error are kept
        self._settle(1)

    def flush(self) -> None:
        """Return when everything was received. Raises ``EngineError`` if it was not in time."""
        self._settle(0)

    def _settle(self, num_left: int) -> None:
        with self._guard():
            while len(self._works) > num_left:
                for work in self._works[0][1]:
                    self._wait(work.is_completed, f"Not every server took its weights from {self.name}")
                    work.wait()
                self._works.popleft()

    def cancel(self) -> None:
        """Make every wait of this group end soon, from any thread.

        Does not block; afterwards the group can only be closed.
        """
        self._is_closed = True

    def close(self) -> None:
        """Leave the group; the others notice at their next operation. Closing twice is allowed.

        Blocks while a bucket is partly received: freeing a gloo group whose threads are working holds the interpreter
        lock, and everything in this process would wait for a server that is lost.
        """
        self._is_closed = True
        group, self._group, self._store = self._group, None, None
        works = [work for _, bucket in self._works for work in bucket]
        if group is not None:
            # The group may be gone at this moment.
            with suppress(RuntimeError):
                group.abort()
        while not all(work.is_completed() for work in works):
            time.sleep(_LEAVING_POLL_SECONDS)
        self._works.clear()

    def _wait(self, is_done: Callable[[], bool], what: str) -> None:
        deadline, pause = time.monotonic() + self.timeout_seconds, _POLL_SECONDS
        while not is_done():
            if self._is_closed:
                raise self._closed()
            if time.monotonic() > deadline:
                raise EngineError(f"{what} within {self.timeout_seconds:g} s.")
            time.sleep(pause)
            pause = min(2 * pause, _MAX_POLL_SECONDS)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Cancel the group if the block fails, and convert errors of torch to ``EngineError``."""
        try:
            yield
        except (RuntimeError, ValueError, OSError) as error:
            self.cancel()
            said = str(error).strip().split("\n", 1)[0]
            raise EngineError(f"A server in {self.name} was lost: {said}") from error
        except BaseException:
            self.cancel()
            raise

    def _closed(self) -> EngineError:
        return EngineError(f"The group {self.name} is closed; open another one.")


def _is_here(machine: str) -> bool:
    return machine == socket.gethostname() or is_loopback(machine)


def address_towards(machine: str) -> str:
    """Return the address by which ``machine`` reaches this host: a loopback address if it is this host.

    Nothing is sent. Raises ``EngineError`` if there is no route to it.
    """
    if _is_here(machine):
        return "127.0.0.1"
    try:
        return own_address(machine)
    except OSError as error:
        raise EngineError(
            f"There is no way to {machine}: {error}. Publish by disk, or name it as others do."
        ) from error


@frozen(kw_only=True, eq=False)
class StoredWeights:
    """One version: its tensors on the CPU, in buckets of bounded size, and a function that writes it."""

    version: int
    write: Callable[[], Path]
    tensors: Mapping[str, Tensor]
    buckets: tuple[TensorBucket, ...]

    def tensors_of(self, number: int) -> list[Tensor]:
        """Return the tensors of a bucket, in its order."""
        return [self.tensors[name] for name in self.buckets[number].names]


@define(eq=False, kw_only=True)
class WeightStore:
    """Storage for one version at a time. ``put`` is called on the trainer's thread, ``write`` on one other thread.

    Directories are written below ``root``, and the last ``num_kept`` of them are kept.
    """

    root: Path
    bucket_bytes: int
    num_kept: int = 1
    device: torch.device = field(factory=lambda: torch.device("cpu"))
    """The device that holds the trainer's weights."""
    _kept: StoredWeights | None = field(default=None, init=False)
    _written: tuple[StoredWeights, Path] | None = field(default=None, init=False)

    def put(self, policy: Publishable, dtype: torch.dtype) -> None:
        """Copy the weights in ``dtype``, and drop the previous ones. Blocks during the copy."""
        self._kept = self._written = None  # drop the old copy first: memory may not hold two versions
        disk = DiskPublisher(root=self.root, dtype=dtype, num_kept=self.num_kept)
        parameter = next(policy.model.parameters())
        tensors: dict[str, Tensor] = {}
        with weights_of(policy) as state:
            # What was gathered from the ranks of a gang is new memory already.
            is_copied = not isinstance(parameter, DTensor)
            for bucket in checkpoint_buckets(policy.model, state, dtype=dtype, is_copied=is_copied):
                tensors.update(bucket)
        self.device = parameter.device
        self._kept = StoredWeights(
            version=policy.version,
            write=partial(disk.write, policy.version, policy.model, tensors, (tensors,)),
            tensors=tensors,
            buckets=tuple(pack_buckets(tensors, self.bucket_bytes)),
        )

    def take(self, version: int) -> StoredWeights:
        """Return the weights. Raises ``EngineError`` if they are not of ``version``."""
        kept = self._kept
        if kept is None or kept.version != version:
            present = "none is" if kept is None else f"version {kept.version} is"
            raise EngineError(f"Version {version} of the weights is kept no longer, {present}; load the next one.")
        return kept

    def write(self, version: int) -> Path:
        """Return the directory of ``version``, writing it unless it exists. Blocks.

        Raises ``EngineError`` if the version is not kept, and ``CheckpointError`` if it cannot be written.
        """
        kept, written = self.take(version), self._written
        if written is None or written[0] is not kept:
            written = self._written = (kept, kept.write())
        return written[1]


@frozen(kw_only=True)
class StorePublisher:
    """Publishes by keeping a copy, which servers request once they are notified of the version.

    The copy stays until the next one. ``dtype``, such as ``bfloat16``, is the engine's.
    """

    store: WeightStore
    dtype: str = "float32"
    only_adapter: ClassVar[bool] = False

    def publish(self, policy: Publishable) -> Snapshot:
        """Copy the weights to the store."""
        self.store.put(policy, getattr(torch, self.dtype))
        return Snapshot(version=policy.version, is_kept=True)


def pack_buckets(tensors: Mapping[str, Tensor], max_bytes: int) -> Iterator[TensorBucket]:
    """Yield buckets of at most ``max_bytes`` of the tensors in their order; a larger tensor gets a bucket to itself."""
    for names in pack_names(tensors, max_bytes):
        yield TensorBucket(
            names=tuple(names),
            dtypes=tuple(str(tensors[name].dtype).removeprefix("torch.") for name in names),
            shapes=tuple(tuple(tensors[name].shape) for name in names),
        )


_log = get_logger(__name__)

_MANY = 1024
_PARTING_SECONDS = 2.0
_GATHERING_SECONDS = 2.0
"""How long a round waits for engines that announced themselves, or took part in the previous one."""


@define(eq=False)
class _Round:
    """One broadcast of a version to the servers of ``members``, by the names of their engines."""

    version: int
    members: dict[str, SendWeights] = field(factory=dict)
    changed: ChangeSignal = field(factory=ChangeSignal)
    """Notified when an engine joins or leaves while the round gathers."""
    placed: anyio.Event = field(factory=anyio.Event)
    ended: anyio.Event = field(factory=anyio.Event)
    group: BroadcastGroup | None = None
    problem: str | None = None
    """Why the round failed, or is about to."""
    is_gathering: bool = True

    @property
    def receivers(self) -> tuple[Receiver, ...]:
        """The servers of all engines, in the order of their ranks."""
        return tuple(self.members[name].receiver for name in sorted(self.members))

    def join(self, wanted: SendWeights) -> None:
        """Add an engine."""
        self.members[wanted.engine] = wanted
        self.changed.notify()

    def leave(self, engine: str) -> None:
        """Remove an engine; if the round has a group already, it fails for all."""
        if self.ended.is_set():
            return
        if not self.is_gathering or len(self.members) == 1:
            self.problem = self.problem or f"Engine {engine} left the broadcast of version {self.version}."
        else:
            del self.members[engine]
        if self.group is not None:
            self.group.cancel()
        self.changed.notify()

    def place(self, group: BroadcastGroup) -> None:
        """Tell the engines where their servers join ``group``."""
        self.group = group
        self.placed.set()

    def place_of(self, engine: str) -> GroupPlace:
        """Return the place of the group with the ranks of an engine's server."""
        assert self.group is not None
        group = self.group
        return GroupPlace(
            name=group.name,
            host=group.host,
            port=group.port,
            backend=group.backend,
            size=1 + group.num_ranks,
            # Rank 0 is the store, and the engines follow by name.
            offset=1 + sum(member.receiver.num_ranks for name, member in self.members.items() if name < engine),
        )

    def end(self) -> None:
        """Wake the engines; the round failed if it has a ``problem``."""
        self.ended.set()
        self.placed.set()

    def check(self) -> None:
        """Raise ``EngineError`` if the round has a problem."""
        if self.problem is not None:
            raise EngineError(self.problem)


@define(eq=False)
class _Formed:
    """A group that all ranks of ``receivers`` have joined."""

    receivers: tuple[Receiver, ...]
    group: BroadcastGroup
    is_busy: bool = True


class WeightStoreActor(Actor[Weights]):
    """Sends the weights on ``store``, where a publisher puts them on the trainer's thread."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._gathering: _Round | None = None
        self._formed: list[_Formed] = []
        self._announced: dict[str, int] = {}
        """The version that each engine has asked about last."""
        self._regulars: frozenset[str] = frozenset()
        """The engines of the last round that was completed."""
        self._left: list[BroadcastGroup] = []  # closed here; leaving them may take long
        self._has_left = anyio.Event()
        self._threads = CapacityLimiter(_MANY)  # these threads wait for peers and must not exhaust the default pool
        self._tasks: BackgroundTasks
        self._disk: OwnThread

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:
        """Close all groups at the end, without waiting for lost ones."""
        self._tasks = context.tasks
        context.tasks.start_soon(self._leave)
        async with OwnThread.open() as self._disk:
            try:
                yield
            finally:
                # Closing waits for what is being received, and the ranks that receive it may be lost.
                with anyio.move_on_after(_PARTING_SECONDS, shield=True):
                    async with anyio.create_task_group() as tasks:
                        for group in [*self._left, *(formed.group for formed in self._formed)]:
                            tasks.start_soon(self._on_thread, group.close)

    @DescribeWeights.handler(concurrency=_MANY)
    async def describe(self, message: DescribeWeights) -> tuple[TensorBucket, ...]:
        """Return names, dtypes and shapes."""
        buckets = self._store.take(message.version).buckets
        if message.engine:
            self._announced[message.engine] = message.version
        return buckets

    @WriteWeights.handler(concurrency=_MANY)
    async def write(self, message: WriteWeights) -> Path:
        """Write a version to disk, one request after another, so that many requests share one directory."""
        # Its server loads this version from disk, so that a round which gathers need not wait for it.
        if self._announced.pop(message.engine, None) is not None:
            self._regulars -= {message.engine}
            if self._gathering is not None:
                self._gathering.changed.notify()
        return await self._disk.run(lambda: self._store.write(message.version))

    @SendWeights.handler(concurrency=_MANY)
    async def send(self, message: SendWeights) -> AsyncIterator[GroupPlace]:
        """Broadcast a version to the servers of an engine, together with those of others."""
        self._store.take(message.version)
        self._announced[message.engine] = message.version
        round_ = self._gathering
        if round_ is None or round_.version != message.version:
            round_ = self._gathering = _Round(message.version)
            self._tasks.start_soon(self._run, round_)
        round_.join(message)
        try:
            await round_.placed.wait()
            round_.check()
            yield round_.place_of(message.engine)
            await round_.ended.wait()
            round_.check()
        finally:
            # Also if the engine's request was cancelled: the others do not wait for its servers.
            round_.leave(message.engine)

    # ------------------------------------------------------------------------------------------------- a round

    async def _run(self, round_: _Round) -> None:
        formed: _Formed | None = None
        try:
            await self._gather(round_)
            kept = self._store.take(round_.version)
            formed, is_new = await self._find_group(round_)
            round_.place(formed.group)
            group = formed.group

            def broadcast() -> None:
                if is_new:
                    group.join()
                for number in range(len(kept.buckets)):
                    group.send(kept.tensors_of(number))
                group.flush()

            await self._on_thread(broadcast)
            self._regulars = frozenset(round_.members)
        except EngineError as error:
            round_.problem = round_.problem or str(error)
            _log.info("broadcast_failed", version=round_.version, reason=round_.problem)
        except BaseException:
            round_.problem = round_.problem or "The weight store was stopped."
            raise
        finally:
            round_.end()
            if formed is not None:
                formed.is_busy = False
                if round_.problem is not None:
                    self._close(formed)

    async def _gather(self, round_: _Round) -> None:
        """Wait until all engines that are expected have asked, but not for long."""
        with anyio.move_on_after(_GATHERING_SECONDS):
            while round_.problem is None and not self._expected(round_.version) <= round_.members.keys():
                await round_.changed.wait()
        round_.is_gathering = False
        if self._gathering is round_:
            self._gathering = None
        # Engines that did not come are not waited for again, until they announce themselves.
        missing = self._expected(round_.version) - round_.members.keys()
        self._regulars -= missing
        for engine in missing:
            del self._announced[engine]
        round_.check()

    def _expected(self, version: int) -> set[str]:
        announced = {engine for engine, wanted in self._announced.items() if wanted == version}
        # Engines are told of a version at the same time, and some may not have asked about it yet.
        behind = {engine for engine in self._regulars if self._announced[engine] < version}
        return announced | behind

    async def _find_group(self, round_: _Round) -> tuple[_Formed, bool]:
        """Return the group of exactly these servers, and whether they have yet to join it."""
        receivers, members = round_.receivers, round_.members.values()
        for formed in self._formed:
            if formed.receivers == receivers and not formed.is_busy:
                formed.is_busy = True
                return formed, False
        names = {receiver.name for receiver in receivers}
        for formed in tuple(self._formed):
            if names & {receiver.name for receiver in formed.receivers}:
                self._close(formed)
        opening = partial(
            BroadcastGroup.open,
            f"areal-{uuid4().hex}",
            machines=[receiver.machine for receiver in receivers],
            device="cuda" if all(receiver.device == "cuda" for receiver in receivers) else "cpu",
            source=self._store.device,
            num_ranks=sum(receiver.num_ranks for receiver in receivers),
            timeout_seconds=max(member.timeout_seconds for member in members),
        )
        formed = _Formed(receivers, await to_thread.run_sync(opening))
        self._formed.append(formed)
        round_.check()
        return formed, True

    def _close(self, formed: _Formed) -> None:
        """Cancel the group's work, which ends shortly afterwards, and queue the group for leaving."""
        formed.group.cancel()
        if formed in self._formed:
            self._formed.remove(formed)
            self._left.append(formed.group)
            self._has_left.set()

    async def _leave(self) -> None:
        """Leave closed groups, each on a thread, because their other ranks may not be done."""
        async with anyio.create_task_group() as tasks:
            while True:
                self._has_left = anyio.Event()
                while self._left:
                    tasks.start_soon(self._on_thread, self._left.pop().close)
                await self._has_left.wait()

    async def _on_thread(self, action: Callable[[], None]) -> None:
        await to_thread.run_sync(action, abandon_on_cancel=True, limiter=self._threads)
