"""The state of replicas and the rules for them: which one gets a request, and what follows if it fails.

* A replica gets requests while it serves, with weights at least as new as promised (``Replica``).
* A session stays with one replica. A new session goes to the least loaded one (``SessionAffinity``).
* If a replica fails in the middle of a generation, another one continues it: the tokens sampled so far become the end
  of the prompt, and each keeps the version that sampled it (``ReroutableGeneration``).
* A generation fails after ``max_failures`` attempts in a row without a new token. Failures after progress do not add
  up, because an answer of an hour may well outlive several servers.
* The random numbers after a move have another key. With the same one, those of the beginning would be drawn again.
* A generation under a grammar cannot move once a token was sampled, because engines start a grammar at its beginning.
  It is refused with 503, which SDKs repeat.

``rerouting`` sends the requests, and ``router`` decides which replicas serve. An engine of a server also continues
generations that ended there early (``servers.engine``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping

import anyio
import numpy as np
from attrs import define, evolve, field

from areal_actors.domain import Chunk, EngineInfo, EngineRequest, FinishReason, Ints
from areal_actors.errors import EngineError, Unavailable
from areal_actors.generation.base import find_stop_ids
from areal_actors.kernel import Ref
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.lib.loops import Scope
from areal_actors.messages import Generation, ReplicaState, ReplicaView, ReservePlace

__all__ = [
    "Attempt",
    "Replica",
    "ReroutableGeneration",
    "SessionAffinity",
    "choose",
    "describe_failure",
    "find_delay",
]

_FIRST_DELAY_SECONDS = 0.05


class ReroutableGeneration:
    """The state of one generation: the tokens sampled so far, and the failures of the replicas that sampled them."""

    def __init__(self, request: EngineRequest, *, context_length: int | None = None) -> None:
        self.request = request
        self.version = 0
        """The newest version that sampled; the generation does not continue with an older one."""
        self.num_sampled = 0
        self.num_attempts = 0
        self.num_failures = 0
        """Attempts that failed since the last new token."""
        self.failed_at: set[str] = set()
        """Names of replicas that failed it; they are used again only if there is no other."""
        self.is_over = False
        self._sampled: list[Ints] = []
        self._max_new_tokens = request.sampling.max_new_tokens
        if context_length is not None:
            self.fit(context_length)

    def fit(self, context_length: int) -> None:
        """Limit the generation to the context of its replicas.

        Without this limit, a generation whose replica is lost at the end of its context would be sent to another one,
        which would refuse it.
        """
        room = context_length - len(self.request.prompt)
        self._max_new_tokens = min(self.request.sampling.max_new_tokens, max(room, 1))

    @property
    def can_move(self) -> bool:
        """Whether another engine could continue it."""
        return self.request.grammar is None or self.num_sampled == 0

    def next_request(self) -> EngineRequest:
        """Return the request for the remaining tokens.

        Each attempt has a new id, because the former one may still be running somewhere.
        """
        request, self.num_attempts = self.request, self.num_attempts + 1
        sampling, left = request.sampling, self._max_new_tokens - self.num_sampled
        if left != sampling.max_new_tokens:
            sampling = evolve(sampling, max_new_tokens=left)
        if not self.num_sampled:
            if self.num_attempts == 1 and sampling is request.sampling:
                return request
            name = request.id if self.num_attempts == 1 else f"{request.id}.{self.num_attempts}"
            return evolve(request, id=name, sampling=sampling)
        return evolve(
            request,
            id=f"{request.id}.{self.num_attempts}",
            prompt=np.concatenate([request.prompt, *self._sampled]),
            sampling=sampling,
            key=evolve(request.key, num_drawn=request.key.num_drawn + self.num_sampled),
        )

    def add(self, chunk: Chunk) -> Chunk:
        """Store a chunk; return it in the form that the client receives."""
        is_first = not self._sampled
        if len(chunk.token_ids):
            self._sampled.append(chunk.token_ids)
            self.num_sampled += len(chunk.token_ids)
            self.num_failures = 0
        self.version = chunk.version
        self.is_over = chunk.finish is not None
        # After a move the prompt contains sampled tokens; whether those are cached is not a fact about the client's
        # prompt.
        return chunk if is_first or not chunk.num_cached_tokens else evolve(chunk, num_cached_tokens=0)

    def find_finish(self) -> FinishReason | None:
        """Return the finish if all tokens are known although no replica reported it, else ``None``."""
        if not self._sampled:
            return None
        if self.has_stopped:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_sampled >= self._max_new_tokens else None

    @property
    def has_stopped(self) -> bool:
        """Whether the last token is one at which the request stops."""
        return bool(self._sampled) and int(self._sampled[-1][-1]) in find_stop_ids(self.request)

    def report_failure(self, replica: str) -> None:
        """Count a failed attempt."""
        self.num_failures += 1
        self.failed_at.add(replica)

    def next_place(self, holder: str = "", number: int = 0) -> ReservePlace:
        """Return what the next attempt demands of its replica; another process names its place."""
        return ReservePlace(
            holder=holder,
            number=number,
            routing_key=self.request.routing_key,
            version=self.version,
            failed_at=tuple(self.failed_at),
            num_failures=self.num_failures,
        )

    def end_attempt(
        self, replica: str, failure: BaseException | None, reason: str, *, is_failure: bool, max_failures: int
    ) -> Chunk | None:
        """Decide what follows an attempt that ``replica`` has left unfinished for ``reason``.

        Returns the last chunk if all tokens are known, and ``None`` if another attempt continues the generation.
        ``is_failure`` says whether the attempt counts as failed: one that was moved on purpose does not. Raises the
        errors of ``check_movable``.
        """
        if is_failure:
            self.report_failure(replica)
        # A replica may be lost after the last token and before it reports the finish.
        if (finish := self.find_finish()) is not None:
            return self.add(Chunk(token_ids=(), logprobs=(), raw_logprobs=(), version=self.version, finish=finish))
        self.check_movable(replica, failure, reason, max_failures=max_failures)
        return None

    def check_movable(self, replica: str, failure: BaseException | None, reason: str, *, max_failures: int) -> None:
        """Raise an error if no other replica may continue what ``replica`` has left for ``reason``.

        Raises:
            Unavailable: the generation is under a grammar, and has begun.
            EngineError: it failed ``max_failures`` times in a row.
        """
        if not self.can_move:
            raise Unavailable(
                f"Replica {replica} left ({reason}) in the middle of an answer with a prescribed form, which another "
                "engine cannot continue; the request may be repeated."
            ) from failure
        if self.num_failures >= max_failures:
            raise EngineError(
                f"Generation {self.request.id} failed {self.num_failures} times in a row, after {self.num_sampled} "
                f"tokens, at {', '.join(sorted(self.failed_at))}; the last reason: {reason}. See their logs."
            ) from failure


@define(eq=False, kw_only=True)
class Replica:
    """A generation actor of the set, and its state.

    ``publication`` and ``pausing`` are the numbers of the last ones that it has applied; -1 means none.
    """

    name: str
    """Its name, which no other replica has."""
    ref: Ref[Generation]
    address: str | None = None
    """Where other processes reach it."""
    state: ReplicaState = ReplicaState.JOINING
    version: int | None = None
    """Version of its weights; ``None`` while they are unknown or undefined, as during a load."""
    num_running: int = 0
    """Number of generations that run here."""
    turn: int = 0
    """Number of the choice at which it was last selected."""
    wakeup: anyio.Event = field(factory=anyio.Event)
    """Set when the task that lets it join has something to do."""
    info: EngineInfo | None = None
    num_engines: int = 1
    publication: int = -1
    pausing: int = -1
    error: str | None = None
    has_refused: bool = False
    """Whether its last failure is that it rejected weights."""
    num_failures: int = 0
    """Consecutive failed generations."""
    lock: anyio.Lock = field(factory=anyio.Lock)
    """Held while it is given weights or a pause."""
    _attempts: set[Attempt] = field(factory=set)
    _emptied: ChangeSignal = field(factory=ChangeSignal)

    @property
    def is_serving(self) -> bool:
        """Whether it gets requests."""
        return self.state is ReplicaState.SERVING

    @property
    def is_gone(self) -> bool:
        """Whether it will not return by itself."""
        return self.state is ReplicaState.GONE

    @property
    def load(self) -> float:
        """The share of its capacity that is in use."""
        return self.num_running / ((self.info and self.info.max_concurrent) or 1)

    @property
    def view(self) -> ReplicaView:
        """The public view of it."""
        return ReplicaView(
            name=self.name, state=self.state, version=self.version, num_running=self.num_running, error=self.error
        )

    def can_serve(self, version: int) -> bool:
        """Return whether it may get requests that were promised weights of at least ``version``."""
        # Not through ``is_serving``: each attempt asks about every replica, and the call took 3 µs for 16 of them.
        return self.state is ReplicaState.SERVING and self.version is not None and self.version >= version

    def begin(self, attempt: Attempt) -> None:
        """Register a generation that runs here until ``end``."""
        self._attempts.add(attempt)
        self.num_running += 1

    def end(self, attempt: Attempt) -> None:
        """Remove a generation that ran here."""
        self._attempts.discard(attempt)
        self.num_running -= 1
        if not self._attempts:
            self._emptied.notify()

    def move_generations(self) -> None:
        """Have all generations here continue on other replicas."""
        for attempt in tuple(self._attempts):
            attempt.move()

    async def wait_empty(self) -> None:
        """Wait until nothing runs here."""
        while self._attempts:
            await self._emptied.wait()

    def reset(self, state: ReplicaState, reason: str) -> None:
        """Set the state and the error, and discard which weights and pause it has."""
        self.state, self.error = state, reason
        self.version, self.publication, self.pausing = None, -1, -1


@define(eq=False)
class Attempt:
    """A generation at one replica, until it ends there or moves elsewhere."""

    _new_scope: Callable[[], Scope]
    is_moved: bool = False
    _scope: Scope | None = None

    async def next(self, chunks: AsyncIterator[Chunk]) -> Chunk | None:
        """Return the next chunk, or ``None`` at the end and when the generation has to move."""
        if self.is_moved:
            return None
        try:
            # The scope surrounds only the wait: around a ``yield`` it would also cancel the consumer's waiting.
            with self._new_scope() as self._scope:
                return await anext(chunks)
        except StopAsyncIteration:
            pass
        finally:
            self._scope = None
        return None

    def move(self) -> None:
        """Have the generation continue on another replica."""
        self.is_moved = True
        if self._scope is not None:
            self._scope.cancel()


def choose(
    replicas: Mapping[str, Replica], *, pinned: str | None, version: int, failed_at: Collection[str]
) -> Replica | None:
    """Return the replica for a generation: the one that its session is pinned to, or else the least loaded.

    Ties go to the replica that was chosen longest ago. Replicas that failed the generation come last. Returns ``None``
    if no replica serves ``version`` or newer.
    """
    if pinned is not None and pinned not in failed_at:
        replica = replicas.get(pinned)
        if replica is not None and replica.can_serve(version):
            return replica
    able = (replica for replica in replicas.values() if replica.can_serve(version))
    return min(able, key=lambda replica: (replica.name in failed_at, replica.load, replica.turn), default=None)


class SessionAffinity:
    """Chooses replicas, and remembers the choice for each session, whose prefix the replica has cached.

    A session that moved stays where it is when its former replica returns, which has lost the prefix. Beyond
    ``max_sessions``, the session that was chosen for longest ago is dropped.
    """

    def __init__(self, max_sessions: int = 1 << 17) -> None:
        self._max_sessions = max_sessions
        self._names: OrderedDict[str, str] = OrderedDict()
        self._num_turns = 0

    def choose(self, replicas: Mapping[str, Replica], wanted: ReservePlace, *, version: int) -> Replica | None:
        """Return the replica for the next attempt, and pin the session to it. ``None`` if none can serve."""
        key = wanted.routing_key
        replica = choose(replicas, pinned=self.find(key), version=version, failed_at=wanted.failed_at)
        if replica is not None:
            self._num_turns += 1
            replica.turn = self._num_turns
            self.pin(key, replica.name)
        return replica

    def find(self, key: str) -> str | None:
        """Return the name of the replica to which a session is pinned, by its routing key."""
        return self._names.get(key)

    def pin(self, key: str, name: str) -> None:
        """Pin a session to the replica ``name``. An empty key is ignored."""
        if not key:
            return
        self._names[key] = name
        self._names.move_to_end(key)
        if len(self._names) > self._max_sessions:
            self._names.popitem(last=False)


def find_delay(wanted: ReservePlace, names: Iterable[str]) -> float:
    """Return the seconds to wait before the attempt ``wanted``, if only the replicas ``names`` serve.

    There is a delay if all of them have failed it: otherwise a replica that fails at once would be asked several times
    within a millisecond.
    """
    if not wanted.num_failures:
        return 0.0
    serving = set(names)
    if not serving or serving.difference(wanted.failed_at):
        return 0.0
    return _FIRST_DELAY_SECONDS * 2.0**wanted.num_failures


def describe_failure(error: BaseException | None) -> str:
    """Return a failure as one line."""
    return "it ended a generation without a reason" if error is None else f"{type(error).__name__}: {error}"
