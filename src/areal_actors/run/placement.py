"""A run whose roles live in processes of their own: the same actors, composed wherever they are.

::

    home ─┬─ directory, listener, scheduler ............................ as long as the run
          ├─ proxies, engines: workers that are replaced alone ......... as long as the run
          └─ attempt 1, 2, … : one after another, each from the newest checkpoint
               ├─ reporter, router of engines, roles that live at home
               └─ sessions, trainer, rollout: workers that share one fate

An engine that dies loses what it was sampling, which goes on at another one; a proxy, its connections. Sessions,
trainer and rollouts know things of one another that no checkpoint has: if one of them is lost, the others are ended,
and a new attempt goes on as ``--resume`` does.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup
from attrs import evolve, field, frozen

from areal_actors.actors.directory import DirectoryActor
from areal_actors.actors.replicas import RouterConfig
from areal_actors.actors.trainer import parse_position
from areal_actors.config import RunConfig
from areal_actors.core import ActorSystem, Ref
from areal_actors.core.failure import root_cause
from areal_actors.core.remote import Line, Listener, listen, standing
from areal_actors.dashboard import RunDirectory
from areal_actors.domain import DataPosition, Role
from areal_actors.errors import CheckpointError, ConfigError, SchedulerError, Unreachable
from areal_actors.messages import (
    AwaitEndpoint,
    AwaitReady,
    AwaitTraining,
    Directory,
    Endpoint,
    EndpointChanged,
    Generation,
    Order,
    Progress,
    Report,
    Training,
    TrainingSummary,
)
from areal_actors.proxy import ProxyConfig
from areal_actors.proxy.auth import create_admin_key
from areal_actors.proxy.config import is_loopback
from areal_actors.proxy.server import bind, url_of
from areal_actors.run.doorway import handing_out
from areal_actors.run.job import load_rendering
from areal_actors.run.learning import save_results
from areal_actors.run.parts import create_reporter
from areal_actors.run.replicas import ServingReplicas
from areal_actors.run.roles import HOMES, LEAVING, REPLICA, Post, has_rollouts, open_role
from areal_actors.run.signals import stop_on_signals
from areal_actors.run.upkeep import Household, Restarts, find_final
from areal_actors.schedulers.base import Home, Scheduler
from areal_actors.schedulers.config import RoleConfig, SchedulerConfig, SchedulerType
from areal_actors.schedulers.local import LocalScheduler
from areal_actors.schedulers.slurm import SlurmScheduler
from areal_actors.telemetry import get_logger
from areal_actors.workflows import Agent, RolloutWorkflow

__all__ = ["PlacedRun", "home_address", "run_placed"]

_log = get_logger(__name__)

P = TypeVar("P")

_CAUSE_SECONDS = 2.0
"""How long a failure that may be the consequence of another one waits for that one to be seen."""


@frozen(kw_only=True)
class PlacedRun:
    """What to run. ``agent`` is run at home, if rollouts live there; ``announce`` is called when agents may come."""

    config: RunConfig
    directory: RunDirectory
    agent: Agent | RolloutWorkflow | None = None
    is_service: bool = False
    resume: bool = False
    admin_key: str | None = field(default=None, repr=False)
    announce: Callable[[Endpoint], Awaitable[None]] | None = None
    is_handling_signals: bool = False

    @property
    def placed(self) -> dict[Role, RoleConfig]:
        """The roles that live in workers."""
        roles = self.config.scheduler.roles.placed
        if not has_rollouts(self.config, is_service=self.is_service):
            roles.pop(Role.ROLLOUT, None)
        return roles

    @property
    def at_home(self) -> tuple[Role, ...]:
        """The roles that do not."""
        return tuple(role for role in Role if role not in self.placed)


async def run_placed(run: PlacedRun) -> None:
    """Train until the end, and save the results. Raises ``ArealError`` with what went wrong."""
    async with _open_house(run) as house:
        await house.train()


class _Lost(Exception):
    """A worker is gone, and with it the attempt."""


class _House:
    """Home, while the run lasts."""

    def __init__(
        self,
        run: PlacedRun,
        *,
        household: Household,
        directory: Ref[Directory],
        listener: Listener,
        secret: bytes,
        sockets: Path | None,
        endpoint: Endpoint | None,
    ) -> None:
        self.run = run
        self.household = household
        self.directory = directory
        self.listener = listener
        self.secret = secret
        self._sockets = sockets
        self._endpoint = endpoint
        self._admin_key = run.config.proxy.admin_key or run.admin_key or create_admin_key()
        self._replicas = ServingReplicas()
        self._num_attempts = 0
        self._is_announced = False
        self.is_done = False
        """Whether the results are saved; what fails while the rest is ended is nobody's loss."""

    @property
    def alone(self) -> tuple[Role, ...]:
        """Workers that are replaced without anybody else. A proxy that comes back elsewhere is found by nobody."""
        return (Role.GENERATION,) if self._sockets is None else (Role.GENERATION, Role.PROXY)

    def order(self, role: Role, name: str, **options: Any) -> Order:
        """What the worker of this name is to be."""
        run = self.run
        return Order(
            role=role,
            config=run.directory.config.absolute(),
            directory=run.directory.path.absolute(),
            lease_seconds=run.config.scheduler.lease_seconds,
            at_home=run.at_home,
            has_intake=run.is_service,
            has_rollouts=has_rollouts(run.config, is_service=run.is_service),
            listen=None if self._sockets is None else f"unix:{self._sockets}/{name}.sock",
            endpoint=self._endpoint,
            admin_key=self._admin_key if role is Role.PROXY and role in run.placed else None,
            # A proxy at home listens by itself.
            doorway=self._sockets / "doorway.sock" if self._sockets and Role.PROXY in run.placed else None,
            **options,
        )

    def start_lone_workers(self, tasks: TaskGroup) -> None:
        """Keep proxies and engines up from now on."""
        for role in self.alone:
            config = self.run.placed.get(role)
            if config is not None:
                for index in range(config.replicas):
                    tasks.start_soon(self._keep, role, f"{role}-{index}", config)

    async def _keep(self, role: Role, name: str, config: RoleConfig) -> None:
        while_ready = partial(self._serving, name) if role is Role.GENERATION else nullcontext
        await self.household.keep(name, self.order(role, name), config, while_ready=while_ready)

    @asynccontextmanager
    async def _serving(self, name: str, report: Report) -> AsyncIterator[None]:
        """An engine that serves is one of the replicas."""

        async def locate() -> str:
            return report.address

        async with (
            standing(locate, secret=self.secret, target=name, node="home") as line,
            self._replicas.having(name, line.ref(Generation, REPLICA)),
        ):
            yield

    # ---------------------------------------------------------------------------------------------- attempts

    async def train(self) -> None:
        """One attempt after another, until one comes to the end."""
        restarts = Restarts(self.run.config.scheduler.restarts)
        while True:
            try:
                return await self._attempt()
            except Exception as error:
                if self.is_done:
                    _log.info("ended_untidily", reason=str(root_cause(error)))
                    return None
                final = find_final(error)
                if final is not None:
                    raise final from error
                cause = root_cause(error)
                if not restarts.allow(now=anyio.current_time()):
                    raise SchedulerError(f"{cause} The run ends after {restarts.describe()}.") from error
                _log.warning("run_begins_anew", attempt=self._num_attempts + 1, cause=str(cause))

    async def _attempt(self) -> None:
        self._num_attempts += 1
        checkpoint, start = await to_thread.run_sync(self._find_checkpoint)
        begin = partial(self.order, attempt=self._num_attempts, checkpoint=checkpoint, start=start)
        async with anyio.create_task_group() as tasks:
            for role, config in self.run.placed.items():
                if role not in self.alone:
                    tasks.start_soon(self._share_fate, begin(role, f"{role}-0"), config)
            try:
                await _Attempt(self, begin, self._replicas).run()
            except Exception as error:
                if find_final(error) is None:  # a worker whose end is seen in a moment says more
                    await anyio.sleep(_CAUSE_SECONDS)
                raise
            tasks.cancel_scope.cancel()

    async def _share_fate(self, order: Order, config: RoleConfig) -> None:
        ending = await self.household.live(f"{order.role}-0", order, config)
        final = None if ending.error is None else find_final(ending.error)
        if final is not None:
            raise final
        if ending.error is not None:
            await anyio.sleep(_CAUSE_SECONDS)  # it missed somebody, perhaps, who is the cause
        raise _Lost(str(ending))

    def _find_checkpoint(self) -> tuple[int | None, DataPosition]:
        """The step to go on from; ``None`` is the beginning."""
        from areal_actors.training.checkpoints import find_latest

        run = self.run
        is_first = self._num_attempts == 1
        found = None if is_first and not run.resume else find_latest(run.directory.checkpoints)
        if found is not None:
            return found.step, parse_position(found.counters["caller"])
        if is_first and run.resume and not run.is_service:
            raise CheckpointError(
                f"There is no complete checkpoint in {run.directory.checkpoints} to go on from; leave --resume out."
            )
        return None, DataPosition()

    async def note_endpoint(self, endpoint: Endpoint) -> None:
        """A proxy at home listens; the next one takes its place."""
        self._endpoint = endpoint
        await self.directory.ask(EndpointChanged(endpoint=endpoint))

    async def announce(self) -> None:
        """Say once that agents may come."""
        endpoint = await self.directory.ask(AwaitEndpoint())
        if self.run.announce is not None and not self._is_announced:
            self._is_announced = True
            await self.run.announce(endpoint)


class _Attempt:
    """What of one attempt lives at home, and how it reaches the rest."""

    def __init__(self, house: _House, begin: Callable[..., Order], replicas: ServingReplicas) -> None:
        self._house = house
        self._run = house.run
        self._begin = begin
        self._replicas = replicas
        self._local: dict[str, Ref[Any]] = {"directory": house.directory}
        self._lines: dict[Role, Line] = {}
        self._arrived = anyio.Event()

    async def run(self) -> None:
        """Train, and save the results."""
        async with AsyncExitStack() as stack:
            await self._open_lines(stack)  # they are closed when nobody here asks any more
            system = await stack.enter_async_context(ActorSystem.open(name="home"))
            await self._spawn_own(system, stack)
            tasks = await stack.enter_async_context(anyio.create_task_group())
            for role in self._run.at_home:
                if self._is_opened_here(role):
                    tasks.start_soon(self._hold, role, system)
            training = await self.find(Training, "trainer")
            stops = self._run.is_handling_signals
            async with stop_on_signals(training) if stops else nullcontext():
                tasks.start_soon(self._house.announce)
                summary = await _await_training(training)
            await save_results(self._run.directory, training, await self.find(Progress, "progress"), summary)
            self._house.is_done = True
            tasks.cancel_scope.cancel()

    def _is_opened_here(self, role: Role) -> bool:
        return role is not Role.ROLLOUT or has_rollouts(self._run.config, is_service=self._run.is_service)

    async def find(self, protocol: type[P], name: str, /) -> Ref[P]:
        """See ``roles.Finder``."""
        role = HOMES[name]
        if role is not None and role in self._lines:
            return self._lines[role].ref(protocol, name)
        while name not in self._local:
            await self._arrived.wait()
        return cast("Ref[P]", self._local[name])

    async def _open_lines(self, stack: AsyncExitStack) -> None:
        for role in self._run.placed:
            if role in self._house.alone:
                continue
            worker = f"{role}-0"
            line = standing(partial(self._locate, worker), secret=self._house.secret, target=worker, node="home")
            self._lines[role] = await stack.enter_async_context(line)

    async def _locate(self, worker: str) -> str:
        return (await self._house.directory.ask(AwaitReady(worker=worker))).address

    async def _spawn_own(self, system: ActorSystem, stack: AsyncExitStack) -> None:
        """The reporter, and what stands for all engines."""
        run = self._run
        renderer = await to_thread.run_sync(load_rendering, run.config)
        checkpoint = self._begin(Role.TRAINER, "home").checkpoint
        reporter = create_reporter(run.config, run.directory, decode=renderer.decode, resumed_step=checkpoint)
        self._have({"progress": await system.spawn(reporter, name="progress")})
        if Role.GENERATION in run.placed:
            # A worker may take its time to start.
            router = RouterConfig(wait_seconds=run.config.scheduler.start_seconds)
            routed = self._replicas.routed(system, router, version=checkpoint or 0)
            generation = await stack.enter_async_context(routed)
            self._have({"generation": generation})

    async def _hold(self, role: Role, system: ActorSystem) -> None:
        """Open a role here, and keep it open."""
        order = self._begin(role, "home")
        agent = self._run.agent if role is Role.ROLLOUT else None
        config = evolve(self._run.config, proxy=self._proxy_config()) if role is Role.PROXY else self._run.config
        async with open_role(Post(config=config, order=order, system=system, find=self.find, agent=agent)) as opened:
            # At home, the one engine needs no router before it.
            self._have({"generation" if name == REPLICA else name: ref for name, ref in opened.actors.items()})
            if opened.endpoint is not None:
                await self._house.note_endpoint(opened.endpoint)
            await anyio.sleep_forever()

    def _proxy_config(self) -> ProxyConfig:
        proxy = self._run.config.proxy
        return evolve(proxy, admin_key=proxy.admin_key or self._run.admin_key)

    def _have(self, actors: Mapping[str, Ref[Any]]) -> None:
        for name, ref in actors.items():
            self._local[name] = ref
            self._house.listener.expose(name, ref)
        self._arrived.set()
        self._arrived = anyio.Event()


async def _await_training(training: Ref[Training]) -> TrainingSummary:
    """To ask again is harmless; whether the trainer still lives is seen by others."""
    while True:
        try:
            summary = await training.ask(AwaitTraining())
            if summary.stop_reason != LEAVING or summary.is_finished:
                return summary
            await anyio.sleep_forever()  # its worker ends in a moment, and with it the attempt
        except Unreachable as error:
            _log.info("trainer_out_of_reach", reason=str(error))
            await anyio.sleep(_CAUSE_SECONDS)


# ------------------------------------------------------------------------------------------------ the house


@asynccontextmanager
async def _open_house(run: PlacedRun) -> AsyncIterator[_House]:
    config, secret = run.config.scheduler, secrets.token_bytes(32)
    async with AsyncExitStack() as stack:
        # A path of its own: that of a run may be longer than the name of a socket can be.
        sockets = Path(stack.enter_context(TemporaryDirectory(prefix="areal-")))
        system = await stack.enter_async_context(ActorSystem.open(name="home"))
        directory = await system.spawn(DirectoryActor(), name="directory")
        listener = await stack.enter_async_context(
            listen(home_address(config, sockets), secret=secret, expose={"directory": directory}, node="home")
        )
        scheduler = await stack.enter_async_context(_open_scheduler(config, run))
        home = Home(addresses=(listener.address,), secret=secret)
        is_local = listener.address.startswith("unix:")
        endpoint = None
        if is_local and Role.PROXY in run.placed:
            endpoint = await stack.enter_async_context(_open_doorway(run, sockets / "doorway.sock"))
        house = _House(
            run,
            household=Household(scheduler, directory, home, config),
            directory=directory,
            listener=listener,
            secret=secret,
            sockets=sockets if is_local else None,
            endpoint=endpoint,
        )
        tasks = await stack.enter_async_context(anyio.create_task_group())
        house.start_lone_workers(tasks)
        yield house
        tasks.cancel_scope.cancel()


def home_address(config: SchedulerConfig, sockets: Path) -> str:
    """Where home listens; sockets lie in ``sockets``. Raises ``ConfigError`` for a host that nobody would find."""
    if config.address is not None:
        return config.address
    if config.type is SchedulerType.LOCAL:
        return f"unix:{sockets}/home.sock"
    try:
        host = socket.gethostbyname(socket.gethostname())
    except OSError:
        host = "127.0.0.1"
    if is_loopback(host):
        raise ConfigError(
            "scheduler.address: this host knows itself by no address that other machines reach; name one of its "
            "interfaces, as tcp://10.0.0.7:0"
        )
    return f"tcp://{host}:0"


def _open_scheduler(config: SchedulerConfig, run: PlacedRun) -> AbstractAsyncContextManager[Scheduler]:
    if config.type is SchedulerType.SLURM:
        return SlurmScheduler.open(config.slurm, directory=run.directory.path)
    return _open_local(config, run)


@asynccontextmanager
async def _open_local(config: SchedulerConfig, run: PlacedRun) -> AsyncIterator[Scheduler]:
    """Children of this process; all of them have to find room at once, because each waits for the others."""
    async with LocalScheduler.open(config.local, logs=run.directory.logs / "workers") as scheduler:
        wanted = [role.resources for role in run.placed.values() for _ in range(role.replicas)]
        scheduler.inventory.check(f"The roles {', '.join(run.placed)} of the run", *wanted)
        yield scheduler


@asynccontextmanager
async def _open_doorway(run: PlacedRun, path: Path) -> AsyncIterator[Endpoint]:
    """Where agents are answered, by whichever proxies there are, and the key that opens them."""
    proxy = run.config.proxy
    key = proxy.admin_key or run.admin_key or create_admin_key()
    with bind(evolve(proxy, admin_key=key)) as listener:
        async with handing_out(listener, path):
            yield Endpoint(url=url_of(listener, proxy.public_host), admin_key=key)
