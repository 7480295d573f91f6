"""What a Tinker server does, without HTTP: sessions, training clients, sampling sessions, and their checkpoints.

::

    session ─┬─ training client ──▶ futures, in order ──▶ thread of the bank ──▶ checkpoints
             └─ sampling session ─▶ futures ────────────▶ a sampler: engine, session manager
                                                             ▲
    agents: model = <run>/<name> ──▶ proxy ──────────────────┘

A sampler is opened from a checkpoint by the host of trained models, which the proxy asks as well: a client of Tinker
and an agent that speaks OpenAI's or Anthropic's protocol sample from the same engine.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import anyio
from attrs import define, evolve, field, frozen

from areal_actors.domain import (
    Completion,
    EngineInfo,
    EngineRequest,
    Ints,
    SampleKey,
    Sampling,
    Snapshot,
    TrainedModel,
    join_chunks,
)
from areal_actors.errors import (
    InvalidRequest,
    NotFound,
    RequestError,
    Unauthorized,
    Unavailable,
    Unprocessable,
    UnsupportedParameter,
)
from areal_actors.generation.base import validate_request
from areal_actors.generation.model_host import ModelStack
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.lib.threads import OwnThread
from areal_actors.messages import Generate, Generation, Models, UseModel
from areal_actors.rendering import Renderer
from areal_actors.run.inference import open_engine, spawn_generation
from areal_actors.sessions.manager import SessionManager
from areal_actors_tinker.bank import AdamSettings, AdapterBank, AdapterSettings, read_settings
from areal_actors_tinker.config import TinkerConfig
from areal_actors_tinker.futures import Futures, Result
from areal_actors_tinker.store import EPHEMERAL, CheckpointStore, Run, StoredCheckpoint, expiry
from areal_actors_tinker.wire import PassRequest, format_pass, format_samples

R = TypeVar("R")
Json = Mapping[str, Any]

_CHECK_SECONDS = 10.0
MAX_SAMPLES = 4096
MAX_EPHEMERAL = 16
"""Checkpoints without a name that are kept of each model; a loop makes one in each step and samples from the last."""


@define(kw_only=True, eq=False)
class Session:
    """A client's session; what it has created ends with it."""

    id: str
    user: str
    last_heartbeat: float
    metadata: Mapping[str, Any] = field(factory=dict)
    name: str | None = None
    models: list[str] = field(factory=list)
    samplers: list[str] = field(factory=list)
    is_finished: bool = False


@frozen(kw_only=True)
class Sampler:
    """A sampling session: the weights of a checkpoint, or the base model's."""

    id: str
    user: str
    checkpoint: StoredCheckpoint | None


class TinkerService:
    """The state of a server for one base model. ``open`` opens it; ``host`` lends the samplers of checkpoints."""

    def __init__(
        self,
        config: TinkerConfig,
        *,
        bank: AdapterBank,
        thread: OwnThread,
        renderer: Renderer,
        base: Ref[Generation],
        info: EngineInfo,
        directory: Path,
        futures: Futures,
        wall_clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.store = CheckpointStore(config.fileroot)
        self.futures = futures
        self.info = info
        self.directory = directory
        self.host: Ref[Models]
        self.now = wall_clock
        self._bank, self._thread = bank, thread
        self._renderer, self._base = renderer, base
        self._generations: dict[str, Ref[Generation]] = {}
        self._secret = secrets.token_bytes(32)
        self._sessions: dict[str, Session] = {}
        self._samplers: dict[str, Sampler] = {}
        self._runs: dict[str, Run] = {}
        self._ephemeral: dict[str, list[StoredCheckpoint]] = {}

    async def _compute(self, function: Callable[[], R]) -> R:
        """Run a function of the bank on its thread. It is not interrupted, and its result discarded if cancelled."""
        return await self._thread.run(function)

    # -------------------------------------------------------------------------------------------------- sessions

    def authenticate(self, key: str) -> str:
        """Return the user of an API key. Raises ``Unauthorized``."""
        if self.config.api_key is not None and not secrets.compare_digest(key.encode(), self.config.api_key.encode()):
            raise Unauthorized("This API key is not the server's; set TINKER_API_KEY to it.")
        if not key:
            raise Unauthorized("There is no API key in X-API-Key.")
        return sha256(key.encode()).hexdigest()[:16]

    def create_session(self, user: str, metadata: Mapping[str, Any], name: str | None) -> Session:
        """Create a session of ``user``."""
        session = Session(
            id=f"s{secrets.token_hex(8)}", user=user, last_heartbeat=self.now(), metadata=metadata, name=name
        )
        self._sessions[session.id] = session
        return session

    def session(self, session_id: str, user: str) -> Session:
        """Return a session of ``user``. Raises ``NotFound``."""
        found = self._sessions.get(session_id)
        if found is None or found.user != user:
            raise NotFound(f"There is no session {session_id!r}.")
        return found

    def sessions(self, user: str) -> list[Session]:
        """Return the sessions of ``user``, the newest first."""
        return [one for one in reversed(self._sessions.values()) if one.user == user]

    async def finish_session(self, session: Session) -> None:
        """End a session: its models leave the memory; checkpoints stay."""
        session.is_finished = True
        for model_id in session.models:
            await self.unload(model_id)
        for sampler in session.samplers:
            self._samplers.pop(sampler, None)

    async def end_silent_sessions(self) -> None:
        """End sessions whose client has sent no heartbeat for ``session_timeout_seconds``, until cancelled."""
        while True:
            await anyio.sleep(_CHECK_SECONDS)
            oldest = self.now() - self.config.session_timeout_seconds
            for session in list(self._sessions.values()):
                if session.last_heartbeat < oldest and not session.is_finished:
                    await self.finish_session(session)

    # -------------------------------------------------------------------------------------------------- training

    def require_base(self, name: str) -> None:
        """Raise ``NotFound`` unless ``name`` is a name of the base model."""
        if name not in self.config.names:
            raise NotFound(f"There is no base model {name!r}; this server has {', '.join(self.config.names)}.")

    def create_model(self, session: Session, number: int, *, settings: AdapterSettings, metadata: Json) -> str:
        """Begin to create an adapter that changes nothing yet; return the id of the request."""
        model_id = self._model_id(session, number)

        async def create() -> Result:
            await self._compute(partial(self._bank.create, model_id, settings))
            self._begin(session, model_id, settings.rank, metadata)
            return {"type": "create_model", "model_id": model_id}

        return self._submit_first(model_id, create)

    def create_from(
        self, session: Session, number: int, *, checkpoint: StoredCheckpoint, has_moments: bool, metadata: Json
    ) -> str:
        """Begin to create an adapter from a checkpoint; return the id of the request."""
        model_id = self._model_id(session, number)

        async def create() -> Result:
            settings = read_settings(checkpoint.directory)
            await self._compute(partial(self._bank.create, model_id, settings))
            try:
                await self._compute(partial(self._bank.load, model_id, checkpoint.directory, has_moments=has_moments))
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await self._compute(partial(self._bank.remove, model_id))
                raise
            self._begin(session, model_id, settings.rank, metadata)
            return {"type": "load_weights", "path": checkpoint.path, "model_id": model_id}

        return self._submit_first(model_id, create)

    @staticmethod
    def _model_id(session: Session, number: int) -> str:
        return f"{session.id}:train:{number}"

    def _submit_first(self, model_id: str, create: Callable[[], Any]) -> str:
        request_id = f"{model_id}:0"
        self.futures.submit(request_id, create)
        return request_id

    def _begin(self, session: Session, model_id: str, rank: int, metadata: Json) -> None:
        run = Run(
            model_id=model_id,
            base_model=self.config.names[0],
            rank=rank,
            owner=session.user,
            created=self.now(),
            metadata=metadata,
        )
        self.store.add_run(run)
        self._runs[model_id] = run
        session.models.append(model_id)
        self.futures.open_queue(model_id, first=1)

    def run(self, model_id: str, user: str) -> Run:
        """Return a run of ``user``, in memory or on disk. Raises ``NotFound``."""
        run = self._runs.get(model_id) or self.store.run(model_id)
        if run.owner != user:
            raise NotFound(f"There is no training run {model_id!r}.")
        return run

    def sign(self, checkpoint: StoredCheckpoint) -> str:
        """Return a token that lets its bearer download a checkpoint while this server runs."""
        text = checkpoint.path.encode()
        return hmac.new(self._secret, text, sha256).hexdigest()

    def signed(self, token: str, model_id: str, kind: str, name: str) -> StoredCheckpoint:
        """Return the checkpoint that a token was made for. Raises ``NotFound``."""
        path = _path(model_id, kind, name)
        expected = hmac.new(self._secret, path.encode(), sha256).hexdigest()
        if not secrets.compare_digest(token.encode(), expected.encode()):
            raise NotFound(f"There is no checkpoint {path}.")
        return self.store.find(path, user=self.store.run(model_id).owner, now=self.now())

    async def unload(self, model_id: str) -> None:
        """Take a model out of the memory; what it has been asked, and not done, fails."""
        self.futures.close_queue(model_id)
        self._runs.pop(model_id, None)
        for checkpoint in self._ephemeral.pop(model_id, []):
            self.store.delete(checkpoint)
        await self._compute(partial(self._bank.remove, model_id))

    def begin_failure(self, model_id: str, number: int, error: RequestError) -> str:
        """Take the turn of a request that is refused, so that later ones run; return the id of the request.

        The SDK gives each request of a model a number before it sends it. One that was answered by an error at once
        would leave a gap, for which all later ones would wait.
        """

        async def fail() -> Result:
            raise error

        return self.futures.submit_in_order(model_id, number, fail)

    def begin_pass(self, request: PassRequest) -> str:
        """Begin a forward and backward pass; return the id of the request."""

        async def compute() -> Result:
            found, metrics = await self._compute(
                partial(
                    self._bank.run_pass,
                    request.model_id,
                    request.data,
                    loss=request.loss,
                    settings=request.settings,
                    is_forward_only=request.is_forward_only,
                )
            )
            return format_pass(found, metrics)

        return self.futures.submit_in_order(request.model_id, request.seq_id, compute)

    def begin_step(self, model_id: str, number: int, settings: AdamSettings) -> str:
        """Begin an update of the weights; return the id of the request."""

        async def compute() -> Result:
            return {"metrics": await self._compute(partial(self._bank.step, model_id, settings))}

        return self.futures.submit_in_order(model_id, number, compute)

    def begin_load(self, model_id: str, number: int, *, checkpoint: StoredCheckpoint, has_moments: bool) -> str:
        """Begin to load a checkpoint into a model; return the id of the request."""

        async def load() -> Result:
            await self._compute(partial(self._bank.load, model_id, checkpoint.directory, has_moments=has_moments))
            return {"type": "load_weights", "path": checkpoint.path, "model_id": model_id}

        return self.futures.submit_in_order(model_id, number, load)

    def begin_save(
        self,
        model_id: str,
        number: int,
        *,
        kind: str,
        name: str,
        ttl_seconds: int | None,
        metadata: Json,
        overwrites: bool = False,
        sampler_number: int | None = None,
    ) -> str:
        """Begin to save weights; return the id of the request.

        With ``sampler_number``, a sampling session of this number is opened on them, and they go with the model.
        """
        if name.startswith(EPHEMERAL) != (sampler_number is not None):
            raise InvalidRequest(f"Names of checkpoints do not begin with {EPHEMERAL!r}.", param="path")
        directory = self.store.place(model_id, kind, name)
        expires = expiry(ttl_seconds, now=self.now())

        async def save() -> Result:
            owner = self._runs[model_id].owner
            if directory.exists():
                if not overwrites:
                    raise InvalidRequest(f"The checkpoint {name!r} exists; choose another name.", param="path")
                with suppress(NotFound):
                    self.store.delete(self.store.find(_path(model_id, kind, name), user=owner, now=self.now()))
            if kind == "external_weights":
                await self._export(model_id, directory)
            else:
                is_training = kind == "weights"
                await self._compute(partial(self._bank.save, model_id, directory, has_moments=is_training))
            checkpoint = StoredCheckpoint(
                model_id=model_id,
                kind=kind,
                name=name,
                directory=directory,
                owner=owner,
                saved=self.now(),
                expires=expires,
                metadata=metadata,
            )
            self.store.add(checkpoint)
            kinds = {"weights": "save_weights", "sampler_weights": "save_weights_for_sampler"}
            result = {"type": kinds.get(kind, "save_weights_external"), "path": checkpoint.path}
            if sampler_number is not None:
                session = self._sessions[model_id.partition(":")[0]]
                sampler = self.add_sampler(session, sampler_number, checkpoint)
                kept = self._ephemeral.setdefault(model_id, [])
                kept.append(checkpoint)
                while len(kept) > MAX_EPHEMERAL:
                    self.store.delete(kept.pop(0))
                return {"type": result["type"], "sampling_session_id": sampler.id}
            return result

        return self.futures.submit_in_order(model_id, number, save)

    async def _export(self, model_id: str, directory: Path) -> None:
        """Write whole weights, merged, as transformers and inference servers load them."""
        adapter = directory.with_name(f".{directory.name}.adapter")

        def write() -> None:
            self._bank.save(model_id, adapter, has_moments=False)
            self._bank.export(adapter, directory, files=self.directory)

        try:
            await self._compute(write)
        finally:
            self.store.discard(adapter)

    # -------------------------------------------------------------------------------------------------- sampling

    def add_sampler(self, session: Session, number: int, checkpoint: StoredCheckpoint | None) -> Sampler:
        """Open a sampling session on a checkpoint, or on the base model."""
        if checkpoint is not None and checkpoint.kind == "external_weights":
            raise InvalidRequest("External weights cannot be sampled here; save weights for a sampler.", param="path")
        sampler = Sampler(id=f"{session.id}:sample:{number}", user=session.user, checkpoint=checkpoint)
        self._samplers[sampler.id] = sampler
        session.samplers.append(sampler.id)
        return sampler

    def sampler(self, sampler_id: str, user: str) -> Sampler:
        """Return a sampling session of ``user``. Raises ``NotFound``."""
        found = self._samplers.get(sampler_id)
        if found is None or found.user != user:
            raise NotFound(f"There is no sampling session {sampler_id!r}.")
        return found

    def begin_sample(
        self,
        sampler: Sampler,
        number: int,
        *,
        prompt: Ints,
        sampling: Sampling,
        num_samples: int,
        stops_at_end: bool,
        seed: int | None,
        scores_prompt: bool,
        top_prompt: int,
        targets: Ints | None,
        last_prompt: int | None,
    ) -> str:
        """Begin to sample, and to score the prompt; return the id of the request."""
        request_id = f"{sampler.id}:{number}"
        if not 1 <= num_samples <= MAX_SAMPLES:
            raise InvalidRequest(f"num_samples is {num_samples}; ask for 1 to {MAX_SAMPLES}.", param="num_samples")
        room = self.info.context_length - len(prompt)
        if room < 1:
            raise InvalidRequest(
                f"The prompt has {len(prompt)} tokens, and the model reads {self.info.context_length} with the answer.",
                param="prompt",
            )
        sampling = evolve(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
        if last_prompt is not None and not 1 <= last_prompt < len(prompt):
            raise InvalidRequest(
                f"prompt_logprobs_last_n is {last_prompt}; the prompt has {len(prompt)} tokens.", param="prompt"
            )
        # Without a seed, no two requests sample the same; with one, equal requests do.
        key = SampleKey(seed=secrets.randbits(63) if seed is None else seed)
        stop_ids = self._renderer.stop_token_ids if stops_at_end else ()
        wanted = EngineRequest(
            id=request_id, prompt=prompt, sampling=sampling, key=key, stop_token_ids=stop_ids, is_streamed=False
        )
        validate_request(wanted, self.info, can_decode=True)

        async def sample() -> Result:
            directory = None if sampler.checkpoint is None else sampler.checkpoint.directory
            async with self._borrow(sampler) as generation, anyio.create_task_group() as tasks:
                completions: dict[int, Completion] = {}
                cached: list[int] = []

                async def run(index: int) -> None:
                    own = evolve(key, path=(index,))
                    request = evolve(wanted, id=f"{request_id}:{index}", key=own, routing_key=sampler.id)
                    async with generation.stream(Generate(request=request)) as stream:
                        chunks = [chunk async for chunk in stream]
                    completions[index] = join_chunks(chunks)
                    cached.append(chunks[0].num_cached_tokens)

                for index in range(num_samples):
                    tasks.start_soon(run, index)
            scores = None
            if scores_prompt or top_prompt or targets is not None:
                scores = await self._compute(
                    partial(self._bank.score_prompt, directory, prompt, top=top_prompt, targets=targets)
                )
                scores = scores if last_prompt is None else scores.only_last(last_prompt)
            return format_samples(
                [completions[index] for index in range(num_samples)],
                num_cached_tokens=max(cached),
                top=sampling.top_logprobs,
                prompt=scores,
            )

        self.futures.submit(request_id, sample)
        return request_id

    @asynccontextmanager
    async def _borrow(self, sampler: Sampler) -> AsyncIterator[Ref[Generation]]:
        """Hold the engine of a sampling session open for a block."""
        if sampler.checkpoint is None:
            yield self._base
            return
        name = _model_name(sampler.checkpoint)
        gone = NotFound(f"The checkpoint {sampler.checkpoint.path} was deleted.")
        try:
            async with self.host.stream(UseModel(name=name)) as items:
                async for _ in items:
                    yield self._generations[name]
                    return
        except (Unavailable, Unprocessable) as error:
            if self.get(name) is None:  # deleted before its engine was open
                raise gone from error
            raise
        raise gone

    def list(self) -> tuple[TrainedModel, ...]:
        """Return the checkpoints that agents can sample from, by the names that they use (the host asks)."""
        found = self.store.root.glob("*/sampler_weights/*.json")
        names = (f"{record.parent.parent.name}/{record.stem}" for record in found)
        return tuple(model for name in sorted(names) if (model := self.get(name)) is not None)

    def get(self, name: str) -> TrainedModel | None:
        """Return the checkpoint ``<run>/<name>``, saved for samplers or for training, or ``None``."""
        run, _, checkpoint = name.partition("/")
        for kind in ("sampler_weights", "weights"):
            try:
                directory = self.store.place(run, kind, checkpoint)
            except (InvalidRequest, NotFound):
                return None
            if directory.with_name(f"{checkpoint}.json").is_file():
                return TrainedModel(
                    name=name, path=directory, saved_at=directory.stat().st_mtime, step=None, reward=None
                )
        return None

    @asynccontextmanager
    async def open_sampler(self, model: TrainedModel) -> AsyncIterator[ModelStack]:
        """Open an engine with the weights of a checkpoint, and the session manager for agents that name it."""
        async with (
            open_engine(self.config.engine, model=self.directory, renderer=self._renderer) as engine,
            ActorSystem.open(name=model.name.replace("/", "-")) as system,
        ):
            state = await self._compute(partial(self._bank.merged, model.path))
            generation = await spawn_generation(system, engine)
            await _publish(generation, state)
            manager = SessionManager(renderer=self._renderer, generation=generation)
            sessions = await system.spawn(manager, name="sessions")
            self._generations[model.name] = generation
            try:
                yield ModelStack(sessions=sessions, token_bytes=self._renderer.token_bytes)
            finally:
                del self._generations[model.name]


async def _publish(generation: Ref[Generation], state: Mapping[str, Any]) -> None:
    from areal_actors.messages import PublishWeights

    await generation.ask(PublishWeights(snapshot=Snapshot(version=1, state=state)))


def _model_name(checkpoint: StoredCheckpoint) -> str:
    return f"{checkpoint.model_id.replace(':', '.')}/{checkpoint.name}"


def _path(model_id: str, kind: str, name: str) -> str:
    return f"tinker://{model_id}/{kind}/{name}"


def parse_sampling(document: Json, *, top: int) -> tuple[Sampling, bool, int | None]:
    """Return the settings of a request's ``sampling_params``, whether the end of a turn stops it, and its seed.

    Raises ``InvalidRequest`` for values of another type.
    """
    unknown = document.keys() - {"max_tokens", "seed", "stop", "temperature", "top_k", "top_p"}
    if unknown:
        raise UnsupportedParameter(f"sampling_params.{min(unknown)} is not supported.", param="sampling_params")
    stop = document.get("stop")
    words = (stop,) if isinstance(stop, str) else tuple(stop or ())
    texts = tuple(word for word in words if isinstance(word, str))
    ids = tuple(word for word in words if isinstance(word, int) and not isinstance(word, bool))
    if len(texts) + len(ids) < len(words) or (texts and ids):
        raise InvalidRequest("stop is a text, a list of texts, or a list of token ids.", param="stop")
    temperature = _number(document, "temperature", float)
    top_p, top_k = _number(document, "top_p", float), _number(document, "top_k", int)
    max_tokens = _number(document, "max_tokens", int)
    sampling = Sampling(
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=0 if top_k is None else max(top_k, 0),
        max_new_tokens=1 << 30 if max_tokens is None else max_tokens,
        stop=texts,
        stop_token_ids=ids,
        top_logprobs=top,
    )
    # ``[]`` turns off every stop, also the end of a turn.
    return sampling, stop is None or bool(texts), _number(document, "seed", int)


N = TypeVar("N", int, float)


def _number(document: Json, name: str, kind: type[N]) -> N | None:
    """Return a number of a request, or ``None`` if it is absent or null. Raises ``InvalidRequest``."""
    value = document.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise InvalidRequest(f"{name} = {value!r:.40} is not a number.", param=name)
    return kind(value)
