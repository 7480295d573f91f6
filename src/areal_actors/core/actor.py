"""What the author of an actor writes against: ``Actor``, and the ``Context`` that its lifespan receives.

::

    class CapacityGranter(Actor[Capacity]):
        @asynccontextmanager
        async def lifespan(self, context: Context) -> AsyncIterator[None]:
            context.tasks.start_soon(self.report)      # ends with the actor
            yield

        @Grant.handler
        async def grant(self, message: Grant) -> Granted: ...

How an actor is run lives in ``cell``.
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
    """Owner of some state, reached by messages of the protocol ``P`` (or of several: ``Actor[A | B]``) only.

    One message is handled at a time unless a handler declares ``concurrency``. A handler that raises on an ask fails
    that ask; on a tell, it crashes the actor and its supervision decides. Handlers are methods and can be called
    directly in tests.

    Raises:
        ProtocolError: at class creation, for two handlers of one message or a message of a foreign protocol; at spawn,
            for a message of the protocol without a handler.
    """

    __areal_actor_root__: ClassVar[bool] = True
    handlers: ClassVar[dict[type[AnyMessage[Any]], Handler]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.handlers = collect_handlers(cls)

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:  # noqa: ARG002
        """The actor's life around its messages, entered and left in the actor's own task.

        ``spawn`` returns once it is entered. It is left after the last handler and background task has ended, shielded
        from cancellation for a bounded time. If the actor crashes, the error passes through, for the record: it cannot
        be swallowed here.
        """
        yield


class BackgroundTasks:
    """Tasks beside the handlers that end with the actor; one that raises crashes it."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def start_soon(
        self,
        function: Callable[[*Arguments], Awaitable[Any]],
        *arguments: *Arguments,
        name: str | None = None,
    ) -> None:
        """Run ``function(*arguments)`` beside the actor until it returns or the actor ends.

        The task acts on nobody's behalf: it may ask any actor, its own included. It must outlive neither.
        """
        self._cell.start_background(
            lambda: function(*arguments), name or str(getattr(function, "__qualname__", "task"))
        )


class Context:
    """What an actor knows of its surroundings, for one incarnation."""

    def __init__(self, cell: Cell, incarnation: int) -> None:
        self._cell = cell
        self.incarnation = incarnation
        """1 for the first life, one more after each restart."""
        self.tasks = BackgroundTasks(cell)
        """Background tasks that end with the actor."""

    @property
    def name(self) -> str:
        """The actor's name."""
        return self._cell.name

    @property
    def system(self) -> ActorSystem:
        """The system that the actor lives in; it can spawn others there."""
        return self._cell.system

    @property
    def self_ref(self) -> Ref[Any]:
        """The actor's own ref, to hand out or to tell itself something."""
        return self._cell.ref

    def watch(self, ref: Ref[Any]) -> None:
        """Have a ``Down`` delivered on the control lane whenever an incarnation of ``ref`` ends.

        Watching twice is watching once; an actor that is gone already is reported at once.

        Raises:
            ProtocolError: this actor has no handler for ``Down``.
        """
        if Down not in self._cell.handlers:
            raise ProtocolError(f"actor {self.name!r} watches {ref.name!r}; add a method under @Down.handler")
        ref.life.watch(self._cell.hear)

    def stop(self) -> None:
        """Ask for the actor's own end: returns at once; what was accepted is handled for up to the system's grace."""
        self._cell.request_stop(None)
