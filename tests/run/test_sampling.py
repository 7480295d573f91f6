"""Sampling settings from the request to the update: what the engine sampled from is what the trainer computes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from anyio import to_thread
from attrs import frozen

from areal_actors.client import create_http_client, format_episode, parse_episode
from areal_actors.domain import Episode, Group, GroupId, Problem
from areal_actors.generation.torch import TorchEngine
from areal_actors.generation.torch.config import TorchEngineConfig
from areal_actors.messages import ExportSession, OpenSession
from areal_actors.models import load_policy, resolve_model
from areal_actors.rendering import load_renderer
from areal_actors.run.inference import Inference, InferenceConfig, open_actors
from areal_actors.sessions.manager import SessionsConfig, TemperatureRule
from areal_actors.training.config import TrainerConfig
from areal_actors.training.trainer import PolicyTrainer

pytestmark = pytest.mark.anyio

MIXED: Sequence[Mapping[str, Any]] = (
    {"temperature": 0.3},
    {"temperature": 0.7, "top_p": 0.9},
    {},
    {"temperature": 1.3, "top_k": 5},
    {"min_p": 0.05},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
)


async def talk(inference: Inference, client: Any, samplings: Sequence[Mapping[str, Any]], member: int) -> Episode:
    """One conversation with a turn for each of ``samplings``, exported in a style by ``member``."""
    async with inference.session() as session:
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"question {member % 2}"}]
        for sampling in samplings:
            body = {"model": "policy", "messages": messages, "max_tokens": 8, "seed": member, **sampling}
            headers = {"authorization": f"Bearer {session.api_key}"}
            response = await client.post(f"{session.base_url}/chat/completions", json=body, headers=headers)
            response.raise_for_status()
            answer = response.json()["choices"][0]["message"]
            messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "go on"}]
        url = f"{session.base_url.removesuffix('/v1')}/rl/set_reward"
        (await client.post(url, json={"reward": member % 2}, headers=headers)).raise_for_status()
        return await session.export(style=("individual", "concat", "tree")[member % 3])


@frozen(kw_only=True)
class Sampled:
    """Conversations, and a trainer with the weights that sampled them."""

    episodes: tuple[Episode, ...]
    policy: PolicyTrainer

    @property
    def group(self) -> Group:
        return Group(id=GroupId("g"), problem=Problem(position=0, data={}), episodes=self.episodes)


async def sample(all_samplings: Sequence[Sequence[Mapping[str, Any]]], **config: Any) -> Sampled:
    """A conversation for each of the sequences of settings, in float32."""
    files = await to_thread.run_sync(resolve_model, "tiny")
    renderer = await to_thread.run_sync(load_renderer, files.path)
    policy = PolicyTrainer(load_policy(files.path), TrainerConfig(dtype="float32", **config))
    engine_config = TorchEngineConfig(dtype="float32", max_concurrent=4, max_length=512)
    async with (
        TorchEngine.open(engine_config, model=policy.model, decode=renderer.decode) as engine,
        open_actors(InferenceConfig(), engine=engine, renderer=renderer) as inference,
        create_http_client() as client,
    ):
        episodes = [await talk(inference, client, each, member) for member, each in enumerate(all_samplings)]
    return Sampled(episodes=tuple(map(via_document, episodes)), policy=policy)


def via_document(episode: Episode) -> Episode:
    return parse_episode(format_episode(episode))


@pytest.mark.parametrize(("layout", "anyio_backend"), [("flat", "asyncio"), ("tree", "trio")])
async def test_the_trainer_recomputes_what_was_sampled_at_any_settings(layout: str) -> None:
    """All settings in one session, in every style and in one batch: each token has the engine's log-probability."""
    found = await sample([MIXED, MIXED, MIXED], layout=layout)
    rows = [row for episode in found.episodes for row in episode.trajectories]

    for row, recomputed in zip(rows, found.policy.logprobs(rows), strict=True):
        gaps = np.abs(recomputed - row.logprobs)
        is_cut = np.isin(row.turns, [turn for turn, info in enumerate(row.turn_infos) if info.sampling.is_truncated])
        assert gaps[~is_cut].max() < 1e-4
        # Rounding may move the bound of a truncation by a token, which changes what the others are normalised by.
        assert np.median(gaps[is_cut & (row.loss_mask == 1)] if is_cut.any() else [0.0]) < 1e-4
        assert gaps.max() < 0.02
    for row, recomputed in zip(rows, found.policy.logprobs(rows, is_raw=True), strict=True):
        np.testing.assert_allclose(recomputed, row.raw_logprobs, atol=1e-4)
    statistics = found.policy.train_step([found.group])
    assert statistics.importance_mean == pytest.approx(1.0, abs=1e-3)
    assert statistics.behaviour_gap_mean < 1e-3
    assert statistics.outside_fraction < 0.02


@pytest.mark.parametrize("layout", ["flat", "tree"])
async def test_low_temperature_is_trained_on_policy(layout: str) -> None:
    """Temperature 0.3 everywhere and nothing said to the trainer: importance 1, no gap, and the metrics say 0.3."""
    found = await sample([[{"temperature": 0.3}] * 3] * 4, layout=layout)
    statistics = found.policy.train_step([found.group])

    assert statistics.importance_mean == pytest.approx(1.0, abs=0.01)
    assert statistics.behaviour_gap_mean < 1e-3
    assert abs(statistics.approximate_kl) < 1e-3
    assert statistics.data.temperature_mean == pytest.approx(0.3)


MESSAGES = [{"role": "user", "content": "say"}]
DIALECTS = {
    "chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "completions": {"prompt": "say", "max_tokens": 4},
    "messages": {"messages": MESSAGES, "max_tokens": 4},
    "responses": {"input": "say", "max_output_tokens": 16},
}


RULES = {
    # the rule: whether the session is trained, the temperature of its request, and the one that is sampled at
    TemperatureRule.AS_REQUESTED: [(True, 0.0, 0.0), (True, 0.9, 0.9)],
    TemperatureRule.OVERRIDE: [(True, 0.0, 0.7), (True, 0.9, 0.7), (False, 0.0, 0.0)],
    TemperatureRule.MINIMUM: [(True, 0.0, 0.7), (True, 0.9, 0.9), (False, 0.0, 0.0)],
}


@pytest.mark.parametrize("rule", RULES)
async def test_temperature_of_requests_follows_the_rule_in_training(rule: TemperatureRule) -> None:
    """In every dialect: it is sampled, recorded, recomputed by the trainer and echoed. Evaluations keep their own."""
    files = await to_thread.run_sync(resolve_model, "tiny")
    renderer = await to_thread.run_sync(load_renderer, files.path)
    policy = PolicyTrainer(load_policy(files.path), TrainerConfig(dtype="float32"))
    config = InferenceConfig(sessions=SessionsConfig(temperature_bounds=rule.bounds(0.7)))
    async with (
        TorchEngine.open(TorchEngineConfig(dtype="float32"), model=policy.model, decode=renderer.decode) as engine,
        open_actors(config, engine=engine, renderer=renderer) as inference,
        create_http_client() as client,
    ):
        for (is_trained, asked, sampled), route, is_stream in product(RULES[rule], DIALECTS, (False, True)):
            opened = await inference.sessions.ask(OpenSession(task="t", is_trained=is_trained))
            body = {"model": "policy", "temperature": asked, "stream": is_stream, **DIALECTS[route]}
            url = f"{inference.endpoint.session_base_url(opened.session)}/{route}"
            answered = await client.post(url, json=body, headers={"authorization": f"Bearer {opened.api_key}"})
            answered.raise_for_status()
            rows = (await inference.exports.ask(ExportSession(session=opened.session, member=0))).trajectories

            assert [info.sampling.temperature for row in rows for info in row.turn_infos] == [sampled]
            if sampled:
                np.testing.assert_allclose(policy.logprobs(rows)[0], rows[0].logprobs, atol=1e-4)
            echoed = {float(value) for value in re.findall(r'"temperature":\s*([0-9.]+)', answered.text)}
            assert echoed == ({sampled} if route == "responses" else set())
