"""The replica set: several generation actors behind one address, and the sole authority over their weights and pauses.

A session stays at the replica that has its prefix cached; a new session goes to the least loaded replica. Replicas may
run in any process: the set knows only their refs.

::

    added ──▶ joining ── has the published weights, and the pause, if there is one ──▶ serving
                ▲  │ fails: tried again, later and later                                  │
                │  └──────────◀── fails to load or to pause, fails generations ───────────┤
                └───────◀── restarts ─────────────────────────────────────────────────────┤
    added ◀── gone ◀── dies ──────────────────────────────────────────────────────────────┘

A replica serves only with the weights of the last publication. Each publication and each change of the pause has a
number, and a replica stores the numbers that it has applied. A replica that is behind is updated by the handler of the
publication or pause or, while it joins, by its own task (``ReplicaSet._keep_joined``).

If a replica fails in the middle of a generation, another one continues it; ``resumable`` has the rules.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from enum import StrEnum
from functools import partial
from typing import Protocol

import anyio
import anyio.lowlevel
from attrs import asdict, define, evolve, field, frozen
from attrs.validators import ge, gt

from areal_actors.domain import Chunk, EngineInfo, EngineStatistics, PauseMode, Snapshot
from areal_actors.errors import (
    ActorStopped,
    ArealError,
    CaptureViolation,
    DeadlineExceeded,
    EngineError,
    EngineInterrupted,
    EngineLost,
    ModelError,
    RemoteError,
    Unavailable,
    Unreachable,
)
from areal_actors.generation.base import Engine
from areal_actors.generation.resumable import ResumableGeneration
from areal_actors.kernel import Actor, BackgroundTasks, Context, Down, DownReason, Ref
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.lib.loops import Scope, running_loop
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import (
    AddReplica,
    DescribeEngine,
    EngineView,
    Generate,
    Generation,
    PauseGeneration,
    PublishWeights,
    Replicas,
    ResumeGeneration,
)

_log = get_logger(__name__)

_MAX_CONCURRENT = 1 << 17
_BUFFER_SIZE = 16
"""Number of chunks that a replica may be ahead of the reader."""
_DESCRIBE_SECONDS = 5.0
"""Time limit for a replica's counters, after which its last known ones are used: it may be loading weights."""
_FIRST_DELAY_SECONDS = 0.05
_MAX_SESSIONS = 1 << 17


class Admission(Protocol):
    """Prepares snapshots for all replicas of one set, before any of them hears of it."""

    async def admit(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot as replicas load it, or raise the error with which its publication fails."""
        ...

    async def keep_only(self, snapshot: Snapshot) -> None:
        """Release what was prepared for other snapshots."""
        ...


@frozen(kw_only=True)
class ReplicaSetConfig:
    """Time limits and retry limits for replicas."""

    wait_seconds: float = field(default=60.0, validator=gt(0))
    """How long a request waits for a replica that can serve it; then it is refused with 503, which clients retry."""
    max_attempts: int = field(default=3, validator=ge(1))
    """A generation fails after this many attempts in a row without a new token."""
    max_failures: int = field(default=3, validator=ge(1))
    """A replica that fails this many generations in a row gets no more until it has joined again."""
    load_seconds: float = field(default=600.0, validator=gt(0))
    """A replica that needs longer than this to load weights or to pause is treated as failed."""
    straggler_seconds: float = field(default=8.0, validator=gt(0))
    """A replica that still loads weights this long after another one has them, and after twice the time that this one
    took, is left out, so that one that hangs does not hold the others. It serves again when it has loaded them."""
    retry_seconds: float = field(default=1.0, validator=gt(0))
    """Delay before a failed replica is tried again; doubled after each further failure."""
    max_retry_seconds: float = field(default=30.0, validator=gt(0))
    """The longest delay before a failed replica is tried again."""


@frozen(kw_only=True)
class EngineSet:
    """Engines of one process that have the same weights, by name, and the settings of the replica set above them."""

    engines: Mapping[str, Engine]
    snapshot: Snapshot
    """The weights that all of them have, for engines that come back before other ones are published."""
    admission: Admission
    config: ReplicaSetConfig


class ReplicaState(StrEnum):
    """State of a replica as its set sees it."""

    JOINING = "joining"
    """It gets no requests: it is being given the weights and the pause of all replicas, or failed to take them.

    The set retries until it succeeds.
    """
    SERVING = "serving"
    """It gets requests."""
    GONE = "gone"
    """It has died. The component that restarts it adds it again."""


@define(eq=False, kw_only=True)
class Replica:
    """A generation actor of the set, and its state.

    ``publication`` and ``pausing`` are the numbers of the last ones that it has applied; -1 means none.
    """

    name: str
    """Its name, which no other replica has."""
    ref: Ref[Generation]
    state: ReplicaState = ReplicaState.JOINING
    version: int | None = None
    """Version of its weights; ``None`` while they are unknown or undefined, as during a load."""
    attempts: set[Attempt] = field(factory=set)
    """The generations that run here."""
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
        return len(self.attempts) / ((self.info and self.info.max_concurrent) or 1)

    def can_serve(self, version: int) -> bool:
        """Return whether it may get requests that were promised weights of at least ``version``."""
        # Not through ``is_serving``: each attempt asks about every replica, and the call took 3 µs for 16 of them.
        return self.state is ReplicaState.SERVING and self.version is not None and self.version >= version

    def move_generations(self) -> None:
        """Have all generations here continue on other replicas."""
        for attempt in tuple(self.attempts):
            attempt.move()

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


@define(eq=False)
class Counters:
    """Counters of replicas, whose sum never decreases although replicas die and restart from zero."""

    _earlier: EngineStatistics = field(factory=EngineStatistics)
    """Those of former incarnations."""
    _last: dict[str, EngineStatistics] = field(factory=dict)

    def add(self, name: str, statistics: EngineStatistics) -> None:
        """Store a replica's statistics. Counters that fell belong to a new incarnation."""
        last = self._last.get(name, EngineStatistics())
        if statistics.sampled_tokens < last.sampled_tokens or statistics.prompt_tokens < last.prompt_tokens:
            self._earlier = _sum(self._earlier, _at_rest(last))
        self._last[name] = statistics

    def total(self, serving: Collection[str]) -> EngineStatistics:
        """Return the sum. ``running`` and ``waiting`` count only serving replicas, as last reported."""
        last = (each if name in serving else _at_rest(each) for name, each in self._last.items())
        return _sum(self._earlier, *last)


def _at_rest(statistics: EngineStatistics) -> EngineStatistics:
    return evolve(statistics, running=0, waiting=0)


def _sum(*parts: EngineStatistics) -> EngineStatistics:
    values = [asdict(part) for part in parts]
    return EngineStatistics(**{name: sum(each[name] for each in values) for name in values[0]})


class ReplicaSet(Actor[Generation | Replicas]):
    """Distributes generations over replicas, and keeps their weights and pauses equal.

    A replica gets a request only if it has the weights of the last publication that was answered.
    """

    def __init__(
        self,
        config: ReplicaSetConfig | None = None,
        *,
        version: int = 0,
        snapshot: Snapshot | None = None,
        admission: Admission | None = None,
        may_go_back: bool = False,
    ) -> None:
        """Create a set without replicas.

        Args:
            config: time limits.
            version: the oldest version that may serve before the first publication.
            snapshot: loaded into replicas that come back before the first publication.
            admission: checks and prepares each snapshot.
            may_go_back: accept versions older than published ones, from a set above that decides about them.
        """
        self._config = config or ReplicaSetConfig()
        self.replicas: dict[str, Replica] = {}
        """The replicas by name, in the order in which they were added."""
        self._changed = ChangeSignal()
        """Notified when the state of a replica or of all of them changes."""
        self._version = version
        """Version of the last publication that was answered: no replica serves with older weights."""
        self._info: EngineInfo | None = None
        """Engine info of the first replica; every other replica must be able to replace it."""
        self._counters = Counters()
        self._pins: OrderedDict[str, str] = OrderedDict()
        """The replica of each session, which has its prefix cached, by routing key; recently used ones come last."""
        self._num_turns = 0
        self._snapshot = snapshot  # the last publication, without tensors that were only lent
        self._admission, self._may_go_back = admission, may_go_back
        self._pause: PauseMode | None = None
        self._publication = self._pausing = 0
        self._publishing = anyio.Lock()
        self._watchers: dict[Replica, Callable[[Down], object]] = {}
        self._new_scope: Callable[[], Scope]
        self._tasks: BackgroundTasks

    @classmethod
    def of_engines(cls, engines: EngineSet) -> ReplicaSet:
        """Create the set for the actors of ``engines``, in whose weights the publisher may go back."""
        return cls(
            engines.config,
            version=engines.snapshot.version,
            snapshot=engines.snapshot,
            admission=engines.admission,
            may_go_back=True,
        )

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:
        """Watch the replicas while the actor runs; they outlive it."""
        self._tasks, self._new_scope = context.tasks, running_loop().new_scope
        try:
            yield
        finally:
            for replica in tuple(self._watchers):
                self._unwatch(replica)

    @property
    def _serving(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.is_serving]

    # --------------------------------------------------------------------------------------------- generation

    @Generate.handler(concurrency=_MAX_CONCURRENT)
    async def generate(self, message: Generate) -> AsyncIterator[Chunk]:
        """Stream from a replica, and from the next one if it fails. Leaving the stream early aborts in its engine.

        Raises:
            Unavailable: no replica that may serve the request came in time, or the rest of it cannot be moved.
            EngineError: the generation failed several times in a row.
        """
        generation = ResumableGeneration(message.request)
        while True:
            replica, failure = await self._find_replica(generation), None
            if self._info is not None:
                generation.fit(self._info.context_length)
            attempt = Attempt(self._new_scope)
            replica.attempts.add(attempt)
            try:
                request = Generate(request=generation.next_request())
                async with replica.ref.stream(request, buffer_size=_BUFFER_SIZE) as chunks:
                    while (chunk := await attempt.next(chunks)) is not None:
                        yield generation.add(chunk)
            except (ActorStopped, Unreachable, DeadlineExceeded, RemoteError, EngineError) as error:
                await anyio.lowlevel.checkpoint_if_cancelled()  # the deadline may be the caller's
                failure = error
            finally:
                replica.attempts.discard(attempt)
            if generation.is_over:
                replica.num_failures = 0
                return
            # It ends the generation on purpose, and would do so on every replica.
            if isinstance(failure, CaptureViolation):
                raise failure
            end = self._end_attempt(generation, replica, failure, is_moved=attempt.is_moved)
            if end is not None:
                yield end
                return

    def _end_attempt(
        self, generation: ResumableGeneration, replica: Replica, failure: ArealError | None, *, is_moved: bool
    ) -> Chunk | None:
        """Count an attempt that ended early; return the last chunk if all tokens are known, or raise if it must."""
        reason = describe_failure(failure)
        is_failure = not (is_moved or isinstance(failure, EngineLost | EngineInterrupted))
        if is_failure:
            replica.num_failures += 1
            if isinstance(failure, ActorStopped | Unreachable) or replica.num_failures >= self._config.max_failures:
                self._mark_unhealthy(replica, reason)
            _log.info("generation_moves", replica=replica.name, sampled=generation.num_sampled, reason=reason)
        elif is_moved:  # by this set, for a reason that it knows
            reason = replica.error or reason
        elif isinstance(failure, EngineLost):  # the engine has not even begun
            self._mark_unhealthy(replica, reason)
        limit = self._config.max_attempts
        return generation.end_attempt(replica.name, failure, reason, is_failure=is_failure, max_failures=limit)

    async def _find_replica(self, generation: ResumableGeneration) -> Replica:
        """Return a replica for the next attempt, waiting for one if necessary."""
        serving = {replica.name for replica in self._serving}
        if generation.num_failures and serving and serving <= generation.failed_at:
            # Otherwise a replica that fails at once would be asked several times within a millisecond.
            await anyio.sleep(_FIRST_DELAY_SECONDS * 2.0**generation.num_failures)
        replica = self._choose(generation)
        if replica is None:
            with anyio.move_on_after(self._config.wait_seconds):
                while replica is None:
                    await self._changed.wait()
                    replica = self._choose(generation)
        if replica is None:
            raise self._unavailable(max(self._version, generation.version))
        return replica

    def _choose(self, generation: ResumableGeneration) -> Replica | None:
        """Return the replica for the next attempt and pin the session to it; ``None`` if none can serve.

        A session that moved stays where it is when its former replica returns, which has lost the prefix.
        """
        key, pins = generation.request.routing_key, self._pins
        version = max(self._version, generation.version)
        replica = choose(self.replicas, pinned=pins.get(key), version=version, failed_at=generation.failed_at)
        if replica is None:
            return None
        self._num_turns += 1
        replica.turn = self._num_turns
        if key:
            pins[key] = replica.name
            pins.move_to_end(key)
            if len(pins) > _MAX_SESSIONS:
                pins.popitem(last=False)
        return replica

    def _unavailable(self, version: int) -> Unavailable:
        states = ", ".join(f"{each.name} {each.state}" for each in self.replicas.values()) or "none is known"
        return Unavailable(
            f"No replica has served version {version} within {self._config.wait_seconds:g} s ({states}); "
            "the request may be repeated.",
            retry_after_seconds=self._config.retry_seconds,
        )

    # --------------------------------------------------------------------------------------- weights and pauses

    @PublishWeights.handler(concurrency=64)
    async def publish(self, message: PublishWeights) -> int:
        """Have all replicas load at once; those that fail are taken out until they succeed.

        Later replicas get the same weights.

        Weights in memory are available only while this request runs: a replica that joins later waits for the next
        publication.

        Raises:
            EngineError: the version is older than a published one, or all replicas rejected the weights. The former
                weights continue to be served. Replicas that were lost get lasting weights when they come back.
        """
        snapshot = message.snapshot
        async with self._publishing:
            if snapshot.is_empty:
                raise ModelError(
                    f"Snapshot of version {snapshot.version} has neither state nor path; give it one of them."
                )
            if snapshot.version < self._version and not self._may_go_back:
                raise EngineError(
                    f"Version {snapshot.version} was published after version {self._version}, which answers rely on. "
                    "Publish versions in order; start generation anew to go back."
                )
            if self._admission is not None:
                snapshot = await self._admission.admit(snapshot)
            try:
                await self._publish(snapshot)
            finally:
                if self._admission is not None and self._snapshot is not None:
                    await self._admission.keep_only(self._snapshot)
        return message.snapshot.version

    @PauseGeneration.handler(concurrency=64)
    async def pause(self, message: PauseGeneration) -> None:
        """Have all replicas stop sampling, including those that join before ``ResumeGeneration``."""
        await self._set_pause(message.mode)

    @ResumeGeneration.handler(concurrency=64)
    async def resume(self, message: ResumeGeneration) -> None:  # noqa: ARG002
        """Have all replicas resume."""
        await self._set_pause(None)

    async def _set_pause(self, mode: PauseMode | None) -> None:
        """Have all replicas pause or resume, including those that are joining."""
        self._pause = mode
        self._pausing += 1
        await self._update_all(self._serving, None)

    async def _publish(self, snapshot: Snapshot) -> None:
        # Tensors in memory are valid during this publication only, so the stored snapshot has none.
        former, self._snapshot = self._snapshot, evolve(snapshot, state=None)
        self._publication += 1
        # Joining replicas load a lasting snapshot on their own schedule. Tensors that are only lent are not
        # available later, so joining replicas are sent those at once.
        is_lent = snapshot.path is None
        states = {ReplicaState.SERVING} | ({ReplicaState.JOINING} if is_lent else set())
        asked = [replica for replica in self.replicas.values() if replica.state in states]
        await self._update_all(asked, snapshot)
        failing = [replica for replica in asked if replica.state is ReplicaState.JOINING]
        # A replica that was lost meanwhile loads a lasting snapshot when it is back.
        if failing and not self._serving and (is_lent or all(replica.has_refused for replica in failing)):
            # The former weights become the wanted ones again.
            self._snapshot = former
            self._publication += 1
            self._wake_joining()
            reasons = "; ".join(f"{replica.name}: {replica.error}" for replica in failing)
            raise EngineError(
                f"No replica could load version {snapshot.version}: {reasons}. Version {self._version} is kept."
            )
        self._version = snapshot.version
        self._changed.notify()

    async def _update_all(self, replicas: list[Replica], snapshot: Snapshot | None) -> None:
        """Update all at once. One that hangs is left out once the others are done; it joins again if it can."""
        self._wake_joining()
        began, scopes = anyio.current_time(), {replica: anyio.CancelScope() for replica in replicas}
        # Lent tensors are read until an engine has loaded them, and a pause may wait for generations to end.
        may_leave_out = snapshot is not None and snapshot.state is None

        async def update(replica: Replica) -> None:
            with scopes[replica]:
                await self._update(replica, snapshot)
            now = anyio.current_time()
            if scopes[replica].cancelled_caught:
                self._mark_unhealthy(replica, f"the others had the weights after {now - began:.0f} s, and it did not")
            elif may_leave_out and replica.is_serving:
                limit = now + self._config.straggler_seconds + (now - began)
                for scope in scopes.values():
                    scope.deadline = min(scope.deadline, limit)

        async with anyio.create_task_group() as tasks:
            for replica in replicas:
                tasks.start_soon(update, replica)

    async def _update(self, replica: Replica, snapshot: Snapshot | None = None) -> None:
        """Apply to a replica the publications and pauses that it has missed. ``snapshot`` is the one being published.

        Afterwards the replica serves or is taken out.
        """
        try:
            async with replica.lock:
                if replica.state is ReplicaState.JOINING:
                    await self._join(replica, snapshot or self._snapshot)
                elif replica.is_serving:
                    if snapshot is not None and replica.publication != self._publication:
                        await self._load(replica, snapshot)
                    if replica.pausing != self._pausing:
                        await self._send_pause(replica)
        except ArealError as error:
            replica.has_refused = isinstance(error, ModelError)
            self._mark_unhealthy(replica, describe_failure(error))
        except BaseException:  # cancelled half-way: it is unknown which weights the replica has
            self._mark_unhealthy(replica, "sending it weights or a pause was cancelled")
            raise

    async def _join(self, replica: Replica, snapshot: Snapshot | None) -> None:
        view = await replica.ref.ask(DescribeEngine(), timeout=self._config.load_seconds)
        misfit = None if self._info is None else find_misfit(self._info, view.info)
        if misfit is not None:
            raise EngineError(f"it serves another model: {misfit}")
        replica.info, replica.version, replica.num_engines = view.info, view.version, view.num_engines
        self._counters.add(replica.name, view.statistics)
        # A publication or a pause may arrive while the replica loads, so repeat until it has both.
        while (replica.publication, replica.pausing) != (self._publication, self._pausing):
            await self._send_pause(replica)
            await self._load(replica, snapshot)
            snapshot = self._snapshot
        if replica.state is ReplicaState.JOINING:
            self._info = self._info or view.info
            replica.state, replica.error, replica.num_failures = ReplicaState.SERVING, None, 0
            _log.info("replica_serves", replica=replica.name, version=replica.version)
            self._changed.notify()

    async def _load(self, replica: Replica, snapshot: Snapshot | None) -> None:
        """Have a replica load the snapshot if that is possible; otherwise check that it has the right version."""
        number = self._publication
        if snapshot is not None and not snapshot.is_empty:
            message = PublishWeights(snapshot=snapshot)
            replica.version = await replica.ref.ask(message, timeout=self._config.load_seconds)
        version = replica.version
        if version is None or (version < self._version if snapshot is None else version != snapshot.version):
            wanted = self._version if snapshot is None else snapshot.version
            raise EngineError(f"it has version {version} and not {wanted}, and waits for the next publication")
        replica.publication = number

    async def _send_pause(self, replica: Replica) -> None:
        number, mode = self._pausing, self._pause
        if mode is None:
            await replica.ref.ask(ResumeGeneration(), timeout=self._config.load_seconds)
        else:
            # With ``WAIT`` the pause lasts as long as the running generations, which have no time limit here.
            seconds = None if mode is PauseMode.WAIT else self._config.load_seconds
            await replica.ref.ask(PauseGeneration(mode=mode), timeout=seconds)
        replica.pausing = number

    async def _keep_joined(self, replica: Replica) -> None:
        """Let a replica join whenever it does not serve, until it is gone."""
        num_failures = 0
        while not replica.is_gone:
            number = self._publication
            if replica.state is ReplicaState.JOINING:
                await self._update(replica)
            is_serving = replica.is_serving
            num_failures = 0 if is_serving else num_failures + 1
            replica.wakeup = anyio.Event()
            if is_serving:
                await replica.wakeup.wait()
            # A publication that came meanwhile is tried at once; otherwise wait.
            elif number == self._publication and not replica.is_gone:
                # The exponent is bounded so that the power does not overflow a float.
                delay = self._config.retry_seconds * 2.0 ** min(num_failures - 1, 16)
                with anyio.move_on_after(min(delay, self._config.max_retry_seconds)):
                    await replica.wakeup.wait()

    def _wake_joining(self) -> None:
        """Have joining replicas try again now."""
        for replica in self.replicas.values():
            if replica.state is ReplicaState.JOINING:
                replica.wakeup.set()

    # ------------------------------------------------------------------------------------------------- replicas

    @AddReplica.handler
    async def add(self, message: AddReplica) -> None:
        """Let a replica join, and join again whenever it does not serve; it replaces one of the same name.

        Raises ``ActorError`` for a ref that cannot be watched.
        """
        replica = Replica(name=message.name, ref=message.ref)
        watcher = self._watchers[replica] = partial(self._handle_down, replica)
        # First, because it raises for a ref that cannot be watched.
        message.ref.watch(watcher)
        if (former := self.replicas.pop(message.name, None)) is not None:
            self._end(former, "it was replaced")
            former.move_generations()
        self.replicas[replica.name] = replica
        self._tasks.start_soon(self._keep_joined, replica, name=f"replica {replica.name}")

    @DescribeEngine.handler(concurrency=64)
    async def describe(self, message: DescribeEngine) -> EngineView:  # noqa: ARG002
        """Return the first replica's info with the capacity and counters of all; wait until one serves.

        Raises:
            Unavailable: none has come in time.
        """
        with anyio.move_on_after(self._config.wait_seconds):
            while self._info is None:
                await self._changed.wait()
        if self._info is None:
            raise self._unavailable(self._version)

        async def count(replica: Replica) -> None:
            try:
                view = await replica.ref.ask(DescribeEngine(), timeout=_DESCRIBE_SECONDS)
            except ArealError as error:
                _log.debug("replica_not_counted", replica=replica.name, reason=describe_failure(error))
            else:
                self._counters.add(replica.name, view.statistics)
                replica.num_engines = view.num_engines

        async with anyio.create_task_group() as tasks:
            for replica in self._serving:
                tasks.start_soon(count, replica)
        serving = self._serving
        room = sum(replica.info.max_concurrent for replica in serving if replica.info is not None)
        return EngineView(
            info=evolve(self._info, max_concurrent=room or self._info.max_concurrent),
            statistics=self._counters.total({replica.name for replica in serving}),
            version=max(self._version, min((replica.version or 0 for replica in serving), default=0)),
            num_engines=sum(replica.num_engines for replica in serving),
        )

    def _mark_unhealthy(self, replica: Replica, reason: str) -> None:
        """Take a replica out until it has been given weights and pause again.

        Its generations continue on other replicas.
        """
        if replica.is_gone:
            return
        # Logged once for each reason: a replica that cannot join is tried again and again.
        if replica.is_serving or replica.error != reason:
            _log.warning("replica_out", replica=replica.name, reason=reason)
        replica.reset(ReplicaState.JOINING, reason)
        replica.move_generations()
        replica.wakeup.set()

    def _handle_down(self, replica: Replica, down: Down) -> None:
        if down.is_restarting:
            self._mark_unhealthy(replica, down.error or "it restarts")
            return
        log = _log.info if down.reason is DownReason.STOPPED else _log.warning
        log("replica_gone", replica=replica.name, reason=down.reason, error=down.error)
        self._end(replica, down.error or f"it is gone: {down.reason}")

    def _end(self, replica: Replica, reason: str) -> None:
        self._unwatch(replica)
        replica.reset(ReplicaState.GONE, reason)
        replica.wakeup.set()
        self._changed.notify()

    def _unwatch(self, replica: Replica) -> None:
        watcher = self._watchers.pop(replica, None)
        if watcher is not None:
            replica.ref.unwatch(watcher)


def find_misfit(first: EngineInfo, info: EngineInfo) -> str | None:
    """Return why an engine cannot take requests that were made for ``first``; ``None`` if it can."""
    if info.vocab_size != first.vocab_size:
        return f"its vocabulary has {info.vocab_size} ids and that of the others {first.vocab_size}"
    if info.context_length < first.context_length:
        return f"its context has {info.context_length} tokens and that of the others {first.context_length}"
    if first.has_grammars and not info.has_grammars:
        return "it takes no grammars, and the others do"
    return None


def describe_failure(error: BaseException | None) -> str:
    """Return a failure as one line."""
    return "it ended a generation without a reason" if error is None else f"{type(error).__name__}: {error}"
