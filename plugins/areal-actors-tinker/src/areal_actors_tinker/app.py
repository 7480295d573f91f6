"""The HTTP routes of Tinker's API, as the SDK calls them.

Each route reads a JSON document (passes come in protobuf, also compressed by zstd), checks what it needs of it, and
calls the service. What takes long is answered with the id of a request, whose outcome ``retrieve_future`` returns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import numpy as np
import zstandard
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from areal_actors import __version__
from areal_actors.domain import Ints
from areal_actors.errors import (
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    RequestError,
    UnsupportedParameter,
)
from areal_actors_tinker.bank import AdamSettings, AdapterSettings, read_settings
from areal_actors_tinker.futures import Failure
from areal_actors_tinker.service import Session, TinkerService, parse_sampling
from areal_actors_tinker.store import EPHEMERAL, Run, StoredCheckpoint, newest
from areal_actors_tinker.wire import PROTOBUF, decode_pass, parse_pass

POLL_SECONDS = 30.0
"""How long ``retrieve_future`` waits for an outcome; the SDK gives up after 45."""
MAX_BODY_BYTES = 64 << 20
"""Bytes of a body, unpacked. The SDK sends at most 5 MB at a time."""

T = TypeVar("T")
Body = Mapping[str, Any]
Handler = Callable[["Call"], Awaitable[Any]]


class Call:
    """One request: its user, its path and query, and its JSON body, of which fields are read by type."""

    def __init__(self, service: TinkerService, request: Request, user: str, body: Body) -> None:
        self.service, self.request, self.user, self.body = service, request, user, body

    def get(self, name: str, kind: type[T], default: T | None = None) -> T | None:
        """Return a field of the body, or ``default`` if it is absent or null. Raises ``InvalidRequest``."""
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise InvalidRequest(f"{name} is {value!r:.50}, and not a {kind.__name__}.", param=name)
        return value

    def need(self, name: str, kind: type[T]) -> T:
        """Return a field that the body must have. Raises ``InvalidRequest``."""
        value = self.get(name, kind)
        if value is None:
            raise InvalidRequest(f"The request has no {name}.", param=name)
        return value

    def session(self) -> Session:
        """Return the session that the body names."""
        return self.service.session(self.need("session_id", str), self.user)

    def checkpoint(self, path: str) -> StoredCheckpoint:
        """Return the checkpoint at a ``tinker://`` path."""
        return self.service.store.find(path, user=self.user, now=self.service.now())

    def model(self) -> str:
        """Return the model that the body names, which is one of the user's."""
        model_id = self.need("model_id", str)
        self.service.run(model_id, self.user)
        return model_id


# ----------------------------------------------------------------------------------------------- service, sessions


async def _health(call: Call) -> Body:  # noqa: ARG001 - there is nothing to read
    return {"status": "ok"}


async def _capabilities(call: Call) -> Body:
    length = call.service.info.context_length
    return {
        "supported_models": [
            {"model_name": name, "max_context_length": length, "trainable": True, "sampleable": True}
            for name in call.service.config.names
        ]
    }


async def _client_config(call: Call) -> Body:  # noqa: ARG001 - the same for all
    return {
        "proto_compress_fwdbwd": True,
        "use_pyqwest_transport": False,
        "sample_use_retrieve_futures": False,
        "sample_join_sampling_session": False,
    }


async def _dynamic_config(call: Call) -> Body:  # noqa: ARG001 - the same for all
    return {"sample_cancel_enabled": True}


async def _telemetry(call: Call) -> Body:  # noqa: ARG001 - nothing is kept
    return {"status": "accepted"}


async def _create_session(call: Call) -> Body:
    metadata = call.get("user_metadata", dict) or {}
    session = call.service.create_session(call.user, metadata, call.get("display_name", str))
    return {"type": "create_session", "session_id": session.id}


async def _heartbeat(call: Call) -> Body:
    session = call.session()
    if session.is_finished:
        raise _Gone("The session has ended.")
    session.last_heartbeat = call.service.now()
    return {"type": "session_heartbeat"}


class _Gone(RequestError):
    status = 410
    code = "session_ended"


async def _get_session(call: Call) -> Body:
    session = call.service.session(call.request.path_params["session_id"], call.user)
    return {
        "training_run_ids": session.models,
        "sampler_ids": session.samplers,
        "user_metadata": dict(session.metadata) or None,
        "display_name": session.name,
    }


async def _list_sessions(call: Call) -> Body:
    limit, offset = _page(call)
    return {"sessions": [session.id for session in call.service.sessions(call.user)][offset : offset + limit]}


async def _finish_session(call: Call) -> Body:
    await call.service.finish_session(call.service.session(call.request.path_params["session_id"], call.user))
    return {}


# ---------------------------------------------------------------------------------------------------------- training


def _promise(request_id: str, **more: object) -> Body:
    return {"request_id": request_id, **more}


def _in_turn(handler: Handler) -> Handler:
    """Let a refused request of a model take its turn and fail then; see ``begin_failure``."""

    async def answer(call: Call) -> Any:
        try:
            return await handler(call)
        except RequestError as error:
            model_id, number = call.body.get("model_id"), call.body.get("seq_id")
            if not isinstance(model_id, str) or type(number) is not int:
                raise
            call.service.run(model_id, call.user)
            return _promise(call.service.begin_failure(model_id, number, error), model_id=model_id)

    return answer


async def _create_model(call: Call) -> Body:
    service, session = call.service, call.session()
    service.require_base(call.need("base_model", str))
    _require_adam(call)
    lora = call.get("lora_config", dict)
    if lora is None:
        raise UnsupportedParameter(
            "All weights cannot be trained through this API; ask for an adapter.", param="lora_config"
        )
    rank, seed = lora.get("rank"), lora.get("seed")
    if not isinstance(rank, int) or not isinstance(seed, int | None):
        raise InvalidRequest(
            "lora_config has a rank, and a seed if it is wanted, which are integers.", param="lora_config"
        )
    number = call.need("model_seq_id", int)
    settings = AdapterSettings(
        rank=rank,
        adapts_attention=bool(lora.get("train_attn", True)),
        adapts_mlp=bool(lora.get("train_mlp", True)),
        seed=seed if seed is not None else number,
    )
    metadata = call.get("user_metadata", dict) or {}
    request_id = service.create_model(session, number, settings=settings, metadata=metadata)
    return _promise(request_id, model_id=f"{session.id}:train:{number}")


def _require_adam(call: Call) -> None:
    optimizer = call.get("optimizer_config", dict) or {}
    if optimizer.get("type", "adamw") != "adamw":
        raise UnsupportedParameter(
            f"The optimizer {optimizer['type']} is not known; use adamw.", param="optimizer_config"
        )


async def _unload_model(call: Call) -> Body:
    model_id = call.model()
    await call.service.unload(model_id)
    request_id = f"{model_id}:unload"

    async def done() -> Body:
        return {"type": "unload_model", "model_id": model_id}

    call.service.futures.submit(request_id, done)
    return _promise(request_id)


async def _get_info(call: Call) -> Body:
    model_id = call.need("model_id", str)
    run = call.service.run(model_id, call.user)
    config = call.service.config
    tokenizer = config.served_names[0] if config.served_names else str(call.service.directory)
    return {
        "type": "get_info",
        "model_id": model_id,
        "model_data": {"model_name": run.base_model, "tokenizer_id": tokenizer},
        "is_lora": True,
        "lora_rank": run.rank,
        "model_name": run.base_model,
    }


async def _pass(call: Call) -> Body:
    if PROTOBUF not in call.request.headers.get("content-type", ""):
        raise UnsupportedParameter(f"Send the pass as {PROTOBUF}; update the SDK.")
    message = decode_pass(call.body["bytes"])
    call.body = {"model_id": message.model_id, "seq_id": message.seq_id}
    call.service.run(message.model_id, call.user)
    return _promise(call.service.begin_pass(parse_pass(message)), model_id=message.model_id)


async def _step(call: Call) -> Body:
    model_id = call.model()
    params = call.get("adam_params", dict) or call.get("optim_params", dict)
    if params is None:
        raise UnsupportedParameter("The step has no adam_params; the optimizer is adamw.", param="optim_params")
    known = {"learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"}
    found = {name: value for name, value in params.items() if name in known}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise InvalidRequest(f"{name} = {value!r} is not a number from 0 on.", param=name)
    if not all(found.get(name, 0.0) < 1 for name in ("beta1", "beta2")):
        raise InvalidRequest("beta1 and beta2 are below 1.", param="adam_params")
    return _promise(call.service.begin_step(model_id, call.need("seq_id", int), AdamSettings(**found)))


async def _load_weights(call: Call) -> Body:
    service, checkpoint = call.service, call.checkpoint(call.need("path", str))
    _require_adam(call)
    has_moments = bool(call.get("optimizer", bool, default=False))
    if has_moments and checkpoint.kind != "weights":
        raise InvalidRequest(f"{checkpoint.path} has no state of an optimizer.", param="optimizer")
    if (base := call.get("base_model", str)) is not None:
        service.require_base(base)
    if (model_id := call.get("model_id", str)) is not None:
        service.run(model_id, call.user)
        number = call.need("seq_id", int)
        request_id = service.begin_load(model_id, number, checkpoint=checkpoint, has_moments=has_moments)
        return _promise(request_id, model_id=model_id)
    session, number = call.session(), call.need("model_seq_id", int)
    request_id = service.create_from(
        session,
        number,
        checkpoint=checkpoint,
        has_moments=has_moments,
        metadata=call.get("user_metadata", dict) or {},
    )
    return _promise(request_id, model_id=f"{session.id}:train:{number}")


def _save(kind: str) -> Handler:
    async def save(call: Call) -> Body:
        model_id, number = call.model(), call.need("seq_id", int)
        sampler_number = call.get("sampling_session_seq_id", int)
        if call.get("age_encryption_recipients", list):
            raise UnsupportedParameter("Files are not encrypted here.", param="age_encryption_recipients")
        prefix = EPHEMERAL if sampler_number is not None else "step-"
        name = call.get("path", str) or f"{prefix}{number}"
        request_id = call.service.begin_save(
            model_id,
            number,
            kind=kind,
            name=name,
            ttl_seconds=call.get("ttl_seconds", int),
            metadata=call.get("user_metadata", dict) or {},
            overwrites=bool(call.get("overwrite", bool, default=False)),
            sampler_number=sampler_number,
        )
        return _promise(request_id, model_id=model_id)

    return save


# ---------------------------------------------------------------------------------------------------------- sampling


async def _create_sampler(call: Call) -> Body:
    session, path = call.session(), call.get("model_path", str)
    if path is None:
        call.service.require_base(call.need("base_model", str))
    checkpoint = None if path is None else call.checkpoint(path)
    sampler = call.service.add_sampler(session, call.need("sampling_session_seq_id", int), checkpoint)
    return {"type": "create_sampling_session", "sampling_session_id": sampler.id}


async def _get_sampler(call: Call) -> Body:
    sampler = call.service.sampler(call.request.path_params["sampler_id"], call.user)
    path = None if sampler.checkpoint is None else sampler.checkpoint.path
    return {"sampler_id": sampler.id, "base_model": call.service.config.names[0], "model_path": path}


async def _sample(call: Call) -> Body:
    if call.get("prompt_alt_tokens_k", int, default=0) or call.get("record_stability_info", bool, default=False):
        raise UnsupportedParameter("prompt_alt_tokens_k and record_stability_info are not supported.")
    service = call.service
    sampler = service.sampler(call.need("sampling_session_id", str), call.user)
    number, num_samples = call.need("seq_id", int), call.get("num_samples", int, default=1) or 0
    top = call.get("topk_sample_logprobs", int, default=0) or 0
    params, stops_at_end, seed = parse_sampling(call.need("sampling_params", dict), top=top)
    targets = call.get("target_prompt_logprobs", dict)
    request_id = service.begin_sample(
        sampler,
        number,
        prompt=_parse_prompt(call.need("prompt", dict)),
        sampling=params,
        num_samples=num_samples,
        stops_at_end=stops_at_end,
        seed=seed,
        scores_prompt=bool(call.get("prompt_logprobs", bool, default=False)),
        top_prompt=call.get("topk_prompt_logprobs", int, default=0) or 0,
        targets=None if targets is None else _parse_targets(targets),
        last_prompt=call.get("prompt_logprobs_last_n", int),
    )
    return _promise(request_id, sample_sequence_ids=[f"{request_id}:{index}" for index in range(num_samples)])


def _parse_prompt(document: Body) -> Ints:
    chunks = document.get("chunks")
    if not isinstance(chunks, list) or not all(isinstance(chunk, dict) for chunk in chunks):
        raise InvalidRequest("prompt has a list of chunks.", param="prompt")
    parts = []
    for chunk in chunks:
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise UnsupportedParameter(f"The prompt has a chunk of {chunk['type']!r:.40}; send tokens.", param="prompt")
        parts.append(_integers(chunk.get("tokens"), "prompt"))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if not len(tokens):
        raise InvalidRequest("The prompt has no tokens.", param="prompt")
    return tokens


def _parse_targets(document: Body) -> Ints:
    if document.get("sparse_crow_indices") is not None:
        raise UnsupportedParameter("target_prompt_logprobs is dense here.", param="target_prompt_logprobs")
    values = _integers(document.get("data"), "target_prompt_logprobs")
    shape = document.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or math.prod(shape) != values.size:  # noqa: PLR2004 - rows of K
        raise InvalidRequest("target_prompt_logprobs has a shape [T - 1, K].", param="target_prompt_logprobs")
    return values.reshape(shape)


def _integers(values: object, place: str) -> Ints:
    if not isinstance(values, list) or not all(type(value) is int and -1 <= value < 2**31 for value in values):
        raise InvalidRequest(f"{place} has a list of token ids.", param=place)
    return np.array(values, dtype=np.int32)


# ---------------------------------------------------------------------------------------------------------- outcomes


async def _retrieve(call: Call) -> Body | Response:
    request_id = call.need("request_id", str)
    if request_id.partition(":")[0] not in {session.id for session in call.service.sessions(call.user)}:
        raise NotFound(f"There is no request {request_id!r}.")
    outcome = await call.service.futures.wait(request_id, seconds=POLL_SECONDS)
    if outcome is None:
        return {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    if isinstance(outcome, Failure):
        return {"error": outcome.message, "category": "user" if outcome.is_users else "server"}
    if isinstance(outcome, bytes):
        return Response(outcome, media_type=PROTOBUF)
    return outcome


async def _cancel(call: Call) -> Body:
    request_id = call.need("request_id", str)
    if request_id.partition(":")[0] in {session.id for session in call.service.sessions(call.user)}:
        call.service.futures.cancel(request_id)
    return {}


# ------------------------------------------------------------------------------------------------------- checkpoints


def _page(call: Call) -> tuple[int, int]:
    try:
        limit, offset = (
            int(call.request.query_params.get(name, normal)) for name, normal in (("limit", 100), ("offset", 0))
        )
    except ValueError as error:
        raise InvalidRequest("limit and offset are integers.", param="limit") from error
    if not 1 <= limit <= 1000 or offset < 0:  # noqa: PLR2004 - a page
        raise InvalidRequest("limit is 1 to 1000, and offset 0 or more.", param="limit")
    return limit, offset


def _describe_run(call: Call, run: Run) -> Body:
    found = call.service.store.checkpoints(owner=call.user, now=call.service.now(), model_id=run.model_id)
    trained, sampled = (next(newest(found, kind), None) for kind in ("weights", "sampler_weights"))
    return {
        "training_run_id": run.model_id,
        "base_model": run.base_model,
        "model_owner": run.owner,
        "is_lora": True,
        "corrupted": False,
        "lora_rank": run.rank,
        "last_request_time": datetime.fromtimestamp(max([run.created, *(one.saved for one in found)]), UTC).isoformat(),
        "last_checkpoint": None if trained is None else trained.document(),
        "last_sampler_checkpoint": None if sampled is None else sampled.document(),
        "user_metadata": {key: str(value) for key, value in run.metadata.items()} or None,
    }


async def _list_runs(call: Call) -> Body:
    limit, offset = _page(call)
    runs = call.service.store.runs(call.user)
    cursor = {"offset": offset, "limit": limit, "total_count": len(runs)}
    return {"training_runs": [_describe_run(call, run) for run in runs[offset : offset + limit]], "cursor": cursor}


async def _get_run(call: Call) -> Body:
    return _describe_run(call, call.service.run(call.request.path_params["model_id"], call.user))


async def _list_checkpoints(call: Call) -> Body:
    model_id = call.request.path_params.get("model_id")
    if model_id is not None:
        call.service.run(model_id, call.user)
    limit, offset = _page(call)
    found = call.service.store.checkpoints(owner=call.user, now=call.service.now(), model_id=model_id)
    cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
    return {"checkpoints": [one.document() for one in found[offset : offset + limit]], "cursor": cursor}


def _own(call: Call) -> StoredCheckpoint:
    """Return the user's checkpoint that the path of the request names."""
    params = call.request.path_params
    found = call.checkpoint(f"tinker://{params['model_id']}/{params['kind']}/{params['name']}")
    if found.owner != call.user:
        raise NotFound(f"There is no checkpoint {found.path} of yours.")
    return found


async def _delete_checkpoint(call: Call) -> None:
    call.service.store.delete(_own(call))


async def _publish(call: Call) -> None:
    call.service.store.publish(_own(call), is_public=call.request.method == "POST")


async def _set_ttl(call: Call) -> None:
    call.service.store.keep_for(_own(call), call.body.get("ttl_seconds"), now=call.service.now())


async def _weights_info(call: Call) -> Body:
    checkpoint = call.checkpoint(call.need("tinker_path", str))
    run = call.service.store.run(checkpoint.model_id)
    settings = None if checkpoint.kind == "external_weights" else read_settings(checkpoint.directory)
    return {
        "base_model": run.base_model,
        "is_lora": settings is not None,
        "lora_rank": None if settings is None else settings.rank,
        "train_unembed": None if settings is None else False,
        "train_mlp": None if settings is None else settings.adapts_mlp,
        "train_attn": None if settings is None else settings.adapts_attention,
    }


async def _file_urls(call: Call) -> Body:
    checkpoint = _own(call)
    names = sorted(
        str(file.relative_to(checkpoint.directory)) for file in checkpoint.directory.rglob("*") if file.is_file()
    )
    root = f"{call.request.url.scheme}://{call.request.url.netloc}{call.request.url.path.rsplit('/', 1)[0]}/files/"
    urls = {name: f"{root}{name}?token={call.service.sign(checkpoint)}" for name in names}
    expires = datetime.fromtimestamp(call.service.now() + 3600, UTC)
    return {"urls": urls, "expires": expires.isoformat()}


async def _file(service: TinkerService, request: Request) -> Response:
    """Return a file of a checkpoint to whoever has its signed URL."""
    params = request.path_params
    checkpoint = service.signed(
        request.query_params.get("token", ""), params["model_id"], params["kind"], params["name"]
    )
    file = (checkpoint.directory / params["file"]).resolve()
    if not file.is_relative_to(checkpoint.directory.resolve()) or not file.is_file():
        raise NotFound("There is no such file.")
    return FileResponse(file)


# ------------------------------------------------------------------------------------------------------------ routes

_RUN = "/training_runs/{model_id}"
_CHECKPOINT = f"{_RUN}/checkpoints/{{kind}}/{{name}}"
ROUTES: Mapping[tuple[str, str], Handler] = {
    ("GET", "/healthz"): _health,
    ("GET", "/get_server_capabilities"): _capabilities,
    ("POST", "/client/config"): _client_config,
    ("POST", "/client/dynamic_config"): _dynamic_config,
    ("POST", "/telemetry"): _telemetry,
    ("POST", "/create_session"): _create_session,
    ("POST", "/session_heartbeat"): _heartbeat,
    ("GET", "/sessions"): _list_sessions,
    ("GET", "/sessions/{session_id}"): _get_session,
    ("POST", "/sessions/{session_id}/finish"): _finish_session,
    ("POST", "/create_model"): _create_model,
    ("POST", "/unload_model"): _unload_model,
    ("POST", "/get_info"): _get_info,
    ("POST", "/forward_backward"): _in_turn(_pass),
    ("POST", "/optim_step"): _in_turn(_step),
    ("POST", "/load_weights"): _in_turn(_load_weights),
    ("POST", "/save_weights"): _in_turn(_save("weights")),
    ("POST", "/save_weights_for_sampler"): _in_turn(_save("sampler_weights")),
    ("POST", "/save_weights_external"): _in_turn(_save("external_weights")),
    ("POST", "/create_sampling_session"): _create_sampler,
    ("GET", "/samplers/{sampler_id}"): _get_sampler,
    ("POST", "/asample"): _sample,
    ("POST", "/retrieve_future"): _retrieve,
    ("POST", "/cancel_future"): _cancel,
    ("GET", "/training_runs"): _list_runs,
    ("GET", _RUN): _get_run,
    ("GET", f"{_RUN}/checkpoints"): _list_checkpoints,
    ("GET", "/checkpoints"): _list_checkpoints,
    ("DELETE", _CHECKPOINT): _delete_checkpoint,
    ("POST", f"{_CHECKPOINT}/publish"): _publish,
    ("DELETE", f"{_CHECKPOINT}/publish"): _publish,
    ("PUT", f"{_CHECKPOINT}/ttl"): _set_ttl,
    ("GET", f"{_CHECKPOINT}/external_weights_urls"): _file_urls,
    ("POST", "/weights_info"): _weights_info,
}
"""Every route below ``/api/v1``, by method and path."""


def create_app(service: TinkerService) -> Starlette:
    """Return the application that serves ``service``."""

    def endpoint(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                user = service.authenticate(request.headers.get("x-api-key", ""))
                result = await handler(Call(service, request, user, await _read_body(request)))
            except RequestError as error:
                return _refuse(error)
            if isinstance(result, Response):
                return result
            return Response(status_code=204) if result is None else JSONResponse(result)

        return answer

    async def send_file(request: Request) -> Response:
        try:
            return await _file(service, request)
        except RequestError as error:
            return _refuse(error)

    routes = [
        Route(f"/api/v1{path}", endpoint(handler), methods=[method]) for (method, path), handler in ROUTES.items()
    ]
    routes.append(Route(f"/api/v1{_CHECKPOINT}/files/{{file:path}}", send_file, methods=["GET"]))
    return Starlette(routes=routes)


def _refuse(error: RequestError) -> Response:
    body = {"detail": str(error), "error": str(error), "code": error.code, "server": f"areal_actors {__version__}"}
    return JSONResponse(body, status_code=error.status)


async def _read_body(request: Request) -> Body:
    """Return the JSON body, ``{"bytes": …}`` for any other, and nothing for a request without one.

    Raises ``PayloadTooLarge`` and ``InvalidRequest``.
    """
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise PayloadTooLarge(f"The body has more than {MAX_BODY_BYTES} bytes; send fewer data at a time.")
        parts.append(part)
    body = b"".join(parts)
    if request.headers.get("content-encoding") == "zstd":
        try:
            # The size in the frame is not to be trusted: it may be absent, or a lie.
            body = zstandard.ZstdDecompressor().stream_reader(body).read(MAX_BODY_BYTES + 1)
        except zstandard.ZstdError as error:
            raise InvalidRequest(f"The body is not compressed by zstd: {error}") from error
        if len(body) > MAX_BODY_BYTES:
            raise PayloadTooLarge(f"The body has more than {MAX_BODY_BYTES} bytes unpacked; send fewer data at a time.")
    if "json" not in request.headers.get("content-type", ""):
        return {"bytes": body}
    if not body:
        return {}
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The body is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise InvalidRequest("The body is no JSON object.")
    return document
