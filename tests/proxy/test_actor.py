"""The proxy's socket and its life."""

from __future__ import annotations

import socket

import anyio
import httpx
import orjson
import pytest

from areal_actors.domain import TextDelta
from areal_actors.errors import ConfigError
from areal_actors.kernel import ActorSystem
from areal_actors.kernel.remote.sockets import is_loopback
from areal_actors.messages import DescribeEndpoint
from areal_actors.proxy import ProxyConfig
from areal_actors.proxy.server import bind, url_of
from areal_actors_testing.serving import open_scripted_proxy

BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("::", False),
        ("example.org", False),
    ],
)
def test_what_counts_as_this_machine(host, expected):
    """Anything else is treated as reachable by strangers."""
    assert is_loopback(host) is expected


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_strangers_need_a_chosen_key(host):
    """A proxy that others can reach must not run on a key that nobody chose; nothing is bound."""
    with pytest.raises(ConfigError, match=r"proxy\.admin_key"):
        bind(ProxyConfig(host=host))


def test_addresses_that_cannot_be_used_are_explained():
    """A port in use names the place and the ways out; so does an address of another machine."""
    with bind(ProxyConfig()) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is in use"):
            bind(ProxyConfig(port=port))
    with pytest.raises(ConfigError, match=r"proxy\.host"):
        bind(ProxyConfig(host="192.0.2.1", admin_key="k"))
    with pytest.raises(ConfigError, match=r"proxy\.host"):
        bind(ProxyConfig(host="no-such-host.invalid", admin_key="k"))


def test_the_url_is_one_that_agents_reach():
    """A wildcard is advertised under this machine's name, or the one that was configured."""
    config = ProxyConfig(host="0.0.0.0", admin_key="k")
    with bind(config) as listener:
        port = listener.getsockname()[1]

        assert url_of(listener, config.public_host) == f"http://{socket.gethostname()}:{port}"
        assert url_of(listener, "node-7") == f"http://node-7:{port}"
    with bind(ProxyConfig()) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_keys_do_not_show_in_settings():
    """Configurations are logged; keys are not."""
    assert "sk-1" not in repr(ProxyConfig(admin_key="sk-1"))


@pytest.mark.anyio
async def test_a_port_in_use_stops_the_start():
    """The mistake is raised where the actor is spawned, before anything is served."""
    async with open_scripted_proxy() as proxy:
        port = int(proxy.url.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match="is in use"):
            async with open_scripted_proxy(config=ProxyConfig(port=port)):
                pytest.fail("the port is taken")


@pytest.mark.anyio
async def test_keys_are_random_unless_chosen():
    """Two proxies have two keys; a chosen one is used."""
    async with open_scripted_proxy() as one, open_scripted_proxy(config=ProxyConfig(admin_key="chosen")) as two:
        assert len(one.endpoint.admin_key) > 32
        assert (await two.server.ask(DescribeEndpoint())).admin_key == "chosen"
        assert "chosen" not in repr(two.endpoint)


@pytest.mark.anyio
async def test_the_port_is_free_again_afterwards():
    """Stopping closes the socket: the same port can be bound at once."""
    async with open_scripted_proxy() as proxy:
        port = int(proxy.url.rsplit(":", 1)[1])
    with bind(ProxyConfig(port=port)) as listener:
        assert listener.getsockname()[1] == port


class Held:
    """A script that holds its second word back."""

    def __init__(self):
        self.released = anyio.Event()
        self.said = anyio.Event()

    async def script(self, request):
        yield TextDelta(text="first")
        self.said.set()
        await self.released.wait()
        yield TextDelta(text="second")


async def _read(session, held, into, *, is_stream=True):
    async with httpx.AsyncClient() as http:
        into.append(await http.post(f"{session.base_url}/chat/completions", json=BODY | {"stream": is_stream}))


@pytest.mark.anyio
@pytest.mark.parametrize("is_stream", [True, False])
async def test_stopping_cuts_what_would_not_end(is_stream):
    """A stream that is open when the time to drain is over ends with an error event, any other request with 503."""
    held, answers = Held(), []
    config = ProxyConfig(drain_seconds=0.0)
    async with open_scripted_proxy(held.script, config=config) as proxy:
        session = await proxy.open_session().__aenter__()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: _read(session, held, answers, is_stream=is_stream))
            await held.said.wait()
            if is_stream:
                await anyio.wait_all_tasks_blocked()
            await proxy.server.stop(grace=0)
        session._is_ended = True
        await session.__aexit__(None, None, None)
    last = orjson.loads(answers[0].text.strip().split("\n\n")[-1].removeprefix("data: "))

    assert last["error"]["code"] == "unavailable"
    assert answers[0].status_code == (200 if is_stream else 503)


@pytest.mark.anyio
async def test_stopping_lets_finish_what_can():
    """While it drains, an open stream goes on to its end, new requests get 503, and health says so."""
    held, answers, late = Held(), [], []
    async with open_scripted_proxy(held.script, config=ProxyConfig(drain_seconds=4.0)) as proxy:
        session = await proxy.open_session().__aenter__()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: _read(session, held, answers))
            await held.said.wait()
            tasks.start_soon(lambda: proxy.server.stop(grace=0))
            async with httpx.AsyncClient(base_url=proxy.url) as http:
                while (health := await http.get("/health")).status_code == 200:
                    await anyio.lowlevel.checkpoint()
                late.append(await http.post(f"{session.base_url}/chat/completions", json=BODY))
            held.released.set()
        session._is_ended = True
        await session.__aexit__(None, None, None)

    assert health.json()["status"] == "stopping"
    assert late[0].status_code == 503
    assert late[0].headers["retry-after"] == "1"
    assert answers[0].text.endswith("data: [DONE]\n\n")


@pytest.mark.anyio
async def test_a_proxy_that_never_served_leaves_nothing():
    """A system that fails right after the start closes the socket."""
    with pytest.raises(RuntimeError, match="boom"):
        async with open_scripted_proxy():
            raise RuntimeError("boom")
    async with ActorSystem.open():
        pass
