"""What is worth repeating."""

from __future__ import annotations

from random import Random

import anyio
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.client.http import RetryPolicy, error_of, send_with_retries
from areal_actors.errors import CapacityExhausted, NotFound, RequestError, SessionEnded, Unavailable
from areal_actors.testing import virtual_backend


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    """Waiting between attempts takes no time here."""
    return virtual_backend(request.param)


class Server:
    """Answers, or fails, as it is told; counts."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.num_requests = 0

    async def send(self):
        self.num_requests += 1
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        status, headers = outcome if isinstance(outcome, tuple) else (outcome, {})
        body = {"error": {"message": f"said {status}", "param": None}}
        return httpx.Response(status, headers=headers, json=body)


async def _sent(server, *, is_repeatable=True, policy=None):
    return await send_with_retries(
        server.send, policy=policy or RetryPolicy(), random=Random(0), is_repeatable=is_repeatable
    )


@pytest.mark.anyio
async def test_retries_repeat_transient_errors():
    """503, 429 and 408 are asked again until there is an answer."""
    server = Server(503, 429, 408, 200)

    assert (await _sent(server, is_repeatable=False)).status_code == 200
    assert server.num_requests == 4


@pytest.mark.anyio
@pytest.mark.parametrize(("status", "error"), [(404, NotFound), (410, SessionEnded), (500, RequestError)])
async def test_retries_raise_permanent_errors_at_once(status, error):
    """An answer that will not change is raised as the class that it stands for, with its message."""
    server = Server(status)
    with pytest.raises(error, match=f"said {status}"):
        await _sent(server)

    assert server.num_requests == 1


@pytest.mark.anyio
async def test_retries_are_bounded():
    """The last error is raised when they are spent, and the server's wish to wait was followed, within bounds."""
    server = Server(*[(429, {"retry-after": "3"})] * 9)
    began = anyio.current_time()
    with pytest.raises(CapacityExhausted) as caught:
        await _sent(server, policy=RetryPolicy(max_attempts=3))

    assert server.num_requests == 3
    assert caught.value.retry_after_seconds == 3.0
    assert 6.0 <= anyio.current_time() - began <= 6.7


@pytest.mark.anyio
async def test_retries_repeat_only_idempotent_requests():
    """A connection that was never made is tried again by anybody; one that broke, only by what can be repeated."""
    broken, refused = httpx.ReadError("broken"), httpx.ConnectError("refused")

    assert (await _sent(Server(broken, 200))).status_code == 200
    assert (await _sent(Server(refused, 200), is_repeatable=False)).status_code == 200
    server = Server(broken, 200)
    with pytest.raises(Unavailable, match="broken"):
        await _sent(server, is_repeatable=False)

    assert server.num_requests == 1


@given(attempt=st.integers(0, 30), asked=st.none() | st.floats(0, 1e6), seed=st.integers(0, 99))
def test_retry_waits_are_bounded(attempt, asked, seed):
    """No wait is negative or longer than the bound and its jitter, whatever the server asks for."""
    policy = RetryPolicy()

    assert 0 <= policy.wait_seconds(attempt, asked, Random(seed)) <= policy.max_wait_seconds * 1.1


@pytest.mark.parametrize("content", [b"", b"<html>", b"[]", b'{"error": "x"}', b'{"error": {"message": 3}}'])
def test_error_with_a_strange_body_is_classified_by_status(content):
    """A proxy between may answer anything; the status still has its class."""
    error = error_of(httpx.Response(404, content=content))

    assert isinstance(error, NotFound)
    assert "404" in error.message
