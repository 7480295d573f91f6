"""What the proxy is measured against: the least that an HTTP server, and the least that a capturing one, can cost.

``http_floor`` reads a body and answers with a constant. ``capture_floor`` parses the request, renders it incrementally
with the real renderer, keeps ids and logprobs, and words an answer: no keys, no checks, no trees, no actors. Both are
Starlette on Hypercorn as it comes. ``proxy`` is the complete stack, and ``capture_floor_ours`` the capturing floor on
the server that the proxy runs on, which tells how much of a difference is the server's. ``proxy_journaled`` is the
proxy with a journal on disk. All have the same engine.
"""

from __future__ import annotations

import gc
import itertools
import os
import socket
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import numpy as np
import orjson
from attrs import define
from benchmarks.null_engine import NullEngine, Setup
from hypercorn.asyncio import serve as serve_plainly
from hypercorn.config import Config
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from areal_actors.domain import ChatMessage, EngineRequest, ForkReason, SampleKey, TextDelta
from areal_actors.journal import Journal, SqliteJournal
from areal_actors.kernel import ActorSystem
from areal_actors.messages import OpenSession
from areal_actors.proxy import ProxyConfig, create_app
from areal_actors.proxy.server import bind, serve, url_of
from areal_actors.rollouts.staleness import CapacityLimits
from areal_actors.run.inference import InferenceConfig, spawn_generation, spawn_session_actors

__all__ = ["ADMIN_KEY", "FACTORIES", "Factory", "serve_as_the_proxy", "served", "tell_cpu"]

ADMIN_KEY = "sk-benchmark"
_NUM_STREAMED = 200

Factory = Callable[[Setup], AbstractAsyncContextManager[tuple[str, ...]]]
"""Opens a server; yields one base URL per session."""
Serve = Callable[[Starlette, socket.socket, Callable[[], Awaitable[None]]], Awaitable[None]]


async def tell_cpu(_: Request) -> Response:
    """CPU seconds of this process."""
    return PlainTextResponse(str(time.process_time()))


async def _tell_memory(_: Request) -> Response:
    """Bytes that are allocated, as Python counts them (0 unless it traces) and as the system does."""
    gc.collect()
    return _json({"traced": tracemalloc.get_traced_memory()[0], "resident": _resident_bytes()})


def _resident_bytes() -> int:
    """Of this process, on Linux."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _questions(engine: NullEngine | None = None) -> list[Route]:
    """What the benchmarks ask of every server."""

    async def tell_first_tokens(_: Request) -> Response:
        return _json(engine.first_tokens if engine else {})

    return [
        Route("/cpu", tell_cpu),
        Route("/memory", _tell_memory),
        Route("/first_tokens", tell_first_tokens),
    ]


async def _serve_plainly(app: Starlette, listener: socket.socket, shutdown: Callable[[], Awaitable[None]]) -> None:
    """Hypercorn as it comes, but for its bounds on requests and idle seconds of a connection."""
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.keep_alive_max_requests = 2**31
    config.keep_alive_timeout = 75.0
    config.loglevel = "WARNING"
    await serve_plainly(app, config, shutdown_trigger=shutdown, mode="asgi")  # type: ignore[arg-type]


async def serve_as_the_proxy(app: Starlette, listener: socket.socket, shutdown: Callable[[], Awaitable[None]]) -> None:
    """Serve as ``ProxyServer`` does."""
    await serve(app, listener, shutdown=shutdown)


@asynccontextmanager
async def served(app: Starlette, serve: Serve = _serve_plainly) -> AsyncIterator[str]:
    """Serve ``app`` within the block; yields its URL."""
    config = ProxyConfig()
    listener = bind(config)
    url = url_of(listener)
    stopping = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve, app, listener, stopping.wait)
        yield url
        stopping.set()


def _sessions_at(url: str, setup: Setup) -> tuple[str, ...]:
    return tuple(f"{url}/s{number}" for number in range(setup.num_sessions))


@asynccontextmanager
async def http_floor(setup: Setup) -> AsyncIterator[tuple[str, ...]]:
    """Starlette on Hypercorn: a body in, a constant out."""
    payload = _format(ChatMessage(role="assistant", content=setup.answer), "chatcmpl-1", 30, 10)
    constant = orjson.dumps(payload | {"session_id": "s1", "api_key": "sk-placeholder"})

    async def play() -> AsyncIterator[bytes]:
        for _ in range(_NUM_STREAMED):
            await anyio.sleep(setup.pause_seconds)
            yield _event({}, {"content": "word"}, None)
        yield b"data: [DONE]\n\n"

    async def answer(request: Request) -> Response:
        if b'"stream":true' in await request.body():
            return StreamingResponse(play(), media_type="text/event-stream")
        await anyio.sleep(setup.delay_seconds)
        return Response(constant, media_type="application/json")

    routes = [Route("/{path:path}", answer, methods=["POST"]), *_questions()]
    async with served(Starlette(routes=routes)) as url:
        yield _sessions_at(url, setup)


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

    def __init__(self, setup: Setup) -> None:
        self._renderer = setup.create_renderer()
        self._engine = NullEngine(self._renderer, setup)
        self._chunk = self._engine.chunk
        self._delay = setup.delay_seconds
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
        return _json({"session_id": f"session-{next(self._numbers)}", "api_key": "sk-placeholder"})

    async def _answer(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        messages = tuple(ChatMessage(role=raw["role"], content=raw["content"]) for raw in body["messages"])
        session, sampled = request.path_params["session"], self._chunk.token_ids
        if body.get("stream"):
            before, suffix = self._extend(self._rows.get(session, _NOTHING), messages)
            return StreamingResponse(self._stream(session, messages, before, suffix), media_type="text/event-stream")
        if self._delay:
            await anyio.sleep(self._delay)
        before, suffix = self._extend(self._rows.get(session, _NOTHING), messages)
        message = self._renderer.parse(sampled)
        self._keep(session, before, messages, suffix, message)
        num_prompt = len(before.ids) + len(suffix)
        return _json(_format(message, f"chatcmpl-{next(self._numbers)}", num_prompt, len(sampled)))

    def _keep(
        self, session: str, before: _Row, messages: tuple[ChatMessage, ...], suffix: Any, message: ChatMessage
    ) -> None:
        sampled = self._chunk.token_ids
        self._rows[session] = _Row(
            messages=(*messages, message),
            ids=np.concatenate([before.ids, suffix, sampled]),
            mask=np.concatenate([before.mask, np.zeros(len(suffix)), np.ones(len(sampled))]),
            logprobs=np.concatenate([before.logprobs, np.zeros(len(suffix)), self._chunk.logprobs]),
        )

    async def _stream(
        self, session: str, messages: tuple[ChatMessage, ...], before: _Row, suffix: Any
    ) -> AsyncIterator[bytes]:
        """One event for each token, as servers of models send them."""
        name, created = f"chatcmpl-{next(self._numbers)}", int(time.time())
        envelope = {"id": name, "object": "chat.completion.chunk", "created": created, "model": "m"}
        parser, texts = self._renderer.open_stream(), []
        async with self._engine.generate(EngineRequest(id=name, prompt=[1], key=SampleKey(seed=1))) as chunks:
            async for chunk in chunks:
                for delta in parser.feed(chunk.token_ids):
                    assert isinstance(delta, TextDelta)
                    texts.append(delta.text)
                    yield _event(envelope, {"content": delta.text}, None)
        for delta in parser.finish():
            assert isinstance(delta, TextDelta)
            texts.append(delta.text)
            yield _event(envelope, {"content": delta.text}, None)
        self._keep(session, before, messages, suffix, ChatMessage(role="assistant", content="".join(texts)))
        yield _event(envelope, {}, "stop")
        yield b"data: [DONE]\n\n"

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


def _event(envelope: dict[str, Any], delta: dict[str, Any], finish: str | None) -> bytes:
    document = {**envelope, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    return b"data: %b\n\n" % orjson.dumps(document)


def _json(document: dict[str, Any]) -> Response:
    return Response(orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


@asynccontextmanager
async def capture_floor(setup: Setup, *, serve: Serve = _serve_plainly) -> AsyncIterator[tuple[str, ...]]:
    """Capture, and nothing else."""
    async with served(Starlette(routes=[*_Capture(setup).routes(), *_questions()]), serve) as url:
        yield _sessions_at(url, setup)


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
async def proxy_with_journal(setup: Setup) -> AsyncIterator[tuple[str, ...]]:
    """The complete stack, and a file in which every turn stands before it is answered."""
    with TemporaryDirectory() as directory:
        async with SqliteJournal.open(Path(directory) / "journal.sqlite") as journal, proxy(setup, journal) as urls:
            yield urls


@asynccontextmanager
async def proxy(setup: Setup, journal: Journal | None = None) -> AsyncIterator[tuple[str, ...]]:
    """The complete stack: proxy, sessions, trees, renderer, generation."""
    renderer = setup.create_renderer()
    engine = NullEngine(renderer, setup)
    limits = CapacityLimits(max_concurrent=2**30, batch_size=2**30)
    async with ActorSystem.open() as system:
        generation = await spawn_generation(system, engine)
        settings = InferenceConfig(limits=limits)
        actors = await spawn_session_actors(system, settings, renderer=renderer, generation=generation, journal=journal)
        sessions, config = actors.sessions, ProxyConfig(admin_key=ADMIN_KEY)
        app = create_app(sessions=sessions, exports=actors.exports, capacity=actors.capacity, config=config)
        app.router.routes.extend(_questions(engine))
        is_durable = journal is not None
        opened = [
            await sessions.ask(OpenSession(task=f"s{number}", is_durable=is_durable))
            for number in range(setup.num_sessions)
        ]
        async with served(app, serve_as_the_proxy) as url:
            yield tuple(f"{url}/{session.session}" for session in opened)


FACTORIES: dict[str, Factory] = {
    "http_floor": http_floor,
    "capture_floor": capture_floor,
    "capture_floor_ours": partial(capture_floor, serve=serve_as_the_proxy),
    "proxy": proxy,
    "proxy_journaled": proxy_with_journal,
}
