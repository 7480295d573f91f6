"""A server with SGLang's native HTTP interface over any engine, and with the ways in which real ones fail.

It streams like SGLang: each event repeats the earlier output, the last one has the versions, a pause with ``retract``
keeps requests, and weights are loaded from disk under a label::

    async with open_sglang_server(engine, model=directory) as server:
        async with open_server_engines(SGLangDialect(), ServerConfig(), urls=[server.url], ...) as remote:
            ...
            await server.kill()
            await server.start()
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from anyio.abc import TaskGroup
from attrs import define, field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from areal_actors.domain import Chunk, EngineRequest, PauseMode, SampleKey, Sampling, Snapshot
from areal_actors.errors import InvalidRequest, ModelError
from areal_actors.generation.base import Engine
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.lib.task_groups import open_tasks
from areal_actors.proxy.server import listen, serve

_ADAPTER_PATHS = ("/load_lora_adapter", "/unload_lora_adapter")
_PATHS = (
    "/model_info",
    "/server_info",
    "/v1/models",
    "/generate",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/update_weights_from_disk",
    *_ADAPTER_PATHS,
)

UNLABELLED = "default"
"""The label of the weights that a server started with."""


class Fault(StrEnum):
    """Faults of one request to generate."""

    ERROR = "error"
    """An answer 500."""
    GARBAGE = "garbage"
    """A stream that is not JSON."""
    CUT = "cut"
    """The stream ends after two tokens."""
    SILENCE = "silence"
    """The stream stalls after two tokens and never continues."""
    FOREIGN_ABORT = "foreign_abort"
    """Another client aborts it after two tokens."""
    DEATH = "death"
    """The server dies after two tokens."""


# ------------------------------------------------------------------------------------------- streams of answers

_SAMPLING = ("max_new_tokens", "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty")


@define
class _Stream:
    """The content of a stream so far, and the format of its events."""

    body: Mapping[str, Any]
    is_incremental: bool
    ids: list[int] = field(factory=list)
    entries: list[list[Any]] = field(factory=list)
    tops: list[list[list[Any]]] = field(factory=list)
    spans: list[dict[str, Any]] = field(factory=list)
    num_sent: int = 0
    """Tokens in events so far."""

    @property
    def is_due(self) -> bool:
        """Whether an event is due: for the first token, and whenever ``stream_interval`` further ones were sampled."""
        interval = self.body["sampling_params"].get("stream_interval", 1)
        return not self.num_sent or len(self.ids) - self.num_sent >= interval

    def add(self, chunk: Chunk, label: str) -> None:
        """Add a chunk, sampled under the weights ``label``."""
        start = len(self.ids)
        temperature_is_one = self.body["sampling_params"]["temperature"] in (0.0, 1.0)
        logprobs = chunk.raw_logprobs if temperature_is_one else chunk.logprobs
        self.ids += chunk.token_ids.tolist()
        self.entries += [
            [value, token_id, None] for value, token_id in zip(logprobs.tolist(), chunk.token_ids.tolist(), strict=True)
        ]
        self.tops += [[[each.logprob, each.token_id, None] for each in top] for top in chunk.top_logprobs]
        if self.spans and self.spans[-1]["version"] == label:
            self.spans[-1]["end"] = len(self.ids)
        elif len(self.ids) > start:
            self.spans.append({"version": label, "start": start, "end": len(self.ids)})

    def event(self, chunk: Chunk, label: str) -> str:
        """Return an event with the chunk that was added last; ``label`` is that of the current weights."""
        since = self.num_sent if self.is_incremental else 0
        self.num_sent = len(self.ids)
        finish = None if chunk.finish is None else {"type": str(chunk.finish)}
        meta = {
            "id": self.body["rid"],
            "finish_reason": finish,
            "weight_version": label,
            "completion_tokens": len(self.ids),
            "cached_tokens": chunk.num_cached_tokens,
            "output_token_logprobs": self.entries[since:],
            "output_top_logprobs": self.tops[since:],
        }
        if finish is not None:
            meta["weight_versions"] = self.spans
        if self.body.get("return_routed_experts") and chunk.routed_experts is not None:
            meta["routed_experts"] = b64encode(chunk.routed_experts.astype(np.int32).tobytes()).decode()
        return f"data: {json.dumps({'output_ids': self.ids[since:], 'meta_info': meta})}\n\n"


def parse_request(body: Mapping[str, Any], end_token_id: int | None) -> EngineRequest:
    """Parse the body of a request to generate; ``end_token_id`` ends generations unless they ignore it."""
    params = body["sampling_params"]
    ends = [] if params["ignore_eos"] or end_token_id is None else [end_token_id]
    sampling = Sampling(
        **{name: params[name] for name in _SAMPLING},
        top_k=max(params["top_k"], 0),
        repetition_penalty=params["repetition_penalty"],
        top_logprobs=body["top_logprobs_num"],
    )
    return EngineRequest(
        id=body["rid"],
        prompt=body["input_ids"],
        sampling=sampling,
        key=SampleKey(seed=0, path=(body["rid"],)),
        stop_token_ids=tuple(() if params["ignore_eos"] else (*params["stop_token_ids"], *ends)),
    )


# -------------------------------------------------------------------------------------------------- the server


@define(eq=False)
class FakeSGLang:
    """A server that can be killed and started again, on one port. ``faults`` apply to the next requests, in order.

    ``paths`` records the paths of all requests, ``bodies`` the requests to generate, ``routing_keys`` their headers.
    """

    engine: Engine
    model: Path
    version: str
    tasks: TaskGroup
    end_token_id: int | None = None
    is_incremental: bool = False
    port: int = 0
    faults: deque[Fault] = field(factory=deque)
    paths: list[str] = field(factory=list)
    bodies: list[dict[str, Any]] = field(factory=list)
    routing_keys: list[str | None] = field(factory=list)
    _labels: dict[int, str] = field(factory=dict)
    _label: str = UNLABELLED
    adapters: dict[str, str] = field(factory=dict)
    """The paths of loaded adapters by name."""
    max_adapter_rank: int = 0
    """The rank of ``--max-lora-rank``; 0 without ``--enable-lora``."""
    records_experts: bool = False
    """Whether it was started with ``--enable-return-routed-experts``, as ``engine`` was."""
    _remembered: dict[str, str] = field(factory=dict)
    _users: Counter[str | None] = field(factory=Counter)
    _unused: ChangeSignal = field(factory=ChangeSignal)
    _streams: set[anyio.CancelScope] = field(factory=set)
    _dying: anyio.Event = field(factory=anyio.Event)
    _ended: anyio.Event | None = None

    @property
    def url(self) -> str:
        """The URL on which it listens, or did."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def label(self) -> str:
        """The label of its weights."""
        return self._label

    async def start(self) -> None:
        """Listen, with the weights in the model's directory, on the same port as before."""
        # It may have been killed while it was paused.
        await self.engine.resume()
        # A new process knows no adapter and no request of the one before.
        self.adapters, self._remembered, self._users = {}, {}, Counter()
        # Published weights are lost with the process: it starts from the directory of its model.
        await self._load(Snapshot(version=self.engine.version + 1, path=self.model), UNLABELLED)
        listener = listen("127.0.0.1", self.port, prefix="server.")
        self.port = listener.getsockname()[1]
        self._dying, self._ended = anyio.Event(), anyio.Event()
        dying, ended = self._dying, self._ended
        app = Starlette(routes=[Route(path, self._answer, methods=["GET", "POST"]) for path in _PATHS])

        async def run() -> None:
            try:
                with anyio.CancelScope(shield=True):  # a cancelled server leaves connections open; ``kill`` ends it
                    await serve(app, listener, shutdown=dying.wait)
            finally:
                ended.set()

        self.tasks.start_soon(run)

    async def kill(self) -> None:
        """Stop at once, breaking all streams."""
        self._die()
        if self._ended is not None:
            with anyio.CancelScope(shield=True):
                await self._ended.wait()

    def _die(self) -> None:
        self._dying.set()
        for stream in self._streams:
            stream.cancel()

    async def _answer(self, request: Request) -> Response:
        path, engine = request.url.path, self.engine
        self.paths.append(path)
        if path == "/generate":
            return await self._generate(request)
        body = json.loads(await request.body() or "{}")
        if path in _ADAPTER_PATHS:
            return await self._change_adapters(path, body["lora_name"], body.get("lora_path", ""))
        if path == "/update_weights_from_disk":
            snapshot = Snapshot(version=engine.version + 1, path=Path(body["model_path"]))
            return _said(await self._load(snapshot, body["weight_version"]))
        if path == "/abort_request":
            await engine.abort(body["rid"])
        elif path == "/pause_generation":
            await engine.pause(PauseMode.ABORT if body["mode"] == "abort" else PauseMode.KEEP)
        elif path == "/continue_generation":
            await engine.resume()
        return JSONResponse(self._facts().get(path, {"status": "ok"}))

    def _facts(self) -> dict[str, dict[str, Any]]:
        """Return the documents in which the server describes itself, by path."""
        model, info = str(self.model), self.engine.info
        base = {"id": model, "root": model, "max_model_len": info.context_length}
        loaded = [{"id": name, "root": root, "parent": model} for name, root in self.adapters.items()]
        return {
            "/model_info": {"model_path": model, "weight_version": self._label},
            "/v1/models": {"data": [base, *loaded]},
            "/server_info": {
                "version": self.version,
                "dtype": info.dtype,
                "max_req_input_len": info.context_length,
                "grammar_backend": "xgrammar",
                "enable_lora": bool(self.max_adapter_rank),
                "enable_return_routed_experts": self.records_experts,
                "max_lora_rank": self.max_adapter_rank or None,
                "internal_states": [{"effective_max_running_requests_per_dp": info.max_concurrent}],
            },
        }

    async def _load(self, snapshot: Snapshot, label: str) -> str | None:
        """Load weights; return the problem, if any."""
        try:
            await self.engine.load(snapshot)
        except ModelError as error:
            return str(error)
        self._labels[snapshot.version] = self._label = label
        return None

    async def _change_adapters(self, path: str, name: str, root: str) -> Response:
        problem = None
        if path == "/unload_lora_adapter":
            if name not in self.adapters:
                problem = f"LoRA with name {name} does not exist. Loaded LoRAs: {list(self.adapters)}"
            else:
                del self.adapters[name]
                # As real servers do: it is forgotten at once, and the answer comes when no request uses it.
                while self._users[name]:
                    await self._unused.wait()
        elif not self.max_adapter_rank:
            problem = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
        elif name in self.adapters:
            problem = f"LoRA with name {name} already exists. Loaded LoRAs: {list(self.adapters)}"
        elif (rank := read_rank(root)) is None:
            problem = f"Can't find 'adapter_config.json' at '{root}'"
        elif rank > self.max_adapter_rank:
            problem = f"LoRA adapter {name} with rank {rank} is incompatible with the current LoRA memory pool."
        else:
            self.adapters[name] = self._remembered[name] = root
        document = {"success": problem is None, "error_message": problem, "loaded_adapters": self.adapters}
        return JSONResponse(document, status_code=200 if problem is None else 400)

    # ----------------------------------------------------------------------------------------- generating

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.routing_keys.append(request.headers.get("x-smg-routing-key"))
        fault = self.faults.popleft() if self.faults else None
        if fault is Fault.ERROR:
            return JSONResponse({"error": {"message": "out of memory"}}, status_code=500)
        if max(body["input_ids"]) >= self.engine.info.vocab_size:
            self._die()
        name = body.get("lora_path")
        if name is not None and name not in self.adapters:
            if name not in self._remembered:
                problem = f"The following requested LoRA adapters are not loaded: {name}"
                return JSONResponse({"error": {"message": problem}}, status_code=400)
            # Real servers load again what was unloaded.
            self.adapters[name] = self._remembered[name]
        return _Events(self, self._stream(body, fault))

    async def _stream(self, body: Mapping[str, Any], fault: Fault | None) -> AsyncGenerator[str]:
        if fault is Fault.GARBAGE:
            yield "data: <html>\n\n"
            return
        said, adapter = _Stream(body=body, is_incremental=self.is_incremental), body.get("lora_path")
        self._users[adapter] += 1
        try:
            async with self.engine.generate(parse_request(body, self.end_token_id)) as chunks:
                async for chunk in chunks:
                    said.add(chunk, self._labels.get(chunk.version, UNLABELLED))
                    if said.is_due or chunk.finish is not None:
                        yield said.event(chunk, self._label)
                    if fault is not None and len(said.ids) > 1 and chunk.finish is None:
                        if fault is Fault.FOREIGN_ABORT:
                            await self.engine.abort(body["rid"])
                            continue
                        if fault is Fault.DEATH:
                            self._die()
                        if fault is not Fault.CUT:
                            await anyio.sleep_forever()
                        return
        except InvalidRequest as error:
            yield f"data: {json.dumps({'error': {'message': str(error), 'code': 400}})}\n\n"
        finally:
            self._users[adapter] -= 1
            self._unused.notify()
        yield "data: [DONE]\n\n"


class _Events(Response):
    """A stream that breaks off when its server dies, and ends when its client disconnects."""

    def __init__(self, server: FakeSGLang, events: AsyncGenerator[str]) -> None:
        super().__init__()
        self._streams = server._streams  # noqa: SLF001 - both classes are one server
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Stream the events until they end, the client disconnects or the server dies."""
        tasks = anyio.create_task_group()

        async def cancel_when_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with tasks, aclosing(self._events) as events:
            self._streams.add(tasks.cancel_scope)
            try:
                tasks.start_soon(cancel_when_gone)
                async for event in events:
                    await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            finally:
                self._streams.discard(tasks.cancel_scope)
                tasks.cancel_scope.cancel()


def read_rank(path: str) -> int | None:
    """Return the rank of the adapter in the directory ``path``, or ``None`` if there is none."""
    try:
        return int(json.loads(Path(path, "adapter_config.json").read_text(encoding="utf-8"))["r"])
    except (OSError, ValueError, KeyError):
        return None


def _said(problem: str | None) -> Response:
    content = {"success": problem is None, "message": problem or "Success"}
    return JSONResponse(content, status_code=200 if problem is None else 400)


@asynccontextmanager
async def open_sglang_server(
    engine: Engine,
    *,
    model: Path,
    version: str = "0.5.23",
    end_token_id: int | None = None,
    is_incremental: bool = False,
    port: int = 0,
    max_adapter_rank: int = 0,
    records_experts: bool = False,
) -> AsyncIterator[FakeSGLang]:
    """Serve ``engine`` on a port of this machine while the block lasts.

    Args:
        engine: open and not shared: a server that starts again loads ``model`` into it.
        model: the directory that the server reports as its model.
        version: the reported version of SGLang.
        end_token_id: ends generations unless they ignore it.
        is_incremental: whether events omit what earlier ones contained.
        port: the port to listen on; 0 takes a free one.
        max_adapter_rank: serves adapters up to this rank.
        records_experts: whether answers have the experts that ``engine`` records.
    """
    async with open_tasks() as tasks:
        server = FakeSGLang(
            engine=engine,
            model=model,
            version=version,
            tasks=tasks,
            end_token_id=end_token_id,
            is_incremental=is_incremental,
            port=port,
            max_adapter_rank=max_adapter_rank,
            records_experts=records_experts,
        )
        try:
            await server.start()
            yield server
        finally:
            await server.kill()
        tasks.cancel_scope.cancel()
