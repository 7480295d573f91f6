"""Weights to several servers: one broadcast to all of them, beside sending everything to each one separately.

Fake SGLang servers run in processes of their own and keep what they receive. The weight store broadcasts one version to
1, 2 and 4 of them; the baseline is one store for each server, which is what a group for each server costs. Seconds are
those on the clock from the publication until all servers have the version, and CPU seconds those of the trainer's
process, the least of some rounds. Copies are the bytes that this process sent over TCP for a version, in units of the
weights (``tcpi_bytes_sent`` of its sockets, on Linux). Weights are bfloat16 and have the shapes of SmolLM2-135M
(257 MiB; a twelfth of them with ``--quick``).

All processes share the cores of one machine, so the clock also counts what every server spends on receiving. On
separate machines those times overlap; the CPU time of the trainer's process is what remains.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

import anyio
from anyio import to_thread
from attrs import field, frozen
from benchmarks.harness import Result
from benchmarks.moving import Policy
from benchmarks.updates import create_model, create_store, serving_child

from areal_actors.domain import Snapshot
from areal_actors.generation.servers.config import Backend, ServerConfig
from areal_actors.generation.servers.engine import open_server_engines
from areal_actors.generation.servers.launching import KINDS
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.messages import Generation, PublishWeights, Weights
from areal_actors.models import load_policy
from areal_actors.run.inference import spawn_generation
from areal_actors.testing.engines import EchoEngine
from areal_actors.testing.sglang_server import open_sglang_server
from areal_actors.training.weight_store import StorePublisher, WeightStore, WeightStoreActor

_MIB = 1 << 20
_NUMBERS = (1, 2, 4)
_INFO_BYTES = 208
"""Of ``struct tcp_info`` up to and with ``tcpi_bytes_sent``."""


@frozen(kw_only=True)
class Times:
    """Seconds of each round."""

    clock: list[float] = field(factory=list)
    cpu: list[float] = field(factory=list)
    sent: list[int] = field(factory=list)
    """Bytes."""


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the signature of every benchmark
    """Seconds until all servers have a version."""
    rounds = 3 if quick else 5
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory, "model")
        create_model(num_layers=2 if quick else 30, vocab_size=8_192 if quick else 49_152).save_pretrained(model)
        policy = Policy(load_policy(model).float().eval())
        results: list[Result] = []
        with ExitStack() as stack, ThreadPoolExecutor() as starting:
            children = [serving_child("benchmarks.broadcasts", "server", model) for _ in range(max(_NUMBERS))]
            urls = list(starting.map(stack.enter_context, children))
            first: dict[str, Times] = {}
            for number in _NUMBERS:
                for way in ("one broadcast", "one by one"):
                    stores = [urls[:number]] if way == "one broadcast" else [[url] for url in urls[:number]]
                    times = anyio.run(_measure, policy, model, stores, rounds)
                    results += _figures(way, number, times, first.setdefault(way, times), policy.num_bytes / 2)
    return results


def _figures(way: str, number: int, times: Times, first: Times, num_bytes: float) -> list[Result]:
    seconds, cpu = min(times.clock), min(times.cpu)
    name = f"{way}, {number} server{'s' * (number > 1)}"
    mib = num_bytes / _MIB
    detail = {
        "mib": round(mib, 1),
        "max": 1e3 * max(times.clock),
        "gib_per_second": number * mib / 1024 / seconds,
    }
    clock = f"{name}, until all have it"
    results = [
        Result(benchmark="broadcasts", name=clock, value=1e3 * seconds, unit="ms", detail=detail),
        Result(benchmark="broadcasts", name=f"{name}, trainer's CPU", value=1e3 * cpu, unit="ms CPU"),
    ]
    if sent := min(times.sent):
        results.append(Result(benchmark="broadcasts", name=f"{name}, sent", value=sent / num_bytes, unit="copies"))
    if number > 1:
        results.append(
            Result(
                benchmark="broadcasts",
                name=f"{name}, ratio of the trainer's CPU",
                value=cpu / min(first.cpu),
                unit="ratio",
                baseline=f"{way}, 1 server, trainer's CPU",
            )
        )
    return results


async def _measure(policy: Policy, model: Path, stores: Sequence[Sequence[str]], rounds: int) -> Times:
    """Publish to the servers of each store; all stores have the same weights."""
    times = Times()
    async with AsyncExitStack() as stack:
        store = create_store(model.parent / "kept")
        opened = [await stack.enter_async_context(_open(model, urls, store)) for urls in stores]
        for _ in range(rounds + 1):  # the first round forms the groups
            policy.step()
            snapshot = await to_thread.run_sync(StorePublisher(store=store, dtype="bfloat16").publish, policy)
            begun, cpu, sent = time.perf_counter(), time.process_time(), _count_sent()
            async with anyio.create_task_group() as tasks:
                for replicas in opened:
                    tasks.start_soon(replicas.ask, PublishWeights(snapshot=snapshot))
            times.clock.append(time.perf_counter() - begun)
            times.cpu.append(time.process_time() - cpu)
            times.sent.append(_count_sent() - sent)
    return Times(clock=times.clock[1:], cpu=times.cpu[1:], sent=times.sent[1:])


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
async def _open(model: Path, urls: Sequence[str], store: WeightStore) -> AsyncIterator[Ref[Generation]]:
    """A replica set of servers with a store of its own."""
    async with ActorSystem.open() as system:
        keeper = await system.spawn(WeightStoreActor(store), name="weights")

        async def find() -> Ref[Weights]:
            return keeper

        async with open_server_engines(
            KINDS[Backend.SGLANG].create_dialect({}),
            ServerConfig(),
            urls=urls,
            model=model,
            snapshot=Snapshot(version=0, path=model),
            publish_directory=model.parent / "published",
            find_weights=find,
        ) as engine:
            yield await spawn_generation(system, engine)


async def _serve(model: Path) -> None:
    echo = EchoEngine(lambda prompt: [3] * len(prompt), vocab_size=49_152)
    async with open_sglang_server(echo, model=model, is_incremental=True) as server:
        print(server.url, flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(_serve, Path(sys.argv[2]))
