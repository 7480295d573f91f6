"""The wrappers around other libraries: every request passes them once, and nothing of them stays behind."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import anyio
import httpx
import httpx2
import pytest
from anyio import to_thread

from areal_actors.client.attribution import Attribution, attributed_to
from areal_actors.client.hooks import hooked
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
    with hooked(), attributed_to(session):
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


def test_hooks_restore_the_libraries():
    """However often it is entered, the methods are wrapped once, and are themselves again in the end."""
    before, finders = methods(), list(sys.meta_path)
    with hooked():
        inside = methods()
        with hooked():
            assert inside == methods()
        assert inside == methods()

    assert before == methods()
    assert finders == sys.meta_path
    assert not set(before) & set(inside)


def test_hooks_keep_wrappers_of_others(servers):
    """A tracer that came after us is not undone, and finds us idle; the next time nothing is wrapped twice."""
    ours, _ = servers
    calls = []
    with ExitStack() as stack:
        stack.callback(setattr, httpx.HTTPTransport, "handle_request", httpx.HTTPTransport.handle_request)
        with hooked():
            wrapped = httpx.HTTPTransport.handle_request

            def trace(self, request):
                calls.append(request.headers.get("authorization"))
                return wrapped(self, request)

            httpx.HTTPTransport.handle_request = trace
        assert trace is httpx.HTTPTransport.handle_request
        httpx.get(f"{ours.url}/v1/a", trust_env=False)
        with in_session(ours):
            httpx.get(f"{ours.url}/v1/b", trust_env=False)
        assert trace is httpx.HTTPTransport.handle_request
        httpx.HTTPTransport.handle_request = wrapped
        with hooked():
            assert wrapped is httpx.HTTPTransport.handle_request

    assert [None, None] == calls
    assert [("/v1/a", None, None), ("/v1/b", "Bearer sk-session", None)] == ours.seen


_LATE = """
import sys
from areal_actors.client.attribution import Attribution, attributed_to
from areal_actors.client.hooks import hooked

url = sys.argv[1]
session = Attribution.to_session("s-" + "x" * 22, "sk-session", url)
assert "requests" not in sys.modules
with hooked(), attributed_to(session):
    import requests
    import importlib.util
    found = importlib.util.find_spec("aiohttp")
    assert found is None or found.loader.is_package("aiohttp")
    assert type(requests.__loader__).__name__ == type(requests.__spec__.loader).__name__ == "SourceFileLoader"
    requests.get(url + "/v1/inside")
requests.get(url + "/v1/outside")
"""


def test_hooks_wrap_libraries_imported_later(servers):
    """A library that was not imported when the session began is restored afterwards, too."""
    ours, _ = servers
    subprocess.run([sys.executable, "-c", _LATE, ours.url], check=True, timeout=60)

    assert [("/v1/inside", "Bearer sk-session", None), ("/v1/outside", None, None)] == ours.seen


async def test_hooks_ignore_threads_without_the_context(servers):
    """A request that cannot be attributed is not guessed."""
    ours, _ = servers
    with in_session(ours):
        thread = Thread(target=httpx.get, args=(f"{ours.url}/v1/models",), kwargs={"trust_env": False})
        thread.start()
        await anyio.to_thread.run_sync(thread.join)

    assert [("/v1/models", None, None)] == ours.seen
