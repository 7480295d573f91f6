"""The model: a service of real actors with simulated engines and agents around it, run for so long in virtual time."""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio
import httpx
from attrs import define, field, frozen
from benchmarks.simulation.agents import PROXY, Observed, ProxyCost, SimulatedAgent, VirtualProxy, Workload
from benchmarks.simulation.engines import EngineModel, SimulatedEngine
from benchmarks.simulation.meter import LOOP, Meter, Reading, virtual_run
from benchmarks.simulation.vocabulary import create_word_renderer

from areal_actors.domain import Problem, Snapshot
from areal_actors.generation.actor import GenerationActor
from areal_actors.generation.router import GenerationRouter
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.lib.process_limits import tuned_gc
from areal_actors.messages import (
    AcknowledgeLease,
    AddReplica,
    Capacity,
    DescribeSessions,
    Endpoint,
    Exports,
    Generation,
    LeaseGroups,
    PublishWeights,
    Sessions,
    VersionAdvanced,
)
from areal_actors.rendering import Renderer
from areal_actors.rollouts.capacity import CapacityGranter
from areal_actors.rollouts.exporter import Exporter, QueueConfig
from areal_actors.rollouts.runner import Peers, RolloutRunner, RolloutsConfig
from areal_actors.rollouts.staleness import CapacityLimits, CapacityState, StaleGroups
from areal_actors.sessions.manager import SessionManager

__all__ = [
    "ACTORS",
    "ENGINES",
    "Measured",
    "Scenario",
    "Service",
    "in_process_cores",
    "open_service",
    "run_scenario",
]

P = TypeVar("P")

ENGINES, TRAINER = "engines", "trainer"
ACTORS = ("capacity", "sessions", "router", "generation", "exports", "rollouts")
"""Labels of the actors that are ours, as the meter has them."""


@frozen(kw_only=True)
class Scenario:
    """What is simulated. About ``num_sessions`` live at once, in groups of ``group_size``."""

    num_sessions: int = 10_000
    num_engines: int = 1_000
    group_size: int = 8
    live_share: float = 0.45
    """Of a group's members, how many still run on the average: the others have ended, and wait for the slowest one."""
    max_staleness: int = 4
    train_seconds: float = 10.0
    """Of a step of the trainer, which takes as many groups as ``batch_size`` says."""
    warm_up_seconds: float = 60.0
    measured_seconds: float = 60.0
    workload: Workload = field(factory=Workload)
    engine: EngineModel = field(factory=EngineModel)
    proxy: ProxyCost = field(factory=ProxyCost)
    is_one_process: bool = False
    """Whether computing takes its time: that of one process, in which proxy and actors share a core."""
    is_external: bool = False
    """Whether agents come over the proxy from outside, one session after the other, with no group and no training."""
    backend: str = "asyncio"

    @property
    def num_groups(self) -> int:
        """Groups that run at once."""
        return max(round(self.num_sessions / self.group_size / self.live_share), 1)

    @property
    def batch_size(self) -> int:
        """Groups of a step: so many that what waits to be trained takes no place from what runs."""
        return max(-(-self.num_groups // max(self.max_staleness, 1)), 1)


@define(kw_only=True)
class Measured:
    """What happened while it was measured."""

    scenario: Scenario
    reading: Reading
    observed: Observed
    num_turns: int
    num_requests: int
    num_episodes: int
    num_live: int
    """Sessions that were live, on the average."""
    num_remembered: int
    """Sessions at the end, live or ended."""
    version: int
    longest: dict[str, float]
    """Seconds that each label kept the loop at most."""
    queues: dict[str, int]
    """The longest queue of each label, in messages that waited in a mailbox."""
    resident_bytes: int
    """Of the whole model, at the end, less what it was when nothing had begun."""
    wall_seconds: float


@frozen(kw_only=True)
class Service:
    """The actors."""

    system: ActorSystem
    sessions: Ref[Sessions]
    generation: Ref[Generation]
    capacity: Ref[Capacity]
    exports: Ref[Exports]
    spawn: Callable[..., Any]


def _limits(scenario: Scenario) -> CapacityLimits:
    if scenario.is_external:
        return CapacityLimits(max_concurrent=2**30, batch_size=2**30)
    return CapacityLimits(
        max_concurrent=scenario.num_groups, max_staleness=scenario.max_staleness, batch_size=scenario.batch_size
    )


@asynccontextmanager
async def open_service(scenario: Scenario, meter: Meter | None, *, renderer: Renderer) -> AsyncIterator[Service]:
    """The actors of a service, with simulated engines; metered, if there is a meter. Works with any clock."""
    tokens = itertools.count()
    async with ActorSystem.open() as system:

        async def spawn(actor: Any, label: str, name: str | None = None) -> Any:
            if meter is not None:
                meter.name_tasks(name or label, label)
                actor = meter.metered(actor, label)
            return await system.spawn(actor, name=name or label)

        engines = [
            await spawn(GenerationActor(_engine(scenario, renderer, index, meter)), "generation", f"generation-{index}")
            for index in range(scenario.num_engines)
        ]
        generation = await spawn(GenerationRouter(), "router")
        for index, engine in enumerate(engines):
            await generation.ask(AddReplica(name=f"generation-{index}", ref=engine))
        capacity = await spawn(CapacityGranter(CapacityState(limits=_limits(scenario))), "capacity")
        manager = SessionManager(
            renderer=renderer, generation=generation, capacity=capacity, token_factory=lambda: f"{next(tokens):08x}"
        )
        sessions = await spawn(manager, "sessions")
        # Steps that wait for the slowest would leave the actors less to do than they can.
        queue = QueueConfig(stale_groups=StaleGroups.TRAIN)
        exports = await spawn(Exporter(sessions=sessions, capacity=capacity, queue=queue), "exports")
        yield Service(
            system=system, sessions=sessions, generation=generation, capacity=capacity, exports=exports, spawn=spawn
        )


def _engine(scenario: Scenario, renderer: Renderer, index: int, meter: Meter | None) -> SimulatedEngine:
    kind = SimulatedEngine if meter is None else _metered_engine(meter)
    return kind(
        scenario.engine,
        name=f"simulated-{index}",
        stop_token_id=renderer.stop_token_ids[0],
        vocab_size=renderer.vocab_size,
    )


def _metered_engine(meter: Meter) -> type[SimulatedEngine]:
    """Engines whose own work is charged to nobody else."""

    class MeteredEngine(SimulatedEngine):
        async def _sample(self, request: Any) -> AsyncIterator[Any]:
            items = meter.items(super()._sample(request), ENGINES)
            async for item in items:
                yield item

    return MeteredEngine


# ------------------------------------------------------------------------------------------------ the run


class _Run:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario, renderer: Renderer) -> None:
        self.scenario = scenario
        self.renderer = renderer
        self.meter = Meter(occupying=_is_in_process if scenario.is_one_process else lambda _: False)
        self.observed = Observed(is_open=False)
        self.queues: dict[str, int] = {}
        self.version = 0
        self.lives: list[int] = []

    async def __call__(self) -> Measured:
        """Warm up, measure, and end."""
        started = time.perf_counter()
        async with (
            open_service(self.scenario, self.meter, renderer=self.renderer) as service,
            httpx.AsyncClient() as http,
        ):
            with tuned_gc():
                before = _resident_bytes()
                proxy = self._proxy(service)
                async with anyio.create_task_group() as tasks:
                    await self._start(service, proxy, tasks, http)
                    measured = await self._measure(service, proxy)
                    tasks.cancel_scope.cancel()
                await service.system.stop(grace=0)
        measured.resident_bytes -= before
        measured.wall_seconds = time.perf_counter() - started
        return measured

    def _proxy(self, service: Service) -> VirtualProxy:
        return VirtualProxy(
            sessions=service.sessions,
            exports=service.exports,
            capacity=service.capacity,
            meter=self.meter,
            cost=self.scenario.proxy,
        )

    async def _measure(self, service: Service, proxy: VirtualProxy) -> Measured:
        await anyio.sleep(self.scenario.warm_up_seconds)
        start, num_requests = self._read(), proxy.num_requests
        self.observed.is_open = True
        self.meter.longest.clear()
        await self._watch(service)
        reading = self._read().since(start)
        longest = dict(self.meter.longest)
        self.observed.is_open = False
        view = await service.sessions.ask(DescribeSessions())
        return Measured(
            scenario=self.scenario,
            reading=reading,
            observed=self.observed,
            num_turns=reading.num_of("Complete"),
            num_requests=proxy.num_requests - num_requests,
            num_episodes=reading.num_of("EndSession"),
            num_live=round(sum(self.lives) / len(self.lives)),
            num_remembered=view.num_live + view.num_ended,
            version=self.version,
            longest=longest,
            queues=self.queues,
            resident_bytes=_resident_bytes(),
            wall_seconds=0.0,
        )

    def _read(self) -> Reading:
        return self.meter.read(anyio.current_time())

    async def _watch(self, service: Service) -> None:
        """Look at the queues from time to time until the measured time is over."""
        end = anyio.current_time() + self.scenario.measured_seconds
        while (now := anyio.current_time()) < end:
            await anyio.sleep(min(1.0, end - now))
            self.lives.append(self.observed.num_live)
            for figures in service.system.statistics().actors:
                label = self.meter.label_of(figures.name)
                self.queues[label] = max(self.queues.get(label, 0), figures.num_queued)

    async def _start(self, service: Service, proxy: VirtualProxy, tasks: Any, http: httpx.AsyncClient) -> None:
        if self.scenario.is_external:
            for number in range(self.scenario.num_sessions):
                tasks.start_soon(self._come_and_go, proxy, number, name="simulation")
            return
        agent = SimulatedAgent(proxy, self.scenario.workload, self.observed, self.meter)
        runner = RolloutRunner(
            agent=agent,
            peers=Peers(sessions=service.sessions, exports=service.exports, capacity=service.capacity),
            endpoint=Endpoint(url="http://simulated", admin_key=""),
            http_client=http,
            config=RolloutsConfig(group_size=self.scenario.group_size, episode_timeout_seconds=7200.0),
            problem_at=lambda draw: Problem(position=draw.position, data={"position": draw.position}),
        )
        await service.spawn(runner, "rollouts")
        tasks.start_soon(self._train, service, name=TRAINER)

    async def _come_and_go(self, proxy: VirtualProxy, number: int) -> None:
        """One session after the other, as an external agent."""
        for episode in itertools.count():
            await proxy.live(f"s{number}-{episode}", workload=self.scenario.workload, observed=self.observed)

    async def _train(self, service: Service) -> None:
        """What the trainer says and when, without its arithmetic."""
        scenario = self.scenario
        while True:
            wanted = LeaseGroups(
                num_groups=scenario.batch_size, version=self.version, max_staleness=scenario.max_staleness
            )
            lease = await service.exports.ask(wanted)
            await anyio.sleep(scenario.train_seconds)
            self.version += 1
            snapshot = Snapshot(version=self.version, path=Path("weights"))
            await service.generation.ask(PublishWeights(snapshot=snapshot))
            await service.exports.ask(AcknowledgeLease(lease=lease.id))
            await service.capacity.tell(VersionAdvanced(version=self.version))


def _is_in_process(label: str) -> bool:
    """Whether a label's work occupies the process of a service that is one: all but agents and what only measures."""
    return label in ACTORS or label in (PROXY, LOOP, ENGINES)


def in_process_cores(reading: Reading) -> float:
    """Of that one process, the engines' pretence included."""
    return sum(spent for label, spent in reading.cpu.items() if _is_in_process(label)) / reading.at


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_scenario(scenario: Scenario) -> Measured:
    """Run it; as long as it takes."""
    run = _Run(scenario, create_word_renderer())
    return cast("Measured", virtual_run(run, meter=run.meter, backend=scenario.backend))
