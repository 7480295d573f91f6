"""Two services behind one URL, with real SDKs and sockets: sessions stay at home, streams stay streams."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import openai
import pytest
from attrs import frozen
from tests.proxy.stack import renderer, sampled

from areal_actors.client import OpenAIProxyClient, create_http_client
from areal_actors.errors import ConfigError, Unauthorized
from areal_actors.kernel import ActorSystem
from areal_actors.messages import DescribeEndpoint, DescribeSessions
from areal_actors.proxy import ProxyConfig
from areal_actors.run.inference import Inference, InferenceConfig, open_actors
from areal_actors.sessions.manager import SessionsConfig
from areal_actors.testing.engines import EchoEngine, script_answers
from areal_actors_service.entry import EntryConfig, EntryServer

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator '(httpx|openai|httpcore):ResourceWarning"),
]

ADMIN = "sk-admin-of-both"
HELLO = [{"role": "user", "content": "Hello"}]


@frozen(kw_only=True)
class ServiceStack:
    """What is open: the entry's URL, and the services behind it by name."""

    url: str
    services: dict[str, Inference]
    engines: dict[str, EchoEngine]

    def at_home(self, session: OpenAIProxyClient) -> str:
        """The name of the service where the session lives."""
        return next(name for name in self.services if f"-{name}." in session.session_id)

    async def num_live(self) -> dict[str, int]:
        """Live sessions by service."""
        return {name: (await each.sessions.ask(DescribeSessions())).num_live for name, each in self.services.items()}


@asynccontextmanager
async def open_service_stack(*, is_gated: bool = False, **settings: float) -> AsyncIterator[ServiceStack]:
    """Services called a and b, each with an engine of its own, and an entry point before them."""
    engines = {
        name: EchoEngine(script_answers(sampled(f"I am {name}")), is_gated=is_gated, vocab_size=renderer().vocab_size)
        for name in "ab"
    }
    async with AsyncExitStack() as stack:
        services = {
            name: await stack.enter_async_context(
                open_actors(
                    InferenceConfig(
                        sessions=SessionsConfig(service_name=name),
                        proxy=ProxyConfig(admin_key=ADMIN, drain_seconds=0.0),
                    ),
                    engine=engine,
                    renderer=renderer(),
                )
            )
            for name, engine in engines.items()
        }
        system = await stack.enter_async_context(ActorSystem.open())
        backends = {name: each.endpoint.url for name, each in services.items()}
        serving = await system.spawn(EntryServer(EntryConfig(backends=backends, port=0, **settings)))
        yield ServiceStack(url=(await serving.ask(DescribeEndpoint())).url, services=services, engines=engines)


async def test_entry_forwards_a_session_to_its_proxy():
    """Turns, rewards, the end and the export of a session reach the service where it was started; sessions go round."""
    async with open_service_stack() as hosted:
        homes = set()
        for _ in range(2):
            async with OpenAIProxyClient(hosted.url, admin_key=ADMIN) as session:
                home = hosted.at_home(session)
                homes.add(home)
                async with openai.AsyncOpenAI(base_url=f"{hosted.url}/v1", api_key=session.completion_key) as client:
                    first = await client.chat.completions.create(model="any", messages=HELLO)
                    said = {"role": "assistant", "content": first.choices[0].message.content}
                    await client.chat.completions.create(model="any", messages=[*HELLO, said, *HELLO])
                async with openai.AsyncOpenAI(base_url=session.base_url, api_key="none") as client:
                    by_url = await client.chat.completions.create(model="any", messages=HELLO)
                await session.set_last_reward(1.0)
            episode = await session.export_episode(style="concat")

            assert f"I am {home}" == said["content"] == by_url.choices[0].message.content
            assert 3 == episode.num_turns
        live = await hosted.num_live()

    assert ({"a", "b"}, {"a": 0, "b": 0}) == (homes, live)


async def test_entry_forwards_streams_as_they_come():
    """The first words are read while the engine has sampled no more of them."""
    async with open_service_stack(is_gated=True) as hosted, OpenAIProxyClient(hosted.url, admin_key=ADMIN) as session:
        engine = hosted.engines[hosted.at_home(session)]
        engine.release(3)
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="none") as client:
            stream = await client.chat.completions.create(model="any", messages=HELLO, stream=True)
            words, num_early = "", 0
            async for chunk in stream:
                words += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                if words and not num_early:
                    num_early = engine.statistics().sampled_tokens
                    engine.release(100)

    assert f"I am {'a' if engine is hosted.engines['a'] else 'b'}" == words
    assert num_early <= 3 < engine.statistics().sampled_tokens


async def test_entry_aborts_the_generation_of_a_client_that_hangs_up():
    """Nobody samples for a client that has gone."""
    async with open_service_stack(is_gated=True) as hosted, OpenAIProxyClient(hosted.url, admin_key=ADMIN) as session:
        engine = hosted.engines[hosted.at_home(session)]
        async with create_http_client() as http, anyio.create_task_group() as tasks:
            headers = {"authorization": f"Bearer {session.api_key}"}
            body = {"model": "any", "messages": HELLO}
            tasks.start_soon(lambda: http.post(f"{hosted.url}/v1/chat/completions", json=body, headers=headers))
            with anyio.fail_after(20):
                while not engine.requests:
                    await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        with anyio.fail_after(20):
            while engine.statistics().aborted == 0:
                await anyio.lowlevel.checkpoint()


async def test_entry_reports_a_proxy_that_is_down_and_serves_others():
    """The sessions of a stopped service are answered 503, which SDKs repeat; new ones start elsewhere."""
    async with open_service_stack() as hosted, create_http_client() as http, AsyncExitStack() as stack:
        both = [await stack.enter_async_context(OpenAIProxyClient(hosted.url, admin_key=ADMIN)) for _ in range(2)]
        first, second = both
        await hosted.services[hosted.at_home(first)].serving.stop()
        client = await stack.enter_async_context(
            openai.AsyncOpenAI(base_url=first.base_url, api_key="none", max_retries=0)
        )
        with pytest.raises(openai.InternalServerError, match="cannot be reached") as refused:
            await client.chat.completions.create(model="any", messages=HELLO)
        health = await http.get(f"{hosted.url}/health")
        third = await stack.enter_async_context(OpenAIProxyClient(hosted.url, admin_key=ADMIN))
        fourth = await stack.enter_async_context(OpenAIProxyClient(hosted.url, admin_key=ADMIN))
        homes = {hosted.at_home(third), hosted.at_home(fourth)}
        first._is_ended = True  # nobody is there to end it

    assert 503 == refused.value.status_code
    assert (200, {"ok", "unreachable"}) == (health.status_code, set(health.json()["proxies"].values()))
    assert {hosted.at_home(second)} == homes


async def test_entry_forwards_requests_unchanged():
    """Escaped paths, queries, statuses, headers and errors are the service's own; nothing is added or lost."""
    async with open_service_stack() as hosted, create_http_client() as http:
        admin = {"authorization": f"Bearer {ADMIN}"}
        started = await http.post(f"{hosted.url}/rl/start_session?task_id=a%2Fb%20c", headers=admin)
        unknown = await http.get(f"{hosted.url}/no%2Fsuch/path?x=%2F")
        refused = await http.post(f"{hosted.url}/rl/start_session")
        anthropic = await http.post(f"{hosted.url}/v1/messages", headers={"x-api-key": "wrong"}, json={})
        large = await http.post(f"{hosted.url}/v1/chat/completions", content=b" " * (17 * 2**20), headers=admin)

    assert started.json()["session_id"].startswith("a-b-c-")
    assert (404, 401, 413) == (unknown.status_code, refused.status_code, large.status_code)
    assert "error" == anthropic.json()["type"]
    assert [1, 1] == [len(started.headers.get_list(name)) for name in ("content-length", "x-request-id")]


async def test_entry_refuses_a_wrong_admin_key():
    """The entry point holds no key of its own."""
    async with open_service_stack() as hosted:
        with pytest.raises(Unauthorized):
            async with OpenAIProxyClient(hosted.url, admin_key="sk-wrong-key"):
                pass


async def test_entry_names_a_port_in_use():
    """As the option of the command that chose it."""
    async with open_service_stack() as stack, ActorSystem.open() as system:
        port = int(stack.url.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=f"^--port: 127.0.0.1:{port} is in use"):
            await system.spawn(EntryServer(EntryConfig(backends={"a": stack.url}, port=port)), name="entry")


async def test_entry_without_any_proxy_answers_503():
    """503 with its reason, in the words of whose client asks."""
    async with ActorSystem.open() as system, create_http_client() as http:
        config = EntryConfig(backends={"a": "http://127.0.0.1:9"}, port=0)
        serving = await system.spawn(EntryServer(config))
        url = (await serving.ask(DescribeEndpoint())).url
        openais = await http.post(f"{url}/v1/chat/completions", json={})
        anthropics = await http.post(f"{url}/v1/messages", json={})
        health = await http.get(f"{url}/health")

    assert {503} == {openais.status_code, anthropics.status_code, health.status_code}
    assert "cannot be reached" in openais.json()["error"]["message"]
    assert "overloaded_error" == anthropics.json()["error"]["type"]


def test_entry_command_listens_until_it_is_interrupted():
    """A real process; it says where it listens, and Ctrl-C ends it at once."""
    command = [sys.executable, "-m", "areal_actors", "entry", "a=http://127.0.0.1:9", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        status = process.wait(30)

    assert line.startswith("Listening at http://127.0.0.1:")
    assert 0 == status
