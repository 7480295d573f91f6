"""Retries over sockets: what the SDK sends again by itself is one turn; what an agent asks again is another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx
import openai
import pytest
from anyio.abc import SocketStream
from attrs import define, field
from tests.stacks.inference_stack import InferenceStack, encode, open_inference_stack

from areal_actors.client import create_http_client
from areal_actors.domain import InteractionStatus, PauseMode
from areal_actors.errors import InvalidRequest
from areal_actors.messages import DescribeEndpoint, OpenSession, PauseGeneration, ResumeGeneration
from areal_actors.proxy import ProxyServer
from areal_actors.proxy.access import read_attempt
from areal_actors.testing.engines import EchoEngine

pytestmark = [
    pytest.mark.anyio,
    # At [DONE] the SDK leaves its generators to the garbage collector, of which trio warns.
    pytest.mark.filterwarnings("ignore:Async generator '(httpx|openai|httpcore):ResourceWarning"),
]

ASK = {"model": "m", "messages": [{"role": "user", "content": "why?"}]}


class Impatient(openai.AsyncOpenAI):
    """The SDK, without its pause between two sendings."""

    def _calculate_retry_timeout(self, *_: object, **__: object) -> float:
        return 0.0


@define
class Relay:
    """A network between client and proxy that loses the answers of the first ``num_lost`` connections."""

    port: int
    num_lost: int
    num_connections: int = 0
    ends: tuple[bytes, ...] = (b'"usage"', b"data: [DONE]")

    async def serve(self, client: SocketStream) -> None:
        self.num_connections += 1
        is_lost = self.num_connections <= self.num_lost
        async with client, await anyio.connect_tcp("127.0.0.1", self.port) as proxy, anyio.create_task_group() as tasks:
            tasks.start_soon(self._forward, client, proxy)
            if is_lost:
                await self._read_answer(proxy)
            else:
                await self._forward(proxy, client)
            tasks.cancel_scope.cancel()

    async def _read_answer(self, proxy: SocketStream) -> None:
        heard = b""
        while not any(end in heard for end in self.ends):
            heard += await proxy.receive()

    async def _forward(self, source: SocketStream, target: SocketStream) -> None:
        try:
            while True:
                await target.send(await source.receive())
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            return


@define
class Stack:
    """The whole stack behind a lossy network."""

    inference: InferenceStack
    client: openai.AsyncOpenAI
    session: str
    sendings: list[str] = field(factory=list)

    async def turns(self):
        return (await self.inference.record(self.session)).interactions


@asynccontextmanager
async def open_stack(*, num_lost: int = 0, engine: EchoEngine | None = None, **options: object) -> AsyncIterator[Stack]:
    engine = engine or EchoEngine(lambda _: encode("one two"))
    sendings: list[str] = []

    async def note(request: httpx.Request) -> None:
        sendings.append(request.headers["x-stainless-retry-count"])

    async with open_inference_stack(engine=engine, max_seconds=60) as inference, create_http_client() as http:
        http.event_hooks["request"].append(note)
        proxy = ProxyServer(sessions=inference.sessions, exports=inference.exports, capacity=inference.capacity)
        endpoint = await (await inference.system.spawn(proxy)).ask(DescribeEndpoint())
        opened = await inference.sessions.ask(OpenSession(task="task"))
        relay = Relay(port=httpx.URL(endpoint.url).port, num_lost=num_lost)
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, relay.serve)
            url = f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}/v1"
            client = Impatient(base_url=url, api_key=opened.api_key, http_client=http, **options)
            yield Stack(inference, client, opened.session, sendings)
            tasks.cancel_scope.cancel()


async def ask(client: openai.AsyncOpenAI, *, is_stream: bool, **options: object) -> tuple[str, str]:
    """The id and the text of an answer."""
    if not is_stream:
        answer = await client.chat.completions.create(**ASK, **options)
        return answer.id, answer.choices[0].message.content or ""
    stream = await client.chat.completions.create(**ASK, stream=True, **options)
    chunks = [chunk async for chunk in stream]
    return chunks[0].id, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("num_lost", [1, 2])
async def test_retry_repeats_a_lost_answer(is_stream: bool, num_lost: int):  # noqa: FBT001
    """The SDK sends again, up to twice, and gets the answer that had been sampled: one turn, one generation."""
    async with open_stack(num_lost=num_lost) as stack:
        name, text = await ask(stack.client, is_stream=is_stream)
        (turn,) = await stack.turns()

    assert ["0", "1", "2"][: num_lost + 1] == stack.sendings
    assert (turn.id, "one two") == (name, text)
    assert 1 == len(stack.inference.engine.requests)


async def test_equal_request_without_evidence_is_another_turn():
    """Equal calls, one after another and at the same time: each is sampled."""
    names: list[str] = []

    async def note(client: openai.AsyncOpenAI) -> None:
        names.append((await ask(client, is_stream=False))[0])

    async with open_stack() as stack:
        for _ in range(2):
            await note(stack.client)
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(note, stack.client)
        known = await stack.turns()

    assert sorted(turn.id for turn in known) == sorted(names)
    assert 22 == len(set(names))


async def test_concurrent_retries_get_their_own_answers():
    """Nothing is sampled again, and no retry shares its answer with another."""
    names: list[str] = []

    async def note(client: openai.AsyncOpenAI) -> None:
        names.append((await ask(client, is_stream=False))[0])

    async with open_stack(num_lost=3) as stack:
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(note, stack.client)
        known = await stack.turns()

    assert 20 == len(known) == len(stack.inference.engine.requests)
    assert 20 == len(names)
    assert set(names) <= {turn.id for turn in known}


async def test_retry_of_a_failed_request_is_sampled():
    """The engine was paused with an abort: 503, the SDK's retry, and an answer; the failed turn is not trained."""
    engine = EchoEngine(lambda _: encode("one two"), is_gated=True)
    async with open_stack(engine=engine) as stack, anyio.create_task_group() as tasks:

        async def disturb() -> None:
            engine.release(1)
            while not engine.statistics().running:
                await anyio.lowlevel.checkpoint()
            await stack.inference.generation.ask(PauseGeneration(mode=PauseMode.ABORT))
            while not engine.statistics().aborted:
                await anyio.lowlevel.checkpoint()
            await stack.inference.generation.ask(ResumeGeneration())
            engine.release(99)

        tasks.start_soon(disturb)
        name, _ = await ask(stack.client, is_stream=False)
        known = await stack.turns()

    assert [InteractionStatus.FAILED, InteractionStatus.COMPLETED] == [turn.status for turn in known]
    assert name == known[1].id


async def test_retry_with_an_idempotency_key():
    """Sent twice under one key: one turn; another body under it: 422, once."""
    async with open_stack(max_retries=3) as stack:
        first = await ask(stack.client, is_stream=False, extra_headers={"idempotency-key": "k"})
        again = await ask(stack.client, is_stream=False, extra_headers={"idempotency-key": "k"})
        with pytest.raises(openai.UnprocessableEntityError) as caught:
            await ask(stack.client, is_stream=False, extra_headers={"idempotency-key": "k"}, seed=1)

    assert first == again
    assert caught.value.code == "idempotency_mismatch"
    assert 3 == len(stack.sendings)


# -------------------------------------------------------------------------------------------------- the evidence


def test_request_without_headers_has_no_retry_evidence():
    """Neither header: no digest is computed."""
    assert read_attempt({}, "chat/completions", b"{}") is None
    assert read_attempt({b"idempotency-key": b" "}, "chat/completions", b"{}") is None


def test_retry_fingerprint_has_operation_and_body():
    """Equal bodies to the same place have equal ones, whatever the sending."""
    first = read_attempt({b"x-stainless-retry-count": b"0"}, "messages", b"{}")
    again = read_attempt({b"x-stainless-retry-count": b"1", b"idempotency-key": b"k"}, "messages", b"{}")
    others = [
        read_attempt({b"x-stainless-retry-count": b"1"}, operation, body)
        for operation, body in (("messages", b"{ }"), ("responses", b"{}"))
    ]

    assert (0, None, 1, "k") == (first.number, first.idempotency_key, again.number, again.idempotency_key)
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint not in {other.fingerprint for other in others}


@pytest.mark.parametrize("number", [b"-1", b"x", b"1.5", b"99999999999999999999", "²".encode("latin-1")])
def test_invalid_retry_count_is_zero(number: bytes):
    """A stranger's header breaks nothing."""
    assert 0 == read_attempt({b"x-stainless-retry-count": number}, "messages", b"{}").number


def test_long_idempotency_key_is_refused():
    """It is kept in memory."""
    with pytest.raises(InvalidRequest, match="255"):
        read_attempt({b"idempotency-key": b"k" * 256}, "messages", b"{}")
