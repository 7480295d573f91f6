"""A session over HTTP, against the real proxy."""

from __future__ import annotations

import anyio
import numpy as np
import openai
import pytest

from areal_actors.client import OpenAIProxyClient, RetryPolicy, create_http_client
from areal_actors.errors import (
    CapacityExhausted,
    InvalidRequest,
    NotFound,
    SessionEnded,
    Unauthorized,
    Unavailable,
    Unprocessable,
)
from areal_actors_testing.serving import open_scripted_proxy

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "one two"}]


async def _ask(session):
    async with create_http_client() as http:
        client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http)
        return await client.chat.completions.create(model="m", messages=MESSAGES)


async def test_proxy_client_exports_rows():
    """Start, ask, reward by id and by position, leave the block, export twice with different discounts."""
    async with open_scripted_proxy() as proxy:
        async with proxy.open_session("task-7") as session:
            first, second = await _ask(session), await _ask(session)
            await session.set_reward(first.id, np.float32(0.5))
            last = await session.set_last_reward(True)
        episode = await session.export_episode(discount=0.9, style="individual")
        again = await session.export_episode(discount=0.9, style="individual")
        with pytest.raises(Unprocessable, match="style"):
            await session.export_episode(style="baroque")

    assert session.session_id.startswith("task-7-")
    assert session.base_url == session.session_url == f"{proxy.url}/{session.session_id}/v1"
    assert last == second.id
    assert [row.reward for row in episode.trajectories] == [0.5, 1.0]
    assert episode == again


async def test_proxy_client_ends_its_session():
    """Also when the block fails, whose error is the one that is seen; ending by hand is fine, and so is twice."""
    async with open_scripted_proxy() as proxy:
        with pytest.raises(KeyError, match="mine"):
            async with proxy.open_session() as failed:
                raise KeyError("mine")
        async with proxy.open_session() as ended:
            await _ask(ended)
            counts = [await ended.end_session(final_reward=1.0), await ended.end_session()]
        for session in (failed, ended):
            with pytest.raises(openai.APIStatusError) as caught:
                await _ask(session)
            assert caught.value.status_code == SessionEnded.status

    assert counts == [1, 1]


async def test_proxy_client_ends_its_session_when_cancelled():
    """Cancellation does not leave a live session behind."""
    async with open_scripted_proxy() as proxy:
        with anyio.CancelScope() as scope:
            async with proxy.open_session() as session:
                scope.cancel()
                await anyio.sleep_forever()
        with pytest.raises(openai.APIStatusError):
            await _ask(session)


async def test_proxy_client_raises_errors_of_the_server():
    """Wrong key, bad rewards, unknown completions: the same classes as on the other side."""
    async with open_scripted_proxy() as proxy:
        with pytest.raises(Unauthorized):
            await OpenAIProxyClient(proxy.url, admin_key="sk-wrong").__aenter__()
        async with proxy.open_session() as session:
            await _ask(session)
            with pytest.raises(InvalidRequest):
                await session.set_last_reward(float("nan"))
            with pytest.raises(NotFound):
                await session.set_reward("chatcmpl-none", 1.0)
            with pytest.raises(InvalidRequest, match="used before"):
                await session.__aenter__()
    with pytest.raises(InvalidRequest, match="has not started"):
        _ = OpenAIProxyClient(proxy.url, admin_key="k").base_url


async def test_proxy_client_without_capacity_or_proxy_fails():
    """After bounded attempts, a full proxy is ``CapacityExhausted`` and a missing one ``Unavailable``."""
    once = RetryPolicy(max_attempts=1)
    async with open_scripted_proxy(max_sessions=1) as proxy, proxy.open_session():
        with pytest.raises(CapacityExhausted):
            await OpenAIProxyClient(proxy.url, admin_key=proxy.endpoint.admin_key, retries=once).__aenter__()
    with pytest.raises(Unavailable):
        await OpenAIProxyClient(proxy.url, admin_key="k", retries=once).__aenter__()


async def test_proxy_client_uses_a_given_http_client():
    """Connections are shared between sessions; the base URL may end in ``/v1``."""
    async with open_scripted_proxy() as proxy, create_http_client() as http:
        for _ in range(2):
            async with OpenAIProxyClient(
                f"{proxy.url}/v1/", admin_key=proxy.endpoint.admin_key, api_key="sk-of-my-own", http_client=http
            ) as session:
                assert session.api_key == "sk-of-my-own"
            assert not http.is_closed
