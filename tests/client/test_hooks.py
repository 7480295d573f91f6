"""The wrappers around other libraries: every request passes them once, and they do nothing outside of sessions."""

from __future__ import annotations

from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import anyio
import httpx
import httpx2
import pytest
from anyio import to_thread

from areal_actors.client.attribution import Attribution, attributed_to
from areal_actors.client.hooks import install_hooks
from areal_actors.domain import SessionId

requests = pytest.importorskip("requests")

pytestmark = pytest.mark.anyio

WRAPPED = [
    (httpx.HTTPTransport, "handle_request"),
    (httpx.AsyncHTTPTransport, "handle_async_request"),
    (httpx2.HTTPTransport, "handle_request"),
    (httpx2.AsyncHTTPTransport, "handle_async_request"),
    (requests.adapters.HTTPAdapter, "send"),
]


class Server(ThreadingHTTPServer):
    """Remembers what it was asked, redirects to ``location`` where the path says so, and streams its answers."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen = []
        self.location = ""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.seen.append((self.path, self.headers.get("authorization"), self.headers.get("x-api-key")))
        is_redirect = self.path.startswith("/redirect")
        self.send_response(307 if is_redirect else 200)
        if is_redirect:
            self.send_header("location", self.server.location)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *args):
        pass


@contextmanager
def open_server():
    with Server() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def servers():
    """The proxy's and another server's."""
    with open_server() as ours, open_server() as foreign:
        yield ours, foreign


@contextmanager
def in_session(server):
    session = Attribution.to_session(SessionId("s-" + "x" * 22), "sk-session", server.url)
    install_hooks()
    with attributed_to(session):
        yield


HEADERS = {"x-api-key": "sk-mine"}


async def by_httpx(url):
    async with httpx.AsyncClient(trust_env=False, follow_redirects=True) as client:
        response = await client.get(url, headers=HEADERS)
    assert "authorization" not in response.request.headers


async def by_httpx2(url):
    async with (
        httpx2.AsyncClient(trust_env=False, follow_redirects=True) as client,
        client.stream("GET", url, headers=HEADERS) as response,
    ):
        assert b"ok" == await response.aread()
    assert "authorization" not in response.request.headers


async def by_blocking_httpx(url):
    def send():
        with httpx.Client(trust_env=False, follow_redirects=True) as client:
            assert "authorization" not in client.get(url, headers=HEADERS).request.headers

    await to_thread.run_sync(send)


async def by_requests(url):
    def send():
        with requests.Session() as session:
            session.trust_env = False
            prepared = session.prepare_request(requests.Request("GET", url, headers=HEADERS))
            assert prepared is session.send(prepared, allow_redirects=True).history[0].request
            assert "authorization" not in prepared.headers

    await to_thread.run_sync(send)


async def by_aiohttp(url):
    aiohttp = pytest.importorskip("aiohttp")
    async with aiohttp.ClientSession(headers=HEADERS) as session, session.get(url) as response:
        assert b"ok" == await response.read()


@pytest.mark.parametrize("ask", [by_httpx, by_httpx2, by_blocking_httpx, by_requests, by_aiohttp])
async def test_hooks_send_no_key_to_a_redirect_target(servers, ask, anyio_backend):
    """Each request of a chain of redirects is judged by itself, and the program's own objects stay as they are."""
    if ask is by_aiohttp and anyio_backend == "trio":
        pytest.skip("aiohttp knows asyncio alone")
    ours, foreign = servers
    ours.location, foreign.location = f"{foreign.url}/redirect", f"{ours.url}/v1/models"
    with in_session(ours):
        await ask(f"{ours.url}/redirect")

    assert [("/redirect", None, "sk-mine")] == foreign.seen
    assert [
        ("/redirect", "Bearer sk-session", "sk-session"),
        ("/v1/models", "Bearer sk-session", "sk-session"),
    ] == ours.seen


def methods():
    return [vars(owner)[name] for owner, name in WRAPPED]


def test_hooks_wrap_methods_once():
    """However often sessions begin."""
    install_hooks()
    before = methods()
    install_hooks()

    assert before == methods()


async def test_hooks_ignore_threads_without_the_context(servers):
    """A request that cannot be attributed is not guessed."""
    ours, _ = servers
    with in_session(ours):
        thread = Thread(target=httpx.get, args=(f"{ours.url}/v1/models",), kwargs={"trust_env": False})
        thread.start()
        await anyio.to_thread.run_sync(thread.join)

    assert [("/v1/models", None, None)] == ours.seen
