"""A block of requests that is one trajectory: how it begins, what belongs to it, how it ends."""

from __future__ import annotations

import anthropic
import anyio
import httpx
import openai
import pytest
from anyio.lowlevel import checkpoint
from tests.client.service import open_service

from areal_actors.client import AgentSession, OpenAIProxyClient, RetryPolicy
from areal_actors.client.agent_session import find_service
from areal_actors.errors import ConfigError, InvalidRequest, NotFound, RewardError, Unauthorized, Unavailable
from areal_actors.proxy import ProxyConfig
from areal_actors.rollouts.staleness import CapacityLimits
from areal_actors.run.inference import InferenceConfig
from areal_actors_testing.serving import open_scripted_proxy

pytestmark = pytest.mark.anyio

ONCE = RetryPolicy(max_attempts=1)


def open_session(proxy, **options):
    return AgentSession(base_url=proxy.url, api_key=proxy.endpoint.admin_key, **options)


def told(proxy, session):
    """What a session was asked, with the rewards."""
    interactions = proxy.sessions._interactions[session.session_id].values()
    return [(interaction.messages[-1].content, interaction.reward) for interaction in interactions]


async def ask(http, url, text):
    question = {"model": "m", "messages": [{"role": "user", "content": text}]}
    response = await http.post(f"{url}/v1/chat/completions", json=question)
    return response.raise_for_status().json()


async def test_agent_session_sets_rewards_and_ends():
    """By id, for the last one, and finally; afterwards the session takes no more."""
    async with open_scripted_proxy() as proxy, httpx.AsyncClient() as http:
        async with open_session(proxy, task_id="task-7") as session:
            first = await ask(http, proxy.url, "one")
            await session.set_reward(first["id"], 0.25)
            await ask(http, proxy.url, "two")
            assert "chatcmpl" in await session.set_last_reward(0.5)
            await ask(http, proxy.url, "three")
            with pytest.raises(RewardError):
                await session.finalize(float("nan"))
            assert 3 == await session.finalize(True)
            with pytest.raises(httpx.HTTPStatusError, match="410"):
                await ask(http, proxy.url, "four")
        outside = await http.post(f"{proxy.url}/v1/chat/completions", json={"messages": []})

        assert session.session_id.startswith("task-7-")
        assert [("one", 0.25), ("two", 0.5), ("three", 1.0)] == told(proxy, session)
        assert 401 == outside.status_code
        assert 0 == proxy.sessions._store.num_live


async def test_agent_session_of_a_failed_block_has_no_final_reward():
    """Its own error is seen, rewards that were set stay, and none is added; a finished session is left as it is."""
    async with open_scripted_proxy() as proxy, httpx.AsyncClient() as http:
        with pytest.raises(KeyError, match="mine"):
            async with open_session(proxy) as failed:
                await ask(http, proxy.url, "one")
                raise KeyError("mine")
        async with open_session(proxy) as forgotten:
            await ask(http, proxy.url, "one")
            await http.post(f"{proxy.url}/rl/v1/finalize", json={"final_reward": 1.0})
            rewarded = told(proxy, forgotten)
            proxy.sessions._store.acknowledge(forgotten.session_id)

        assert [("one", None)] == told(proxy, failed)
        assert [("one", 1.0)] == rewarded
        assert 0 == proxy.sessions._store.num_live


async def test_agent_session_ends_when_cancelled():
    """Otherwise it would stay open until it was idle for an hour."""
    async with open_scripted_proxy() as proxy:
        with anyio.CancelScope() as scope:
            async with open_session(proxy) as session:
                scope.cancel()
                await anyio.sleep_forever()

        assert session.session_id
        assert 0 == proxy.sessions._store.num_live


class Held(httpx.AsyncBaseTransport):
    """The network, which keeps the first answer back until it is released."""

    def __init__(self):
        self.arrived, self.released = anyio.Event(), anyio.Event()
        self.inner = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request):
        response = await self.inner.handle_async_request(request)
        await response.aread()
        if not self.arrived.is_set():
            self.arrived.set()
            await self.released.wait()
        return response

    async def aclose(self):
        await self.inner.aclose()


async def test_agent_session_started_after_cancellation_is_ended():
    """The answer to a start comes after the cancellation: there is a session without an owner."""
    async with open_scripted_proxy() as proxy, httpx.AsyncClient(transport=Held()) as http:
        scope = anyio.CancelScope()

        async def start():
            with scope:
                async with open_session(proxy, http_client=http):
                    pytest.fail("cancelled before")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(start)
            await http._transport.arrived.wait()
            assert 1 == proxy.sessions._store.num_live
            scope.cancel()
            await checkpoint()
            http._transport.released.set()

        assert 0 == proxy.sessions._store.num_live


async def test_agent_session_attributes_requests_of_sdks():
    """Clients made outside, under keys of another server: OpenAI's and Anthropic's."""
    messages = [{"role": "user", "content": "one two"}]
    async with open_scripted_proxy() as proxy:
        gpt = openai.AsyncOpenAI(base_url=proxy.url, api_key="sk-of-another-server")
        claude = anthropic.AsyncAnthropic(base_url=proxy.url, api_key="sk-of-another-server", auth_token=None)
        async with gpt, claude:
            for _ in range(2):
                async with open_session(proxy) as session:
                    await gpt.chat.completions.create(model="m", messages=messages)
                    await claude.messages.create(model="m", messages=messages, max_tokens=9)

                assert [("one two", None)] * 2 == told(proxy, session)
            with pytest.raises(openai.AuthenticationError):
                await gpt.chat.completions.create(model="m", messages=messages)


@pytest.mark.parametrize("session_urls", [True, False])
async def test_agent_sessions_are_told_apart_by_their_urls(session_urls):
    """Self-play: each player's client has the base URL and the key of its session, and the innermost does not win."""
    async with open_scripted_proxy(config=ProxyConfig(session_urls=session_urls)) as proxy:
        async with open_session(proxy) as white, open_session(proxy) as black:
            for player in (white, black):
                async with openai.AsyncOpenAI(base_url=player.base_url, api_key=player.api_key) as client:
                    text = "white" if player is white else "black"
                    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
            await white.finalize(1.0)
            await black.finalize(0.0)

        assert [("white", 1.0)] == told(proxy, white)
        assert [("black", 0.0)] == told(proxy, black)


async def test_agent_session_innermost_is_used():
    """And the outer one again after it; tasks stay where they were started."""
    async with open_scripted_proxy() as proxy, httpx.AsyncClient() as http, anyio.create_task_group() as tasks:
        async with open_session(proxy) as outer:
            is_inside, is_done = anyio.Event(), anyio.Event()

            async def aside():
                await is_inside.wait()
                await ask(http, proxy.url, "aside")
                is_done.set()

            tasks.start_soon(aside)
            async with open_session(proxy) as inner:
                is_inside.set()
                await is_done.wait()
                await ask(http, proxy.url, "inner")
            await ask(http, proxy.url, "outer")

        assert [("inner", None)] == told(proxy, inner)
        assert [] == [text for text, _ in told(proxy, outer) if text == "inner"]
        assert ("outer", None) in told(proxy, outer)


async def test_agent_session_leaves_keys_of_other_clients():
    """The administrator's client works inside a session as outside of it."""
    async with open_scripted_proxy(config=ProxyConfig(session_urls=False)) as proxy, open_session(proxy):
        async with OpenAIProxyClient(proxy.url, admin_key=proxy.endpoint.admin_key) as other:
            pass
        assert 0 == (await other.export_episode()).num_turns


async def test_agent_session_waits_for_capacity(monkeypatch):
    """A full proxy is waited for, as long as it says each time, and however often."""
    limits = CapacityLimits(max_concurrent=1, batch_size=1, max_staleness=1000)
    waits, has_room = [], anyio.Event()

    async def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 20:
            leave.set()
            await has_room.wait()
        await checkpoint()

    async with open_service(InferenceConfig(limits=limits)) as inference, anyio.create_task_group() as tasks:
        leave, is_open = anyio.Event(), anyio.Event()
        url, key = inference.endpoint.url, inference.endpoint.admin_key

        async def occupy():
            async with AgentSession(base_url=url, api_key=key):
                is_open.set()
                await leave.wait()
            has_room.set()

        tasks.start_soon(occupy)
        await is_open.wait()
        monkeypatch.setattr("areal_actors.client.http.anyio.sleep", sleep)
        async with AgentSession(base_url=url, api_key=key) as session:
            assert session.session_id
        monkeypatch.undo()

    assert 20 == len(waits)
    assert all(1.0 <= seconds <= 1.1 for seconds in waits)


async def test_agent_session_reports_mistakes():
    """No key, a wrong one, no server, no URL, used twice, used before."""
    async with open_scripted_proxy() as proxy:
        for key in ("sk-wrong-key", None):
            with pytest.raises(Unauthorized):
                await AgentSession(base_url=proxy.url, api_key=key, environment={}).__aenter__()
        with pytest.raises(InvalidRequest, match="not started"):
            _ = open_session(proxy).base_url
        async with open_session(proxy) as session:
            with pytest.raises(InvalidRequest, match="used before"):
                await session.__aenter__()
            with pytest.raises(NotFound):
                await session.set_reward("chatcmpl-none", 1.0)
    with pytest.raises(Unavailable):
        await AgentSession(base_url=proxy.url, environment={}, retries=ONCE).__aenter__()
    with pytest.raises(ConfigError, match="OPENAI_BASE_URL"):
        await AgentSession(environment={}).__aenter__()


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        ((None, None), {"OPENAI_BASE_URL": "http://o/v1", "OPENAI_API_KEY": "ok"}, ("http://o", "ok")),
        (
            (None, None),
            {"OPENAI_BASE_URL": "http://o", "AREAL_API_KEY": "ak", "OPENAI_API_KEY": "ok"},
            ("http://o", "ak"),
        ),
        ((None, None), {"AREAL_BASE_URL": "http://a", "OPENAI_BASE_URL": "http://o"}, ("http://a", None)),
        ((None, None), {"AREAL_BASE_URL": "http://a", "OPENAI_API_KEY": "ok"}, ("http://a", None)),
        ((None, "mine"), {"AREAL_BASE_URL": "http://a", "AREAL_API_KEY": "ak"}, ("http://a", "mine")),
        (("http://g", None), {"AREAL_BASE_URL": "http://a", "OPENAI_API_KEY": "ok"}, ("http://g", "ok")),
        ((None, None), {"OPENAI_BASE_URL": "http://o", "OPENAI_API_KEY": ""}, ("http://o", None)),
    ],
)
async def test_agent_session_finds_the_proxy(given, environment, expected):
    """Arguments, then our variables, then OpenAI's; whose key is never sent to a proxy that ours name."""
    service = find_service(*given, environment)

    assert expected == (service.root, service.api_key)
