"""What every run opens inside its event loop, whoever brings the problems: inference, reporter, runner, trainer.

A run ends when training does, or when a person asks (``signals``), and writes what a person wants to find: weights,
the report, the learning curve.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any

from anyio import to_thread
from attrs import frozen

from areal_actors.actors.gang import GangMembers
from areal_actors.actors.intake import IntakeConfig
from areal_actors.actors.progress import Listener, ProgressReporter
from areal_actors.actors.rollouts import Peers, RolloutRunner
from areal_actors.actors.trainer import TrainerActor, TrainingPeers, parse_position
from areal_actors.cache.journal import Journal
from areal_actors.client import create_agent_http_client
from areal_actors.core import Ref
from areal_actors.dashboard import (
    FailureWriter,
    MetricsWriter,
    RolloutDumper,
    RunState,
    SessionSampler,
    TensorboardWriter,
    create_display,
    write_curve,
)
from areal_actors.dashboard.report import write_report
from areal_actors.messages import (
    AwaitTraining,
    DescribeEngine,
    PhaseChanged,
    Progress,
    Rollouts,
    Training,
    TrainingSummary,
)
from areal_actors.models import load_policy, resolve_tokenizer
from areal_actors.proxy import ProxyConfig
from areal_actors.run.capture import check_engine
from areal_actors.run.exporting import save_weights
from areal_actors.run.heap import settled_heap
from areal_actors.run.inference import Inference, InferenceConfig, open_actors
from areal_actors.run.job import Job
from areal_actors.run.models import open_engine
from areal_actors.run.proxies import open_proxies
from areal_actors.run.ranks import RankOpener, open_ranks
from areal_actors.run.signals import stop_on_signals
from areal_actors.telemetry import get_logger
from areal_actors.training.checkpoints import find_latest
from areal_actors.training.publication import Publisher, create_publisher
from areal_actors.training.weights import load_weights
from areal_actors.workflows import Agent, EpisodeEngine, RolloutWorkflow

__all__ = ["Learning", "learn"]

_log = get_logger(__name__)


@frozen(kw_only=True)
class Learning:
    """What differs between runs.

    Without an ``agent`` nobody is run here, and nothing evaluated. ``intake`` takes external sessions in. ``announce``
    is called once agents are answered.
    """

    agent: Agent | RolloutWorkflow | None
    proxy: ProxyConfig
    intake: IntakeConfig | None = None
    journal: Journal | None = None
    announce: Callable[[Inference], Awaitable[None]] | None = None
    is_handling_signals: bool = False
    open_ranks: RankOpener = open_ranks
    """Starts the other processes of a gang that trains together."""


async def learn(job: Job, learning: Learning) -> None:
    """Open everything, train until the end, and save the results."""
    async with AsyncExitStack() as stack:
        members = await stack.enter_async_context(learning.open_ranks(job))
        inference = await stack.enter_async_context(_open_inference(job, learning))
        assert inference.progress is not None
        rollouts = await _spawn_runner(job, learning, inference, stack)
        training = await _spawn_trainer(job, inference, rollouts, members)
        if learning.is_handling_signals:  # the process is ours
            stack.enter_context(settled_heap())
        proxies = open_proxies(
            inference,
            num_more=learning.proxy.num_processes - 1,
            config=job.directory.config,
            logs=job.directory.path / "logs",
        )
        await stack.enter_async_context(proxies)
        async with stop_on_signals(training) if learning.is_handling_signals else nullcontext():
            if learning.announce is not None:
                await learning.announce(inference)
            summary = await training.ask(AwaitTraining())
        await _save_results(job, inference.progress, summary)


@asynccontextmanager
async def _open_inference(job: Job, learning: Learning) -> AsyncIterator[Inference]:
    """The engine, with a copy of the policy's weights, and the actors around it."""
    config = job.config
    settings = InferenceConfig(
        engine=config.engine,
        renderer=config.renderer,
        proxy=learning.proxy,
        sessions=config.sessions,
        capacity=config.capacity,
        export=config.rollout.export,
        models=config.trained_models,
        intake=learning.intake,
        limits=config.limits,
        users=config.user_accounts,
        seed=config.seed,
    )
    version = job.policy.version
    async with (
        open_engine(
            config.served_engine(job.directory.path) or config.engine,
            model=job.policy.model,
            renderer=job.renderer,
            version=version,
            files=job.model.path,
        ) as engine,
        open_actors(
            settings,
            engine=engine,
            renderer=job.renderer,
            version=version,
            start=parse_position(job.counters),
            progress=_create_reporter(job),
            journal=learning.journal,
        ) as inference,
    ):
        await check_engine(engine, policy=job.policy, renderer=job.renderer)
        yield inference


def _create_reporter(job: Job) -> ProgressReporter:
    config, directory = job.config, job.directory
    resumed, decode = job.resumed_step, job.renderer.decode
    listeners: list[Listener] = [
        MetricsWriter(directory.metrics, resumed_step=resumed),
        FailureWriter(directory.failures, resumed_step=resumed),
        SessionSampler(
            directory.sessions, decode=decode, max_sessions=config.logging.max_sessions, resumed_step=resumed
        ),
    ]
    display = create_display(
        config.logging.display,
        RunState(title=config.experiment_name, total_steps=config.total_steps, step=resumed or 0),
    )
    if display is not None:
        listeners.append(display)
    if config.logging.tensorboard:
        listeners.append(TensorboardWriter(directory.tensorboard, resumed_step=resumed))
    if config.rollout.dump_to_file:
        listeners.append(RolloutDumper(directory, decode=decode, resumed_step=resumed))
    return ProgressReporter(listeners)


async def _spawn_runner(
    job: Job, learning: Learning, inference: Inference, stack: AsyncExitStack
) -> Ref[Rollouts] | None:
    """Who runs the agent on the problems, if there are any, and on those that are held out."""
    if learning.agent is None:
        return None
    http_client = await stack.enter_async_context(create_agent_http_client())
    runner = RolloutRunner(
        agent=learning.agent,
        peers=Peers(
            sessions=inference.sessions,
            exports=inference.exports,
            capacity=inference.capacity,
            progress=inference.progress,
        ),
        endpoint=inference.endpoint,
        http_client=http_client,
        engine=EpisodeEngine(inference.generation, inference.renderer, gconfig=job.config.gconfig),
        config=job.config.rollout.runner,
        problem_at=None if job.problems is None else job.problems.at,
        held_out=() if job.held_out is None else job.held_out.all(),
        start=parse_position(job.counters),
        seed=job.config.seed,
    )
    return await inference.system.spawn(runner, name="rollouts")


async def _spawn_trainer(
    job: Job, inference: Inference, rollouts: Ref[Rollouts] | None, members: GangMembers
) -> Ref[Training]:
    trainer = TrainerActor(
        policy=job.policy,
        peers=TrainingPeers(
            exports=inference.exports,
            generation=inference.generation,
            capacity=inference.capacity,
            rollouts=rollouts,
            progress=inference.progress,
        ),
        plan=job.config.plan,
        checkpoints=job.directory.checkpoints,
        counters=job.counters,
        captures=job.directory.captures,
        publisher=await _create_publisher(job, inference),
        members=members,
    )
    return await inference.system.spawn(trainer, name="trainer")


async def _create_publisher(job: Job, inference: Inference) -> Publisher:
    """In the engine's dtype, so that it loads what it would have made of the weights itself."""
    config, view = job.config.trainer, await inference.generation.ask(DescribeEngine())
    return create_publisher(
        config.publish, root=job.directory.published, dtype=view.info.dtype, num_kept=config.publish_keep
    )


async def _save_results(job: Job, progress: Ref[Progress], summary: TrainingSummary) -> None:
    """Weights, curve and report. A run that was interrupted has its checkpoint, and no use for the weights yet."""
    if summary.is_finished:
        await progress.ask(PhaseChanged(phase="saving the weights", detail=str(job.directory.weights)))
        await to_thread.run_sync(_export, job)
    await progress.ask(PhaseChanged(phase="done", detail=_describe_end(job, summary)))
    await to_thread.run_sync(write_curve, job.directory)
    await to_thread.run_sync(write_report, job.directory)


def _describe_end(job: Job, summary: TrainingSummary) -> str:
    reason = summary.stop_reason or ""
    return reason if summary.is_finished else f"{reason}; --resume goes on from {job.directory.checkpoints}"


def _export(job: Job) -> None:
    tokenizer = resolve_tokenizer(job.config.tokenizer or job.config.model)
    model = job.policy.model if job.policy.gang.is_alone else _load_trained(job)
    save_weights(model, job.directory, tokenizer=tokenizer, step=job.policy.version)
    _log.info("model_saved", model=job.directory.model, path=str(job.directory.weights))


def _load_trained(job: Job) -> Any:
    """The model as the last checkpoint has it: this process holds but a part of it."""
    checkpoint = find_latest(job.directory.checkpoints)
    assert checkpoint is not None, "training ends with one"
    model = load_policy(job.model.path)
    load_weights(model, checkpoint)
    return model
