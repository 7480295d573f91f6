"""A server with vLLM's HTTP interface over any ``Engine``, to test ``backend: vllm`` without vLLM.

::

    async with open_vllm_server(engine) as server:
        async with open_server_engines(VllmDialect(), ..., urls=[server.url]) as remote:
            ...

It answers the requests that ``VllmDialect`` sends like a real server: an error within a stream is an event after a
status 200, ids have a prefix when they are aborted, and weights have no label until they get one. It has no grammars.
``failures`` replace the next answers to generate.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Any

import anyio
from attrs import define, field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from areal_actors.domain import Chunk, EngineRequest, PauseMode, SampleKey, Sampling, Snapshot
from areal_actors.errors import ArealError, RequestError
from areal_actors.generation.base import Engine
from areal_actors.generation.servers.vllm import ABORT_PREFIX, GENERATE, LOGPROBS_MODE, OLDEST
from areal_actors.lib.task_groups import open_tasks
from areal_actors.proxy.server import listen, serve, url_of
from areal_actors_testing.sglang_server import read_rank

_FACTS = ("/version", "/v1/models", "/weight_info", "/server_info", "/health")
_ADAPTER_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


class Failure(StrEnum):
    """Ways in which an answer fails."""

    ERROR = "error"
    """Status 500."""
    GARBAGE = "garbage"
    """A stream that is not JSON."""
    CUT = "cut"
    """A stream that ends after its first token, without an error."""


@define(kw_only=True, eq=False)
class VllmServer:
    """A server over ``engine``. ``bodies`` holds the requests to generate, in order."""

    engine: Engine
    model: Path
    url: str = ""
    version: str = ".".join(map(str, OLDEST))
    logprobs_mode: str = LOGPROBS_MODE
    failures: deque[Failure] = field(factory=deque)
    bodies: list[Mapping[str, Any]] = field(factory=list)
    label: str = "default"
    adapters: dict[str, str] = field(factory=dict)
    """The paths of loaded adapters by name."""
    max_adapter_rank: int = 0
    """The rank of ``--max-lora-rank``; 0 without ``--enable-lora``."""
    _labels: dict[int, str] = field(factory=dict, init=False)
    _running: dict[str, str] = field(factory=dict, init=False)
    _ids: count[int] = field(factory=count, init=False)

    def create_app(self) -> Starlette:
        """Create the application with the routes that the dialect uses."""
        told = (
            GENERATE,
            "/abort_requests",
            "/pause",
            "/resume",
            "/collective_rpc",
            "/reset_prefix_cache",
            "/update_weight_version",
            *(_ADAPTER_PATHS if self.max_adapter_rank else ()),
        )

        async def refuse_incomplete(_: Request, error: Exception) -> Response:
            return _error(400, f"a field is missing: {error}")

        return Starlette(
            routes=[
                *(Route(path, self._describe, methods=["GET"]) for path in _FACTS),
                *(Route(path, self._answer, methods=["POST"]) for path in told),
            ],
            exception_handlers={KeyError: refuse_incomplete},
        )

    async def _describe(self, request: Request) -> Response:
        info, model = self.engine.info, str(self.model)
        loaded = [{"id": name, "root": path, "parent": info.model} for name, path in self.adapters.items()]
        config = {
            "model_config": {
                "model": model,
                "max_model_len": info.context_length,
                "dtype": f"torch.{info.dtype}",
                "logprobs_mode": self.logprobs_mode,
            },
            "device_config": {"device": info.device},
            "scheduler_config": {"max_num_seqs": info.max_concurrent},
            "structured_outputs_config": {"backend": "auto"},
            "lora_config": {"max_lora_rank": self.max_adapter_rank} if self.max_adapter_rank else None,
        }
        documents: dict[str, dict[str, Any]] = {
            "/version": {"version": self.version},
            "/v1/models": {"object": "list", "data": [{"id": info.model, "root": model}, *loaded]},
            "/weight_info": {"weight_version": self.label},
            "/server_info": {"vllm_config": config},
        }
        found = documents.get(request.url.path)
        return Response() if found is None else JSONResponse(found)

    async def _answer(self, request: Request) -> Response:
        path, engine = request.url.path, self.engine
        body = json.loads(await request.body() or "{}")
        if path == GENERATE:
            return self._generate(body)
        if path in _ADAPTER_PATHS:
            return self._change_adapters(path, body)
        if path == "/abort_requests":
            for running in [running for running, name in self._running.items() if name in body["request_ids"]]:
                await engine.abort(running)
        elif path == "/pause":
            await engine.pause(PauseMode(request.query_params["mode"]))
        elif path == "/resume":
            await engine.resume()
        elif path == "/collective_rpc":
            # Tokens that were sampled before keep the label that they had.
            self._labels[engine.version] = self.label
            try:
                weights = Path(body["kwargs"]["weights_path"])
                await engine.load(Snapshot(version=engine.version + 1, path=weights))
            except ArealError as error:
                return _error(500, str(error))
        elif path == "/update_weight_version":
            self.label = self._labels[engine.version] = body["new_version"]
        # Also a reset of the cache, which the engine dropped when it loaded.
        return JSONResponse({"status": "ok"})

    def _change_adapters(self, path: str, body: Mapping[str, Any]) -> Response:
        name = body["lora_name"]
        if path == "/v1/unload_lora_adapter":
            if self.adapters.pop(name, None) is None:
                return _error(404, f"The lora adapter '{name}' cannot be found.")
            return Response(f"Success: LoRA adapter '{name}' removed successfully.")
        root = body["lora_path"]
        if name in self.adapters:
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        rank = read_rank(root)
        if rank is None:
            return _error(404, f"Loading lora {name} failed: No adapter found for {root}")
        if rank > self.max_adapter_rank:
            return _error(500, f"LoRA rank {rank} is greater than max_lora_rank {self.max_adapter_rank}.")
        self.adapters[name] = root
        return Response(f"Success: LoRA adapter '{name}' added successfully.")

    # -------------------------------------------------------------------------------------------- generating

    def _generate(self, body: Mapping[str, Any]) -> Response:
        wanted, number = body["sampling_params"], next(self._ids)
        sampling = Sampling(
            max_new_tokens=wanted["max_tokens"],
            stop=tuple(wanted["stop"]),
            stop_token_ids=tuple(wanted["stop_token_ids"]),
            logit_bias=tuple((int(token), bias) for token, bias in wanted.get("logit_bias", {}).items()),
            top_logprobs=wanted["logprobs"],
            **{name: wanted[name] for name in _SAME},
        )
        # vLLM's request ids need not be unique, but an engine's must be, so each gets a number, which is also its seed.
        generation = EngineRequest(
            id=f"{body['request_id']}-{number}",
            prompt=body["token_ids"],
            sampling=sampling,
            key=SampleKey(seed=number),
        )
        self.bodies.append(body)
        if body.get("model") not in (None, self.engine.info.model, *self.adapters):
            return _error(404, f"The model `{body['model']}` does not exist.")
        failure = self.failures.popleft() if self.failures else None
        if failure is Failure.ERROR:
            return _error(500, "The engine core died.")
        if failure is Failure.GARBAGE:
            return Response("data: {]\n\n", media_type="text/event-stream")
        return _Events(self._stream(body["request_id"], generation, is_cut=failure is Failure.CUT))

    async def _stream(self, name: str, request: EngineRequest, *, is_cut: bool) -> AsyncGenerator[str]:
        # Real servers know it by this name when it is aborted.
        self._running[request.id] = ABORT_PREFIX + name
        spans: list[dict[str, Any]] = []
        try:
            async with self.engine.generate(request) as chunks:
                async for chunk in chunks:
                    label = self._labels.get(chunk.version, self.label)
                    start = spans[-1]["end"] if spans else 0
                    if not spans or spans[-1]["version"] != label:
                        spans.append({"version": label, "start": start, "end": start})
                    spans[-1]["end"] = start + len(chunk.token_ids)
                    yield _event({"choices": [_choice(chunk, spans)]})
                    if is_cut:
                        return
        except ArealError as error:
            status = error.status if isinstance(error, RequestError) else 500
            yield _event({"error": {"message": str(error), "code": status}})
        finally:
            del self._running[request.id]
        yield "data: [DONE]\n\n"


_SAME = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


def _choice(chunk: Chunk, spans: list[dict[str, Any]]) -> dict[str, Any]:
    entries = zip(chunk.token_ids.tolist(), chunk.logprobs.tolist(), strict=True)
    tops = chunk.top_logprobs or ((),) * len(chunk.token_ids)
    content = [
        {
            "token_id": token_id,
            "logprob": logprob,
            "top_logprobs": [{"token_id": top.token_id, "logprob": top.logprob} for top in alternatives],
        }
        for (token_id, logprob), alternatives in zip(entries, tops, strict=True)
    ]
    return {
        "token_ids": chunk.token_ids.tolist(),
        "logprobs": {"content": content},
        "finish_reason": chunk.finish.value if chunk.finish else None,
        "weight_versions": spans if chunk.finish else None,
    }


class _Events(StreamingResponse):
    """A stream of events that is closed in the task that reads it, even if the client does not want the rest."""

    def __init__(self, events: AsyncGenerator[str]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._events = events

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):
            await super().stream_response(send)


def _event(document: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)


@asynccontextmanager
async def open_vllm_server(
    engine: Engine, *, model: Path, port: int = 0, max_adapter_rank: int = 0
) -> AsyncIterator[VllmServer]:
    """Serve ``engine`` on this machine until the block is left; answers in progress are cut off then.

    ``model`` is the directory that the server reports as its model. The caller opens and closes the engine.
    """
    listener = listen("127.0.0.1", port, prefix="vllm.")
    server = VllmServer(engine=engine, model=model, url=url_of(listener), max_adapter_rank=max_adapter_rank)
    stopping = anyio.Event()
    async with open_tasks() as tasks:

        async def run() -> None:
            with anyio.CancelScope(shield=True):  # a cancelled server leaves connections open; ``stopping`` ends it
                await serve(server.create_app(), listener, shutdown=stopping.wait)

        tasks.start_soon(run)
        try:
            yield server
        finally:
            stopping.set()
