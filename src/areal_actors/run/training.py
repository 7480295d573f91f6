"""A training run from its configuration: what ``areal-actors train`` and ``Trainer(config).train(...)`` do.

The run opens everything inside one event loop: the engine and the actors around it (``inference``), then the reporter,
the rollout runner and the trainer. It ends when training does, or when a person asks (``signals``), and writes what a
person wants to find: weights, the report, one line of summary.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread
from attrs import field, frozen

from areal_actors.actors.progress import Listener, ProgressReporter
from areal_actors.actors.rollouts import Peers, RolloutRunner
from areal_actors.actors.trainer import TrainerActor, TrainingPeers, parse_position
from areal_actors.client import create_agent_http_client
from areal_actors.config import RunConfig, save_config
from areal_actors.core import Ref
from areal_actors.dashboard import (
    FailureWriter,
    MetricsWriter,
    RolloutDumper,
    RunDirectory,
    RunState,
    RunSummary,
    SessionSampler,
    TensorboardWriter,
    create_display,
    summarize_run,
    write_curve,
)
from areal_actors.dashboard.report import write_report
from areal_actors.datasets import Problems, find_overlap, load_problems
from areal_actors.errors import CheckpointError, ConfigError
from areal_actors.messages import AwaitTraining, PhaseChanged, Progress, Training, TrainingSummary
from areal_actors.models import ModelFiles, load_policy, resolve_model
from areal_actors.rendering import Renderer, load_renderer
from areal_actors.run.agents import prepare_agent
from areal_actors.run.capture import check_engine
from areal_actors.run.heap import settled_heap
from areal_actors.run.inference import Inference, InferenceConfig, open_actors, open_engine
from areal_actors.run.signals import stop_on_signals
from areal_actors.telemetry import get_logger, logging_to_file, quiet_transformers
from areal_actors.workflows import Agent, EpisodeEngine, RolloutWorkflow, import_reference

if TYPE_CHECKING:
    from areal_actors.training.trainer import PolicyTrainer

__all__ = ["RunSummary", "Trainer", "train"]

_log = get_logger(__name__)


def train(config: RunConfig, *, resume: bool = False, run_dir: Path | None = None) -> RunSummary:
    """Run a configuration to its end, in an event loop of its own. Raises ``ArealError`` with what went wrong."""
    return Trainer(config).train(resume=resume, run_dir=run_dir)


class Trainer:
    """The Python door to training."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def train(
        self,
        workflow: Any = None,
        workflow_kwargs: Mapping[str, Any] | None = None,
        *,
        resume: bool = False,
        run_dir: Path | None = None,
        backend: str = "asyncio",
    ) -> RunSummary:
        """Train, blocking, on an event loop of its own (``backend``: ``asyncio`` or ``trio``).

        ``workflow`` is an agent or a rollout workflow: an instance, a class with ``workflow_kwargs``, a reference as in
        the configuration, which it replaces, or a ``CommandConfig``.
        """

        async def main() -> RunSummary:
            return await self.run(workflow, workflow_kwargs, resume=resume, run_dir=run_dir, is_handling_signals=True)

        return anyio.run(main, backend=backend)

    async def run(
        self,
        workflow: Any = None,
        workflow_kwargs: Mapping[str, Any] | None = None,
        *,
        resume: bool = False,
        run_dir: Path | None = None,
        is_handling_signals: bool = False,
    ) -> RunSummary:
        """Train inside the running event loop. Signals are left to its owner, unless ``is_handling_signals``."""
        directory = self.config.run_directory if run_dir is None else RunDirectory(path=_absolute(run_dir))
        opening = prepare_agent(
            self.config.rollout, workflow=workflow, workflow_kwargs=workflow_kwargs, logs=directory.agent_logs
        )
        started = time.monotonic()
        _prepare(self.config, directory, resume=resume)
        with logging_to_file(directory.log):
            async with opening as agent:
                await self._run(agent, directory, resume=resume, is_handling_signals=is_handling_signals)
        return summarize_run(directory, seconds=time.monotonic() - started)

    async def _run(
        self, agent: Agent | RolloutWorkflow, directory: RunDirectory, *, resume: bool, is_handling_signals: bool
    ) -> None:
        job = await to_thread.run_sync(lambda: _load(self.config, agent, directory, resume=resume))
        async with AsyncExitStack() as stack:
            inference = await stack.enter_async_context(_open_inference(job))
            progress = await inference.system.spawn(_create_reporter(job), name="progress")
            training = await _spawn_learners(job, inference, progress, stack)
            if is_handling_signals:  # the process is ours
                stack.enter_context(settled_heap())
            async with stop_on_signals(training) if is_handling_signals else nullcontext():
                summary = await training.ask(AwaitTraining())
            await _save_results(job, progress, summary)


@frozen(kw_only=True)
class _Job:
    """What a run needs, loaded."""

    config: RunConfig
    directory: RunDirectory
    agent: Agent | RolloutWorkflow
    model: ModelFiles
    renderer: Renderer
    problems: Problems
    held_out: Problems | None
    policy: PolicyTrainer
    counters: Mapping[str, Any] | None = field(default=None)
    """Those of the checkpoint that the run goes on from."""


# ------------------------------------------------------------------------------------------------- before the loop


def _absolute(path: Path) -> Path:
    """What reports and exports name wherever they are read."""
    return path.absolute()


def _prepare(config: RunConfig, directory: RunDirectory, *, resume: bool) -> None:
    """Make the run directory; an earlier run of the same name is set aside, unless it is to go on."""
    if resume and not directory.has_run:
        raise ConfigError(f"There is no run in {directory.path} to resume; leave --resume out, or check --run-dir.")
    if not resume:
        former = directory.set_aside()
        if former is not None:
            _log.info("earlier_run_kept", path=str(former))
    directory.path.mkdir(parents=True, exist_ok=True)
    save_config(config, directory.config)


def _load(config: RunConfig, agent: Agent | RolloutWorkflow, directory: RunDirectory, *, resume: bool) -> _Job:
    """Everything that blocks: problems, model, tokenizer, checkpoint."""
    problems = load_problems(config.dataset, import_reference=import_reference, shuffle_seed=config.seed)
    held_out = None
    if config.eval_dataset is not None:
        held_out = load_problems(config.eval_dataset, import_reference=import_reference)
        _warn_of_overlap(problems, held_out)
    model = resolve_model(config.model)
    tokenizer = model if config.tokenizer is None else resolve_model(config.tokenizer)
    renderer = load_renderer(tokenizer.path, config=config.renderer)
    policy = _create_policy(config, model)
    counters = policy.restore(directory.checkpoints) if resume else None
    if resume and counters is None:
        raise CheckpointError(
            f"There is no complete checkpoint in {directory.checkpoints} to go on from; leave --resume out."
        )
    return _Job(
        config=config,
        directory=directory,
        agent=agent,
        model=model,
        renderer=renderer,
        problems=problems,
        held_out=held_out,
        policy=policy,
        counters=counters,
    )


def _create_policy(config: RunConfig, model: ModelFiles) -> PolicyTrainer:
    from areal_actors.training.trainer import PolicyTrainer

    needs_reference = config.trainer.objective.kl.coefficient > 0
    reference = load_policy(model.path) if needs_reference else None
    return PolicyTrainer(load_policy(model.path), config.trainer, reference=reference)


def _warn_of_overlap(problems: Problems, held_out: Problems) -> None:
    num_shared = find_overlap(problems, held_out)
    if num_shared:
        _log.warning("held_out_problems_are_trained_on", shared=num_shared, held_out=len(held_out))


# ------------------------------------------------------------------------------------------------- inside the loop


@asynccontextmanager
async def _open_inference(job: _Job) -> AsyncIterator[Inference]:
    """The engine, with a copy of the policy's weights, and the actors around it."""
    config = job.config
    settings = InferenceConfig(
        engine=config.engine,
        renderer=config.renderer,
        proxy=config.proxy,
        sessions=config.sessions,
        capacity=config.capacity,
        export=config.rollout.export,
        limits=config.limits,
        users=config.user_accounts,
        seed=config.seed,
    )
    version = job.policy.version
    async with (
        open_engine(config.engine, model=job.policy.model, renderer=job.renderer, version=version) as engine,
        open_actors(
            settings, engine=engine, renderer=job.renderer, version=version, start=parse_position(job.counters)
        ) as inference,
    ):
        await check_engine(engine, policy=job.policy, renderer=job.renderer)
        yield inference


def _create_reporter(job: _Job) -> ProgressReporter:
    config, directory = job.config, job.directory
    resumed = job.policy.version if job.counters is not None else None
    decode = job.renderer.decode
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


async def _spawn_learners(
    job: _Job, inference: Inference, progress: Ref[Progress], stack: AsyncExitStack
) -> Ref[Training]:
    """The rollout runner and the trainer."""
    http_client = await stack.enter_async_context(create_agent_http_client())
    runner = RolloutRunner(
        agent=job.agent,
        peers=Peers(
            sessions=inference.sessions, exports=inference.exports, capacity=inference.capacity, progress=progress
        ),
        endpoint=inference.endpoint,
        http_client=http_client,
        engine=EpisodeEngine(inference.generation, inference.renderer, gconfig=job.config.gconfig),
        config=job.config.rollout.runner,
        problem_at=job.problems.at,
        held_out=() if job.held_out is None else job.held_out.all(),
        start=parse_position(job.counters),
        seed=job.config.seed,
    )
    rollouts = await inference.system.spawn(runner, name="rollouts")
    trainer = TrainerActor(
        policy=job.policy,
        peers=TrainingPeers(
            exports=inference.exports,
            generation=inference.generation,
            capacity=inference.capacity,
            rollouts=rollouts,
            progress=progress,
        ),
        plan=job.config.plan,
        checkpoints=job.directory.checkpoints,
        counters=job.counters,
        captures=job.directory.captures,
    )
    return await inference.system.spawn(trainer, name="trainer")


async def _save_results(job: _Job, progress: Ref[Progress], summary: TrainingSummary) -> None:
    """Weights, curve and report. A run that was interrupted has its checkpoint, and no use for the weights yet."""
    if summary.is_finished:
        await progress.ask(PhaseChanged(phase="saving the weights", detail=str(job.directory.weights)))
        await to_thread.run_sync(_export, job)
    await progress.ask(PhaseChanged(phase="done", detail=summary.stop_reason or ""))
    await to_thread.run_sync(write_curve, job.directory)
    await to_thread.run_sync(write_report, job.directory)


def _export(job: _Job) -> None:
    from areal_actors.training.weights import export_model

    with quiet_transformers():
        export_model(job.policy.model, job.directory.weights, tokenizer_directory=job.model.path)
