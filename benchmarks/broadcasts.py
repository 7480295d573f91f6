"""Weights to several servers: one broadcast to all of them, a group for each one, or one file that all of them read.

Fake SGLang servers run in processes of their own and keep what they receive. The weight store broadcasts one version to
1, 2 and 4 of them; the baselines are one store for each server, which is what a group for each server costs, and a
directory, which is written once. ``AREAL_SERVER_URLS``, URLs with commas between them, and ``AREAL_SERVER_MODEL``, the
directory that they were started with, name real SGLang servers to measure in place of the fake ones.

The trainer's wait is the time of the publication itself: the copy into the store, or the writing of the directory.
Until all have it, and CPU, are counted from the end of the publication, since the trainer takes its next step
meanwhile: the first on the clock, the second in the trainer's process. Each is the least of some rounds. Copies are the
bytes that this process sent over TCP for a version, in units of the weights (``tcpi_bytes_sent`` of its sockets, on
Linux). Weights are bfloat16 and have the shapes of SmolLM2-135M (257 MiB; a twelfth of them with ``--quick``).

``gloo`` broadcasts along a binomial tree: its root sends to the ranks 1, 2, 4 and so on, so that n servers take
``ceil(log2(n + 1))`` copies from the trainer. That is the gate: with one more, servers would not share a group.

All processes share the cores of one machine, so the clock also counts what every server spends on receiving. On
separate machines those times overlap; the CPU time of the trainer's process is what remains.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path

import anyio
import torch
from anyio import to_thread
from attrs import field, frozen
from benchmarks.harness import Result
from benchmarks.moving import Policy
from benchmarks.updates import create_model, create_store, serving_child
from safetensors.torch import load_file

from areal_actors.domain import Snapshot
from areal_actors.generation.servers.config import Backend, ServerConfig
from areal_actors.generation.servers.engine import open_server_engines
from areal_actors.generation.servers.launching import find_kind
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.messages import Generation, PublishWeights, Weights
from areal_actors.models import load_policy
from areal_actors.run.inference import spawn_generation
from areal_actors.testing.engines import EchoEngine
from areal_actors.testing.sglang_server import open_sglang_server
from areal_actors.training.publication import DiskPublisher, Publisher
from areal_actors.training.weight_store import StorePublisher, WeightStore, WeightStoreActor

_MIB = 1 << 20
_NUMBERS = (1, 2, 4)
_INFO_BYTES = 208
"""Of ``struct tcp_info`` up to and with ``tcpi_bytes_sent``."""


class Way(StrEnum):
    """How servers get a version."""

    BROADCAST = "one broadcast"
    SEPARATE = "one by one"
    DISK = "by disk"


@frozen(kw_only=True)
class Times:
    """Seconds of each round, and bytes."""

    waited: list[float] = field(factory=list)
    """Of the trainer."""
    clock: list[float] = field(factory=list)
    cpu: list[float] = field(factory=list)
    sent: list[int] = field(factory=list)


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the signature of every benchmark
    """Seconds until all servers have a version."""
    rounds = 3 if quick else 5
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack, ThreadPoolExecutor() as starting:
        if real := os.environ.get("AREAL_SERVER_URLS"):
            urls, model = real.split(","), Path(os.environ["AREAL_SERVER_MODEL"])
        else:
            model = Path(directory, "model")
            create_model(num_layers=2 if quick else 30, vocab_size=8_192 if quick else 49_152).save_pretrained(model)
            children = [serving_child("benchmarks.broadcasts", "server", model) for _ in range(max(_NUMBERS))]
            urls = list(starting.map(stack.enter_context, children))
        policy = Policy(load_policy(model).float().eval())
        results: list[Result] = []
        first: dict[Way, Times] = {}
        for number in (number for number in _NUMBERS if number <= len(urls)):
            for way in Way:
                times = anyio.run(_measure, way, policy, model, urls[:number], rounds)
                first.setdefault(way, times)
                results += _figures(way, number, times, first, policy.num_bytes / 2)
    return results


def _figures(way: Way, number: int, times: Times, first: Mapping[Way, Times], num_bytes: float) -> list[Result]:
    seconds, cpu = min(times.clock), min(times.cpu)
    name = f"{way}, {number} server{'s' * (number > 1)}"
    mib = num_bytes / _MIB
    detail = {
        "mib": round(mib, 1),
        "max": 1e3 * max(times.clock),
        "gib_per_second": number * mib / 1024 / seconds,
    }
    figure = partial(Result, benchmark="broadcasts")
    results = [
        figure(name=f"{name}, the trainer's wait", value=1e3 * min(times.waited), unit="ms"),
        figure(name=f"{name}, until all have it", value=1e3 * seconds, unit="ms", detail=detail),
        figure(name=f"{name}, trainer's CPU", value=1e3 * cpu, unit="ms CPU"),
    ]
    # Those that gloo's tree leaves to the root.
    copies = {Way.BROADCAST: math.ceil(math.log2(number + 1)), Way.SEPARATE: number, Way.DISK: 0}[way]
    if sent := min(times.sent):
        results.append(figure(name=f"{name}, sent", value=sent / num_bytes, unit="copies", gate=0.01 + copies))
    if number > 1:
        results.append(
            figure(
                name=f"{name}, trainer's CPU for each further one",
                value=(cpu - min(first[way].cpu)) / (number - 1) / min(first[Way.BROADCAST].cpu),
                unit="ratio",
                gate=1.5 * (copies - 1) / (number - 1) if copies else 0.5,
                baseline=f"{Way.BROADCAST}, 1 server, trainer's CPU",
            )
        )
    return results


async def _measure(way: Way, policy: Policy, model: Path, urls: Sequence[str], rounds: int) -> Times:
    """Publish to the servers at ``urls``."""
    times = Times()
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = None if way is Way.DISK else create_store(directory / "kept")
        publisher: Publisher = (
            DiskPublisher(root=directory / "published", dtype=torch.bfloat16)
            if store is None
            else StorePublisher(store=store, dtype="bfloat16")
        )
        sets = [[url] for url in urls] if way is Way.SEPARATE else [urls]
        opened = [await stack.enter_async_context(_open(model, each, directory, store)) for each in sets]
        for _ in range(rounds + 1):  # the first round forms the groups
            policy.step()
            begun = time.perf_counter()
            snapshot = await to_thread.run_sync(publisher.publish, policy)
            published, cpu, sent = time.perf_counter(), time.process_time(), _count_sent()
            async with anyio.create_task_group() as tasks:
                for replicas in opened:
                    tasks.start_soon(replicas.ask, PublishWeights(snapshot=snapshot))
            times.waited.append(published - begun)
            times.clock.append(time.perf_counter() - published)
            times.cpu.append(time.process_time() - cpu)
            times.sent.append(_count_sent() - sent)
    return Times(waited=times.waited[1:], clock=times.clock[1:], cpu=times.cpu[1:], sent=times.sent[1:])


def _count_sent() -> int:
    """Bytes that the open TCP connections of this process have sent. Those of gloo stay open between versions.

    Returns 0 where the system does not count them.
    """
    total = 0
    if sys.platform != "linux":
        return total
    for path in Path("/proc/self/fd").iterdir():
        try:
            if not str(path.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except OSError:  # closed meanwhile, or not TCP
            continue
        if len(info) == _INFO_BYTES:
            total += struct.unpack_from("Q", info, _INFO_BYTES - 8)[0]
    return total


@asynccontextmanager
async def _open(
    model: Path, urls: Sequence[str], directory: Path, store: WeightStore | None
) -> AsyncIterator[Ref[Generation]]:
    """A replica set of servers, with an actor of its own for the store."""
    async with ActorSystem.open() as system:
        keeper = None if store is None else await system.spawn(WeightStoreActor(store), name="weights")

        async def find() -> Ref[Weights]:
            assert keeper is not None
            return keeper

        async with open_server_engines(
            find_kind(Backend.SGLANG).create(),
            ServerConfig(),
            urls=urls,
            model=model,
            snapshot=Snapshot(version=0, path=model),
            publish_directory=directory / "published",
            find_weights=None if store is None else find,
        ) as engine:
            yield await spawn_generation(system, engine)


class _Reading(EchoEngine):
    """Keeps the tensors of a directory, as a server does."""

    async def load(self, snapshot: Snapshot) -> None:
        """Read what was written."""
        if snapshot.path is not None:
            tensors = await to_thread.run_sync(load_file, snapshot.path / "model.safetensors")
            # Tensors of a file are read when they are used.
            self.kept = await to_thread.run_sync(lambda: {name: tensor.clone() for name, tensor in tensors.items()})
        await super().load(snapshot)


async def _serve(model: Path) -> None:
    echo = _Reading(lambda prompt: [3] * len(prompt), vocab_size=49_152)
    async with open_sglang_server(echo, model=model, is_incremental=True) as server:
        print(server.url, flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(_serve, Path(sys.argv[2]))
