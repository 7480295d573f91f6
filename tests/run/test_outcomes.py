"""The outcome of an episode over HTTP: conversations without a reward inherit it in the rows of every style."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from attrs import evolve
from openai import AsyncOpenAI

from areal_actors.cache import STYLES, Unrewarded
from areal_actors.client import OpenAIProxyClient, create_http_client
from areal_actors.domain import Credit, Episode, UntrainedReason
from areal_actors.generation.torch.config import TorchEngineConfig
from areal_actors.rollouts.exporter import ExportConfig
from areal_actors.run.inference import InferenceConfig, open_inference

pytestmark = pytest.mark.anyio

CONFIG = InferenceConfig(engine=TorchEngineConfig(dtype="float32", max_concurrent=4, max_length=256))


@asynccontextmanager
async def open_sessions(unrewarded: Unrewarded = Unrewarded.INHERIT) -> AsyncIterator[OpenAIProxyClient]:
    """A session of a real proxy, as a client over HTTP sees it."""
    config = evolve(CONFIG, export=ExportConfig(unrewarded=unrewarded))
    async with open_inference("tiny", config) as inference, create_http_client() as http_client:
        endpoint = inference.endpoint
        async with OpenAIProxyClient(endpoint.url, admin_key=endpoint.admin_key, http_client=http_client) as session:
            yield session


async def talk(base_url: str, api_key: str) -> tuple[str, ...]:
    """Two turns, a sub-agent beside them, and a turn after a compaction; the ids of the answers."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def ask(*messages: dict[str, str | None]) -> tuple[str, dict[str, str | None]]:
            answer = await client.chat.completions.create(model="policy", messages=list(messages), max_tokens=3)
            return answer.id, {"role": "assistant", "content": answer.choices[0].message.content}

        question = {"role": "user", "content": "plan it"}
        first, said = await ask(question)
        sub, _ = await ask({"role": "user", "content": "search for it"})
        second, _ = await ask(question, said, {"role": "user", "content": "go on"})
        last, _ = await ask({"role": "user", "content": "summary: it was planned. Answer."})
    return first, sub, second, last


def credits_of(episode: Episode) -> dict[str, tuple[float, Credit | None]]:
    """The return and the credit of each trained turn."""
    return {
        row.interactions[turn]: (round(float(row.returns[row.turns == turn][0]), 6), row.turn_infos[turn].credit)
        for row in episode.trajectories
        for turn in range(len(row.interactions))
    }


@pytest.mark.parametrize("how", ["finalize", "set_reward", "end_session"])
async def test_session_reward_reaches_all_conversations(how: str):
    """The sub-agent's turn, and the turns before the compaction, return what the episode earned; in every style."""
    async with open_sessions() as session:
        first, sub, second, last = await talk(session.base_url, session.api_key)
        if how == "set_reward":
            await session.set_last_reward(1.0)
        elif how == "end_session":
            await session.end_session(1.0)
        else:
            async with httpx.AsyncClient() as http:
                url = f"{session.base_url.removesuffix('/v1')}/rl/finalize"
                key = {"authorization": f"Bearer {session.api_key}"}
                assert (await http.post(url, json={"final_reward": 1.0}, headers=key)).is_success
        exported = [await session.export_episode(discount=0.5, style=style) for style in sorted(STYLES)]

    for episode in exported:
        assert {
            first: (0.5, Credit.INHERITED),
            second: (1.0, Credit.INHERITED),
            sub: (1.0, Credit.INHERITED),
            last: (1.0, Credit.REWARDED),
        } == credits_of(episode)
        assert 1.0 == episode.reward


async def test_answer_rewards_stay_in_conversation():
    """A reward with an id is one of that answer, and so are several without one."""
    async with open_sessions() as session:
        first, sub, second, last = await talk(session.base_url, session.api_key)
        await session.set_reward(sub, 0.5)
        await session.set_last_reward(1.0)
        episode = await session.export_episode(discount=1.0)

    found = {name: value for name, (value, _) in credits_of(episode).items()}
    assert {first: 0.0, second: 0.0, sub: 0.5, last: 1.0} == found


async def test_unrewarded_conversations_are_skipped_or_zero_as_configured():
    """Also for a request that names its discount and style: those are its own, and the setting is the service's."""
    async with open_sessions(Unrewarded.SKIP) as session:
        first, sub, second, last = await talk(session.base_url, session.api_key)
        await session.end_session(1.0)
        skipped = await session.export_episode(discount=1.0, style="concat")
    async with open_sessions(Unrewarded.ZERO) as session:
        *_, final = await talk(session.base_url, session.api_key)
        await session.end_session(1.0)
        zero = await session.export_episode(discount=1.0, style="concat")

    assert [last] == list(credits_of(skipped))
    reasons = {entry.interaction: entry.reason for entry in skipped.untrained}
    assert dict.fromkeys((first, sub, second), UntrainedReason.NO_REWARD) == reasons
    assert {final: (1.0, Credit.REWARDED)} == {n: c for n, c in credits_of(zero).items() if c[0]}
