"""The controller of a run: it runs attempts, each of which opens the roles of the plan, until one finishes.

::

    controller ─┬─ directory, listener, scheduler .................... as long as the run
                ├─ proxies, engines: workers replaced individually ... as long as the run
                └─ attempt 1, 2, … : one after another, each from the newest checkpoint
                     ├─ reporter, router of engines, roles in the controller process
                     └─ sessions, trainer, rollout: workers that fail together

An engine that dies loses its pending requests, which continue on another engine; a proxy loses its connections.
Sessions, trainer and rollouts share state that no checkpoint contains: if one of them is lost, the others are ended,
and a new attempt resumes as ``--resume`` does. A run without workers has one attempt: its errors end the run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from typing import Any, TypeVar, cast

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup
from attrs import asdict, evolve

from areal_actors.dashboard.report import write_report
from areal_actors.dashboard.run_record import RunRecord, read_record, write_record
from areal_actors.domain import DataPosition, Role, RunStatus
from areal_actors.errors import ActorError, ActorStopped, RunDirectoryError, SchedulerError, Unreachable
from areal_actors.generation.replicas import ReplicaSet, ReplicaSetConfig
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.kernel.failure import root_cause
from areal_actors.kernel.remote import ReconnectingConnection
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.lib.plugins import PluginGroup, plugin_names
from areal_actors.lib.process_limits import tuned_gc
from areal_actors.lib.task_groups import open_tasks
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import (
    AddReplica,
    AwaitEndpoint,
    AwaitTraining,
    AwaitWeights,
    Endpoint,
    EndpointChanged,
    Generation,
    Intake,
    PhaseChanged,
    Progress,
    Replicas,
    Report,
    RoleSpec,
    RunEnded,
    SaveWeights,
    ServiceOpened,
    Training,
    TrainingEnded,
    TrainingSummary,
)
from areal_actors.proxy.access import create_admin_key
from areal_actors.rendering import Renderer
from areal_actors.run.control_plane import ControlPlane, connect_to_worker, open_control_plane
from areal_actors.run.directory import no_checkpoint
from areal_actors.run.job import load_rendering
from areal_actors.run.openers import RoleContext, open_role
from areal_actors.run.plan import ACTOR_ROLES, PREEMPTED, REPLICA, Finder, PlacedRole, RunPlan
from areal_actors.run.reporting import create_reporter
from areal_actors.run.signals import Interrupts, open_interrupts
from areal_actors.run.supervise import Restarts, find_final
from areal_actors.viewer import open_page, view_run

_log = get_logger(__name__)

P = TypeVar("P")

_INDEPENDENT = (Role.GENERATION, Role.PROXY)
"""The roles whose workers are replaced individually: they own no state that others need."""

_CAUSE_SECONDS = 2.0
"""How long an error that may follow from another one, in a worker, is held back for that one to be noticed."""
_CRASH_SECONDS = 60.0
"""How long an error that surely follows from another one is held back: the crashed role ends its processes first."""


async def run_plan(plan: RunPlan) -> None:
    """Train to the end and save the results. Raises the ``ArealError`` that ended the run."""
    async with open_interrupts() as interrupts, open_control_plane(plan) as control_plane:
        controller = RunController(plan, control_plane, interrupts)
        page: AbstractAsyncContextManager[str | None] = nullcontext()
        # A program that embeds the library owns its process, and the ports that are opened there.
        if plan.is_handling_signals and plan.config.logging.page:
            run = view_run(plan.directory, status=controller.describe_actors)
            page = open_page({run.name: run}, port=plan.config.logging.page_port, prefix="logging.page_")
        try:
            async with page as controller.page_url, open_tasks() as tasks:
                controller.start_independent_workers(tasks)
                if plan.control is not None:
                    tasks.start_soon(plan.control.forward, interrupts)
                await controller.train()
                tasks.cancel_scope.cancel()
        except BaseException as error:
            # Every other end is recorded with the results.
            if controller.has_begun and not controller.is_done:
                status, cause = _status_after(error)
                controller.record(status, str(cause) or type(cause).__name__)
            raise


def _status_after(error: BaseException) -> tuple[RunStatus, BaseException]:
    """Return the status of a run that ``error`` ends, and the cause."""
    cause = root_cause(error) if isinstance(error, Exception) else error
    is_failure = isinstance(cause, Exception) and not isinstance(cause, anyio.get_cancelled_exc_class())
    return RunStatus.FAILED if is_failure else RunStatus.INTERRUPTED, cause


class _Lost(Exception):
    """A worker was lost, which ends the attempt."""


@asynccontextmanager
async def after_its_cause(*, has_workers: bool) -> AsyncIterator[None]:
    """Hold back an error of the block that follows from another one, until that one is raised and cancels this task.

    Raised at once, it would cancel the clean-up of the role that failed first, and a cancelled clean-up replaces the
    error in flight. So the first error that is not a consequence is the error of the run, whichever role has it. The
    other one may also be the end of a worker, which is noticed later.
    """
    try:
        yield
    except Exception as error:
        if isinstance(root_cause(error), ActorStopped):
            await anyio.sleep(_CRASH_SECONDS)
        elif has_workers and find_final(error) is None:
            await anyio.sleep(_CAUSE_SECONDS)
        raise


class RunController:
    """The controller process of a run."""

    def __init__(self, plan: RunPlan, control_plane: ControlPlane, interrupts: Interrupts) -> None:
        self.plan = plan
        self.control_plane = control_plane
        self.interrupts = interrupts
        self.replicas = ReadyReplicas()
        self._endpoint = control_plane.endpoint
        key = None if self._endpoint is None else self._endpoint.admin_key
        self._admin_key = key or plan.proxy.admin_key or create_admin_key()
        self._num_attempts = 0
        self._service: ServiceOpened | None = None
        self._record = RunRecord(status=RunStatus.RUNNING, is_service=plan.is_service)
        self._has_begun_before = plan.resume and read_record(plan.directory) is not None
        self.has_begun = False
        self.page_url: str | None = None
        self.actors: Mapping[str, Ref[Any]] = {}
        """The actors of the current attempt that the controller process can reach."""
        self.is_done = False
        """Whether the results are saved. Errors raised after that are logged and ignored."""

    def spec(self, role: Role, name: str, **options: Any) -> RoleSpec:
        """Return the spec for the worker of this name: its role and settings."""
        plan = self.plan
        return RoleSpec(
            role=role,
            config=plan.directory.config.absolute(),
            directory=plan.directory.path.absolute(),
            lease_seconds=plan.config.scheduler.lease_seconds,
            # Over a unix socket, no network can be the cause of the silence.
            hang_seconds=None if self.control_plane.sockets is None else plan.config.scheduler.hang_seconds,
            local_roles=plan.local_roles,
            has_intake=plan.is_service,
            has_accounts=bool(plugin_names(PluginGroup.ACCOUNTS)),
            has_rollouts=plan.has_rollouts,
            has_begun=self._has_begun_before,
            listen=self.control_plane.worker_address(name),
            # Only a proxy needs the key, so no other worker gets it.
            admin_key=self._admin_key if role is Role.PROXY and role in plan.placed else None,
            is_replaced_alone=role in _INDEPENDENT,
            **options,
        )

    def start_independent_workers(self, tasks: TaskGroup) -> None:
        """Start background tasks that keep proxies and engines running."""
        for role in _INDEPENDENT:
            if role in self.plan.placed:
                for index in range(self.plan.placed[role].config.replicas):
                    tasks.start_soon(self._keep, role, f"{role}-{index}")

    async def _keep(self, role: Role, name: str) -> None:
        supervisor, config = self.control_plane.supervisor, self.plan.placed[role].config
        try:
            await supervisor.run_restarting(
                name, self.spec(role, name), config, while_ready=partial(self._register, role, name)
            )
        except Exception as error:
            # A worker that cannot be replaced any more does not take back what is saved.
            if not self.is_done:
                raise
            _log.info("error_after_results", worker=name, reason=str(root_cause(error)))

    @asynccontextmanager
    async def _register(self, role: Role, name: str, report: Report) -> AsyncIterator[None]:  # noqa: ARG002 - of ``while_ready``
        """Make an engine a replica while it serves."""
        if role is Role.PROXY:
            yield
            return
        async with (
            self.connect(name) as connection,
            self.replicas.add(name, connection.ref(Generation, REPLICA)),
        ):
            yield

    def connect(self, worker: str) -> AbstractAsyncContextManager[ReconnectingConnection]:
        """Connect to the worker of this name, as ``connect_to_worker`` does."""
        plane = self.control_plane
        return connect_to_worker(plane.directory, worker, secret=plane.secret, node="controller")

    # ---------------------------------------------------------------------------------------------- attempts

    async def train(self) -> None:
        """Run attempts until one finishes."""
        restarts = Restarts(self.plan.config.scheduler.restarts)
        while True:
            # Compared below, to tell a release of all workers from a failure.
            num_releases = self.control_plane.supervisor.barrier.num_releases
            try:
                return await self._attempt()
            except Exception as error:
                if self.is_done:
                    _log.info("error_after_results", reason=str(root_cause(error)))
                    return None
                final = find_final(error)
                if final is not None:
                    raise final from error
                # A run in one process has lost no process that another one could replace.
                if not self.plan.placed:
                    raise root_cause(error) from error
                if num_releases != self.control_plane.supervisor.barrier.num_releases:
                    # The workers were released to make room, which does not count as a failure.
                    continue
                cause = root_cause(error)
                if not restarts.allow(now=anyio.current_time()):
                    raise SchedulerError(f"{cause} The run ends after {restarts.describe()}.") from error
                _log.warning("attempt_restarted", attempt=self._num_attempts + 1, cause=str(cause))

    async def _attempt(self) -> None:
        plan, is_first = self.plan, self._num_attempts == 0
        self._num_attempts += 1

        def find_position() -> tuple[int | None, DataPosition]:
            # In its thread: torch takes seconds to import, and a run from the start needs it in other processes only.
            from areal_actors.training.stored_checkpoints import find_latest, parse_position

            found = find_latest(plan.directory.checkpoints)
            return (None, DataPosition()) if found is None else (found.step, parse_position(found.counters["caller"]))

        checkpoint, start = None, DataPosition()
        if plan.resume or not is_first:
            checkpoint, start = await to_thread.run_sync(find_position)
        # A run may have been killed before its first checkpoint: it resumes with its initial weights and its journal.
        if checkpoint is None and is_first and plan.resume and not (plan.is_service or plan.directory.groups.exists()):
            raise no_checkpoint(plan.directory)
        if checkpoint is not None and is_first and checkpoint >= plan.config.total_steps:
            hint = "nothing is left to train; raise total_steps to go on"
            _log.warning("already_trained", steps=checkpoint, total_steps=plan.config.total_steps, hint=hint)
        begin = partial(self.spec, attempt=self._num_attempts, checkpoint=checkpoint, start=start)
        async with anyio.create_task_group() as tasks:
            for role, placed in plan.placed.items():
                if role not in _INDEPENDENT:
                    tasks.start_soon(self._end_run_with, begin(role, f"{role}-0"), placed)
            async with after_its_cause(has_workers=bool(plan.placed)):
                await _Attempt(self, begin).run()
            tasks.cancel_scope.cancel()

    async def _end_run_with(self, spec: RoleSpec, placed: PlacedRole) -> None:
        supervisor, name = self.control_plane.supervisor, f"{spec.role}-0"
        ended = await supervisor.run_once(name, spec, placed.config, num_tasks=placed.num_tasks)
        if ended.error is None:
            raise _Lost(str(ended))
        # The cause may be another worker that this one could not reach.
        async with after_its_cause(has_workers=True):
            raise find_final(ended.error) or _Lost(str(ended))

    def describe_actors(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of the current attempt's actors by name, for the page of the run."""
        # A copy: the page asks on a thread, and actors are added meanwhile.
        return {name: asdict(ref.statistics()) for name, ref in tuple(self.actors.items())}

    def record(self, status: RunStatus, reason: str | None = None) -> None:
        """Write the state of the run to its directory, and the report of one that failed. Blocks.

        What cannot be written is logged: a full disk does not end a run, nor hide the error that ended it.
        """
        directory, self.has_begun = self.plan.directory, True
        self._record = evolve(self._record, status=status, reason=reason)
        try:
            write_record(directory, self._record)
            if status is RunStatus.FAILED:
                write_report(directory)
        except (OSError, RunDirectoryError) as error:
            _log.warning("run_not_recorded", status=status, reason=str(error))

    @asynccontextmanager
    async def listening(self, endpoint: Endpoint) -> AsyncIterator[None]:
        """Publish the endpoint of a proxy in this process while the block lasts. Its successor listens there, too."""
        if self.plan.is_handling_signals:
            # A proxy that answers before the trainer is open completes its requests, too.
            await self.interrupts.listen()
        self._endpoint = endpoint
        await self.control_plane.directory.ask(EndpointChanged(endpoint=endpoint))
        try:
            yield
        finally:
            # Agents of the next attempt must wait for its proxy: until then, connections to this port are refused.
            # A cancelled run has ended its directory by now, and with it everything that waited there.
            with anyio.CancelScope(shield=True), suppress(ActorStopped):
                await self.control_plane.directory.ask(EndpointChanged(endpoint=None))

    async def announce(self, find: Finder) -> None:
        """Announce the endpoint, the first time that a proxy is ready, and to the reporter of each attempt."""
        endpoint = await self.control_plane.directory.ask(AwaitEndpoint())
        if self.plan.announce is None:
            return
        self._service = self._service or await self.plan.announce(endpoint)
        progress = await find(Progress, "progress")
        await progress.tell(self._service)


class _Attempt:
    """The part of one attempt that runs in the controller process, with its connections to the workers."""

    def __init__(self, controller: RunController, begin: Callable[..., RoleSpec]) -> None:
        self._controller = controller
        self._control_plane = controller.control_plane
        self._plan = controller.plan
        self._begin = begin
        self._spec = begin(Role.TRAINER, "controller")
        """The attempt, and the checkpoint that it continues from; the same for each role."""
        self._local: dict[str, Ref[Any]] = {"directory": self._control_plane.directory}
        controller.actors = self._local
        self._connections: dict[Role, ReconnectingConnection] = {}
        self._arrived = ChangeSignal()

    async def run(self) -> None:
        """Train to the end and save the results."""
        plan = self._plan
        async with AsyncExitStack() as stack:
            # Until every role has a worker, all of them may be released again.
            await self._control_plane.supervisor.wait_complete()
            # Connections open first, so that they close after the actors that use them.
            for role in plan.placed:
                if role not in _INDEPENDENT:
                    self._connections[role] = await stack.enter_async_context(self._controller.connect(f"{role}-0"))
            renderer = await to_thread.run_sync(load_rendering, plan.config)
            system = await stack.enter_async_context(ActorSystem.open(name="controller"))
            if Role.GENERATION in plan.placed:
                # Requests wait for the first engine as long as a worker may take to start.
                config = ReplicaSetConfig(wait_seconds=plan.config.scheduler.start_seconds)
                routed = self._controller.replicas.routed(system, config, version=self._spec.checkpoint or 0)
                self._add({"generation": await stack.enter_async_context(routed)})
            await stack.enter_async_context(self._reporting_end())
            tasks = await stack.enter_async_context(anyio.create_task_group())
            tasks.start_soon(self._spawn_reporter, system, renderer)
            opened = [_LocalRole(role) for role in plan.local_roles if role is not Role.ROLLOUT or plan.has_rollouts]
            for one in opened:
                tasks.start_soon(one.hold, self._open(one.role, renderer))
            training = await self.find(Training, "trainer")
            if plan.is_handling_signals:
                # After everything is loaded, so that models and libraries are frozen, too. The settings apply to the
                # whole process, so a program that embeds the library keeps its own.
                stack.enter_context(tuned_gc())
            interrupts = self._controller.interrupts
            async with interrupts.telling(training, is_handling_signals=plan.is_handling_signals):
                if Role.PROXY in plan.local_roles:
                    await self._controller.announce(self.find)
                else:
                    # In the background, since a placed proxy may be ready later than the trainer.
                    tasks.start_soon(self._controller.announce, self.find)
                async with after_its_cause(has_workers=False):
                    await self._finish(training)
            # An error from here on, while workers are being ended, must not start another attempt.
            self._controller.is_done = True
            for one in opened:
                await one.close()
            tasks.cancel_scope.cancel()

    async def find(self, protocol: type[P], name: str, /) -> Ref[P]:
        """Return a ref to the actor of this name. See ``plan.Finder``."""
        role = ACTOR_ROLES[name]
        if role is not None and role in self._connections:
            return self._connections[role].ref(protocol, name)
        while name not in self._local:
            await self._arrived.wait()
        return cast("Ref[P]", self._local[name])

    async def _spawn_reporter(self, system: ActorSystem, renderer: Renderer) -> None:
        """Spawn the reporter, and with it the files of the run, once engines have weights.

        A start that fails because of its settings has failed by then, and leaves no files.
        """
        await self._control_plane.directory.ask(AwaitWeights(attempt=self._spec.attempt))
        await to_thread.run_sync(self._controller.record, RunStatus.RUNNING)
        if self._plan.control is not None:
            self._plan.control.begun.set()
        reporter = await to_thread.run_sync(
            partial(
                create_reporter,
                self._plan.config,
                self._plan.directory,
                decode=renderer.decode,
                resumed_step=self._spec.checkpoint,
                page=self._controller.page_url,
            )
        )
        self._add({"progress": await system.spawn(reporter, name="progress")})

    @asynccontextmanager
    async def _reporting_end(self) -> AsyncIterator[None]:
        """Tell the reporter, while it lives, if an error ends the block. Other ends are reported with the results."""
        try:
            yield
        except BaseException as error:
            progress = self._local.get("progress")
            if progress is not None:
                # A reporter that failed itself, or was cancelled with the run, has closed its listeners.
                with anyio.move_on_after(_CAUSE_SECONDS, shield=True), suppress(ActorError):
                    await progress.ask(RunEnded(status=_status_after(error)[0]))
            raise

    @asynccontextmanager
    async def _open(self, role: Role, renderer: Renderer) -> AsyncIterator[None]:
        """Open a role in this process."""
        plan = self._plan
        context = RoleContext(
            name=f"{role}-local",
            config=evolve(plan.config, proxy=plan.proxy) if role is Role.PROXY else plan.config,
            spec=self._begin(role, "controller"),
            renderer=renderer,
            find=self.find,
            agents=plan.agents,
            supervised=plan.supervised,
        )
        async with open_role(context) as opened:
            # In the controller process there is one engine, which needs no router.
            self._add({"generation" if name == REPLICA else name: ref for name, ref in opened.actors.items()})
            if opened.endpoint is None:
                yield
                return
            async with self._controller.listening(opened.endpoint):
                yield

    async def _finish(self, training: Ref[Training]) -> None:
        """Wait for the end of training, and save weights, learning curve and report.

        An interrupted run has its checkpoint, and exports no weights.
        """
        summary: TrainingSummary | None = None
        while summary is None:
            try:
                summary = await training.ask(AwaitTraining())
            except Unreachable as error:
                # Asking again is harmless, and other tasks detect that the trainer's worker is lost.
                _log.info("trainer_out_of_reach", reason=str(error))
                await anyio.sleep(_CAUSE_SECONDS)
        if summary.stop_reason == PREEMPTED and not summary.is_finished:
            # Its worker exits in a moment, which ends the attempt.
            await anyio.sleep_forever()
        directory, progress = self._plan.directory, await self.find(Progress, "progress")
        detail = summary.stop_reason or ""
        if summary.is_finished:
            await progress.ask(PhaseChanged(phase="saving the weights", detail=str(directory.weights)))
            await training.ask(SaveWeights())
        else:
            detail += f"; --resume goes on from {directory.checkpoints}"
        await progress.ask(PhaseChanged(phase="done", detail=detail))
        await to_thread.run_sync(write_report, directory)
        if summary.is_finished and self._plan.is_service and not self._plan.config.serve.exit_when_trained:
            # Answer with the trained weights until a signal arrives, or the caller cancels the run.
            await (await self.find(Intake, "intake")).ask(TrainingEnded())
            await to_thread.run_sync(self._controller.record, RunStatus.SERVING, summary.stop_reason)
            await progress.ask(PhaseChanged(phase="serving the trained weights", detail="until Ctrl-C"))
            name = await self._controller.interrupts.wait()
            await progress.ask(PhaseChanged(phase="done", detail=f"interrupted by {name}"))
        status = RunStatus.FINISHED if summary.is_finished else RunStatus.INTERRUPTED
        await progress.ask(RunEnded(status=status))
        await to_thread.run_sync(self._controller.record, status, summary.stop_reason)

    def _add(self, actors: Mapping[str, Ref[Any]]) -> None:
        for name, ref in actors.items():
            self._local[name] = ref
            self._control_plane.listener.expose(name, ref)
        self._arrived.notify()


class _LocalRole:
    """A role that is open in this process until it is told to close."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self._scope = anyio.CancelScope()
        self._is_open = False
        self._closing = anyio.Event()
        self._closed = anyio.Event()

    async def hold(self, opening: AbstractAsyncContextManager[None]) -> None:
        """Keep the role open until ``close`` is called."""
        with self._scope:
            async with after_its_cause(has_workers=False), opening:
                self._is_open = True
                await self._closing.wait()
        self._closed.set()

    async def close(self) -> None:
        """Close the role, and wait until its actors have stopped and its resources are closed.

        A role that is still being opened is cancelled.
        """
        # It may wait for a worker that will not be ready for hours, as a proxy in the queue of a cluster.
        if not self._is_open:
            self._scope.cancel()
        self._closing.set()
        await self._closed.wait()


class ReadyReplicas:
    """The engines that are ready in workers, and the replica set of the current attempt.

    Each attempt has a separate set, because versions never decrease within an attempt but may between two of them.
    """

    def __init__(self) -> None:
        self._ready: dict[str, AddReplica] = {}
        self._set: Ref[Replicas] | None = None

    @asynccontextmanager
    async def add(self, name: str, ref: Ref[Generation]) -> AsyncIterator[None]:
        """Register the engine ``name`` while the block lasts."""
        self._ready[name] = added = AddReplica(name=name, ref=ref)
        try:
            # Within the block: an engine that ends meanwhile must not be offered to the set of the next attempt.
            await self._tell(added)
            yield
        finally:
            self._ready.pop(name, None)

    @asynccontextmanager
    async def routed(
        self, system: ActorSystem, config: ReplicaSetConfig, *, version: int
    ) -> AsyncIterator[Ref[Generation]]:
        """Spawn a replica set for all engines in ``system``.

        Engines with weights older than ``version`` receive no requests.
        """
        replicas = await system.spawn(ReplicaSet(config, version=version), name="generation")
        self._set = replicas
        try:
            for added in tuple(self._ready.values()):
                await self._tell(added)
            yield replicas
        finally:
            self._set = None

    async def _tell(self, added: AddReplica) -> None:
        if self._set is not None:
            # The attempt is over; the next set adds all engines.
            with suppress(ActorStopped):
                await self._set.ask(added)
