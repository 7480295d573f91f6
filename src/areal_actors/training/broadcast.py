"""A process group for broadcasting weights: this process is its first rank, the others are those of servers.

One broadcast serves all of them, in a tree or a ring between them, so that this process does not send once per server.
The others join through ``torch.distributed``, as an inference server does that is given a host, a port and a name. On
this side the group is not registered: it is not the default group, which belongs to the gang, and does not end with it.
Every method except ``cancel`` blocks, but not beyond its timeout: waits are polled, so that ``cancel`` ends them from
any thread. The only exception is the connection setup of ``gloo``, which has a separate timeout.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from areal_actors.errors import EngineError
from areal_actors.kernel.remote.sockets import is_loopback, own_address
from areal_actors.training.config import GangConfig
from areal_actors.training.gang import open_store

__all__ = ["BroadcastGroup", "address_towards"]

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
