"""Router replay, from the routers of the engine to the gradients of the trainer's."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from anyio import to_thread
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from openai import AsyncOpenAI
from tests.moe import save_moe
from tests.run.trained import NAME, train

from areal_actors.client import create_http_client
from areal_actors.domain import Chunk, EngineRequest, Episode, Group, GroupId, Problem, Snapshot, unfold
from areal_actors.errors import CaptureViolation, ConfigError, ExportError
from areal_actors.generation.base import Engine
from areal_actors.generation.servers.config import Backend, ServerConfig
from areal_actors.generation.servers.dialect import RoutedLayers
from areal_actors.generation.servers.engine import open_server_engines
from areal_actors.generation.servers.launching import find_kind
from areal_actors.generation.torch import TorchEngine
from areal_actors.generation.torch.config import TorchEngineConfig
from areal_actors.interchange.episodes import format_episode, parse_episode
from areal_actors.models import load_policy, resolve_model
from areal_actors.rendering import load_renderer
from areal_actors.run.checks import check_capture_of
from areal_actors.run.inference import InferenceConfig, open_actors
from areal_actors.training.config import Activations, TrainerConfig
from areal_actors.training.router_replay import record_experts
from areal_actors.training.trainer import PolicyTrainer
from areal_actors_testing.sglang_server import open_sglang_server

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    """One event loop: numbers do not depend on it."""
    return "asyncio"


UNKNOWN = 255


@asynccontextmanager
async def served(engine: Engine, path: Path) -> AsyncIterator[Engine]:
    """``engine`` behind a server with SGLang's interface."""
    snapshot = Snapshot(version=0, path=path)
    dialect = find_kind(Backend.SGLANG).create(added_tokens={}, stream_interval=4, routed_layers=RoutedLayers.of(path))
    async with (
        open_sglang_server(engine, model=path, records_experts=True) as server,
        open_server_engines(
            dialect,
            ServerConfig(),
            urls=[server.url],
            model=path,
            snapshot=snapshot,
            publish_directory=path.parent / "published",
        ) as opened,
    ):
        yield next(iter(opened.engines.values()))


async def sample(
    path: Path, *, dtype: str, records: bool = True, num_turns: int = 2, length: int = 12, is_served: bool = False
) -> Episode:
    """An episode of two conversations with the same first question, in the export style ``tree``."""
    renderer = await to_thread.run_sync(load_renderer, path)
    model = await to_thread.run_sync(load_policy, path)
    config = TorchEngineConfig(
        dtype=dtype, device="cpu", max_concurrent=4, max_length=256, return_routed_experts=records
    )
    async with (
        TorchEngine.open(config, model=model, decode=renderer.decode) as own,
        served(own, path) if is_served else nullcontext(own) as engine,
        open_actors(InferenceConfig(), engine=engine, renderer=renderer) as inference,
        create_http_client() as http_client,
        inference.session() as session,
    ):
        client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http_client)
        for branch in range(2):
            messages = [{"role": "user", "content": "what is it?"}]
            for turn in range(num_turns):
                found = await client.chat.completions.create(
                    model="policy", messages=messages, max_tokens=length, seed=10 * branch + turn
                )
                answer = found.choices[0].message.content or ""
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and then?"}]
        await session.set_reward(1.0)
        return await session.export(style="tree")


def gap(trainer: PolicyTrainer, rows) -> float:
    """The mean difference of log-probabilities between the engine and the trainer."""
    pairs = zip(rows, trainer.logprobs(rows), strict=True)
    return float(np.concatenate([np.abs(found - row.logprobs)[row.loss_mask == 1] for row, found in pairs]).mean())


@pytest.mark.parametrize("place", ["embedded", "sglang"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
async def test_recorded_experts_equal_those_of_trainer(tmp_path: Path, kind: str, place: str):
    """In float32, of every token that a prediction depends on, whichever turn and cache computed it."""
    path = save_moe(kind, tmp_path)
    episode = await sample(path, dtype="float32", is_served=place == "sglang")
    model = load_policy(path)

    branches = [branch.row for row in episode.trajectories for branch in unfold(row)]
    assert 2 == len(branches)
    for row in branches:
        with torch.no_grad(), record_experts(model) as chosen:
            model(input_ids=torch.from_numpy(row.input_ids.astype(np.int64))[None])
        own = np.sort(torch.stack(chosen, 1).numpy()[:-1], -1)
        assert row.routed_experts is not None
        assert np.uint8 == row.routed_experts.dtype
        np.testing.assert_array_equal(np.sort(row.routed_experts[:-1], -1), own)
    # They survive the document in which an episode is journalled and sent.
    for row, parsed in zip(episode.trajectories, parse_episode(format_episode(episode)).trajectories, strict=True):
        np.testing.assert_array_equal(row.routed_experts, parsed.routed_experts)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
async def test_forced_experts_train_router(tmp_path: Path, activations: str):
    """Other experts than the model's own change what is computed; the router has a gradient, the loss is the same."""
    path = save_moe("qwen3_moe", tmp_path)
    episode = await sample(path, dtype="float32", num_turns=1)
    (row,) = episode.trajectories
    assert row.routed_experts is not None
    forced = evolve(row, routed_experts=np.where(row.routed_experts == UNKNOWN, UNKNOWN, 3 - row.routed_experts))
    trainer = PolicyTrainer(
        load_policy(path),
        TrainerConfig(dtype="float32", device="cpu", router_replay=True, activations=Activations(activations)),
    )
    before = trainer.logprobs([row])[0]

    np.testing.assert_allclose(before, row.logprobs, atol=1e-4)
    assert np.abs(trainer.logprobs([forced])[0] - before).max() > 1e-3
    gates = {
        name: weight.detach().clone() for name, weight in trainer.model.named_parameters() if "gate.weight" in name
    }
    # Two conversations with opposite advantages: equal rows would cancel each other.
    first, second = (branch.row for branch in unfold(row))
    second = evolve(second, returns=0 * second.returns, reward=0.0)
    episodes = (
        evolve(episode, trajectories=(first,)),
        evolve(episode, member=1, reward=0.0, trajectories=(second,)),
    )
    group = Group(id=GroupId("g"), problem=Problem(position=0, data={}), episodes=episodes)
    trainer.train_step([group])
    assert gates
    assert all(not torch.equal(weight, trainer.model.get_parameter(name)) for name, weight in gates.items())
    with pytest.raises(ExportError, match="router_replay"):
        trainer.train_step(
            [evolve(group, episodes=(evolve(episode, trajectories=(evolve(row, routed_experts=None),)),))]
        )


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_run_with_router_replay_is_published_and_resumed(tmp_path: Path, kind: str):
    """A mixture of experts, sampled in bfloat16: the resumed step trains with replay, too."""
    model = save_moe(kind, tmp_path / "model")
    settings = (f"model={model}", "engine.dtype=bfloat16", "trainer.router_replay=true")
    for more in (("total_steps=1",), ("total_steps=2", "--resume")):
        outcome = train(tmp_path, NAME, *settings, *more)
        assert 0 == outcome.exit_code, outcome.output

    lines = (tmp_path / NAME / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if record.get("behaviour_gap_max") is not None]
    assert 2 == len(steps)


class WithOtherExperts:
    """An engine that reports experts which it did not use."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @asynccontextmanager
    async def generate(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[Chunk]]:
        """The chunks of the engine, the last one with the experts that were not chosen."""
        async with self._engine.generate(request) as chunks:
            yield (
                chunk if chunk.routed_experts is None else evolve(chunk, routed_experts=3 - chunk.routed_experts)
                async for chunk in chunks
            )


@pytest.mark.parametrize("seed", range(8, 11))
async def test_engine_self_test_replays_experts(tmp_path: Path, seed: int):
    """In bfloat16, routers of some of these models choose other experts than in float32; the engine is right."""
    path = save_moe("mixtral", tmp_path, seed=seed)
    renderer = load_renderer(path)
    config = TorchEngineConfig(
        dtype="bfloat16", device="cpu", max_concurrent=1, max_length=256, return_routed_experts=True
    )
    policy = PolicyTrainer(load_policy(path), TrainerConfig(dtype="float32", device="cpu", router_replay=True))
    async with TorchEngine.open(config, model=load_policy(path), decode=renderer.decode) as engine:
        async with open_actors(InferenceConfig(), engine=engine, renderer=renderer) as inference:
            await check_capture_of(inference.generation, policy=policy, renderer=renderer)
        async with open_actors(InferenceConfig(), engine=WithOtherExperts(engine), renderer=renderer) as inference:
            with pytest.raises(CaptureViolation, match="log-probabilities are off"):
                await check_capture_of(inference.generation, policy=policy, renderer=renderer)


def test_router_replay_refuses_dense_models_and_servers(tmp_path: Path):
    """Before the first step, with what to change."""
    with pytest.raises(ConfigError, match="has no routers"):
        PolicyTrainer(load_policy(resolve_model("tiny").path), TrainerConfig(router_replay=True))
    outcome = train(tmp_path, NAME, "trainer.router_replay=true", "rollout.backend=vllm")
    assert 0 != outcome.exit_code
    assert "router_replay" in outcome.output
    with pytest.raises(ConfigError, match="is not a mixture of experts"):
        RoutedLayers.of(resolve_model("tiny").path)


@given(data=st.data())
def test_reported_experts_are_decoded(data):
    """As they were, without dense layers; another number of them is an error."""
    num_layers, num_chosen, num_tokens = (data.draw(st.integers(1, 4)) for _ in range(3))
    sparse = tuple(sorted(data.draw(st.sets(st.integers(0, num_layers - 1), min_size=1))))
    shape = (num_tokens, num_layers, num_chosen)
    given_experts = data.draw(hnp.arrays(np.int32, shape, elements=st.integers(0, 200)))
    layers = RoutedLayers(num_chosen=num_chosen, num_layers=num_layers, sparse=sparse)
    encoded = b64encode(given_experts.tobytes()).decode()

    np.testing.assert_array_equal(given_experts[:, list(sparse)], layers.decode(encoded, num_tokens=num_tokens))
    with pytest.raises(ValueError, match="experts for"):
        layers.decode(encoded, num_tokens=num_tokens + 1)
