"""Adapters on a real server: ``python -m tests.generation.servers.real_adapters --python ENVIRONMENT/bin/python``.

The trainer's side moves the factors for each version; what the server samples must have the log-probabilities that the
trainer computes with them. ``--kind vllm`` starts vLLM.
"""

# ruff: noqa: T201 - a program for people

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import anyio
import httpx
import numpy as np
import torch
from attrs import evolve
from tests.generation.servers.real_server_stack import TOLERANCE, create_config
from tests.generation.servers.server_stack import ReplicatedServers, open_replicated

from areal_actors.domain import EngineRequest, SampleKey, Sampling, Snapshot
from areal_actors.generation.servers.config import AdapterSlots, Backend, ServerConfig
from areal_actors.generation.servers.launching import find_kind, launch_servers
from areal_actors.models import load_policy, resolve_model
from areal_actors.training.config import ComputeDtype, LoraConfig, TrainerConfig
from areal_actors.training.publication import AdapterPublisher
from areal_actors.training.trainer import PolicyTrainer
from areal_actors_testing.engine_contract import collect

PROMPT = np.random.default_rng(3).integers(3, 384, 40)
RANK = 8


def ask(name: str, *, num_tokens: int = 60) -> EngineRequest:
    return EngineRequest(
        id=name, prompt=PROMPT, sampling=Sampling(max_new_tokens=num_tokens), key=SampleKey(seed=0), routing_key=name
    )


@torch.no_grad()
def move(policy: PolicyTrainer) -> None:
    """Another version, far enough from the one before for every token to tell them apart."""
    policy.version += 1
    assert policy.adapter is not None
    generator = torch.Generator().manual_seed(policy.version)
    for name, factor in policy.adapter.parameters().items():
        factor.copy_(torch.randn(factor.shape, generator=generator) * (0.05 if "lora_A" in name else 0.2))


@torch.no_grad()
def recompute(policy: PolicyTrainer, output: list[int]) -> np.ndarray:
    ids = torch.tensor([*PROMPT.tolist(), *output])
    logprobs = torch.log_softmax(policy.model(input_ids=ids[None]).logits[0, len(PROMPT) - 1 : -1].float(), -1)
    return logprobs.gather(1, ids[len(PROMPT) :, None])[:, 0].numpy()


async def check(kind: Backend, config: ServerConfig, directory: Path) -> None:
    path, slots = resolve_model("tiny").path, AdapterSlots(rank=RANK)
    trainer = TrainerConfig(dtype=ComputeDtype.FLOAT32, lora=LoraConfig(rank=RANK, alpha=16))
    policy = PolicyTrainer(load_policy(path), trainer)
    publisher = AdapterPublisher(root=directory / "adapters", base=path)
    async with (
        launch_servers(kind, config, model=path, logs=directory / "logs", adapters=slots) as launched,
        open_replicated(
            find_kind(kind).create(),
            config,
            urls=launched.urls,
            model=path,
            snapshot=Snapshot(version=0, path=path),
            publish_directory=directory / "published",
            processes=launched,
            adapters=slots,
        ) as engine,
    ):
        tokens: dict[int, list[int]] = {}
        for _ in range(5):
            move(policy)
            began = time.perf_counter()
            await engine.load(publisher.publish(policy))
            loaded = time.perf_counter() - began
            await collect(engine, ask(f"first-{policy.version}", num_tokens=1))
            first = time.perf_counter() - began
            chunks = await collect(engine, ask(f"v{policy.version}"))
            ids = [int(token) for chunk in chunks for token in chunk.token_ids]
            found = np.concatenate([chunk.raw_logprobs for chunk in chunks])
            gap = float(np.abs(found - recompute(policy, ids)).max())
            print(f"  version {policy.version}: loaded {loaded:.2f} s, first token {first:.2f} s, gap {gap:.1e}")
            assert gap <= TOLERANCE
            assert {chunk.version for chunk in chunks if len(chunk.token_ids)} == {policy.version}
            tokens[policy.version] = ids
        await check_running(engine, policy, publisher)
        async with httpx.AsyncClient(base_url=launched.urls[0], trust_env=False) as client:
            names = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
        print(f"  models: {names}")
        assert len([name for name in names if name.startswith("areal-")]) <= 2


async def check_running(engine: ReplicatedServers, policy: PolicyTrainer, publisher: AdapterPublisher) -> None:
    """A generation that runs while the next adapter is loaded: the tokens of each version are what it computes."""
    before, chunks, loading = policy.version, [], anyio.Event()
    snapshots = []

    async def load() -> None:
        move(policy)
        snapshots.append(publisher.publish(policy))
        await engine.load(snapshots[0])

    async with anyio.create_task_group() as tasks, engine.generate(ask("running", num_tokens=150)) as stream:
        async for chunk in stream:
            chunks.append(chunk)
            if not loading.is_set() and sum(len(each.token_ids) for each in chunks) > 20:
                loading.set()
                tasks.start_soon(load)
    ids = [int(token) for chunk in chunks for token in chunk.token_ids]
    versions = np.array([chunk.version for chunk in chunks for _ in chunk.token_ids])
    found = np.concatenate([chunk.raw_logprobs for chunk in chunks])
    after = np.abs(found - recompute(policy, ids))[versions == policy.version]
    num_before = int((versions == before).sum())
    print(
        f"  running: {num_before} tokens of version {before}, {len(after)} of {policy.version}, gap {after.max():.1e}"
    )
    assert (np.diff(versions) >= 0).all()
    assert len(after)
    assert after.max() <= TOLERANCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="a Python that the server is installed for")
    parser.add_argument("--kind", choices=["sglang", "vllm"], default="sglang")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = create_config(options.python)
    if options.kind == "sglang":
        config = evolve(config, arguments=(*config.arguments, "--lora-backend", "torch_native"))
    else:
        arguments = ("--dtype", "float32", "--max-model-len", "2048", "--enforce-eager")
        environment = {**config.environment, "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1"}
        config = evolve(config, python=options.python, command=(), arguments=arguments, environment=environment)
    with tempfile.TemporaryDirectory() as directory:
        print(options.kind)
        anyio.run(check, Backend(options.kind), config, Path(directory))


if __name__ == "__main__":
    main()
