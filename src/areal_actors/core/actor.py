"""The interface for authors of actors: ``Actor``, and the ``Context`` that its lifespan receives.

::

    class CapacityGranter(Actor[Capacity]):
        @asynccontextmanager
        async def lifespan(self, context: Context) -> AsyncIterator[None]:
            context.tasks.start_soon(self.report)      # ends with the actor
            yield

        @Grant.handler
        async def grant(self, message: Grant) -> Granted: ...

``cell`` implements how an actor is run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, TypeVarTuple

from areal_actors.core.contract import Handler, collect_handlers
from areal_actors.core.message import AnyMessage
from areal_actors.core.ref import Ref
from areal_actors.core.supervision import Down
from areal_actors.errors import ProtocolError

if TYPE_CHECKING:
    from areal_actors.core.cell import Cell
    from areal_actors.core.system import ActorSystem

__all__ = ["Actor", "BackgroundTasks", "Context"]

P = TypeVar("P")
Arguments = TypeVarTuple("Arguments")


class Actor(Generic[P]):
    """An owner of state that is reached only by messages of the protocol ``P`` (or of several: ``Actor[A | B]``).

    An actor handles one message at a time unless a handler declares ``concurrency``. If a handler raises on an ask,
    that ask fails. If it raises on a tell, the actor crashes and its supervision policy decides what happens next.
    Handlers are methods and can be called directly in tests.

    Raises:
        ProtocolError: at class creation, for two handlers of one message or for a message of a protocol that the actor
            does not name; at spawn, for a message of the protocol without a handler.
    """

    # ``contract`` recognises this class by the attribute, because it cannot import this module.
    __areal_actor_root__: ClassVar[bool] = True
    handlers: ClassVar[dict[type[AnyMessage[Any]], Handler]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.handlers = collect_handlers(cls)

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:  # noqa: ARG002
        """Set up and tear down an incarnation; entered and left in the actor's own task.

        ``spawn`` returns once the lifespan is entered. The lifespan is left after the last handler and background task
        have ended, shielded from cancellation for a bounded time (``cleanup_seconds`` of the system). If the actor
        crashes, the error is raised at the ``yield`` so that the lifespan can record it; it cannot be swallowed here.
        """
        yield


class BackgroundTasks:
    """Background tasks of an actor.

    They run concurrently with its handlers and end with it; one that raises crashes it.
    """

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def start_soon(
        self,
        function: Callable[[*Arguments], Awaitable[Any]],
        *arguments: *Arguments,
        name: str | None = None,
    ) -> None:
        """Run ``function(*arguments)`` in the background until it returns or the actor ends.

        The task does not belong to any message that is being handled, so it may ask any actor, including its own. It
        must not outlive the actor.
        """
        self._cell.start_background(
            lambda: function(*arguments), name or str(getattr(function, "__qualname__", "task"))
        )


class Context:
    """The view that an actor has of its system and of itself, for one incarnation."""

    def __init__(self, cell: Cell, incarnation: int) -> None:
        self._cell = cell
        self.incarnation = incarnation
        """Number of this incarnation: 1 at the first start, incremented at each restart."""
        self.tasks = BackgroundTasks(cell)
        """Background tasks that end with the actor."""

    @property
    def name(self) -> str:
        """The actor's name."""
        return self._cell.name

    @property
    def system(self) -> ActorSystem:
        """The system that runs the actor; use it to spawn other actors."""
        return self._cell.system

    @property
    def self_ref(self) -> Ref[Any]:
        """A ref to this actor, to pass to other actors or to send messages to itself."""
        return self._cell.ref

    def watch(self, ref: Ref[Any]) -> None:
        """Deliver a ``Down`` on this actor's control lane whenever an incarnation of ``ref`` ends.

        Watching the same ref twice has no further effect. If the watched actor has already ended, the ``Down`` is
        delivered at once.

        Raises:
            ProtocolError: this actor has no handler for ``Down``.
        """
        if Down not in self._cell.handlers:
            raise ProtocolError(f"actor {self.name!r} watches {ref.name!r}; add a method under @Down.handler")
        ref.life.watch(self._cell.hear)

    def stop(self) -> None:
        """Request that this actor stops, and return at once.

        Messages that were already accepted are handled for up to the system's grace period.
        """
        self._cell.request_stop(None)
