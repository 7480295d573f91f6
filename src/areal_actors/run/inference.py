"""The actors between an agent and a model: engine, generation, capacity, sessions, exporter, and the proxy.

``open_inference`` opens them in the caller's event loop, asyncio or trio, and closes them when the block is left. The
roles of a run (``openers``) spawn the same actors with the functions below, each role its own part.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread
from attrs import asdict, evolve, field, frozen

from areal_actors.config import RunConfig
from areal_actors.dashboard.reporter import ProgressReporter
from areal_actors.domain import (
    Credential,
    DataPosition,
    Episode,
    InteractionId,
    JournalEvent,
    SessionId,
    TrainedModel,
)
from areal_actors.errors import ActorStopped
from areal_actors.generation import Engine, Snapshot
from areal_actors.generation.actor import GenerationActor
from areal_actors.generation.model_host import ModelHost, ModelsConfig, ModelStack
from areal_actors.generation.replicas import EngineSet, ReplicaSet
from areal_actors.generation.servers.config import ServedEngine
from areal_actors.generation.torch.config import TorchEngineConfig
from areal_actors.journal import (
    Journal,
    NoJournal,
    RecoveredSession,
    as_of,
    recover,
    restate,
    restore_groups,
)
from areal_actors.kernel import Actor, ActorSystem, Ref, root_cause
from areal_actors.lib.notebooks import Startable, format_table
from areal_actors.lib.plugins import PluginGroup, load_plugin, plugin_names
from areal_actors.messages import (
    Accounts,
    AddReplica,
    Capacity,
    DescribeEndpoint,
    Endpoint,
    EndSession,
    EpisodeFinished,
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
from areal_actors.proxy.metrics import ReadRun
from areal_actors.rendering import Renderer, RendererConfig, load_renderer
from areal_actors.rollouts.capacity import CapacityConfig, CapacityGranter
from areal_actors.rollouts.exporter import ExportConfig, Exporter, QueueConfig
from areal_actors.rollouts.group_journal import GroupJournal, RestoredQueue
from areal_actors.rollouts.runner import Peers, RolloutsConfig
from areal_actors.rollouts.staleness import CapacityLimits, CapacityState
from areal_actors.run.rollouts import RolloutEngine, open_rollouts
from areal_actors.sessions.intake import IntakeConfig, IntakeKeeper, IntakePeers
from areal_actors.sessions.manager import SessionManager, SessionsConfig
from areal_actors.training.advantages import has_signal
from areal_actors.training.config import AdvantageConfig
from areal_actors.workflows import GenerationConfig

FORGET_SECONDS = 5.0

UNLIMITED = 1_000_000
"""The number of open sessions allowed if they are not trained on."""


@frozen(kw_only=True)
class InferenceConfig:
    """The settings of the actors that answer agents. ``seed`` is the key of all samples.

    If ``models`` names a ``fileroot``, trained models can be asked in addition to the policy.
    """

    engine: TorchEngineConfig = field(factory=TorchEngineConfig)
    servers: ServedEngine | None = None
    """Inference servers that replace the embedded engine for the policy; trained models still use the latter."""
    renderer: RendererConfig = field(factory=RendererConfig)
    proxy: ProxyConfig = field(factory=ProxyConfig)
    sessions: SessionsConfig = field(factory=SessionsConfig)
    capacity: CapacityConfig = field(factory=CapacityConfig)
    export: ExportConfig = field(factory=ExportConfig)
    queue: QueueConfig = field(factory=QueueConfig)
    advantages: AdvantageConfig = field(factory=AdvantageConfig)
    """Settings that decide which groups have a training signal."""
    models: ModelsConfig = field(factory=ModelsConfig)
    intake: IntakeConfig | None = None
    """How external sessions are accepted for training; ``None`` if sessions are only stored and exported."""
    limits: CapacityLimits = field(
        factory=lambda: CapacityLimits(max_concurrent=UNLIMITED, batch_size=UNLIMITED, max_staleness=0)
    )
    create_accounts: Callable[[], Actor[Accounts]] | None = None
    """Creates the keeper of users and their keys (a plug-in); without it, there are no users."""
    seed: int = 0


@frozen(kw_only=True)
class SessionActors:
    """The actors that share the journal."""

    sessions: Ref[Sessions]
    exports: Ref[Exports]
    capacity: Ref[Capacity]
    intake: Ref[Intake] | None = None
    accounts: Ref[Accounts] | None = None
    """Users and their keys, if a plug-in keeps them."""

    @property
    def actors(self) -> dict[str, Ref[Any]]:
        """The open actors that a proxy needs, by the names under which other processes reach them."""
        found = {name: getattr(self, name) for name in ("sessions", "exports", "capacity", "intake", "accounts")}
        return {name: ref for name, ref in found.items() if ref is not None}


@frozen(kw_only=True)
class Inference(SessionActors):
    """The refs of the open actors, and the endpoint at which the proxy listens."""

    system: ActorSystem
    renderer: Renderer
    endpoint: Endpoint
    generation: Ref[Generation]
    serving: Ref[Serving]
    progress: Ref[Progress] | None = None

    def _repr_html_(self) -> str:
        """Return the endpoint and the actors as a table, for notebooks."""
        return format_table({"url": self.endpoint.url, "actors": ", ".join(self.actors)})

    def rollouts(
        self, *, gconfig: GenerationConfig | None = None, config: RolloutsConfig | None = None
    ) -> AbstractAsyncContextManager[RolloutEngine]:
        """Open an engine that runs agents and rollout workflows on request. Leaving the block cancels running ones.

        ::

            async with open_inference("tiny") as inference, inference.rollouts() as engine:
                running = [engine.submit(data=item, workflow=MyWorkflow, group_size=4) for item in problems]
                for rollout in running:
                    tensors = await rollout
        """
        return open_rollouts(
            self.system,
            self.generation,
            self.renderer,
            peers=Peers(sessions=self.sessions, exports=self.exports, capacity=self.capacity),
            endpoint=self.endpoint,
            config=config,
            gconfig=gconfig,
        )

    @asynccontextmanager
    async def session(self, task: str = "session") -> AsyncIterator[EmbeddedSession]:
        """Open a session for one trajectory: every request made with its key belongs to it. It is forgotten on exit."""
        opened = await self.sessions.ask(OpenSession(task=task))
        try:
            yield EmbeddedSession(opened=opened, inference=self)
        finally:
            # If the session manager has stopped, its error must not replace the error of the block.
            with anyio.move_on_after(FORGET_SECONDS, shield=True), suppress(ActorStopped):
                await self.sessions.ask(ForgetSession(session=opened.session))


@frozen(kw_only=True)
class EmbeddedSession:
    """A session for an application in this process: a base URL and key for any client, a reward, and training rows."""

    opened: SessionOpened
    inference: Inference = field(repr=False)

    @property
    def id(self) -> SessionId:
        """The session's id."""
        return self.opened.session

    @property
    def api_key(self) -> str:
        """The key to pass to an SDK as its API key. It also authorizes rewards and the end of the session."""
        return self.opened.api_key

    @property
    def completion_key(self) -> str:
        """The key for untrusted agents: it authorizes completions, but neither rewards nor the end of the session."""
        return self.opened.completion_key

    @property
    def base_url(self) -> str:
        """The base URL to pass to an OpenAI SDK."""
        return self.inference.endpoint.session_base_url(self.opened.session)

    def _repr_html_(self) -> str:
        """Return the session as a table without its keys, for notebooks."""
        return format_table({"session": self.id, "base_url": self.base_url})

    async def set_reward(self, reward: float, *, interaction: str | None = None) -> None:
        """Reward the last completed answer, or the one whose completion id is ``interaction``.

        Raises ``RewardError`` if the reward is not a number, or ``NotFound`` if the id is unknown.
        """
        named = None if interaction is None else InteractionId(interaction)
        await self.inference.sessions.ask(SetReward(credential=self._credential, reward=reward, interaction=named))

    async def export(self, *, discount: float | None = None, style: str | None = None) -> Episode:
        """End the session and return its training rows."""
        await self.inference.sessions.ask(EndSession(credential=self._credential))
        return await self.inference.exports.ask(
            ExportSession(session=self.opened.session, discount=discount, style=style)
        )

    @property
    def _credential(self) -> Credential:
        return Credential(session=self.opened.session, has_control=True)


def open_inference(model: str | Path, config: InferenceConfig | None = None) -> Startable[Inference]:
    """Serve ``model`` (a name that ``models`` knows, or a directory) from inside the running event loop.

    ::

        async with open_inference("tiny") as inference, inference.session() as session:
            client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)

    In a notebook, ``opening = open_inference("tiny")`` is held over cells with ``inference = await opening.start()``
    and ``await opening.aclose()``.

    Raises ``ModelError`` for a model that cannot be found or read, the block's own exception, and the error of an actor
    that crashes, which cancels the block.
    """
    return Startable(partial(_open_inference, model, config or InferenceConfig()))


@asynccontextmanager
async def _open_inference(model: str | Path, config: InferenceConfig) -> AsyncIterator[Inference]:
    # Loading blocks for seconds; other tasks of the caller's event loop continue.
    files = await to_thread.run_sync(resolve_model, str(model))
    renderer = await to_thread.run_sync(lambda: load_renderer(files.path, config=config.renderer))
    body: BaseException | None = None
    try:
        async with (
            open_engine(config.servers or config.engine, model=files.path, renderer=renderer) as engine,
            open_actors(config, engine=engine, renderer=renderer) as inference,
        ):
            try:
                yield inference
            except BaseException as error:
                body = error
                raise
    except ExceptionGroup as group:
        if group is body:
            raise
        # An actor has crashed. As with train(), `except ArealError` works in a program that embeds the actors.
        raise root_cause(group) from group
    finally:
        # Its traceback refers to this frame, which would make a reference cycle.
        del body


@asynccontextmanager
async def open_actors(
    config: InferenceConfig,
    *,
    engine: Engine | EngineSet,
    renderer: Renderer,
    progress: ProgressReporter | None = None,
    journal: Journal | None = None,
) -> AsyncIterator[Inference]:
    """Open the actors around an engine that is already open.

    ``progress`` is notified of the sessions that an intake accepts. The actions of external agents are written to
    ``journal``, and its content is restored first. Raises ``JournalError`` if the journal cannot be read.
    """
    async with ActorSystem.open() as system:
        generation = await spawn_generation(system, engine)
        reporter = None if progress is None else await system.spawn(progress, name="progress")
        actors = await spawn_session_actors(
            system,
            config,
            renderer=renderer,
            generation=generation,
            progress=reporter,
            journal=journal,
        )
        serving = await spawn_proxy(system, config, actors, renderer=renderer, generation=generation)
        yield Inference(
            **asdict(actors, recurse=False),
            system=system,
            renderer=renderer,
            endpoint=await serving.ask(DescribeEndpoint()),
            generation=generation,
            serving=serving,
            progress=reporter,
        )


def settings_of(config: RunConfig, *, proxy: ProxyConfig, intake: IntakeConfig | None) -> InferenceConfig:
    """Return the inference settings of a run."""
    return InferenceConfig(
        engine=config.embedded_engine,
        renderer=config.renderer,
        proxy=proxy,
        sessions=evolve(config.sessions, temperature_bounds=config.temperature_bounds),
        export=config.rollout.export,
        queue=config.queue,
        advantages=config.trainer.advantages,
        models=config.trained_models,
        intake=intake,
        # External agents are answered as long as the run lasts, even after the last step has its groups.
        limits=config.limits if intake is None else evolve(config.limits, max_groups=None),
        create_accounts=_accounts_of(config),
        seed=config.seed,
    )


def _accounts_of(config: RunConfig) -> Callable[[], Actor[Accounts]] | None:
    names = plugin_names(PluginGroup.ACCOUNTS)
    return partial(load_plugin(PluginGroup.ACCOUNTS, names[0]), config) if names else None


# -------------------------------------------------------------------------------------------------- actors


async def spawn_session_actors(
    system: ActorSystem,
    config: InferenceConfig,
    *,
    renderer: Renderer,
    generation: Ref[Generation],
    version: int = 0,
    start: DataPosition | None = None,
    progress: Ref[Progress] | None = None,
    journal: Journal | None = None,
    group_journal: GroupJournal | None = None,
    restored_queue: RestoredQueue | None = None,
) -> SessionActors:
    """Restore the content of ``journal`` and spawn the actors. Raises ``JournalError`` if it cannot be read.

    Groups of a dataset are written to ``group_journal``; ``restored_queue`` is what it had.
    """
    journal = journal or NoJournal()
    recovered, facts = await _read_journal(journal, version=version)
    restored = restore_groups(facts, version=version)
    del facts
    queue = restored_queue or RestoredQueue()
    state = CapacityState.at_version(config.limits, version)
    # Restored groups count as at their delivery, so that no more are admitted than in an undisturbed run.
    state = evolve(state, accepted=state.accepted + len(queue.held))
    capacity = await system.spawn(CapacityGranter(state, config=config.capacity), name="capacity")
    sessions = await _spawn_session_manager(
        system,
        config,
        renderer=renderer,
        generation=generation,
        capacity=capacity,
        journal=journal,
        recovered=recovered,
    )
    del recovered  # the manager owns the sessions from here on
    exporter = Exporter(
        sessions=sessions,
        capacity=capacity,
        config=config.export,
        queue=config.queue,
        has_signal=partial(has_signal, config=config.advantages),
        start=start,
        are_problems_external=config.intake is not None,
        journal=journal,
        group_journal=group_journal,
        restored=queue,
    )
    exports = await system.spawn(exporter, name="exports")
    if progress is not None:
        for stored in (*queue.held, *queue.rejected, *queue.parts):
            # Reports on versions from the resumed one on were removed when the reporter started.
            report = partial(
                EpisodeFinished,
                problem=stored.group.problem,
                version=stored.admitted,
                is_repeated=stored.admitted < version,
            )
            for episode in stored.group.episodes:
                await progress.tell(report(episode=episode))
    intake = None
    if config.intake is not None:
        peers = IntakePeers(sessions=sessions, exports=exports, capacity=capacity, progress=progress)
        settings = config.intake if start is None else evolve(config.intake, next_position=start.next)
        keeper = IntakeKeeper(peers=peers, config=settings, journal=journal, restored=restored, version=version)
        intake = await system.spawn(keeper, name="intake")
    accounts = None
    if config.create_accounts is not None:
        accounts = await system.spawn(config.create_accounts(), name="accounts")
    return SessionActors(
        sessions=sessions,
        exports=exports,
        capacity=capacity,
        intake=intake,
        accounts=accounts,
    )


async def _read_journal(
    journal: Journal, *, version: int
) -> tuple[Mapping[SessionId, RecoveredSession], list[JournalEvent]]:
    """Return the sessions in ``journal``, and the events from which groups are restored."""
    told = [fact async for fact in journal.read()]
    known = [as_of(fact, version) for fact in told]
    recovered = recover(known)
    # Weights newer than the checkpoint are lost, so their samples count as samples of ``version``. This is written to
    # the journal now, since the lost version numbers will be assigned again.
    again = restate(told, recovered, version=version)
    if again:
        await journal.write(*again)
    return recovered, known


async def _spawn_session_manager(system: ActorSystem, config: InferenceConfig, **options: Any) -> Ref[Sessions]:
    manager = SessionManager(config=config.sessions, seed=config.seed, **options)
    return await system.spawn(manager, name="sessions")


async def spawn_generation(
    system: ActorSystem, engine: Engine | EngineSet, *, name: str = "generation"
) -> Ref[Generation]:
    """Spawn the actor that owns ``engine``, which its caller opens and closes.

    The engines of a set have an actor each, and a replica set above them.
    """
    engines = engine.engines if isinstance(engine, EngineSet) else {name: engine}
    refs = {each: await system.spawn(GenerationActor(one), name=each) for each, one in engines.items()}
    if not isinstance(engine, EngineSet):
        return refs[name]
    generation = await system.spawn(ReplicaSet.of_engines(engine), name=name)
    for replica, ref in refs.items():
        await generation.ask(AddReplica(name=replica, ref=ref))
    return generation


async def spawn_proxy(
    system: ActorSystem,
    config: InferenceConfig,
    actors: SessionActors,
    *,
    renderer: Renderer,
    generation: Ref[Generation],
    read_run: ReadRun | None = None,
) -> Ref[Serving]:
    """Spawn the proxy, and the host of trained models if they are enabled.

    The host returns refs of the actors that it opens, so it has to be in the process of the proxy. ``read_run``
    is as in ``create_app``.
    """
    models: Ref[Models] | None = None
    if config.models.fileroot is not None and config.models.max_loaded:
        host = ModelHost(Catalogue(root=config.models.fileroot), partial(open_model, config), config=config.models)
        models = await system.spawn(host, name="models")
    proxy = ProxyServer(
        sessions=actors.sessions,
        exports=actors.exports,
        capacity=actors.capacity,
        generation=generation,
        intake=actors.intake,
        accounts=actors.accounts,
        models=models,
        config=config.proxy,
        token_bytes=renderer.token_bytes,
        read_run=read_run,
    )
    return await system.spawn(proxy, name="proxy")


@asynccontextmanager
async def open_model(config: InferenceConfig, model: TrainedModel) -> AsyncIterator[ModelStack]:
    """Open a trained model while the block lasts, in its own actor system. Files are read in threads.

    Raises ``ModelError`` for a model that cannot be read.
    """

    def load() -> Renderer:
        return load_renderer(resolve_model(str(model.path)).path, config=config.renderer)

    renderer = await to_thread.run_sync(load)
    async with (
        open_engine(config.engine, model=model.path, renderer=renderer, version=model.step or 0) as engine,
        ActorSystem.open(name=model.name) as system,
    ):
        generation = await spawn_generation(system, engine)
        sessions = await _spawn_session_manager(system, config, renderer=renderer, generation=generation)
        yield ModelStack(sessions=sessions, token_bytes=renderer.token_bytes)


# ---------------------------------------------------------------------------------------------------- engine


@asynccontextmanager
async def open_engine(
    config: TorchEngineConfig | ServedEngine,
    *,
    model: Any,
    renderer: Renderer,
    version: int = 0,
) -> AsyncIterator[Engine | EngineSet]:
    """Open the engine for ``model``, the directory of a model.

    The embedded engine also takes a transformers model that nothing else uses.
    """
    if isinstance(config, TorchEngineConfig):
        from areal_actors.generation.torch import TorchEngine

        async with TorchEngine.open(
            config, model=model, decode=renderer.decode, tokenizer=renderer.tokenizer, version=version
        ) as engine:
            yield engine
        return
    async with _open_servers(config, Path(model), version=version, renderer=renderer) as served:
        yield served


@asynccontextmanager
async def _open_servers(
    served: ServedEngine, model: Path, *, version: int, renderer: Renderer
) -> AsyncIterator[EngineSet]:
    from areal_actors.generation.servers.dialect import RoutedLayers
    from areal_actors.generation.servers.engine import open_server_engines
    from areal_actors.generation.servers.launching import find_kind, launch_servers

    kind, config = find_kind(served.backend), served.config
    # Servers need the added tokens for grammars that contain special tokens.
    added = renderer.tokenizer.get_added_tokens_decoder()
    added_tokens = {token.content: token_id for token_id, token in added.items()}
    recording = {"routed_layers": RoutedLayers.of(model)} if served.records_experts else {}
    async with AsyncExitStack() as stack:
        urls, launched = config.urls, None
        if not urls:
            logs = served.directory / "logs"
            launched = await stack.enter_async_context(
                launch_servers(
                    kind,
                    config,
                    model=model,
                    logs=logs,
                    adapters=served.adapters,
                    records_experts=served.records_experts,
                )
            )
            urls = launched.urls
        opening = open_server_engines(
            kind.create(added_tokens=added_tokens, stream_interval=config.stream_interval, **recording),
            config,
            urls=urls,
            model=model,
            snapshot=Snapshot(version=version, path=model),
            publish_directory=served.directory / "published",
            processes=launched,
            adapters=served.adapters,
            decode=renderer.decode,
        )
        yield await stack.enter_async_context(opening)
