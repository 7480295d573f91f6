"""The host of trained models: opens models on request, keeps a few of them open, and closes idle ones.

A model is a separate stack (engine, generation, sessions) in a scope and a background task of this actor. A failure of
one model, such as an unreadable file or a crashed engine, reaches only the requests for that model.

::

    UseModel ──▶ place ──▶ loading ──▶ open ◀──▶ in use          a request in flight holds its model open
                              │          │ idle, and its place is wanted
                              ▼          ▼
                           failed      closed
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol

import anyio
from anyio import to_thread
from attrs import define, field, frozen
from attrs.validators import ge

from areal_actors.domain import Credential, TrainedModel
from areal_actors.errors import ActorStopped, ArealError, ModelError, Unavailable, Unprocessable
from areal_actors.kernel import Actor, BackgroundTasks, Context, Ref
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.lib.settings import constant
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import (
    ForgetSession,
    ListModels,
    ModelInUse,
    Models,
    OpenSession,
    Sessions,
    UseModel,
)

_log = get_logger(__name__)

_FORGET_SECONDS = 5.0


@frozen(kw_only=True)
class ModelsConfig:
    """Trained models that answer next to the policy, for requests whose model is an experiment/trial."""

    fileroot: Path | None = None
    """Directory of the models, as <fileroot>/<experiment>/<trial>/weights; the run's fileroot if unset."""
    max_loaded: int = field(default=1, validator=ge(0))
    """Models open at once in addition to the policy, each with its own weights and cache. 0 disables them."""
    open_timeout_seconds: float = constant(300.0)
    """How long a request may wait for a place and for its model to load."""


@frozen(kw_only=True)
class ModelStack:
    """An open model."""

    sessions: Ref[Sessions]
    token_bytes: Callable[..., Sequence[bytes]]


class ModelCatalogue(Protocol):
    """Finds trained models by their names, as ``models.Catalogue`` does on a disk. Both methods may block."""

    def get(self, name: str) -> TrainedModel | None:
        """Return the model ``experiment/trial``, or ``None``."""
        ...

    def list(self) -> tuple[TrainedModel, ...]:
        """Return all models, sorted by name."""
        ...


OpenModel = Callable[[TrainedModel], AbstractAsyncContextManager[ModelStack]]
"""Opens a stack. It may raise any error, and it may end early if an actor inside crashes."""


@define(kw_only=True, eq=False)
class _Slot:
    """The place of one model, from before it is loaded until it is closed."""

    model: TrainedModel
    num_users: int = 0
    last_used: int = 0
    """A counter instead of a time, because two uses may end at the same time."""
    stack: ModelStack | None = None
    failure: ArealError | None = None
    settled: anyio.Event = field(factory=anyio.Event)
    """Set when ``stack`` or ``failure`` is set."""
    closing: anyio.Event = field(factory=anyio.Event)

    async def result(self) -> ModelStack:
        """Return the stack once it is open, or raise the error that prevented it."""
        await self.settled.wait()
        if self.stack is None:
            raise self.failure or Unavailable(f"{self.model.name} is being closed; try again.")
        return self.stack


class ModelHost(Actor[Models]):
    """Lends models out."""

    def __init__(
        self,
        catalogue: ModelCatalogue,
        open_model: OpenModel,
        *,
        config: ModelsConfig | None = None,
    ) -> None:
        self._catalogue = catalogue
        self._open_model = open_model
        self._config = config or ModelsConfig()
        self._num_uses = 0
        self._slots: dict[TrainedModel, _Slot] = {}
        self._changed = ChangeSignal()
        self._tasks: BackgroundTasks

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:
        """Store the background tasks in which models are open; they end with the actor."""
        self._tasks = context.tasks
        yield

    @ListModels.handler
    async def list(self, message: ListModels) -> tuple[TrainedModel, ...]:  # noqa: ARG002 - the message says it all
        """List the models on disk. The disk is read each time, because runs may have finished since."""
        return await to_thread.run_sync(self._catalogue.list) if self._config.max_loaded else ()

    @UseModel.handler(concurrency=100_000)
    async def use(self, message: UseModel) -> AsyncIterator[ModelInUse]:
        """Lend a model until the borrower leaves the stream."""
        model = await to_thread.run_sync(self._catalogue.get, message.name) if self._config.max_loaded else None
        if model is None:
            return
        slot, stack = await self._borrow(model)
        try:
            try:
                opened = await stack.sessions.ask(OpenSession(task="inference"))
            except ActorStopped as error:
                # The model has failed since it was opened, and is about to be closed.
                raise Unavailable(f"The model {model.name} has stopped: {error}; try again.") from error
            try:
                yield ModelInUse(
                    sessions=stack.sessions,
                    credential=Credential(session=opened.session),
                    token_bytes=stack.token_bytes,
                )
                await anyio.sleep_forever()
            finally:
                # Shielded, because this also runs while the borrower is being cancelled.
                with anyio.move_on_after(_FORGET_SECONDS, shield=True), suppress(ActorStopped):
                    await stack.sessions.tell(ForgetSession(session=opened.session))
        finally:
            self._give_back(slot)

    # ------------------------------------------------------------------------------------------------- places

    async def _borrow(self, model: TrainedModel) -> tuple[_Slot, ModelStack]:
        """Return an open slot of ``model`` that counts this user. Raises as ``UseModel`` documents."""
        with anyio.move_on_after(self._config.open_timeout_seconds):
            while True:
                slot = self._slots.get(model) or self._start(model)
                if slot is not None and not slot.closing.is_set():
                    # Counted while it still loads, so that its place is not wanted before it is used.
                    slot.num_users += 1
                    try:
                        return slot, await slot.result()
                    except BaseException:
                        self._give_back(slot)
                        raise
                await self._changed.wait()
        raise Unavailable(
            f"{model.name} was not open within {self._config.open_timeout_seconds:g} s; try again, or raise "
            "models.max_loaded if other models are in use."
        )

    def _give_back(self, slot: _Slot) -> None:
        slot.num_users -= 1
        self._num_uses += 1
        slot.last_used = self._num_uses
        self._changed.notify()

    def _start(self, model: TrainedModel) -> _Slot | None:
        """Return a new slot in which ``model`` starts loading, or ``None`` if all places are taken.

        In the latter case the idle model that was used longest ago starts closing.
        """
        if len(self._slots) < self._config.max_loaded:
            slot = self._slots[model] = _Slot(model=model)
            self._tasks.start_soon(self._host, slot)
            return slot
        others = self._slots.values()
        idle = [slot for slot in others if not slot.num_users and slot.settled.is_set()]
        # One at a time: the place that is being freed may be enough.
        if idle and not any(slot.closing.is_set() for slot in others):
            min(idle, key=lambda slot: slot.last_used).closing.set()
        return None

    # ------------------------------------------------------------------------------------------------- models

    async def _host(self, slot: _Slot) -> None:
        """Keep one model open until its place is wanted. Failures inside do not propagate."""
        try:
            async with self._open_model(slot.model) as slot.stack:
                _log.info("model_opened", model=slot.model.name)
                slot.settled.set()
                self._changed.notify()
                await slot.closing.wait()
            _log.info("model_closed", model=slot.model.name)
        except Exception as error:  # noqa: BLE001 - any error belongs to this model alone
            # Unreadable weights are ``Unprocessable``, because a retry would fail as well.
            slot.failure = (
                Unprocessable(f"The model {slot.model.name} cannot be loaded: {error}", param="model")
                if isinstance(error, ModelError)
                else Unavailable(f"The model {slot.model.name} is not available: {error}")
            )
            _log.warning("model_failed", model=slot.model.name, error=str(error))
        finally:
            # First, so that a new request starts the model again instead of joining this slot.
            del self._slots[slot.model]
            slot.closing.set()
            slot.settled.set()
            self._changed.notify()
