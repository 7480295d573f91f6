"""A group of processes to which weights are broadcast: this one is its first rank, the others are those of a server.

The others join by ``torch.distributed`` as an inference server does that is given a host, a port and a name. On this
side the group is registered nowhere: it is not the default group, which is the gang's, and does not end with it. Every
method but ``cancel`` blocks, and none for longer than its time: what waits is looked at again and again, so that
``cancel`` ends it from any thread. The one exception is the meeting of ``gloo`` itself, which has a time of its own.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from areal_actors.core.remote.addresses import is_loopback, own_address
from areal_actors.errors import EngineError
from areal_actors.training.config import GangConfig
from areal_actors.training.gang import open_store

__all__ = ["BroadcastGroup", "address_towards"]

_POLL_SECONDS = 0.0005
_MAX_POLL_SECONDS = 0.01
_LEAVING_POLL_SECONDS = 0.05
_MEETING_SECONDS = 60.0
"""How long those may take to connect to one another that have come."""


@define(eq=False, kw_only=True)
class BroadcastGroup:
    """One group. Tensors are sent from ``source``. Made by ``open``.

    After any error it is of no more use; it has to be closed in the end, whatever happened.
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
    _works: list[Any] = field(factory=list)
    _is_closed: bool = False

    @classmethod
    def open(
        cls, name: str, *, machine: str, device: str, source: torch.device, num_ranks: int, timeout_seconds: float
    ) -> BroadcastGroup:
        """Listen for the ``num_ranks`` processes of a server on ``machine``, whose tensors are on ``device``.

        Weights come from ``source``; with both of them on GPUs, they go by nccl, by gloo otherwise. Raises
        ``EngineError`` if there is no address to listen at.
        """
        is_fast = device == "cuda" and source.type == "cuda" and dist.is_nccl_available()
        host = address_towards(machine)
        config = GangConfig(num_processes=num_ranks + 1, timeout_seconds=timeout_seconds)
        try:
            store = open_store(host, config)
        except (OSError, RuntimeError) as error:
            raise EngineError(f"Nobody can be met at {host}: {error}. Publish by disk, or mend the network.") from error
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
        """Meet the others. Raises ``EngineError`` if they do not come in time, or not all of them."""
        store = self._store
        if store is None:
            raise self._closed()
        with self._guard():
            self._wait(lambda: store.num_keys() > 0, f"Nobody has joined {self.name} at {self.host}:{self.port}")
            prefixed = PrefixStore(f"{self.name}/", PrefixStore(self.name, store))
            # As torch names it, which makes one of a kind for all devices, and calls it by the first.
            device = dist.Backend.backend_capability[self.backend][0]
            self._group = self._create(PrefixStore(f"{device}/", prefixed))
            if self._is_closed:
                raise self._closed()

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast ``tensors``, which are on the CPU. Raises ``EngineError`` if they were not taken in time."""
        group = self._group
        if self._is_closed or group is None:
            raise self._closed()
        with self._guard(), torch.no_grad():
            sent = [tensor.to(self.source, non_blocking=True) for tensor in tensors]
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            options.timeout = timedelta(seconds=2 * self.timeout_seconds)  # we give up before
            for tensor in sent:
                self._works.append(group.broadcast([tensor], options))
            for work in self._works:
                self._wait(work.is_completed, f"The server did not take its weights from {self.name}")
                work.wait()
            self._works = []

    def cancel(self) -> None:
        """Have whatever waits here end in a moment, from any thread. Does not block; the group can but be closed."""
        self._is_closed = True

    def close(self) -> None:
        """Leave; the others learn it as soon as they look. Twice is fine.

        Blocks while a bucket is half taken: a group of gloo whose threads are at work would be freed with the
        interpreter held, and everything in this process would wait for a server that is lost.
        """
        self._is_closed = True
        group, self._group, self._store = self._group, None, None
        works, self._works = self._works, []
        if group is not None:
            with suppress(RuntimeError):  # it may be over at this moment
                group.abort()
        while not all(work.is_completed() for work in works):
            time.sleep(_LEAVING_POLL_SECONDS)

    def _create(self, store: PrefixStore) -> Any:
        size, longest = self.num_ranks + 1, timedelta(seconds=self.timeout_seconds)
        if self.backend == "nccl":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = 2 * longest  # noqa: SLF001 - its watchdog ends the process; we end the wait before
            with torch.cuda.device(self.source):
                return dist.ProcessGroupNCCL(store, 0, size, nccl)
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
        gloo._timeout = min(longest, timedelta(seconds=_MEETING_SECONDS))  # noqa: SLF001
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=self.host)]  # noqa: SLF001
        return dist.ProcessGroupGloo(store, 0, size, gloo)

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
        """What fails in the block makes the group useless; errors of torch become ours."""
        try:
            yield
        except (RuntimeError, ValueError, OSError) as error:
            self.cancel()
            said = str(error).strip().split("\n", 1)[0]
            raise EngineError(f"The server in {self.name} was lost: {said}") from error
        except BaseException:
            self.cancel()
            raise

    def _closed(self) -> EngineError:
        return EngineError(f"The group {self.name} is closed; open another one.")


def address_towards(machine: str) -> str:
    """The address by which ``machine`` reaches this host; of loopback, if it is this host. Nothing is sent.

    Raises ``EngineError`` if there is no way to it.
    """
    if machine == socket.gethostname() or is_loopback(machine):
        return "127.0.0.1"
    try:
        return own_address(machine)
    except OSError as error:
        raise EngineError(
            f"There is no way to {machine}: {error}. Publish by disk, or name it as others do."
        ) from error
