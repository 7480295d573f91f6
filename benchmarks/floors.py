"""What the proxy is measured against: the least that an HTTP server, and the least that a capturing one, can cost.

``http_floor`` reads a body and answers with a constant. ``capture_floor`` parses the request, renders it incrementally
with the real renderer, keeps ids and logprobs, and words an answer: no keys, no checks, no trees, no actors.
``proxy`` is the complete stack. All have the same engine, which samples a fixed answer at no cost, and run on
Hypercorn.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import numpy as np
import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from areal_actors.actors.capacity import CapacityGranter
from areal_actors.actors.exporter import Exporter
from areal_actors.actors.generation import GenerationActor
from areal_actors.actors.sessions import SessionManager
from areal_actors.core import ActorSystem
from areal_actors.domain import (
    ChatMessage,
    Chunk,
    EngineInfo,
    EngineRequest,
    EngineStatistics,
    FinishReason,
    ForkReason,
    PauseMode,
    Snapshot,
)
from areal_actors.messages import DescribeEndpoint, OpenSession
from areal_actors.proxy import ProxyConfig, ProxyServer
from areal_actors.proxy.server import bind, serve, url_of
from areal_actors.rendering import TemplateRenderer, create_renderer
from areal_actors.staleness import CapacityLimits, CapacityState
from areal_actors.testing.tokenizers import tiny_tokenizer

__all__ = ["FACTORIES", "NUM_SESSIONS", "Factory"]

NUM_SESSIONS = 16
ANSWER = "The answer to this question is 42, as you know."

Factory = Callable[[], AbstractAsyncContextManager[tuple[str, ...]]]
"""Opens a server; yields one base URL per session."""


class NullEngine:
    """Samples ``ANSWER`` in one chunk, at once."""

    version = 0

    def __init__(self, renderer: TemplateRenderer) -> None:
        ids = [*_encode(renderer, ANSWER), renderer.stop_token_ids[0]]
        self.info = EngineInfo(
            name="null",
            model="null",
            vocab_size=renderer.vocab_size,
            context_length=2**20,
            dtype="none",
            device="none",
            max_concurrent=2**20,
        )
        logprobs = np.full(len(ids), -0.5, dtype=np.float32)
        self.chunk = Chunk(token_ids=ids, logprobs=logprobs, raw_logprobs=logprobs, version=0, finish=FinishReason.STOP)

    @asynccontextmanager
    async def generate(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[Chunk]]:  # noqa: ARG002
        """One chunk."""
        yield self._chunks()

    async def _chunks(self) -> AsyncIterator[Chunk]:
        yield self.chunk

    async def abort(self, request_id: str) -> None:
        """Nothing runs."""

    async def pause(self, mode: PauseMode = PauseMode.KEEP) -> None:
        """Nothing runs."""

    async def resume(self) -> None:
        """Nothing waits."""

    async def load(self, snapshot: Snapshot) -> None:
        """There are no weights."""

    def statistics(self) -> EngineStatistics:
        """Nothing is counted."""
        return EngineStatistics()


def _encode(renderer: TemplateRenderer, text: str) -> list[int]:
    """Ids of plain text: what an assistant's message adds to a prompt that is asked for nothing else."""
    empty = renderer.render((ChatMessage(role="user", content=""),))
    full = renderer.render((ChatMessage(role="user", content=text),))
    return full[: len(full) - len(empty)].tolist()


async def _tell_cpu(_: Request) -> PlainTextResponse:
    return PlainTextResponse(str(time.process_time()))


_CPU_ROUTE = Route("/cpu", _tell_cpu)


@asynccontextmanager
async def _served(app: Starlette) -> AsyncIterator[str]:
    config = ProxyConfig()
    listener = bind(config)
    url = url_of(listener, config)
    stopping = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: serve(app, listener, shutdown=stopping.wait))
        yield url
        stopping.set()


@asynccontextmanager
async def http_floor() -> AsyncIterator[tuple[str, ...]]:
    """Starlette on Hypercorn: a body in, a constant out."""
    constant = orjson.dumps(_format(ChatMessage(role="assistant", content=ANSWER), "chatcmpl-1", 30, 10))

    async def answer(request: Request) -> Response:
        await request.body()
        return Response(constant, media_type="application/json")

    routes = [Route("/{session}/v1/chat/completions", answer, methods=["POST"]), _CPU_ROUTE]
    async with _served(Starlette(routes=routes)) as url:
        yield tuple(f"{url}/s{number}" for number in range(NUM_SESSIONS))


@asynccontextmanager
async def capture_floor() -> AsyncIterator[tuple[str, ...]]:
    """The least that knows which tokens were read and sampled."""
    renderer = create_renderer(tiny_tokenizer())
    chunk = NullEngine(renderer).chunk
    numbers = itertools.count()
    captured: dict[str, tuple[tuple[ChatMessage, ...], Any, Any]] = {}

    async def answer(request: Request) -> Response:
        body = orjson.loads(await request.body())
        messages = tuple(ChatMessage(role=raw["role"], content=raw["content"]) for raw in body["messages"])
        session = request.path_params["session"]
        prompt = _extend_captured(renderer, captured.get(session), messages)
        message = renderer.parse(chunk.token_ids)
        captured[session] = ((*messages, message), np.concatenate([prompt, chunk.token_ids]), chunk.logprobs)
        payload = _format(message, f"chatcmpl-{next(numbers)}", len(prompt), len(chunk.token_ids))
        return Response(orjson.dumps(payload), media_type="application/json")

    routes = [Route("/{session}/v1/chat/completions", answer, methods=["POST"]), _CPU_ROUTE]
    async with _served(Starlette(routes=routes)) as url:
        yield tuple(f"{url}/s{number}" for number in range(NUM_SESSIONS))


def _extend_captured(
    renderer: TemplateRenderer, parent: tuple[tuple[ChatMessage, ...], Any, Any] | None, messages: Any
) -> Any:
    if parent is None or messages[: len(parent[0])] != parent[0]:
        return renderer.render(messages)
    suffix = renderer.extend(history=parent[0], new=messages[len(parent[0]) :], is_closed=True)
    assert not isinstance(suffix, ForkReason)
    return np.concatenate([parent[1], suffix])


def _format(message: ChatMessage, name: str, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": message.content, "refusal": None},
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


@asynccontextmanager
async def proxy() -> AsyncIterator[tuple[str, ...]]:
    """The complete stack: proxy, sessions, trees, renderer, generation."""
    renderer = create_renderer(tiny_tokenizer())
    limits = CapacityLimits(max_concurrent=NUM_SESSIONS, batch_size=NUM_SESSIONS)
    async with ActorSystem.open() as system:
        generation = await system.spawn(GenerationActor(NullEngine(renderer)))
        sessions = await system.spawn(SessionManager(renderer=renderer, generation=generation))
        capacity = await system.spawn(CapacityGranter(CapacityState(limits=limits)))
        exports = await system.spawn(Exporter(sessions=sessions, capacity=capacity))
        server = await system.spawn(
            ProxyServer(sessions=sessions, exports=exports, capacity=capacity, extra_routes=[_CPU_ROUTE])
        )
        endpoint = await server.ask(DescribeEndpoint())
        opened = [await sessions.ask(OpenSession(task=f"s{number}")) for number in range(NUM_SESSIONS)]
        yield tuple(f"{endpoint.url}/{session.session}" for session in opened)


FACTORIES: dict[str, Factory] = {"http_floor": http_floor, "capture_floor": capture_floor, "proxy": proxy}
