"""Connections that come and go: the server keeps nothing of a client that has closed."""

from __future__ import annotations

import asyncio
import sys

import anyio
import httpx
import pytest
from benchmarks.connections import GATE, LOOPS, measure
from tests.proxy.plain import connect

from areal_actors.testing.serving import open_scripted_proxy


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
@pytest.mark.parametrize("loop", LOOPS)
def test_closed_connections_leave_no_descriptors(loop):
    """A server that may open 256 files answers 1,000 short-lived clients, and holds no more than before them."""
    outcome = asyncio.run(measure(loop, 1_000))

    assert outcome.num_unanswered == 0
    assert outcome.num_held <= GATE


@pytest.mark.anyio
async def test_an_idle_client_is_kept_and_answered_again():
    """Closing belongs to the client: a connection that it keeps serves its next request."""
    async with open_scripted_proxy() as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        async with await connect(proxy):
            pass
        answers = [await http.get("/health") for _ in range(3)]
        ports = {answer.extensions["network_stream"].get_extra_info("client_addr") for answer in answers}

    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert len(ports) == 1


@pytest.mark.anyio
async def test_a_client_that_leaves_at_once_is_noticed():
    """The server ends its side soon after, though it waits 75 seconds for the next request of one that stays."""
    async with open_scripted_proxy() as proxy:
        stream = await connect(proxy)
        await stream.send_eof()
        with anyio.fail_after(10), pytest.raises(anyio.EndOfStream):
            await stream.receive()
        await stream.aclose()
