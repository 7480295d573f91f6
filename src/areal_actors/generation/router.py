"""The replica set: several generation actors behind one address, and the sole authority over their weights and pauses.

A session stays at the replica that has its prefix cached; a new session goes to the least loaded replica. When a
replica stops serving, its generations continue on another one, with the ids sampled so far (``routing`` has the rules).
Replicas may run in any process: the router knows only their refs.

::

    added ──▶ joining ── has the published weights, and the pause, if there is one ──▶ serving
                ▲  │ fails: tried again, later and later                                  │
                │  └──────────◀── fails to load or to pause, fails generations ───────────┤
                └───────◀── restarts ─────────────────────────────────────────────────────┤
    added ◀── gone ◀── dies ──────────────────────────────────────────────────────────────┘

A replica serves only with the weights of the last publication. Each publication and each change of the pause has a
number, and a replica stores the numbers that it has applied. A replica that is behind is updated by the handler of the
publication or pause or, while it joins, by its own task (``ReplicaSet._keep_joined``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

import anyio
import anyio.lowlevel
from attrs import asdict, define, evolve, field, frozen
from attrs.validators import ge, gt

from areal_actors.domain import EngineInfo, EngineStatistics, PauseMode, Snapshot
from areal_actors.errors import (
    ArealError,
    EngineError,
    ModelError,
    Unavailable,
)
from areal_actors.generation.base import Engine
from areal_actors.generation.rerouting import Rerouting
from areal_actors.generation.routing import (
    Attempt,
    Replica,
    ReroutableGeneration,
    SessionAffinity,
    describe_failure,
    find_delay,
)
from areal_actors.kernel import Actor, BackgroundTasks, Context, Down, DownReason, Ref
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.lib.loops import Scope, running_loop
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import (
    AddReplica,
    AttemptEnd,
    DescribeEngine,
    DescribeReplicas,
    EngineView,
    Generation,
    HoldPlaces,
    LeavePlace,
    MovedPlace,
    PauseGeneration,
    Place,
    PublishWeights,
    RemoveReplica,
    Replicas,
    ReplicaState,
    ReplicaView,
    ReservePlace,
    ResumeGeneration,
)

__all__ = ["Admission", "CounterTotals", "EngineSet", "GenerationRouter", "ReplicaSet", "RouterConfig"]

_log = get_logger(__name__)

_MAX_CONCURRENT = 1 << 17
_DESCRIBE_SECONDS = 5.0
"""Time limit for a replica's counters, after which its last known ones are used: it may be loading weights."""


class Admission(Protocol):
    """Prepares snapshots for all replicas of one set, before any of them hears of it."""

    async def admit(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot as replicas load it, or raise the error with which its publication fails."""
        ...

    async def keep_only(self, snapshot: Snapshot) -> None:
        """Release what was prepared for other snapshots."""
        ...


@frozen(kw_only=True)
class RouterConfig:
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
    config: RouterConfig


class GenerationRouter(Rerouting, Actor[Generation | Replicas]):
    """Distributes generations over replicas. ``version`` is the oldest version that may serve.

    A replica gets a request only if it has the weights of the last publication that was answered. A generation never
    continues under weights older than those that have sampled it so far.
    """

    def __init__(
        self,
        config: RouterConfig | None = None,
        *,
        version: int = 0,
        snapshot: Snapshot | None = None,
        admission: Admission | None = None,
        may_go_back: bool = False,
    ) -> None:
        """Create a router without replicas.

        Args:
            config: time limits.
            version: the oldest version that may serve before the first publication.
            snapshot: loaded into replicas that come back before the first publication.
            admission: checks and prepares each snapshot.
            may_go_back: accept versions older than published ones, from a router above that decides about them.
        """
        self._config = config or RouterConfig()
        self.max_attempts = self._config.max_attempts
        self._set = ReplicaSet(
            self._config, version=version, snapshot=snapshot, admission=admission, may_go_back=may_go_back
        )
        self._holders: dict[str, _Holder] = {}
        self._new_scope: Callable[[], Scope]
        self._tasks: BackgroundTasks

    @classmethod
    def of_engines(cls, engines: EngineSet) -> GenerationRouter:
        """Create the router for the actors of ``engines``, in whose weights the publisher may go back."""
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
            self._set.close()

    # --------------------------------------------------------------------------------------------- generation

    @asynccontextmanager
    async def reserve(self, generation: ReroutableGeneration) -> AsyncIterator[_OwnPlace]:
        """Reserve a place for the next attempt, waiting for a replica if necessary."""
        replica = await self._find_replica(generation.next_place())
        if self._set.info is not None:
            generation.fit(self._set.info.context_length)
        attempt = Attempt(self._new_scope)
        replica.begin(attempt)
        try:
            yield _OwnPlace(replica, attempt, self._set.note_end)
        finally:
            replica.end(attempt)

    @HoldPlaces.handler(concurrency=_MAX_CONCURRENT)
    async def hold_places(self, message: HoldPlaces) -> AsyncIterator[MovedPlace | None]:
        """Hold the places of another process, and yield those whose generations have to continue elsewhere."""
        holder = self._holders[message.holder] = _Holder()
        try:
            yield None
            while True:
                while holder.moved:
                    number, replica = holder.moved.popleft()
                    yield MovedPlace(number=number, reason=replica.error or "it was moved")
                await holder.changed.wait()
        finally:
            del self._holders[message.holder]
            for replica, attempt in holder.places.values():
                replica.end(attempt)

    @ReservePlace.handler(concurrency=_MAX_CONCURRENT)
    async def reserve_place(self, message: ReservePlace) -> Place | None:
        """Reserve a place for an attempt that another process streams from the replica itself."""
        holder, number = self._holders.get(message.holder), message.number
        if holder is None:
            return None
        holder.wanted.add(number)
        try:
            replica = await self._find_replica(message)
            if replica.address is None or replica.info is None:
                raise EngineError(f"Other processes cannot reach replica {replica.name}; stream from its router.")
            # The other process may have left meanwhile.
            if number not in holder.wanted or self._holders.get(message.holder) is not holder:
                return None
        finally:
            holder.wanted.discard(number)
        attempt = _HeldAttempt(self._new_scope, holder=holder, number=number, replica=replica)
        holder.places[number] = replica, attempt
        replica.begin(attempt)
        return Place(
            replica=replica.name,
            address=replica.address,
            version=replica.version or 0,
            context_length=(self._set.info or replica.info).context_length,
        )

    @LeavePlace.handler
    async def leave_place(self, message: LeavePlace) -> None:
        """Free a place, and count the end of its attempt."""
        holder = self._holders.get(message.holder)
        if holder is None:
            return
        holder.wanted.discard(message.number)
        if (held := holder.places.pop(message.number, None)) is None:
            return
        replica, attempt = held
        replica.end(attempt)
        if self._set.by_name.get(replica.name) is replica and message.end is not AttemptEnd.LEFT:
            # That process may not reach a replica that is well; the router watches its own connection to it.
            end = AttemptEnd.FAILED if message.end is AttemptEnd.UNREACHABLE else message.end
            self._set.note_end(replica, end, message.reason)

    async def _find_replica(self, wanted: ReservePlace) -> Replica:
        """Return a replica for an attempt, waiting for one if necessary."""
        replicas = self._set
        if wanted.num_failures:
            await anyio.sleep(find_delay(wanted, (replica.name for replica in replicas.serving)))
        version = max(replicas.version, wanted.version)
        replica = replicas.choose(wanted, version=version)
        if replica is None:
            with anyio.move_on_after(self._config.wait_seconds):
                while replica is None:
                    await replicas.changed.wait()
                    # A publication may have been answered meanwhile.
                    version = max(replicas.version, wanted.version)
                    replica = replicas.choose(wanted, version=version)
        if replica is None:
            raise self._unavailable(version)
        return replica

    def _unavailable(self, version: int) -> Unavailable:
        states = ", ".join(f"{each.name} {each.state}" for each in self._set.by_name.values()) or "none is known"
        return Unavailable(
            f"No replica has served version {version} within {self._config.wait_seconds:g} s ({states}); "
            "the request may be repeated.",
            retry_after_seconds=self._config.retry_seconds,
        )

    # ------------------------------------------------------------------------------------- weights and pauses

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
        await self._set.publish(message.snapshot)
        return message.snapshot.version

    @PauseGeneration.handler(concurrency=64)
    async def pause(self, message: PauseGeneration) -> None:
        """Have all replicas stop sampling, including those that join before ``ResumeGeneration``."""
        await self._set.set_pause(message.mode)

    @ResumeGeneration.handler(concurrency=64)
    async def resume(self, message: ResumeGeneration) -> None:  # noqa: ARG002
        """Have all replicas resume."""
        await self._set.set_pause(None)

    # --------------------------------------------------------------------------------------------- replicas

    @AddReplica.handler
    async def add(self, message: AddReplica) -> None:
        """Let a replica join."""
        self._set.add(message.name, message.ref, self._tasks, address=message.address)

    @RemoveReplica.handler(concurrency=1024)
    async def remove(self, message: RemoveReplica) -> None:
        """Remove a replica, and wait until nothing runs there."""
        replica = self._set.remove(message.name)
        if replica is not None:
            await replica.wait_empty()

    @DescribeReplicas.handler
    async def describe_replicas(self, message: DescribeReplicas) -> tuple[ReplicaView, ...]:  # noqa: ARG002
        """Return all replicas."""
        return tuple(replica.view for replica in self._set.by_name.values())

    @DescribeEngine.handler(concurrency=64)
    async def describe(self, message: DescribeEngine) -> EngineView:  # noqa: ARG002
        """Return the first replica's info with the capacity and counters of all; wait until one serves.

        Raises:
            Unavailable: none has come in time.
        """
        replicas = self._set
        with anyio.move_on_after(self._config.wait_seconds):
            while replicas.info is None:
                await replicas.changed.wait()
        if replicas.info is None:
            raise self._unavailable(replicas.version)

        async def count(replica: Replica) -> None:
            try:
                view = await replica.ref.ask(DescribeEngine(), timeout=_DESCRIBE_SECONDS)
            except ArealError as error:
                _log.debug("replica_not_counted", replica=replica.name, reason=describe_failure(error))
            else:
                replicas.totals.add(replica.name, view.statistics)
                replica.num_engines = view.num_engines

        async with anyio.create_task_group() as tasks:
            for replica in replicas.serving:
                tasks.start_soon(count, replica)
        serving = replicas.serving
        room = sum(replica.info.max_concurrent for replica in serving if replica.info is not None)
        return EngineView(
            info=evolve(replicas.info, max_concurrent=room or replicas.info.max_concurrent),
            statistics=replicas.totals.total({replica.name for replica in serving}),
            version=replicas.served_version,
            num_engines=sum(replica.num_engines for replica in serving),
        )


@define(eq=False)
class _Holder:
    """The places of another process."""

    places: dict[int, tuple[Replica, Attempt]] = field(factory=dict)
    """Those that are taken, by their numbers."""
    wanted: set[int] = field(factory=set)
    """Numbers of places that are being reserved."""
    moved: deque[tuple[int, Replica]] = field(factory=deque)
    """Places of which the other process does not know yet that their generations have to move."""
    changed: ChangeSignal = field(factory=ChangeSignal)


@define(eq=False, kw_only=True)
class _HeldAttempt(Attempt):
    """An attempt of a generation of another process."""

    holder: _Holder
    number: int
    replica: Replica

    def move(self) -> None:
        """Have the other process move it."""
        self.is_moved = True
        self.holder.moved.append((self.number, self.replica))
        self.holder.changed.notify()


class _OwnPlace:
    """A place of a generation of the router's own process."""

    version = 0
    """The router has a connection to each incarnation of a replica, so that no other one can answer."""

    def __init__(
        self, replica: Replica, attempt: Attempt, note_end: Callable[[Replica, AttemptEnd, str], None]
    ) -> None:
        self.attempt = attempt
        self._replica, self._note_end = replica, note_end

    @property
    def replica(self) -> str:
        """The replica's name."""
        return self._replica.name

    @property
    def reason(self) -> str | None:
        """Why the replica does not serve."""
        return self._replica.error

    async def find(self) -> Ref[Generation]:
        """Return the replica."""
        return self._replica.ref

    def note_end(self, end: AttemptEnd, reason: str = "") -> None:
        """Count it."""
        self._note_end(self._replica, end, reason)


class ReplicaSet:
    """The replicas of a router. ``version`` is the oldest version that may serve before the first publication."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        version: int,
        snapshot: Snapshot | None,
        admission: Admission | None,
        may_go_back: bool,
    ) -> None:
        self.by_name: dict[str, Replica] = {}
        self.changed = ChangeSignal()
        """Notified when the state of a replica or of all of them changes."""
        self.version = version
        """Version of the last publication that was answered: no replica serves with older weights."""
        self.info: EngineInfo | None = None
        """Engine info of the first replica; every other replica must be able to replace it."""
        self.totals = CounterTotals()
        self._affinity = SessionAffinity()
        self._config = config
        self._snapshot = snapshot  # the last publication, without tensors that were only lent
        self._admission, self._may_go_back = admission, may_go_back
        self._pause: PauseMode | None = None
        self._publication = self._pausing = 0
        self._publishing = anyio.Lock()
        self._watchers: dict[Replica, Callable[[Down], object]] = {}

    @property
    def serving(self) -> list[Replica]:
        """The replicas that get requests."""
        return [replica for replica in self.by_name.values() if replica.is_serving]

    @property
    def served_version(self) -> int:
        """The oldest version that an answer may come from."""
        return max(self.version, min((replica.version or 0 for replica in self.serving), default=0))

    def choose(self, wanted: ReservePlace, *, version: int) -> Replica | None:
        """Return the replica for an attempt; ``None`` if none serves ``version`` or newer."""
        return self._affinity.choose(self.by_name, wanted, version=version)

    def note_end(self, replica: Replica, end: AttemptEnd, reason: str) -> None:
        """Count how an attempt ended, and take the replica out if it is gone or fails again and again."""
        if end is AttemptEnd.FINISHED:
            replica.num_failures = 0
        elif end is AttemptEnd.LOST:  # the engine has not even begun
            self.mark_unhealthy(replica, reason)
        else:
            replica.num_failures += 1
            if end is AttemptEnd.UNREACHABLE or replica.num_failures >= self._config.max_failures:
                self.mark_unhealthy(replica, reason)

    # ----------------------------------------------------------------------------------------------- members

    def add(self, name: str, ref: Ref[Generation], tasks: BackgroundTasks, *, address: str | None = None) -> None:
        """Let a replica join, and join again whenever it does not serve; it replaces one of the same name.

        Raises ``ActorError`` for a ref that cannot be watched.
        """
        # First, because it raises for a ref that cannot be watched.
        life = ref.life
        self.remove(name)
        replica = Replica(name=name, ref=ref, address=address)
        self.by_name[name] = replica
        watcher = self._watchers[replica] = partial(self._handle_down, replica)
        tasks.start_soon(self._keep_joined, replica, name=f"replica {name}")
        life.watch(watcher)

    def remove(self, name: str) -> Replica | None:
        """Remove a replica and return it. Generations that run there continue on other replicas."""
        replica = self.by_name.pop(name, None)
        if replica is not None:
            self._end(replica, "it was removed")
            replica.move_generations()
        return replica

    def close(self) -> None:
        """Stop watching all replicas, which continue to run."""
        for replica in tuple(self._watchers):
            self._unwatch(replica)

    def mark_unhealthy(self, replica: Replica, reason: str) -> None:
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
            self.mark_unhealthy(replica, down.error or "it restarts")
            return
        log = _log.info if down.reason is DownReason.STOPPED else _log.warning
        log("replica_gone", replica=replica.name, reason=down.reason, error=down.error)
        self._end(replica, down.error or f"it is gone: {down.reason}")

    def _end(self, replica: Replica, reason: str) -> None:
        self._unwatch(replica)
        replica.reset(ReplicaState.GONE, reason)
        replica.wakeup.set()
        self.changed.notify()

    def _unwatch(self, replica: Replica) -> None:
        watcher = self._watchers.pop(replica, None)
        if watcher is not None:
            replica.ref.life.unwatch(watcher)

    # ------------------------------------------------------------------------------------- weights and pauses

    async def publish(self, snapshot: Snapshot) -> None:
        """Have all replicas load; those that fail are taken out until they succeed.

        See ``GenerationRouter.publish``.
        """
        async with self._publishing:
            if snapshot.is_empty:
                raise ModelError(
                    f"Snapshot of version {snapshot.version} has neither state nor path; give it one of them."
                )
            if snapshot.version < self.version and not self._may_go_back:
                raise EngineError(
                    f"Version {snapshot.version} was published after version {self.version}, which answers rely on. "
                    "Publish versions in order; start generation anew to go back."
                )
            if self._admission is not None:
                snapshot = await self._admission.admit(snapshot)
            try:
                await self._publish(snapshot)
            finally:
                if self._admission is not None and self._snapshot is not None:
                    await self._admission.keep_only(self._snapshot)

    async def _publish(self, snapshot: Snapshot) -> None:
        # Tensors in memory are valid during this publication only, so the stored snapshot has none.
        former, self._snapshot = self._snapshot, evolve(snapshot, state=None)
        self._publication += 1
        # Joining replicas load a lasting snapshot on their own schedule. Tensors that are only lent are not
        # available later, so joining replicas are sent those at once.
        is_lent = snapshot.path is None and not snapshot.is_kept
        states = {ReplicaState.SERVING} | ({ReplicaState.JOINING} if is_lent else set())
        asked = [replica for replica in self.by_name.values() if replica.state in states]
        await self._update_all(asked, snapshot)
        failing = [replica for replica in asked if replica.state is ReplicaState.JOINING]
        # A replica that was lost meanwhile loads a lasting snapshot when it is back.
        if failing and not self.serving and (is_lent or all(replica.has_refused for replica in failing)):
            # The former weights become the wanted ones again.
            self._snapshot = former
            self._publication += 1
            self._wake_joining()
            reasons = "; ".join(f"{replica.name}: {replica.error}" for replica in failing)
            raise EngineError(
                f"No replica could load version {snapshot.version}: {reasons}. Version {self.version} is kept."
            )
        self.version = snapshot.version
        self.changed.notify()

    async def set_pause(self, mode: PauseMode | None) -> None:
        """Have all replicas pause or resume, including those that are joining."""
        self._pause = mode
        self._pausing += 1
        await self._update_all(self.serving, None)

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
                self.mark_unhealthy(replica, f"the others had the weights after {now - began:.0f} s, and it did not")
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
            self.mark_unhealthy(replica, describe_failure(error))
        except BaseException:  # cancelled half-way: it is unknown which weights the replica has
            self.mark_unhealthy(replica, "sending it weights or a pause was cancelled")
            raise

    async def _join(self, replica: Replica, snapshot: Snapshot | None) -> None:
        view = await replica.ref.ask(DescribeEngine(), timeout=self._config.load_seconds)
        misfit = None if self.info is None else find_misfit(self.info, view.info)
        if misfit is not None:
            raise EngineError(f"it serves another model: {misfit}")
        replica.info, replica.version, replica.num_engines = view.info, view.version, view.num_engines
        self.totals.add(replica.name, view.statistics)
        # A publication or a pause may arrive while the replica loads, so repeat until it has both.
        while (replica.publication, replica.pausing) != (self._publication, self._pausing):
            await self._send_pause(replica)
            await self._load(replica, snapshot)
            snapshot = self._snapshot
        if replica.state is ReplicaState.JOINING:
            self.info = self.info or view.info
            replica.state, replica.error, replica.num_failures = ReplicaState.SERVING, None, 0
            _log.info("replica_serves", replica=replica.name, version=replica.version)
            self.changed.notify()

    async def _load(self, replica: Replica, snapshot: Snapshot | None) -> None:
        """Have a replica load the snapshot if that is possible; otherwise check that it has the right version."""
        number = self._publication
        if snapshot is not None and not snapshot.is_empty:
            message = PublishWeights(snapshot=snapshot)
            replica.version = await replica.ref.ask(message, timeout=self._config.load_seconds)
        version = replica.version
        if version is None or (version < self.version if snapshot is None else version != snapshot.version):
            wanted = self.version if snapshot is None else snapshot.version
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
        for replica in self.by_name.values():
            if replica.state is ReplicaState.JOINING:
                replica.wakeup.set()


def find_misfit(first: EngineInfo, info: EngineInfo) -> str | None:
    """Return why an engine cannot take requests that were made for ``first``; ``None`` if it can."""
    if info.vocab_size != first.vocab_size:
        return f"its vocabulary has {info.vocab_size} ids and that of the others {first.vocab_size}"
    if info.context_length < first.context_length:
        return f"its context has {info.context_length} tokens and that of the others {first.context_length}"
    if first.has_grammars and not info.has_grammars:
        return "it takes no grammars, and the others do"
    return None


@frozen
class _Account:
    earlier: EngineStatistics = field(factory=EngineStatistics)
    last: EngineStatistics = field(factory=EngineStatistics)


class CounterTotals:
    """Sums of counters that never decrease, although replicas die and restart from zero."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def add(self, name: str, statistics: EngineStatistics) -> None:
        """Store a replica's statistics. Counters that fell belong to a new incarnation."""
        account = self._accounts.get(name, _Account())
        earlier = account.earlier
        # Counters that fell mean that the replica restarted: keep what it had counted before.
        if statistics.sampled_tokens < account.last.sampled_tokens or statistics.prompt_tokens < (
            account.last.prompt_tokens
        ):
            earlier = _sum((earlier, evolve(account.last, running=0, waiting=0)))
        self._accounts[name] = _Account(earlier, statistics)

    def total(self, serving: Collection[str]) -> EngineStatistics:
        """Return the sum. ``running`` and ``waiting`` count only serving replicas, as last reported."""
        return _sum(
            part
            for name, account in self._accounts.items()
            for part in (
                account.earlier,
                account.last if name in serving else evolve(account.last, running=0, waiting=0),
            )
        )


def _sum(parts: Iterable[EngineStatistics]) -> EngineStatistics:
    total = asdict(EngineStatistics())
    for part in parts:
        for name, value in asdict(part).items():
            total[name] += value
    return EngineStatistics(**total)
