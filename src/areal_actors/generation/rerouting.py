"""Generations that survive the loss of a replica, in the router's process and in others.

A generation is a row of attempts, each of which has a place at a replica (``Rerouting``). The router gives out the
places of its own generations; other processes reserve theirs from it, and stream from the replica itself::

    DirectGeneration                    GenerationRouter                    replica
        ├─ HoldPlaces (once) ─────────────▶│                                    │
        │                                  │                                    │
        ├─ ReservePlace ──────────────────▶│ chooses, counts                    │
        │◀───────────────────────── Place ─┤                                    │
        ├─ Generate ───────────────────────────────────────────────────────────▶│
        │◀═══════════════════════════════════════════════════════════ chunks ═══╡
        ├─ LeavePlace ────────────────────▶│ the place is free                  │

The stream of ``HoldPlaces`` says which generations have to move. Its end, and so that of a process or its connection,
frees all places. So the router's process, the controller of a run, does a constant amount of work for each generation
and none for its tokens, and is still the sole authority over weights, pauses and which replicas serve.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from itertools import count
from typing import Protocol
from uuid import uuid4

import anyio
import anyio.lowlevel
from attrs import define, field

from areal_actors.domain import Chunk
from areal_actors.errors import (
    ActorError,
    ActorStopped,
    ArealError,
    CaptureViolation,
    DeadlineExceeded,
    EngineError,
    EngineLost,
    GenerationAborted,
    MailboxFull,
    RemoteError,
    Unreachable,
)
from areal_actors.generation.routing import Attempt, ReroutableGeneration, describe_failure
from areal_actors.kernel import Actor, BackgroundTasks, Context, Ref
from areal_actors.kernel.remote import Peer
from areal_actors.lib.loops import Scope, running_loop
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import (
    AttemptEnd,
    DescribeEngine,
    EngineView,
    Generate,
    Generation,
    HoldPlaces,
    LeavePlace,
    PauseGeneration,
    Place,
    PublishWeights,
    Replicas,
    ResumeGeneration,
)

__all__ = ["DirectGeneration", "Rerouting", "ReservedPlace"]

_log = get_logger(__name__)

_MAX_CONCURRENT = 1 << 17
_BUFFER_SIZE = 16
"""Number of chunks that a replica may be ahead of the reader."""
_MAX_MOVED = 1024
"""Number of moved generations that the router may be ahead of this process."""


class ReservedPlace(Protocol):
    """A place at a replica for one attempt of a generation."""

    attempt: Attempt

    @property
    def replica(self) -> str:
        """The replica's name."""
        ...

    @property
    def version(self) -> int:
        """The oldest version of the weights that the replica may sample with."""
        ...

    @property
    def reason(self) -> str | None:
        """Why the generation has to continue elsewhere, if it has to."""
        ...

    async def find(self) -> Ref[Generation]:
        """Return the replica. Raises ``Unreachable``."""
        ...

    def note_end(self, end: AttemptEnd, reason: str = "") -> None:
        """Note how the attempt ended."""
        ...


class Rerouting(ABC):
    """The handler of ``Generate`` of an actor that streams from replicas, and from the next one if one fails."""

    max_attempts: int
    """A generation fails after this many attempts in a row without a new token."""

    @abstractmethod
    def reserve(self, generation: ReroutableGeneration) -> AbstractAsyncContextManager[ReservedPlace]:
        """Reserve a place for the next attempt, waiting for one if necessary."""

    @Generate.handler(concurrency=_MAX_CONCURRENT)
    async def generate(self, message: Generate) -> AsyncIterator[Chunk]:
        """Stream from a replica, and from the next one if it fails. Leaving the stream early aborts in its engine.

        Raises:
            Unavailable: no replica that may serve the request came in time, or the rest of it cannot be moved.
            EngineError: the generation failed several times in a row.
        """
        generation = ReroutableGeneration(message.request)
        while True:
            failure = None
            async with self.reserve(generation) as place:
                attempt = place.attempt
                try:
                    request, replica = Generate(request=generation.next_request()), await place.find()
                    async with replica.stream(request, buffer_size=_BUFFER_SIZE) as chunks:
                        while (chunk := await attempt.next(chunks)) is not None:
                            if chunk.version < place.version:
                                raise _stale(place, chunk)
                            yield generation.add(chunk)
                except (ActorStopped, Unreachable, DeadlineExceeded, RemoteError, EngineError) as error:
                    await anyio.lowlevel.checkpoint_if_cancelled()  # the deadline may be the caller's
                    failure = error
                if generation.is_over:
                    place.note_end(AttemptEnd.FINISHED)
                    return
                # Both end the generation on purpose, and would do so on every replica.
                if isinstance(failure, GenerationAborted | CaptureViolation):
                    raise failure
                reason, is_moved = describe_failure(failure), attempt.is_moved
                # The replica set ordered the move, for a reason that it knows: this is not a failure of the generation.
                if is_moved:
                    reason = place.reason or reason
                else:
                    place.note_end(_end_of(failure), reason)
            is_failure = not (is_moved or isinstance(failure, EngineLost))
            if is_failure:
                _log.info("generation_moves", replica=place.replica, sampled=generation.num_sampled, reason=reason)
            limit = self.max_attempts
            end = generation.end_attempt(place.replica, failure, reason, is_failure=is_failure, max_failures=limit)
            if end is not None:
                yield end
                return


def _end_of(failure: ArealError | None) -> AttemptEnd:
    if isinstance(failure, EngineLost):
        return AttemptEnd.LOST
    return AttemptEnd.UNREACHABLE if isinstance(failure, ActorStopped | Unreachable) else AttemptEnd.FAILED


def _stale(place: ReservedPlace, chunk: Chunk) -> Unreachable:
    return Unreachable(
        f"replica {place.replica} sampled with version {chunk.version} and not {place.version}: an earlier incarnation "
        "of it answered",
        sent=True,
    )


# ------------------------------------------------------------------------------------------------ past the router


Dial = Callable[[str], AbstractAsyncContextManager[Peer]]
"""Connects to the process that listens at an address."""


@define(eq=False)
class _Link:
    """The connection to one incarnation of a replica; all generations at it share it."""

    address: str
    scope: anyio.CancelScope = field(factory=anyio.CancelScope)
    tried: anyio.Event = field(factory=anyio.Event)
    """Set once the connection is up, or has failed."""
    peer: Peer | None = None
    cause: str = "the connection is closed"

    @property
    def is_lost(self) -> bool:
        """Whether the connection was up and is not any more, or is being given up."""
        return self.scope.cancel_called or (self.peer is not None and not self.peer.is_connected)


@define(eq=False)
class _Holding:
    """The stream by which the router holds the places of this process."""

    holder: str = field(factory=lambda: uuid4().hex)
    opened: anyio.Event = field(factory=anyio.Event)
    """Set once the stream is open, or could not be opened."""
    error: ArealError | None = None
    places: dict[int, _DirectPlace] = field(factory=dict)
    """Those that are taken or being reserved, by their numbers."""


class DirectGeneration(Rerouting, Actor[Generation]):
    """Streams from the replicas of a router in another process without passing through that process.

    Everything but generations goes to the router. A generation ends its attempt when the router's process cannot be
    reached any more, because its place is not held then.
    """

    def __init__(self, router: Ref[Generation | Replicas], dial: Dial, *, actor: str, max_attempts: int = 3) -> None:
        """Create the actor.

        Args:
            router: the router.
            dial: connects to a replica's process; the connection belongs to this actor.
            actor: the name under which each replica's process exposes it.
            max_attempts: as of ``RouterConfig``.
        """
        self.max_attempts = max_attempts
        self._router, self._dial, self._actor = router, dial, actor
        self._links: dict[str, _Link] = {}
        self._holding: _Holding | None = None
        self._numbers = count()
        self._tasks: BackgroundTasks
        self._new_scope: Callable[[], Scope]

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:
        """Keep the connections while the actor runs."""
        self._tasks, self._new_scope = context.tasks, running_loop().new_scope
        yield

    @asynccontextmanager
    async def reserve(self, generation: ReroutableGeneration) -> AsyncIterator[_DirectPlace]:
        """Reserve a place from the router for the duration of the block. Raises as ``ReservePlace`` does."""
        place: Place | None = None
        while place is None:
            holding = self._holding
            if holding is None:
                holding = self._holding = _Holding()
                self._tasks.start_soon(self._hold_places, holding, name="places of generations")
            await holding.opened.wait()
            number = next(self._numbers)
            taken = holding.places[number] = _DirectPlace(self, Attempt(self._new_scope))
            try:
                place = await self._router.ask(generation.next_place(holding.holder, number))
                if place is None:
                    if holding.error is not None:
                        raise holding.error
                    # The router has lost the stream of this holding, and this side has not noticed yet.
                    if self._holding is holding:
                        self._holding = None
                    continue
                taken.place = place
                generation.fit(place.context_length)
                yield taken
            finally:
                del holding.places[number]
                self._leave(LeavePlace(holder=holding.holder, number=number, end=taken.end, reason=taken.end_reason))

    def _leave(self, message: LeavePlace) -> None:
        """Give back a place; without a connection to the router, it is free already."""

        async def leave() -> None:
            with suppress(ActorError):
                await self._router.tell(message)

        try:
            self._router.tell_nowait(message)
        except MailboxFull:
            self._tasks.start_soon(leave, name="leaves a place")
        except ActorError:
            pass

    async def _hold_places(self, holding: _Holding) -> None:
        """Move the generations that the router names, and all of them when it cannot be reached any more."""
        reason = "the router has ended its place"
        try:
            async with self._router.stream(HoldPlaces(holder=holding.holder), buffer_size=_MAX_MOVED) as moved:
                async for each in moved:
                    if each is None:
                        holding.opened.set()
                    elif (place := holding.places.get(each.number)) is not None:
                        place.move(each.reason)
        except ArealError as error:
            holding.error = error
            reason = f"its place was lost: {describe_failure(error)}"
        finally:
            if self._holding is holding:
                self._holding = None
            holding.opened.set()
            for place in tuple(holding.places.values()):
                place.move(reason)

    async def find(self, place: Place) -> tuple[_Link, Ref[Generation]]:
        """Return the replica of ``place`` and the connection to it, opened if necessary. Raises ``Unreachable``."""
        link = self._links.get(place.replica)
        # What runs over the old connection belongs to an earlier incarnation of the replica.
        if link is not None and (link.address != place.address or link.is_lost):
            link.scope.cancel()
            link = None
        if link is None:
            link = self._links[place.replica] = _Link(place.address)
            self._tasks.start_soon(self._hold, place.replica, link, name=f"connection to {place.replica}")
        await link.tried.wait()
        if link.peer is None:
            raise Unreachable(f"replica {place.replica} at {place.address} is unreachable: {link.cause}", sent=False)
        return link, link.peer.ref(Generation, self._actor)

    async def _hold(self, name: str, link: _Link) -> None:
        """Hold the connection until it is lost. The next place at the replica opens another one."""
        try:
            with link.scope:
                async with self._dial(link.address) as peer:
                    with anyio.move_on_after(peer.limits.hello_seconds):
                        await peer.wait_exposed(self._actor)
                    link.peer = peer
                    link.tried.set()
                    _log.info("replica_connected", replica=name, address=link.address)
                    await peer.wait_closed()
        except (ArealError, OSError) as error:
            link.cause = str(error)
            _log.info("replica_unreachable", replica=name, address=link.address, reason=link.cause)
        finally:
            if self._links.get(name) is link:
                del self._links[name]
            link.tried.set()

    # ------------------------------------------------------------------------------------------ for the router

    @PublishWeights.handler(concurrency=64)
    async def publish(self, message: PublishWeights) -> int:
        """Have all replicas load."""
        return await self._router.ask(message)

    @PauseGeneration.handler(concurrency=64)
    async def pause(self, message: PauseGeneration) -> None:
        """Have all replicas stop sampling."""
        await self._router.ask(message)

    @ResumeGeneration.handler(concurrency=64)
    async def resume(self, message: ResumeGeneration) -> None:
        """Have all replicas resume."""
        await self._router.ask(message)

    @DescribeEngine.handler(concurrency=64)
    async def describe(self, message: DescribeEngine) -> EngineView:
        """Return the view of all replicas."""
        return await self._router.ask(message)


@define(eq=False)
class _DirectPlace:
    """A place that was reserved from a router in another process."""

    _owner: DirectGeneration
    attempt: Attempt
    place: Place = field(init=False)
    """Set when the router has answered."""
    reason: str | None = None
    end: AttemptEnd = AttemptEnd.LEFT
    end_reason: str = ""
    _link: _Link | None = None

    @property
    def replica(self) -> str:
        """The replica's name."""
        return self.place.replica

    @property
    def version(self) -> int:
        """The version of its weights."""
        return self.place.version

    async def find(self) -> Ref[Generation]:
        """Return the replica."""
        self._link, ref = await self._owner.find(self.place)
        return ref

    def note_end(self, end: AttemptEnd, reason: str = "") -> None:
        """Have the router told with the place. An unreachable replica needs a new connection the next time."""
        if end is AttemptEnd.UNREACHABLE and self._link is not None:
            self._link.scope.cancel()
        self.end, self.end_reason = end, reason

    def move(self, reason: str) -> None:
        """Have the generation continue elsewhere."""
        self.reason = reason
        self.attempt.move()
