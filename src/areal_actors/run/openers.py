"""The openers of a run's roles, each called in the process of its role: a worker, or the controller.

A role does not know where the other roles are. It requests a ref by name, and the ref finds the actor in whichever
process it is, also after it has moved. Each role has its own actor system, which closes before the resources that its
actors use (engine, journal, agent): actors stop first, so a proxy answers its pending requests, and journal writes are
saved.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from anyio import to_thread
from attrs import evolve, field, frozen

from areal_actors.client import create_agent_http_client
from areal_actors.config import RunConfig
from areal_actors.dashboard import RunDirectory, read_gauges
from areal_actors.domain import Role, Snapshot
from areal_actors.errors import JournalError
from areal_actors.generation.servers.config import Backend
from areal_actors.journal import SqliteJournal
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.lib.openmp import settle_team
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import (
    Accounts,
    AwaitEndpoint,
    AwaitWeights,
    Capacity,
    DescribeEndpoint,
    DescribeEngine,
    Directory,
    Endpoint,
    Exports,
    Generation,
    Intake,
    Progress,
    PublishWeights,
    RoleSpec,
    Rollouts,
    Sessions,
    WeightsPublished,
)
from areal_actors.models import resolve_model, resolve_tokenizer
from areal_actors.rendering import Renderer
from areal_actors.rollouts.group_journal import GroupJournal, RestoredQueue, restore_queue
from areal_actors.rollouts.runner import Agents, Peers, RolloutRunner
from areal_actors.run.advice import size_setting, warn_of_length, warn_of_singletons
from areal_actors.run.checks import check_capture_of
from areal_actors.run.directory import sampling_digest
from areal_actors.run.exporting import load_trained, save_weights
from areal_actors.run.inference import (
    SessionActors,
    open_engine,
    settings_of,
    spawn_generation,
    spawn_proxy,
    spawn_session_actors,
)
from areal_actors.run.job import (
    Job,
    create_policy,
    load_problem_sets,
    load_supervised,
    open_group_teacher,
    prepare_agents,
)
from areal_actors.run.loop import train
from areal_actors.run.plan import REPLICA, Finder
from areal_actors.run.ranks import RankOpener, open_ranks
from areal_actors.training.config import PublishBy
from areal_actors.workflows import EpisodeEngine, RolloutWorkflow, direct_connections

if TYPE_CHECKING:
    from areal_actors.run.conversations import SupervisedData
    from areal_actors.training.publication import Publisher
    from areal_actors.training.trainer import PolicyTrainer

_log = get_logger(__name__)


@frozen(kw_only=True)
class RoleContext:
    """The settings and surroundings of a role that is opened.

    ``name`` is the node name of its actors. ``agents`` and ``supervised`` are those passed in by the caller of the run;
    otherwise the role loads what the configuration names.
    """

    name: str
    config: RunConfig
    spec: RoleSpec
    renderer: Renderer
    find: Finder
    agents: Agents | None = None
    supervised: SupervisedData | None = None
    open_ranks: RankOpener = open_ranks
    """Starts or awaits the other processes of a training gang."""

    @property
    def answers_first(self) -> bool:
        """Whether agents are answered before the trainer is opened, which takes several times as long.

        Then the engine begins with the weights of the files: a service that is started again in one process does this.
        A service that has never run waits for its trainer, so that one that fails because of its settings has accepted
        no session. Weights that the trainer has to merge, or that servers need, are published by it.
        """
        config, spec = self.config, self.spec
        together = {Role.GENERATION, Role.SESSIONS, Role.PROXY, Role.TRAINER} <= set(spec.local_roles)
        is_plain = config.served_engine(self.directory.path) is None and config.trainer.lora is None
        return spec.has_intake and spec.has_begun and together and is_plain

    @property
    def directory(self) -> RunDirectory:
        """The run's directory."""
        return RunDirectory(path=self.spec.directory)


@frozen(kw_only=True)
class OpenRole:
    """The actors of an open role, by the names under which other processes reach them."""

    actors: Mapping[str, Ref[Any]] = field(factory=dict)
    endpoint: Endpoint | None = None


def open_role(context: RoleContext) -> AbstractAsyncContextManager[OpenRole]:
    """Open the role of ``context`` while the block lasts. Raises the errors of its parts."""
    return _OPENERS[context.spec.role](context)


# ---------------------------------------------------------------------------------------------------- inference


@asynccontextmanager
async def _open_generation(context: RoleContext) -> AsyncIterator[OpenRole]:
    """Open an engine with the initial weights of the model; the trainer publishes newer ones."""
    config = context.config
    files = await to_thread.run_sync(resolve_model, config.model)
    served = config.served_engine(context.directory.path)
    async with (
        open_engine(served or config.embedded_engine, model=files.path, renderer=context.renderer) as engine,
        ActorSystem.open(name=context.name) as system,
    ):
        generation = await spawn_generation(system, engine, name=REPLICA)
        if context.answers_first:
            if (step := context.spec.checkpoint) is not None:

                def read() -> Snapshot:
                    from areal_actors.training.stored_checkpoints import find_checkpoint

                    found = find_checkpoint(context.directory.checkpoints, step)
                    return Snapshot(version=step, state=found.load("model"))

                await generation.ask(PublishWeights(snapshot=await to_thread.run_sync(read)))
            await (await context.find(Directory, "directory")).ask(WeightsPublished(attempt=context.spec.attempt))
        yield OpenRole(actors={REPLICA: generation})


@asynccontextmanager
async def _open_sessions(context: RoleContext) -> AsyncIterator[OpenRole]:
    """Open the actors that share the journal of a service, or that of the groups of a dataset."""
    config, spec, find = context.config, context.spec, context.find
    settings = settings_of(config, proxy=config.proxy, intake=config.intake if spec.has_intake else None)
    async with AsyncExitStack() as stack:
        # Until then, engines may have the weights of an earlier attempt. The trainer has loaded the model by then, so a
        # start that fails because of its settings leaves no journal.
        await (await find(Directory, "directory")).ask(AwaitWeights(attempt=spec.attempt))
        journal = None
        if spec.has_intake and config.journal.enabled:
            opening = SqliteJournal.open(config.journal.path or context.directory.journal, config.journal)
            journal = await stack.enter_async_context(opening)
        group_journal, restored_queue = None, None
        if spec.has_rollouts and not spec.has_intake and config.journal.enabled:
            group_journal, restored_queue = await _open_group_journal(context, stack)
        system = await stack.enter_async_context(ActorSystem.open(name=context.name))
        generation = await find(Generation, "generation")
        warn_of_length(config, (await generation.ask(DescribeEngine())).info.context_length)
        opened = await spawn_session_actors(
            system,
            settings,
            renderer=context.renderer,
            generation=generation,
            version=spec.version,
            start=spec.start,
            progress=await find(Progress, "progress"),
            journal=journal,
            group_journal=group_journal,
            restored_queue=restored_queue,
        )
        yield OpenRole(actors=opened.actors)


async def _open_group_journal(
    context: RoleContext, stack: AsyncExitStack
) -> tuple[GroupJournal | None, RestoredQueue | None]:
    """Open the journal of the groups of a dataset, and restore what an earlier process left.

    If it cannot be used, the run goes on without: what is lost then is the time to sample some groups again.
    """
    config, spec = context.config, context.spec
    # One process uses the file, as the run directory is locked. Its loss is not that of a service's sessions.
    settings = evolve(config.journal, retention_days=0.0)
    try:
        journal = await stack.enter_async_context(SqliteJournal.open(context.directory.groups, settings))
        digest = await to_thread.run_sync(sampling_digest, spec.config)
        restored = restore_queue(
            [event async for event in journal.read()],
            settings=digest,
            version=spec.version,
            first_version=config.limits.first_version,
            is_done=config.queue.open_draws(spec.start).is_consumed,
        )
    except JournalError as error:
        detail = "Groups that are finished but not trained are sampled again if the run is killed and resumed."
        _log.warning("groups_not_durable", reason=str(error), detail=detail)
        return None, None
    group_journal = GroupJournal(journal, settings=digest, next_step=restored.next_step)
    await group_journal.discard(restored)
    if restored.held:
        num_steps, num_waiting = len(restored.steps), len(restored.waiting)
        _log.info("groups_restored", steps_repeated=num_steps, waiting=num_waiting, discarded=len(restored.void))
    return group_journal, restored


@asynccontextmanager
async def _open_proxy(context: RoleContext) -> AsyncIterator[OpenRole]:
    find, spec = context.find, context.spec
    proxy_config = context.config.proxy
    if spec.admin_key is not None:
        # The controller listens at the configured address, and forwards requests.
        proxy_config = evolve(proxy_config, admin_key=spec.admin_key, port=0, public_host=None)
    actors = SessionActors(
        sessions=await find(Sessions, "sessions"),
        exports=await find(Exports, "exports"),
        capacity=await find(Capacity, "capacity"),
        intake=await find(Intake, "intake") if spec.has_intake else None,
        accounts=await find(Accounts, "accounts") if spec.has_accounts else None,
    )
    config = settings_of(context.config, proxy=proxy_config, intake=None)
    generation = await find(Generation, "generation")
    async with ActorSystem.open(name=context.name) as system:
        serving = await spawn_proxy(
            system,
            config,
            actors,
            renderer=context.renderer,
            generation=generation,
            read_run=partial(read_gauges, context.directory),
        )
        yield OpenRole(actors={"proxy": serving}, endpoint=await serving.ask(DescribeEndpoint()))


# ---------------------------------------------------------------------------------------------------- training


@asynccontextmanager
async def _open_rollout(context: RoleContext) -> AsyncIterator[OpenRole]:
    config, spec, find = context.config, context.spec, context.find
    load = partial(load_problem_sets, config, is_external=spec.has_intake)
    problems, held_out = await to_thread.run_sync(load)
    if context.agents is not None:
        opening: AbstractAsyncContextManager[Agents] = nullcontext(context.agents)
    else:
        opening = prepare_agents(config, logs=context.directory.agent_logs)
    async with (
        opening as agents,
        create_agent_http_client() as http_client,
        open_group_teacher(config, context.renderer) as teacher,
        ActorSystem.open(name=context.name) as system,
    ):
        sizes = {
            size_setting(name): config.agents[name].group_size
            for name in problems or ()
            # A workflow may make several episodes of each member, and a grouped one has its own size.
            if not isinstance(agents[name if name in agents else ""], RolloutWorkflow)
        }
        warn_of_singletons(config, sizes)
        endpoint = await (await find(Directory, "directory")).ask(AwaitEndpoint())
        runner = RolloutRunner(
            agents,
            peers=Peers(
                sessions=await find(Sessions, "sessions"),
                exports=await find(Exports, "exports"),
                capacity=await find(Capacity, "capacity"),
                progress=await find(Progress, "progress"),
                directory=await find(Directory, "directory"),
            ),
            endpoint=endpoint,
            http_client=http_client,
            engine=EpisodeEngine(await find(Generation, "generation"), context.renderer, gconfig=config.gconfig),
            configs=config.runners,
            seed=config.seed,
            train=problems,
            held_out=held_out,
            teacher=teacher,
            max_staleness=config.rollout.max_head_offpolicyness,
        )
        with direct_connections(endpoint.url):
            yield OpenRole(actors={"rollouts": await system.spawn(runner, name="rollouts")})


@asynccontextmanager
async def _open_trainer(context: RoleContext) -> AsyncIterator[OpenRole]:
    """Open the trainer.

    Engines have its weights, and have passed the capture test, before any agent samples; unless a service goes on with
    weights that have passed it before.
    """
    config, directory, find = context.config, context.directory, context.find
    if context.answers_first:
        # Not at the same time: the import alone takes seconds of the interpreter's lock, which the proxy needs to open.
        await (await find(Directory, "directory")).ask(AwaitEndpoint())
        # On a thread, since agents are answered. Elsewhere the engine may be importing transformers on its own thread:
        # two threads that import modules with circular imports may see some of them unfinished.
        await to_thread.run_sync(import_module, "areal_actors.training.actor")
    from areal_actors.training.actor import TrainerActor, TrainingPeers

    can_evaluate = context.spec.has_rollouts and bool(config.held_out_sets)
    # An engine in this process is open before the policy is loaded: transformers sets torch's default dtype, which is
    # global, while it loads a model. Loaded at the same time, one model would have tensors in the other's dtype.
    await find(Generation, "generation")
    job = await to_thread.run_sync(_load_job, context)
    async with AsyncExitStack() as stack:
        publisher = await _publish_first(context, job.policy)
        members = await stack.enter_async_context(context.open_ranks(job))
        teacher = await stack.enter_async_context(open_group_teacher(config, context.renderer))
        system = await stack.enter_async_context(ActorSystem.open(name=context.name))
        trainer = TrainerActor(
            policy=job.policy,
            peers=TrainingPeers(
                exports=await find(Exports, "exports"),
                generation=await find(Generation, "generation"),
                capacity=await find(Capacity, "capacity"),
                rollouts=await find(Rollouts, "rollouts") if can_evaluate else None,
                progress=await find(Progress, "progress"),
            ),
            plan=config.plan,
            loop=train,
            checkpoints=directory.checkpoints,
            counters=job.counters,
            captures=directory.captures,
            publisher=publisher,
            members=members,
            save_weights=partial(_export_policy, config, directory, job.policy),
            supervised=None if job.supervised is None else job.supervised.batch,
            teacher=teacher,
        )
        yield OpenRole(actors={"trainer": await system.spawn(trainer, name="trainer")})


def _load_job(context: RoleContext) -> Job:
    """Load what the trainer and the other ranks of its gang need. Blocks."""
    config, directory, spec = context.config, context.directory, context.spec
    policy, counters = create_policy(config, resolve_model(config.model)), None
    if spec.checkpoint is not None:
        counters = policy.restore(directory.checkpoints, step=spec.checkpoint)
    supervised = context.supervised or load_supervised(config)
    settle_team()
    return Job(config=config, directory=directory, policy=policy, supervised=supervised, counters=counters)


async def _publish_first(context: RoleContext, policy: PolicyTrainer) -> Publisher:
    """Publish the first weights to the engines, test the engines, and return the publisher for later weights."""
    config, spec = context.config, context.spec
    generation = await context.find(Generation, "generation")
    are_together = {Role.GENERATION, Role.TRAINER} <= set(spec.local_roles)
    # Memory can be lent only within one process. Servers opened in this process write lent weights where they read
    # them, and remove them again. Engines in workers report their dtype only once they have weights, so they read
    # float32.
    first = _create_publisher(context, by=PublishBy.MEMORY if are_together else PublishBy.DISK, dtype="float32")

    def publish() -> Snapshot:
        snapshot = first.publish(policy)
        # A thread of the pool may not compute again for the rest of the run.
        settle_team()
        return snapshot

    if not context.answers_first:  # otherwise it has them
        snapshot = await to_thread.run_sync(publish)
        await generation.ask(PublishWeights(snapshot=snapshot))
    await check_capture_of(generation, policy=policy, renderer=context.renderer)
    await (await context.find(Directory, "directory")).ask(WeightsPublished(attempt=spec.attempt))
    dtype = (await generation.ask(DescribeEngine())).info.dtype
    by = PublishBy.MEMORY if are_together and config.trainer.publish is PublishBy.MEMORY else PublishBy.DISK
    return _create_publisher(context, by=by, dtype=dtype)


def _create_publisher(context: RoleContext, *, by: PublishBy, dtype: str) -> Publisher:
    """Create a publisher for engines in ``dtype``, to which it converts the weights as the engine itself would."""
    import torch

    from areal_actors.training.publication import AdapterPublisher, DiskPublisher, MemoryPublisher

    config, root = context.config, context.directory.published
    num_kept = config.trainer.publish_keep
    if config.serves_adapters:
        return AdapterPublisher(root=root, base=resolve_model(config.model).path, num_kept=num_kept)
    if by is PublishBy.MEMORY:
        return MemoryPublisher()
    return DiskPublisher(root=root, dtype=getattr(torch, dtype), num_kept=num_kept)


def _export_policy(config: RunConfig, directory: RunDirectory, policy: PolicyTrainer) -> None:
    """Write the trained weights under the run's name. Blocks. Raises ``CheckpointError``."""
    tokenizer = resolve_tokenizer(config.tokenizer or config.model)
    if policy.gang.is_alone:
        model, state, adapter = policy.model, policy.state_dict(), policy.adapter
    else:  # a process of a gang holds only a shard
        from areal_actors.training.stored_checkpoints import find_checkpoint

        # Training ends with one.
        model, state, adapter = load_trained(config, find_checkpoint(directory.checkpoints, policy.version))
    lora = config.trainer.lora
    if adapter is not None and lora is not None and not lora.exports_merged:
        adapter.save(directory.adapter)
        _log.info("adapter_saved", path=str(directory.adapter))
        return
    save_weights(model, state, directory, tokenizer=tokenizer, step=policy.version, adapter=adapter)
    _log.info("model_saved", model=directory.model, path=str(directory.weights))


def import_role(role: Role, config: RunConfig) -> None:
    """Import the modules with which ``role`` computes. Blocks, for minutes where torch is read from a slow filesystem.

    For a worker, which has one role. Where several are opened at once, each imports its modules on the event loop: two
    threads that import modules with circular imports may see some of them unfinished.
    """
    if role is Role.TRAINER:
        import_module("areal_actors.training.actor")
    elif role is Role.GENERATION and config.rollout.backend is Backend.TORCH:
        import_module("areal_actors.generation.torch")


_OPENERS = {
    Role.GENERATION: _open_generation,
    Role.SESSIONS: _open_sessions,
    Role.PROXY: _open_proxy,
    Role.ROLLOUT: _open_rollout,
    Role.TRAINER: _open_trainer,
}
