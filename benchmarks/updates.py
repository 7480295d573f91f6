"""New weights: from the end of a training step to the first token that was sampled with them.

The way is the whole one: a publisher makes a snapshot, the generation actor has its engine load it, and a request that
is sent then streams its first token. The engine lives in this process and is handed the weights themselves, or in
another one, which gets them over a unix socket or as a path on disk, or it is a server, which is told by HTTP of a
directory, or receives them in a group. By default that is the small server of ``areal_actors.testing``, in a process of
its own. ``AREAL_SERVER`` (``sglang`` or ``vllm``), ``AREAL_SERVER_URL`` and ``AREAL_SERVER_MODEL``, the directory that
it was started with, name a real one, which is measured as well, with its own model.

What one would write first is the baseline: the tensors copied into a second model, sent through a socket before, or
written as safetensors and read, and its logits for the same prompt. All are seconds on the clock, the least of some
rounds; a file that was written a moment ago is read from memory, but a directory that engines in other processes load
is on the disk before anybody hears of it, and so is its baseline. Weights are float32 and have the shapes of
SmolLM2-135M (a twelfth of them with ``--quick``).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import numpy as np
from anyio import to_thread
from attrs import field, frozen
from benchmarks.harness import Result
from benchmarks.machine import ROOT
from benchmarks.moving import ByHand, Policy, measure_by_hand

from areal_actors.domain import EngineRequest, SampleKey, Sampling, Snapshot
from areal_actors.generation.servers.config import Backend, ServerConfig
from areal_actors.generation.servers.engine import open_server_engines
from areal_actors.generation.servers.launching import find_kind
from areal_actors.generation.torch import TorchEngine, TorchEngineConfig
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.kernel.remote import connect, listen
from areal_actors.messages import Generate, Generation, PublishWeights, Weights
from areal_actors.models import load_policy
from areal_actors.run.inference import spawn_generation
from areal_actors.testing.sglang_server import open_sglang_server
from areal_actors.training.config import TrainerConfig
from areal_actors.training.publication import DiskPublisher, MemoryPublisher, Publisher
from areal_actors.training.weight_store import StorePublisher, WeightStore, WeightStoreActor

_SECRET = b"a secret of two benchmark processes"
_ENGINE = TorchEngineConfig(dtype="float32", device="cpu", max_length=64)
_PROMPT = np.arange(3, 35, dtype=np.int32)
_MAX_RATIO = 4.0
"""Of the whole way to what is moved by hand: a request crosses processes, which share the cores, and the wire between
actors may take three times as long as a bare socket (see ``remote``)."""
_MIB = 1 << 20

_ids = count()


@frozen(kw_only=True)
class Times:
    """Seconds of each round from the beginning of a publication: until the engine has the weights, and a token."""

    loaded: list[float] = field(factory=list)
    sampled: list[float] = field(factory=list)


@frozen(kw_only=True)
class Route:
    """A way of weights to an engine, and how one would go it by hand."""

    name: str
    by_hand: ByHand
    publisher: Publisher
    open: Callable[[], AbstractAsyncContextManager[Ref[Generation]]]


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the signature of every benchmark
    """Seconds until the first new token, beside the same bytes moved by hand."""
    rounds = 3 if quick else 5
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory, "model")
        create_model(num_layers=2 if quick else 30, vocab_size=8_192 if quick else 49_152).save_pretrained(model)
        routes = create_routes(model, Path(directory))
        results = anyio.run(measure_routes, "", model, routes, rounds)
        real = _find_real(Path(directory))
        if real is not None:
            served, ways = real
            results += anyio.run(measure_routes, f"{os.environ['AREAL_SERVER']}: ", served, ways, rounds)
    return results


def create_model(*, num_layers: int, vocab_size: int) -> Any:
    """SmolLM2-135M with random weights, or less of it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=576,
        intermediate_size=1_536,
        num_hidden_layers=num_layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


# -------------------------------------------------------------------------------------------------------- the ways


def create_routes(model: Path, directory: Path) -> list[Route]:
    """Those that any machine has."""
    disk = DiskPublisher(root=directory / "published")
    store = create_store(directory / "kept")
    return [
        Route(
            name="engine in this process, by memory",
            by_hand=ByHand.COPIED,
            publisher=MemoryPublisher(),
            open=partial(_open_here, model),
        ),
        Route(
            name="engine in another process, by memory",
            by_hand=ByHand.SENT,
            publisher=MemoryPublisher(),
            open=partial(_open_elsewhere, model),
        ),
        Route(
            name="engine in another process, by disk",
            by_hand=ByHand.SYNCED,
            publisher=disk,
            open=partial(_open_elsewhere, model),
        ),
        Route(
            name="server, by disk",
            by_hand=ByHand.WRITTEN,
            publisher=MemoryPublisher(),  # the engine of servers writes it
            open=partial(_open_fake, model, directory / "served", None),
        ),
        Route(
            name="server, sent in a group",
            by_hand=ByHand.SENT,
            publisher=StorePublisher(store=store),
            open=partial(_open_fake, model, directory / "served", store),
        ),
    ]


def create_store(root: Path) -> WeightStore:
    """With buckets of the size that is the default of a run."""
    return WeightStore(root=root, bucket_bytes=TrainerConfig().publish_bucket_mib * _MIB)


def _find_real(directory: Path) -> tuple[Path, list[Route]] | None:
    """The ways to the server that is named by the environment, and the directory of its model."""
    if "AREAL_SERVER_URL" not in os.environ:
        return None
    names = "AREAL_SERVER", "AREAL_SERVER_URL", "AREAL_SERVER_MODEL"
    if missing := [name for name in names if name not in os.environ]:
        raise RuntimeError(f"A server is named by {', '.join(names)}; {' and '.join(missing)} are missing.")
    kind, url, directory_of_model = (os.environ[name] for name in names)
    backend, model = Backend(kind), Path(directory_of_model)
    opening = partial(_open_server, backend, url, model, directory / "real")
    by_disk = Route(
        name=f"{backend} server, by disk",
        by_hand=ByHand.WRITTEN,
        publisher=MemoryPublisher(),
        open=partial(opening, None),
    )
    if backend is not Backend.SGLANG:
        return model, [by_disk]
    store = create_store(directory / "kept-for-real")
    sent = Route(
        name=f"{backend} server, sent in a group",
        by_hand=ByHand.SENT,
        publisher=StorePublisher(store=store),
        open=partial(opening, store),
    )
    return model, [by_disk, sent]


@asynccontextmanager
async def _open_here(model: Path) -> AsyncIterator[Ref[Generation]]:
    async with TorchEngine.open(_ENGINE, model=model) as engine, ActorSystem.open() as system:
        yield await spawn_generation(system, engine)


@asynccontextmanager
async def _open_elsewhere(model: Path) -> AsyncIterator[Ref[Generation]]:
    with serving_child("benchmarks.updates", "actor", model) as address:
        async with connect(address, secret=_SECRET) as peer:
            yield peer.ref(Generation, "generation")


@asynccontextmanager
async def _open_fake(model: Path, published: Path, store: WeightStore | None) -> AsyncIterator[Ref[Generation]]:
    with serving_child("benchmarks.updates", "server", model) as url:
        async with _open_server(Backend.SGLANG, url, model, published, store) as generation:
            yield generation


@asynccontextmanager
async def _open_server(
    backend: Backend, url: str, model: Path, published: Path, store: WeightStore | None
) -> AsyncIterator[Ref[Generation]]:
    async with ActorSystem.open() as system:
        keeper = None if store is None else await system.spawn(WeightStoreActor(store), name="weights")

        async def find() -> Ref[Weights]:
            assert keeper is not None
            return keeper

        opening = open_server_engines(
            find_kind(backend).create(),
            ServerConfig(),
            urls=[url],
            model=model,
            snapshot=Snapshot(version=0, path=model),
            publish_directory=published,
            find_weights=None if store is None else find,
        )
        async with opening as engine, ActorSystem.open() as inner:
            yield await spawn_generation(inner, engine)


@contextmanager
def serving_child(module: str, kind: str, model: Path) -> Iterator[str]:
    """A process with an engine; where it listens."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", module, kind, str(model), directory]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
            try:
                assert child.stdout is not None
                address = child.stdout.readline().strip()
                if not address:
                    raise RuntimeError(f"The process of the {kind} ended before it listened; see above.")
                yield address
            finally:
                child.kill()


async def _serve_actor(model: Path, directory: Path) -> None:
    address = f"unix:{directory}/own/socket"
    (directory / "own").mkdir(mode=0o700)
    async with TorchEngine.open(_ENGINE, model=model) as engine, ActorSystem.open() as system:
        generation = await spawn_generation(system, engine)
        async with listen(address, secret=_SECRET, expose={"generation": generation}):
            print(address, flush=True)
            await anyio.sleep_forever()


async def _serve_http(model: Path, directory: Path) -> None:  # noqa: ARG001 - all children are started alike
    async with (
        TorchEngine.open(_ENGINE, model=model) as engine,
        open_sglang_server(engine, model=model, is_incremental=True) as server,
    ):
        print(server.url, flush=True)
        await anyio.sleep_forever()


# ------------------------------------------------------------------------------------------------------- measuring


async def measure_routes(prefix: str, model: Path, routes: list[Route], rounds: int) -> list[Result]:
    """The figures of some ways of weights from a policy like ``model``, and of the baselines before them."""
    policy = Policy(load_policy(model).float().eval())
    by_hand = measure_by_hand(policy, load_policy(model).float().eval(), _PROMPT, rounds)
    results = [_figure(f"{prefix}{name}", times, policy) for name, times in by_hand.items()]
    for route in routes:
        async with route.open() as generation:
            times = await _measure(policy, route.publisher, generation, rounds)
        baseline, value = f"{prefix}{route.by_hand}", min(times.sampled) / min(by_hand[route.by_hand])
        results.append(_figure(f"{route.name}, until loaded", times.loaded, policy))
        results.append(_figure(f"{route.name}, until the first token", times.sampled, policy))
        results.append(_ratio(f"{route.name}, ratio", value, baseline))
    return results


def _figure(name: str, times: list[float], policy: Policy) -> Result:
    milliseconds = [1e3 * seconds for seconds in times]
    detail = {"mib": round(policy.num_bytes / _MIB, 1), "median": median(milliseconds), "max": max(milliseconds)}
    return Result(benchmark="updates", name=name, value=min(milliseconds), unit="ms", detail=detail)


def _ratio(name: str, value: float, baseline: str) -> Result:
    return Result(benchmark="updates", name=name, value=value, unit="ratio", gate=_MAX_RATIO, baseline=baseline)


async def _measure(policy: Policy, publisher: Publisher, generation: Ref[Generation], rounds: int) -> Times:
    times = Times()
    await _sample(generation)
    for _ in range(rounds):
        policy.step()
        begun = time.perf_counter()
        snapshot = await to_thread.run_sync(publisher.publish, policy)
        await generation.ask(PublishWeights(snapshot=snapshot))
        times.loaded.append(time.perf_counter() - begun)
        version = await _sample(generation)
        times.sampled.append(time.perf_counter() - begun)
        assert version == policy.version
    return times


async def _sample(generation: Ref[Generation]) -> int:
    """The version of one token, as soon as it is known."""
    request = EngineRequest(
        id=f"update-{next(_ids)}",
        prompt=_PROMPT,
        sampling=Sampling(max_new_tokens=1, temperature=1.0),
        key=SampleKey(seed=1),
    )
    async with generation.stream(Generate(request=request)) as chunks:
        return (await anext(aiter(chunks))).version


_CHILDREN: Mapping[str, Callable[[Path, Path], Awaitable[None]]] = {"actor": _serve_actor, "server": _serve_http}

if __name__ == "__main__":
    anyio.run(_CHILDREN[sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3]))
