"""A real SGLang server on a CPU: ``python -m tests.generation.servers.real_sglang --python ENVIRONMENT/bin/python``.

The server is started as a run starts it (``launching``), and the same engine speaks to it. Figures are printed; what
must hold is asserted.
"""

# ruff: noqa: T201 - a program for people; no event says that a server has sampled enough

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import anyio
import httpx
import numpy as np
import torch
from attrs import evolve
from tests.generation.servers.real_server_stack import (
    TOLERANCE,
    RealServer,
    ask,
    create_config,
    open_server_stack,
    wait_for_tokens,
)
from tests.moe import save_moe

from areal_actors.domain import FinishReason
from areal_actors.generation.servers.config import ServerConfig
from areal_actors_testing.engine_contract import ENGINE_CHECKS, collect, join_ids


async def check_contract(real: RealServer) -> None:
    """Everything that holds for an engine."""
    for check in ENGINE_CHECKS:
        with anyio.fail_after(120):
            await check(real.subject)
        print(f"  {check.__name__}")


async def check_published_weights(real: RealServer) -> None:
    """Five versions by disk, each other weights: what the server says of its tokens is what we compute."""
    gaps, latencies = [], []
    for _ in range(5):
        with torch.no_grad():
            for parameter in real.policy.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        version, began = real.engine.version + 1, time.perf_counter()
        await real.engine.load(real.subject.create_snapshot(version))
        async with real.engine.generate(ask(real, f"published-{version}")) as chunks:
            seen = [await anext(aiter(chunks))]
            latencies.append(time.perf_counter() - began)
            seen += [chunk async for chunk in chunks]
        assert {chunk.version for chunk in seen} == {version}
        gaps.append(real.gap(seen))
    print(f"  largest difference of log-probabilities {max(gaps):.2g}, of {TOLERANCE:g}")
    print(f"  from publish to the first token of the new version {min(latencies):.3f} to {max(latencies):.3f} s")
    assert max(gaps) <= TOLERANCE


async def check_load_under_load(real: RealServer) -> None:
    """Eight generations while weights change and sampling pauses: whole, with versions that only grow."""
    answers: dict[str, list] = {}

    async def run(name: str) -> None:
        answers[name] = await collect(real.engine, ask(real, name, num_tokens=400))

    first, before = real.engine.version, real.engine.statistics().sampled_tokens
    async with anyio.create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(run, f"loaded-{number}")
        for version in (first + 1, first + 2):
            await wait_for_tokens(real, before + 400 * (version - first))
            await real.engine.pause()
            await real.engine.resume()
            await real.engine.load(real.subject.create_snapshot(version))
    for chunks in answers.values():
        versions = [chunk.version for chunk in chunks]
        assert versions == sorted(versions)
        assert sum(len(chunk.token_ids) for chunk in chunks) == 400
        assert real.gap(chunks) <= TOLERANCE  # the weights are the same under each of these versions
    mixed = sum(len({chunk.version for chunk in chunks}) > 1 for chunks in answers.values())
    print(f"  {mixed} of {len(answers)} answers have tokens of several versions")


async def check_death(real: RealServer) -> None:
    """Kill -9 in the middle of eight answers: started again, given the present weights, and every answer whole."""
    answers: list = []

    async def run(name: str) -> None:
        answers.append(await collect(real.engine, ask(real, name, num_tokens=400)))

    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(run, f"killed-{number}")
        before = real.engine.statistics().sampled_tokens
        await wait_for_tokens(real, before + 400)
        os.killpg(next(iter(real.launched.processes.values())), signal.SIGKILL)
    gaps = [real.gap(chunks) for chunks in answers]
    assert len(answers) == 8
    assert all(chunks[-1].finish is FinishReason.LENGTH for chunks in answers)
    assert all(sum(len(chunk.token_ids) for chunk in chunks) == 400 for chunks in answers)
    assert max(gaps) <= TOLERANCE
    print(f"  {len(answers)} answers whole after {time.perf_counter() - began:.1f} s, difference {max(gaps):.2g}")


NUM_EPISODES = 12
NUM_TURNS = 8


async def check_gateway(config: ServerConfig, directory: Path, *, smg: str) -> None:
    """Two servers behind a gateway: episodes stay with theirs, and outlive the one that is killed."""
    async with open_server_stack(evolve(config, num_servers=2), directory, smg=smg) as real:
        placed: dict[str, list[str]] = {}

        async def note(response: httpx.Response) -> None:
            key = response.request.headers["x-smg-routing-key"]
            placed.setdefault(key, []).append(response.headers.get("x-smg-routed-worker-id", ""))

        for engine in real.engine.engines:
            engine.server.generating.event_hooks["response"].append(note)
        await run_episodes(real, "pinned")
        workers = {key: set(found) for key, found in placed.items()}
        assert len(workers) == NUM_EPISODES
        assert all(len(found) == 1 for found in workers.values()), workers
        sizes = [sum(worker in found for found in workers.values()) for worker in set.union(*workers.values())]
        print(f"  {NUM_EPISODES} episodes of {NUM_TURNS} turns, each with one server: {sizes} of them with each")
        assert len(sizes) == 2

        began = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(run_episodes, real, "killed", has_loads=True))
            before = real.engine.statistics().sampled_tokens
            await wait_for_tokens(real, before + 60 * NUM_EPISODES)
            os.killpg(real.launched.processes[real.launched.urls[0]], signal.SIGKILL)
        print(f"  {NUM_EPISODES} episodes whole after {time.perf_counter() - began:.1f} s, one server killed")
        await check_return(real, began)


async def check_return(real: RealServer, began: float) -> None:
    """Episodes run until the killed server is back, which the gateway may ask before it has the present weights."""
    for number in itertools.count(1):
        was_back = all(engine.server.is_ready for engine in real.engine.engines)
        await run_episodes(real, f"returned-{number}")
        if was_back:
            print(f"  {number} more rounds, the last of them with both, {time.perf_counter() - began:.0f} s in all")
            return


async def run_episodes(real: RealServer, name: str, *, has_loads: bool = False) -> None:
    """Every turn goes on after the one before; weights change after a turn of the first one's, if they are to."""
    gaps: list[float] = []

    async def run(number: int) -> None:
        subject = real.subject
        prompt = np.random.default_rng(number).integers(3, 384, 40)
        for turn in range(NUM_TURNS):
            begun = real.engine.version
            request = evolve(ask(real, f"{name}-{number}-{turn}"), prompt=prompt, routing_key=f"{name}-{number}")
            chunks = await collect(real.engine, request)
            ids, versions = np.asarray(join_ids(chunks)), [chunk.version for chunk in chunks if len(chunk.token_ids)]
            assert len(ids) == 200
            assert chunks[-1].finish is FinishReason.LENGTH
            assert begun <= versions[0]
            assert versions == sorted(versions)
            assert versions[-1] <= real.engine.version
            found = np.concatenate([chunk.raw_logprobs for chunk in chunks])
            gaps.append(float(np.abs(found - subject.recompute(prompt, ids)).max()))
            prompt = np.concatenate([prompt, ids[:20], [7, 8, 9]])
            if has_loads and number == 0:
                await real.engine.load(subject.create_snapshot(real.engine.version + 1))

    async with anyio.create_task_group() as tasks:
        for number in range(NUM_EPISODES):
            tasks.start_soon(run, number)
    print(f"  {len(gaps)} answers whole, largest difference {max(gaps):.2g}, version {real.engine.version}")
    assert max(gaps) <= TOLERANCE


def check_training(config: ServerConfig, directory: Path) -> None:
    """Three steps from the configuration of a run, with servers that the run starts."""
    train(config, directory / "memory", "memory")


def check_placed_training(config: ServerConfig, directory: Path) -> None:
    """The same with the trainer and the engine in separate processes."""
    roles = json.dumps({"generation": {}, "trainer": {}})
    train(config, directory / "placed", "disk", f"scheduler.roles={roles}", "scheduler.local.oversubscribe=true")


def check_replayed_experts(config: ServerConfig, directory: Path) -> None:
    """A mixture of experts: the trainer computes with the experts that the server reports, and finds its numbers."""
    model = save_moe("qwen3_moe", directory / "moe")
    train(config, directory / "experts", "memory", f"model={model}", "trainer.router_replay=true")


def train(config: ServerConfig, directory: Path, way: str, *more: str) -> None:
    servers = {
        "command": list(config.command),
        "arguments": list(config.arguments),
        "environment": dict(config.environment),
    }
    arguments = ["examples/tiny.yaml", "rollout.backend=sglang", f"sglang={json.dumps(servers)}", "total_steps=3"]
    arguments += [f"trainer.publish={way}", "trainer.dtype=float32", *more]
    arguments += [f"fileroot={directory}", "logging.display=plain"]
    subprocess.run([sys.executable, "-m", "areal_actors", "train", *arguments], check=True)
    records = [json.loads(line) for line in (directory / "tiny/trial/metrics.jsonl").read_text().splitlines()]
    gaps = [record["behaviour_gap_max"] for record in records if record.get("behaviour_gap_max") is not None]
    print(f"  {way}: largest difference between server and trainer over {len(gaps)} steps {max(gaps):.2g}")
    assert max(gaps) <= TOLERANCE


CHECKS = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_contract,
        check_published_weights,
        check_load_under_load,
        check_death,
    )
}

RUNS = {
    "training": check_training,
    "placed_training": check_placed_training,
    "replayed_experts": check_replayed_experts,
}


async def check_server(config: ServerConfig, directory: Path, names: list[str]) -> None:
    began = time.perf_counter()
    async with open_server_stack(config, directory) as real:
        print(f"{real.engine.info.name} serves after {time.perf_counter() - began:.1f} s")
        for name in names:
            print(name)
            await CHECKS[name](real)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="a Python that SGLang is installed for")
    parser.add_argument("--smg", help="a Python that SGLang's gateway is installed for")
    parser.add_argument("checks", nargs="*", choices=[*CHECKS, "gateway", *RUNS, []], help="all without any")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = create_config(options.python)
    names = options.checks or [*CHECKS, *(["gateway"] if options.smg else []), *RUNS]
    with tempfile.TemporaryDirectory() as directory:
        if at_server := [name for name in names if name in CHECKS]:
            anyio.run(check_server, config, Path(directory), at_server)
        if "gateway" in names:
            print("gateway")
            anyio.run(partial(check_gateway, config, Path(directory, "gateway"), smg=options.smg))
        for name in [name for name in names if name in RUNS]:
            print(name)
            RUNS[name](config, Path(directory))


if __name__ == "__main__":
    main()
