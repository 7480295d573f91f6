"""Everything between an agent and a model: engine, generation, capacity, sessions, exporter, and the proxy before them.

``open_inference`` opens them inside the caller's event loop, asyncio or trio, and closes them with the block. Training
adds its own actors to the same system (``training``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

import anyio
from anyio import to_thread
from attrs import evolve, field, frozen

from areal_actors.actors.accounts import AccountKeeper, UsersConfig
from areal_actors.actors.capacity import CapacityConfig, CapacityGranter
from areal_actors.actors.exporter import ExportConfig, Exporter
from areal_actors.actors.generation import GenerationActor
from areal_actors.actors.intake import IntakeConfig, IntakeKeeper, IntakePeers
from areal_actors.actors.models import ModelHost, ModelsConfig
from areal_actors.actors.progress import ProgressReporter
from areal_actors.actors.sessions import SessionManager, SessionsConfig
from areal_actors.cache.journal import Journal, NoJournal, as_of, recover, restate, restore_groups
from areal_actors.cache.journal.recovery import Leftovers
from areal_actors.core import ActorSystem, Ref
from areal_actors.domain import Credential, DataPosition, Episode, InteractionId, SessionId
from areal_actors.engines import Engine
from areal_actors.engines.servers.config import ServedEngine
from areal_actors.engines.torch.config import TorchEngineConfig
from areal_actors.errors import ActorStopped
from areal_actors.messages import (
    Accounts,
    Capacity,
    DescribeEndpoint,
    Endpoint,
    EndSession,
    Exports,
    ExportSession,
    ForgetSession,
    Generation,
    Intake,
    Models,
    OpenSession,
    Progress,
    Serving,
    SessionOpened,
    Sessions,
    SetReward,
)
from areal_actors.models import Catalogue, resolve_model
from areal_actors.proxy import ProxyConfig, ProxyServer
from areal_actors.rendering import Renderer, RendererConfig, load_renderer
from areal_actors.run.by_hand import RolloutEngine, open_rollouts
from areal_actors.run.models import ModelOpener, open_engine
from areal_actors.staleness import CapacityLimits, CapacityState
from areal_actors.workflows import GenerationConfig

__all__ = ["EmbeddedSession", "Inference", "InferenceConfig", "open_actors", "open_engine", "open_inference"]

FORGET_SECONDS = 5.0

UNLIMITED = 1_000_000
"""Sessions that may be open where nobody trains on them."""


@frozen(kw_only=True)
class InferenceConfig:
    """The settings of what answers agents. ``seed`` keys all samples.

    Trained models answer beside the policy where ``models`` names a ``fileroot``.
    """

    engine: TorchEngineConfig = field(factory=TorchEngineConfig)
    servers: ServedEngine | None = None
    """What answers in the place of the embedded engine, which trained models have all the same."""
    renderer: RendererConfig = field(factory=RendererConfig)
    proxy: ProxyConfig = field(factory=ProxyConfig)
    sessions: SessionsConfig = field(factory=SessionsConfig)
    capacity: CapacityConfig = field(factory=CapacityConfig)
    export: ExportConfig = field(factory=ExportConfig)
    models: ModelsConfig = field(factory=ModelsConfig)
    intake: IntakeConfig | None = None
    """How external sessions are taken in; without it, they are only remembered and exported."""
    limits: CapacityLimits = field(
        factory=lambda: CapacityLimits(max_concurrent=UNLIMITED, batch_size=UNLIMITED, max_staleness=0)
    )
    users: UsersConfig = field(factory=UsersConfig)
    """Without a path, there are no users."""
    seed: int = 0

    @property
    def opener(self) -> ModelOpener:
        """What opens a trained model, with the settings of the policy."""
        return ModelOpener(engine=self.engine, renderer=self.renderer, sessions=self.sessions, seed=self.seed)


@frozen(kw_only=True)
class Inference:
    """What is open: the actors' refs, and where the proxy listens.

    ``leftovers`` is what the journal's earlier processes left to be done beside the sessions, which live on.
    """

    system: ActorSystem
    renderer: Renderer
    endpoint: Endpoint
    sessions: Ref[Sessions]
    exports: Ref[Exports]
    capacity: Ref[Capacity]
    generation: Ref[Generation]
    serving: Ref[Serving]
    progress: Ref[Progress] | None = None
    intake: Ref[Intake] | None = None
    accounts: Ref[Accounts] | None = None
    """Users and their keys, where a file for them was named."""
    leftovers: Leftovers = field(factory=Leftovers)

    def rollouts(self, *, gconfig: GenerationConfig | None = None) -> AbstractAsyncContextManager[RolloutEngine]:
        """An engine that runs agents and rollout workflows by hand; what still runs ends with the block."""
        return open_rollouts(self, gconfig=gconfig)

    @asynccontextmanager
    async def session(self, task: str = "session") -> AsyncIterator[EmbeddedSession]:
        """One trajectory: whatever is asked with its key belongs to it. It is forgotten when the block ends."""
        opened = await self.sessions.ask(OpenSession(task=task))
        try:
            yield EmbeddedSession(opened=opened, inference=self)
        finally:
            # The block's own error must not hide behind that of a session manager which has stopped.
            with anyio.move_on_after(FORGET_SECONDS, shield=True), suppress(ActorStopped):
                await self.sessions.tell(ForgetSession(session=opened.session))


@frozen(kw_only=True)
class EmbeddedSession:
    """A session for somebody's own app: a base URL and a key for any client, a reward, and the rows to train on."""

    opened: SessionOpened
    inference: Inference = field(repr=False)

    @property
    def id(self) -> SessionId:
        """The session's id."""
        return self.opened.session

    @property
    def api_key(self) -> str:
        """What an SDK takes as its API key."""
        return self.opened.api_key

    @property
    def base_url(self) -> str:
        """What an OpenAI SDK takes as its base URL."""
        return self.inference.endpoint.session_base_url(self.opened.session)

    async def set_reward(self, reward: float, *, interaction: str | None = None) -> None:
        """Reward the last completed answer, or the one with the id ``interaction`` (the completion's id).

        Raises ``RewardError`` or ``NotFound`` for a reward that is no number or an id that is unknown.
        """
        named = None if interaction is None else InteractionId(interaction)
        await self.inference.sessions.ask(SetReward(credential=self._credential, reward=reward, interaction=named))

    async def export(self, *, discount: float | None = None, style: str | None = None) -> Episode:
        """End the session and build its training rows."""
        await self.inference.sessions.ask(EndSession(credential=self._credential))
        return await self.inference.exports.ask(
            ExportSession(session=self.opened.session, discount=discount, style=style)
        )

    @property
    def _credential(self) -> Credential:
        return Credential(session=self.opened.session)


@asynccontextmanager
async def open_actors(
    config: InferenceConfig,
    *,
    engine: Engine,
    renderer: Renderer,
    version: int = 0,
    start: DataPosition | None = None,
    progress: ProgressReporter | None = None,
    journal: Journal | None = None,
) -> AsyncIterator[Inference]:
    """The actors around an engine that is open already. ``version`` and ``start`` are where a resumed run stands.

    ``progress`` hears of the sessions that an intake takes in. What external agents do is written to ``journal``, and
    what it holds is restored first. Raises ``JournalError`` if it cannot be read.
    """
    journal = journal or NoJournal()
    told = [fact async for fact in journal.read()]
    facts = [as_of(fact, version) for fact in told]
    recovered, restored = recover(facts), restore_groups(facts, version=version)
    again = restate(told, recovered, version=version)
    if again:
        await journal.write(*again)
    leftovers = recovered.leftovers
    del told, facts
    async with ActorSystem.open() as system:
        generation = await system.spawn(GenerationActor(engine), name="generation")
        state = CapacityState.at_version(config.limits, version)
        capacity = await system.spawn(CapacityGranter(state, config=config.capacity), name="capacity")
        manager = SessionManager(
            renderer=renderer,
            generation=generation,
            capacity=capacity,
            config=config.sessions,
            seed=config.seed,
            journal=journal,
            recovered=recovered,
        )
        del recovered  # the manager owns the sessions from here on
        sessions = await system.spawn(manager, name="sessions")
        exporter = Exporter(
            sessions=sessions,
            capacity=capacity,
            config=config.export,
            start=start,
            are_problems_external=config.intake is not None,
            journal=journal,
        )
        exports = await system.spawn(exporter, name="exports")
        reporter = None if progress is None else await system.spawn(progress, name="progress")
        intake = None
        if config.intake is not None:
            peers = IntakePeers(sessions=sessions, exports=exports, capacity=capacity, progress=reporter)
            settings = config.intake if start is None else evolve(config.intake, next_position=start.next)
            keeper = IntakeKeeper(peers=peers, config=settings, journal=journal, restored=restored, version=version)
            intake = await system.spawn(keeper, name="intake")
        accounts = None
        if config.users.path is not None:
            accounts = await system.spawn(AccountKeeper(config.users.path, config=config.users), name="accounts")
        models = await _spawn_models(system, config)
        proxy = ProxyServer(
            sessions=sessions,
            exports=exports,
            capacity=capacity,
            generation=generation,
            intake=intake,
            accounts=accounts,
            models=models,
            config=config.proxy,
            decode=renderer.decode,
        )
        serving = await system.spawn(proxy, name="proxy")
        yield Inference(
            system=system,
            renderer=renderer,
            endpoint=await serving.ask(DescribeEndpoint()),
            sessions=sessions,
            exports=exports,
            capacity=capacity,
            generation=generation,
            serving=serving,
            intake=intake,
            progress=reporter,
            accounts=accounts,
            leftovers=leftovers,
        )


async def _spawn_models(system: ActorSystem, config: InferenceConfig) -> Ref[Models] | None:
    if config.models.fileroot is None or not config.models.max_loaded:
        return None
    host = ModelHost(Catalogue(root=config.models.fileroot), config.opener, config=config.models)
    return await system.spawn(host, name="models")


@asynccontextmanager
async def open_inference(model: str | Path, config: InferenceConfig | None = None) -> AsyncIterator[Inference]:
    """Serve ``model`` (a name that ``models`` knows, or a directory) from inside the running event loop.

    ::

        async with open_inference("tiny") as inference, inference.session() as session:
            client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)

    Raises ``ModelError`` for a model that cannot be found or read.
    """
    config = config or InferenceConfig()
    files = await to_thread.run_sync(resolve_model, str(model))
    renderer = await to_thread.run_sync(lambda: load_renderer(files.path, config=config.renderer))
    async with (
        open_engine(config.servers or config.engine, model=files.path, renderer=renderer) as engine,
        open_actors(config, engine=engine, renderer=renderer) as inference,
    ):
        yield inference
