"""Several processes that train one policy: rendezvous, collective operations, and detection of lost ranks.

Each process, a *rank*, holds a part of the weights (``sharding``) and computes its share of the passes; all ranks do
the same things in the same order, which their leader ensures. They exchange only numbers, through
``torch.distributed``. If a rank is killed, the connections of the others break at once; if one hangs, the others give
up after a timeout. Both raise ``GangError``, and a gang that has lost a rank cannot be used any more.

A process has one gang at a time, since ``torch.distributed`` has one default group. ``Gang.alone`` is a gang of one
process.

Passes that run at the same time wait for the slowest of them, layer by layer. They are therefore assigned by size
(``assign_passes``), in rounds of one pass for each process; in the last round some processes may have none. The
assignment is a pure function, so all ranks compute it without communication.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed import TCPStore, distributed_c10d  # type: ignore[attr-defined]  # exported, not declared

from areal_actors.errors import ArealError, ConfigError, GangError
from areal_actors.training.config import GangBackend, GangConfig
from areal_actors.training.packing import Pack

P = ParamSpec("P")
R = TypeVar("R")
Doubles = npt.NDArray[np.float64]


def open_store(host: str, config: GangConfig) -> TCPStore:
    """Open the store where the ranks meet; it listens on ``host`` only, on any free port."""
    # Pass a socket that is already bound: otherwise the store would listen on all addresses of the machine.
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        config.num_processes,
        is_master=True,
        timeout=timedelta(seconds=config.timeout_seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect_store(host: str, port: int, config: GangConfig) -> TCPStore:
    """Connect to the store that rank 0 has opened. Raises ``GangError`` if nothing answers there."""
    timeout = timedelta(seconds=config.timeout_seconds)
    try:
        return TCPStore(host, port, config.num_processes, is_master=False, timeout=timeout)
    except RuntimeError as error:
        raise GangError(f"The first rank does not answer at {host}:{port}: {_first_line(error)}") from error


class Gang:
    """One rank's view of its gang. Created by ``alone`` and ``form``."""

    def __init__(self, *, rank: int, size: int, device: torch.device | None, group: Any = None) -> None:
        self.rank, self.size = rank, size
        self.device = device
        """The device on which this rank computes; ``None`` for a gang of one, which leaves the model where it is."""
        self._threads_before: int | None = None
        self._is_closed = False
        self._host = ""
        self._timeout = timedelta()
        # The group of a view for another thread; ``None`` is torch's default group.
        self._group = group
        self._background: Gang | None = None

    @classmethod
    def alone(cls) -> Gang:
        """Return a gang of one process, which exchanges nothing."""
        return cls(rank=0, size=1, device=None)

    @classmethod
    def form(cls, store: TCPStore, *, rank: int, config: GangConfig) -> Gang:
        """Join the other ranks at ``store`` and return once all have joined. The gang has to be closed.

        Raises ``GangError`` if they do not join in time, and ``ConfigError`` for a backend that this machine does not
        have.
        """
        # Imported here: the package of addresses needs cattrs and msgspec, and a trainer without a gang does not.
        from areal_actors.kernel.remote.sockets import is_loopback

        backend, has_nccl = config.backend, torch.cuda.is_available() and dist.is_nccl_available()
        if backend is GangBackend.NCCL and not has_nccl:
            raise ConfigError("trainer.gang.backend: nccl needs GPUs, and this process sees none; use gloo")
        if backend is GangBackend.AUTO:
            backend = GangBackend.NCCL if has_nccl else GangBackend.GLOO
        device = torch.device("cpu")
        if backend is GangBackend.NCCL:
            # One GPU for each rank of a machine, assigned in order.
            device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        gang = cls(rank=rank, size=config.num_processes, device=device)
        with _gloo_at(store.host), gang.guard():
            dist.init_process_group(
                str(backend),
                store=store,
                rank=rank,
                world_size=gang.size,
                timeout=timedelta(seconds=config.timeout_seconds),
            )
        gang._host, gang._timeout = store.host, timedelta(seconds=config.timeout_seconds)
        if backend is GangBackend.GLOO and is_loopback(store.host):  # all ranks are on one machine
            gang._threads_before = torch.get_num_threads()
            # Ranks on one machine would otherwise each start as many threads as there are cores.
            torch.set_num_threads(max(1, gang._threads_before // gang.size))
        return gang

    @property
    def is_alone(self) -> bool:
        """Whether this gang has only one rank."""
        return self.size == 1

    def background(self) -> Gang:
        """Return these ranks for the calls of one other thread, which must not mix with those of this one.

        All ranks call this, and the first call connects them once more, by gloo: what a thread in the background
        exchanges is on the host.
        """
        if self.is_alone:
            return self
        if self._background is None:
            with _gloo_at(self._host):
                group = dist.new_group(backend="gloo", timeout=self._timeout)
            self._background = Gang(rank=self.rank, size=self.size, device=torch.device("cpu"), group=group)
        return self._background

    def rounds(self, packs: Sequence[Pack]) -> list[int | None]:
        """Return for each round of passes the index that this rank computes of ``packs``.

        ``None`` is a pass over nothing, made only because all ranks have to take part in the collective calls.
        """
        return list(assign_passes([pack.input_ids.size for pack in packs], num_ranks=self.size)[self.rank])

    def sum(self, values: Doubles) -> Doubles:
        """Return the sum over the ranks of arrays [n]; the bits are the same on every rank."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Doubles) -> Doubles:
        """Return the elementwise maximum over the ranks of arrays [n]."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def require_equal(self, digests: Sequence[int], names: Sequence[str]) -> None:
        """Raise ``GangError`` on all ranks if one of ``digests`` (below 2**52) differs between ranks."""
        own = np.array(digests, dtype=np.float64)
        # One reduction gives both extremes: the minimum is the negated maximum of the negated values.
        extremes = self.max(np.concatenate([own, -own]))
        differing = [
            name for name, low, high in zip(names, -extremes[len(own) :], extremes, strict=False) if low < high
        ]
        if differing:
            raise GangError(
                f"The {self.size} processes of the gang differ in {', '.join(differing)}. Give them the same program, "
                "configuration, model and checkpoint, and start again."
            )

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Run a block that all ranks execute together; any error that only this rank saw closes the gang.

        The other ranks notice when this process ends, or when their timeout expires. Raises ``GangError`` for
        connections that broke and timeouts that expired. An ``ArealError`` passes through and leaves the gang open,
        because all ranks raise it.
        """
        if self._is_closed:
            raise GangError(f"The gang of rank {self.rank} is closed; resume from the last checkpoint with a new one.")
        try:
            yield
        except ArealError:
            # Every rank raises it, so the gang is still in step.
            raise
        # It may have failed in the middle of a collective call, in which the others would wait for it.
        except BaseException as error:
            self.close()
            # gloo's errors have no class, only a message.
            is_of_connections = isinstance(error, dist.DistError) or (
                isinstance(error, RuntimeError) and "gloo" in str(error).lower()
            )
            if self.is_alone or not is_of_connections:
                raise
            raise GangError(f"Rank {self.rank} of {self.size} has lost the others: {_first_line(error)}") from error

    def abort(self) -> None:
        """Wake this rank, from any thread, if it waits for a rank that is gone; nccl does not notice that by itself."""
        # The group may be destroyed at this moment.
        with suppress(RuntimeError, ValueError):
            if self._background is not None:
                self._background.abort()
            if not self.is_alone and not self._is_closed:
                group = self._group or distributed_c10d._get_default_group()  # noqa: SLF001 - no public name for it
                group.abort()

    def close(self) -> None:
        """Leave the gang. Closing twice is allowed."""
        if self.is_alone or self._is_closed:
            return
        self.abort()
        self._is_closed = True
        if self._group is not None:
            return  # a view: its group ends with the gang
        if dist.is_initialized():
            dist.destroy_process_group()
        # Groups are numbered, and a group that no rank joined uses up a number: the ranks of the next one would not
        # meet.
        distributed_c10d._world.group_count = 0  # noqa: SLF001
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None

    def _reduce(self, values: Doubles, operation: dist.ReduceOp.RedOpType) -> Doubles:
        if self.is_alone:
            return values
        tensor = torch.from_numpy(values.copy()).to(self.device)
        dist.all_reduce(tensor, op=operation, group=self._group)
        return tensor.cpu().numpy()


def guarded(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Wrap a method that all ranks call, of an object with a ``gang``, in ``Gang.guard``."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.gang.guard():
            return method(self, *args, **kwargs)

    return call


@contextmanager
def _gloo_at(host: str) -> Iterator[None]:
    """Make gloo listen only where the other ranks find this one: at the interface that leads to ``host``.

    By default it takes the address of the machine's name, which may be a loopback address.
    """
    name = "GLOO_SOCKET_IFNAME"
    interface = None if sys.platform != "linux" or name in os.environ else interface_to(host)
    if interface is None:
        yield
        return
    os.environ[name] = interface
    try:
        yield
    finally:
        del os.environ[name]


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]


def assign_passes(sizes: Sequence[int], *, num_ranks: int) -> tuple[tuple[int | None, ...], ...]:
    """Return for each rank the indices of the passes that it computes, round by round.

    ``sizes`` are the sizes of the passes; ``None`` stands for a round in which the rank has no pass. Every pass is in
    exactly one share, and all shares have the same length.
    """
    by_size = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    # Pad the last round, so that all ranks make the same number of collective calls.
    order = [*by_size, *[None] * (-len(by_size) % num_ranks)]
    return tuple(tuple(order[rank::num_ranks]) for rank in range(num_ranks))


_SIOCGIFADDR = 0x8915
"""The Linux ioctl that returns the address of an interface."""


def interface_to(host: str) -> str | None:
    """Return the interface through which this machine reaches ``host``; ``None`` if that cannot be determined.

    ``host`` may be this machine itself. Nothing is sent.
    """
    from areal_actors.kernel.remote.sockets import is_loopback, own_address  # see ``Gang.form``

    if is_loopback(host):
        return "lo"
    try:
        own = own_address(host)
    except OSError:
        return None
    return next((name for _, name in socket.if_nameindex() if own in _addresses(name)), None)


def _addresses(interface: str) -> Iterator[str]:
    """Yield the addresses of a Linux interface; of its IPv4 addresses only the first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, suppress(OSError):  # it may have no IPv4 address
        told = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        yield socket.inet_ntoa(told[20:24])
    with suppress(OSError):
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
        yield from (str(IPv6Address(bytes.fromhex(line[:32]))) for line in lines if line.split()[-1] == interface)
