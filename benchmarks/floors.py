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
from attrs import define
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

__all__ = ["ADMIN_KEY", "FACTORIES", "NUM_SESSIONS", "Factory"]

NUM_SESSIONS = 16
ADMIN_KEY = "sk-benchmark"
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
    ids: list[int] = full[: len(full) - len(empty)].tolist()
    return ids


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
    payload = _format(ChatMessage(role="assistant", content=ANSWER), "chatcmpl-1", 30, 10)
    constant = orjson.dumps(payload | {"session_id": "s1"})

    async def answer(request: Request) -> Response:
        await request.body()
        return Response(constant, media_type="application/json")

    routes = [Route("/{path:path}", answer, methods=["POST"]), _CPU_ROUTE]
    async with _served(Starlette(routes=routes)) as url:
        yield tuple(f"{url}/s{number}" for number in range(NUM_SESSIONS))


@define
class _Row:
    """What a capturing server keeps of one conversation."""

    messages: tuple[ChatMessage, ...]
    ids: Any
    mask: Any
    logprobs: Any
    reward: float = 0.0


_NOTHING = _Row(messages=(), ids=np.empty(0, np.int32), mask=np.empty(0), logprobs=np.empty(0))


class _Capture:
    """The least that knows which tokens were read and sampled: a dict of rows, and no question asked."""

    def __init__(self) -> None:
        self._renderer = create_renderer(tiny_tokenizer())
        self._chunk = NullEngine(self._renderer).chunk
        self._numbers = itertools.count()
        self._rows: dict[str, _Row] = {}

    def routes(self) -> list[Route]:
        """All that it serves."""
        handlers = {
            "/grant_capacity": self._grant,
            "/rl/start_session": self._start,
            "/{session}/v1/chat/completions": self._answer,
            "/{session}/rl/set_reward": self._set_reward,
            "/{session}/rl/end_session": self._grant,
            "/export_trajectories": self._export,
        }
        return [Route(path, handler, methods=["POST"]) for path, handler in handlers.items()]

    async def _grant(self, request: Request) -> Response:
        await request.body()
        return _json({"status": "success"})

    async def _start(self, request: Request) -> Response:
        await request.body()
        return _json({"session_id": f"session-{next(self._numbers)}"})

    async def _answer(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        messages = tuple(ChatMessage(role=raw["role"], content=raw["content"]) for raw in body["messages"])
        session, sampled = request.path_params["session"], self._chunk.token_ids
        before, suffix = self._extend(self._rows.get(session, _NOTHING), messages)
        message = self._renderer.parse(sampled)
        self._rows[session] = _Row(
            messages=(*messages, message),
            ids=np.concatenate([before.ids, suffix, sampled]),
            mask=np.concatenate([before.mask, np.zeros(len(suffix)), np.ones(len(sampled))]),
            logprobs=np.concatenate([before.logprobs, np.zeros(len(suffix)), self._chunk.logprobs]),
        )
        num_prompt = len(before.ids) + len(suffix)
        return _json(_format(message, f"chatcmpl-{next(self._numbers)}", num_prompt, len(sampled)))

    def _extend(self, before: _Row, messages: tuple[ChatMessage, ...]) -> tuple[_Row, Any]:
        """The row that is continued, and the ids that are new."""
        if not before.messages or messages[: len(before.messages)] != before.messages:
            return _NOTHING, self._renderer.render(messages)
        new = messages[len(before.messages) :]
        suffix = self._renderer.extend(history=before.messages, new=new, is_closed=True)
        assert not isinstance(suffix, ForkReason)
        return before, suffix

    async def _set_reward(self, request: Request) -> Response:
        self._rows[request.path_params["session"]].reward = orjson.loads(await request.body())["reward"]
        return _json({"status": "success"})

    async def _export(self, request: Request) -> Response:
        row = self._rows.pop(orjson.loads(await request.body())["session_id"])
        return _json({"ids": row.ids, "mask": row.mask, "logprobs": row.logprobs, "reward": row.reward})


def _json(document: dict[str, Any]) -> Response:
    return Response(orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


@asynccontextmanager
async def capture_floor() -> AsyncIterator[tuple[str, ...]]:
    """Capture, and nothing else."""
    async with _served(Starlette(routes=[*_Capture().routes(), _CPU_ROUTE])) as url:
        yield tuple(f"{url}/s{number}" for number in range(NUM_SESSIONS))


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
    limits = CapacityLimits(max_concurrent=2**30, batch_size=2**30)
    async with ActorSystem.open() as system:
        generation = await system.spawn(GenerationActor(NullEngine(renderer)))
        capacity = await system.spawn(CapacityGranter(CapacityState(limits=limits)))
        manager = SessionManager(renderer=renderer, generation=generation, capacity=capacity)
        sessions = await system.spawn(manager)
        exports = await system.spawn(Exporter(sessions=sessions, capacity=capacity))
        server = await system.spawn(
            ProxyServer(
                sessions=sessions,
                exports=exports,
                capacity=capacity,
                config=ProxyConfig(admin_key=ADMIN_KEY),
                extra_routes=[_CPU_ROUTE],
            )
        )
        endpoint = await server.ask(DescribeEndpoint())
        opened = [await sessions.ask(OpenSession(task=f"s{number}")) for number in range(NUM_SESSIONS)]
        yield tuple(f"{endpoint.url}/{session.session}" for session in opened)


FACTORIES: dict[str, Factory] = {"http_floor": http_floor, "capture_floor": capture_floor, "proxy": proxy}
