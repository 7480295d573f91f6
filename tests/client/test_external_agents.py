"""Agents of another program, which change only their base URL: by hand, and as a batch."""

from __future__ import annotations

import os

import pytest

from areal_actors import AgentRunner, AgentSession
from areal_actors_testing.serving import open_scripted_proxy

aiohttp = pytest.importorskip("aiohttp")

pytestmark = pytest.mark.anyio

DATASET = ["one", "two", "three"]


@pytest.fixture
def anyio_backend():
    """Asyncio alone, because of aiohttp."""
    return "asyncio"


class MyAgent:
    """Reads its base URL from the environment, and knows nothing of sessions."""

    async def run(self, prompt):
        url = os.environ["OPENAI_BASE_URL"]
        async with aiohttp.ClientSession(base_url=url) as session:
            response = await session.post(
                "/v1/chat/completions",
                json={"model": "gpt-3.5-turbo", "messages": [{"role": "user", "content": prompt}]},
            )
            completion_data = await response.json()
            await session.post("/rl/v1/set_reward", json={"completion_id": completion_data["id"], "reward": 0.5})
            response = await session.post(
                "/v1/chat/completions",
                json={"model": "gpt-3.5-turbo", "messages": [{"role": "user", "content": f"{prompt} again"}]},
            )
            await response.read()
            await session.post("/rl/v1/finalize", json={"final_reward": 1.0})


@pytest.fixture
async def proxy():
    """A proxy, under its administrator's key."""
    async with open_scripted_proxy() as served:
        yield served


@pytest.fixture(params=["", "/", "/v1/"])
def environment(request, proxy, monkeypatch):
    """The variables of OpenAI's clients, for the whole process, as people write them."""
    monkeypatch.setenv("OPENAI_BASE_URL", proxy.url + request.param)
    monkeypatch.setenv("OPENAI_API_KEY", proxy.endpoint.admin_key)
    monkeypatch.delenv("AREAL_BASE_URL", raising=False)
    monkeypatch.delenv("AREAL_API_KEY", raising=False)


async def episodes(proxy):
    """Every session of the proxy, as prompts with their rewards."""
    found = {}
    for session, interactions in proxy.sessions._interactions.items():
        found[session] = [(i.messages[-1].content, i.reward) for i in interactions.values()]
    return found


def expected(prompt):
    """What one run of the agent leaves behind."""
    return [(prompt, 0.5), (f"{prompt} again", 1.0)]


async def test_agent_session_trains_trajectories(proxy, environment):
    """All requests within the context are one trajectory, which the agent itself finalized."""
    for _ in range(2):
        for prompt in DATASET:
            async with AgentSession():
                await MyAgent().run(prompt)
    found = await episodes(proxy)

    assert [expected(prompt) for prompt in DATASET * 2] == list(found.values())
    assert 0 == proxy.sessions._store.num_live


async def test_agent_runner_trains_a_batch(proxy, environment, capsys):
    """The runner opens a session for each item, and says at the end how it went."""
    for _ in range(2):
        batch = await AgentRunner().run(MyAgent().run, DATASET)
        assert not batch.failed
    found = await episodes(proxy)

    assert sorted(map(expected, DATASET * 2)) == sorted(found.values())
    assert DATASET == [result.item for result in batch.results]
    assert "3 of 3 items" in capsys.readouterr().err
