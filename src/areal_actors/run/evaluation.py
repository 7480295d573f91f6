"""An evaluation without training: ``areal-actors eval`` and ``evaluate(config)``.

The held-out problems are run by the rollout runner, as evaluations during training are. Every episode that is over is
one line in ``episodes.jsonl``, from which the results are computed, so an interrupted evaluation is resumed with the
episodes that have no line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from shutil import rmtree
from types import MappingProxyType
from typing import Any, cast

from anyio import to_thread
from attrs import evolve, field, frozen

from areal_actors.client import create_agent_http_client
from areal_actors.config import RunConfig
from areal_actors.config.schema import ModelName
from areal_actors.dashboard import RunDirectory, write_report
from areal_actors.dashboard.dumps import EpisodeRecorder, keep_finished, read_outcomes
from areal_actors.dashboard.records import read_records
from areal_actors.dashboard.reporter import Listener, ProgressReporter
from areal_actors.datasets import Problems
from areal_actors.domain import Estimate, Outcome, SetResult, summarize_outcomes
from areal_actors.errors import ConfigError, EpisodeError
from areal_actors.generation.model_host import ModelsConfig
from areal_actors.generation.servers.config import Backend
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.lib import loops
from areal_actors.lib.atomic_write import atomic_write
from areal_actors.lib.plugins import PluginGroup, load_plugin
from areal_actors.lib.telemetry import get_logger, logging_to_file
from areal_actors.messages import Evaluate, Exports, Progress, Sessions
from areal_actors.models import resolve_model
from areal_actors.rollouts.runner import Agents, Peers, RolloutRunner
from areal_actors.run.directory import prepared_directory
from areal_actors.run.evaluated_model import EvaluatedModel, find_model
from areal_actors.run.inference import Inference, InferenceConfig, open_actors, open_engine, settings_of
from areal_actors.run.job import load_held_out, load_rendering, prepare_agents
from areal_actors.run.reporting import create_reporter
from areal_actors.workflows import EpisodeEngine, PluginWorkflow, RolloutWorkflow

_log = get_logger(__name__)

_KEEP_ALL = sys.maxsize - 2
"""For writers that remove the records of steps from a resumed one on: here, ``keep_finished`` has removed some."""
_TOKENS_UNKNOWN = (
    "The model answered at a URL: token ids and log-probabilities are not available, and conversations are those that "
    "were sent."
)
_TOKENS_KNOWN = "Token ids and log-probabilities are those that the engine sampled."
_FAILED = "An episode that failed counts as reward 0 and as not solved; the mean without those that failed is separate."


@frozen(kw_only=True)
class EvaluationSummary:
    """The results of an evaluation. ``step`` is that of a run's weights. ``num_resumed`` episodes were run earlier."""

    model: str
    step: int | None
    num_samples: int
    sets: tuple[SetResult, ...]
    directory: RunDirectory
    seconds: float
    num_resumed: int = 0
    are_tokens_known: bool = True
    identity: Mapping[str, Any] = field(factory=dict)
    """What has to be equal for two evaluations to be the same one."""

    def to_json(self, *, is_complete: bool = True) -> dict[str, Any]:
        """Return the results as plain data."""
        return {
            "model": self.model,
            "step": self.step,
            "num_samples": self.num_samples,
            "sets": [found.to_json() for found in self.sets],
            "failed_episodes": _FAILED,
            "tokens": _TOKENS_KNOWN if self.are_tokens_known else _TOKENS_UNKNOWN,
            "interval": "95 %, normal, clustered by problem",
            "seconds": round(self.seconds, 3),
            "resumed_episodes": self.num_resumed,
            "is_complete": is_complete,
            "directory": str(self.directory.path),
            "identity": dict(self.identity),
        }


def evaluate(
    config: RunConfig,
    *,
    model: str | None = None,
    served_name: str | None = None,
    num_samples: int | None = None,
    output: Path | None = None,
    resume: bool = False,
    backend: str = "asyncio",
) -> EvaluationSummary:
    """Evaluate a model on the held-out problems of ``config`` in a new event loop, and write the report.

    Args:
        config: names the agent, the problems, and the settings of the engine.
        model: as for ``find_model``; by default the model of ``config``.
        served_name: the name of the model at a URL; by default the only one that its server lists.
        num_samples: episodes per problem; by default ``evaluation.num_samples``.
        output: the directory, by default ``<run>.eval/<model>`` next to the run of ``model``, or else of ``config``.
        resume: continue the evaluation in the directory. Otherwise an earlier one is moved aside.
        backend: ``asyncio``, as configured, or ``trio``.

    Raises:
        ConfigError: the configuration has no agent or no held-out problems, or ``resume`` is of another evaluation.
        EpisodeError: every episode failed. The results are written nevertheless.
    """
    if num_samples is not None:
        config = evolve(config, evaluation=evolve(config.evaluation, num_samples=num_samples))
    missing = []
    if any(config.agents.get(name, config.rollout).workflow is None for name in config.held_out_sets):
        missing.append("rollout.workflow is missing: the agent to evaluate")
    if not config.held_out_sets:
        missing.append("eval_dataset is missing: the problems to evaluate on; or several sets, as eval_datasets")
    if missing:
        raise ConfigError(tuple(missing))
    found = find_model(config, model, served_name=served_name)
    if found.url is not None and config.rollout.openai.agents_may_reward:
        raise ConfigError(
            "rollout.openai.agents_may_reward: a model at a URL has no routes for rewards; return the reward from run"
        )
    trial = found.trained_in or config.run_directory.path
    path = output.absolute() if output is not None else trial.with_name(f"{trial.name}.eval") / found.label
    directory = RunDirectory(path=path)

    async def main() -> EvaluationSummary:
        with prepared_directory(config, directory, resume=resume), logging_to_file(directory.log):
            return await run_evaluation(config, found, directory, is_resumed=resume)

    return loops.run(main, event_loop=config.event_loop, backend=backend)


async def run_evaluation(
    config: RunConfig,
    model: EvaluatedModel,
    directory: RunDirectory,
    *,
    is_resumed: bool = False,
    held_out: Mapping[str, Problems] | None = None,
    num_by_source: Mapping[str, int] = MappingProxyType({}),
    listener: Listener | None = None,
) -> EvaluationSummary:
    """Evaluate ``model``, writing to a directory that is prepared.

    ``held_out`` are the problems in place of those of the configuration, and ``num_by_source`` the numbers of episodes
    of their problems by set, where these differ. ``listener`` receives the news, too. Errors are those of ``evaluate``.
    """
    started = time.monotonic()
    if held_out is None:
        held_out = await to_thread.run_sync(load_held_out, config)
    num_samples = config.evaluation.num_samples
    # Its keys are read before an agent is opened, which sets placeholders in their variables.
    upstream = None
    if model.url is not None:
        find_upstream = load_plugin(PluginGroup.UPSTREAMS, "url")
        upstream = await find_upstream(model.url, model.served_name, os.environ)
    location = None if upstream is not None else await to_thread.run_sync(model.materialize, directory.path)
    name = model.label if upstream is None else upstream.label
    fingerprint = await to_thread.run_sync(model.fingerprint, location)
    identity = _identify(config, held_out, fingerprint=fingerprint)
    if is_resumed:
        _check_identity(directory, identity)
        keep_finished(directory)
    outcomes = read_outcomes(directory.episodes)
    summary = EvaluationSummary(
        model=name,
        step=model.step,
        num_samples=num_samples,
        sets=_summarize(outcomes, config),
        directory=directory,
        seconds=0.0,
        num_resumed=sum(outcome.member < num_samples for outcome in outcomes),
        are_tokens_known=upstream is None,
        identity=identity,
    )
    wanted = Evaluate(
        version=model.step or 0,
        num_samples=num_samples,
        num_by_source=num_by_source,
        finished=tuple((outcome.task, outcome.member) for outcome in outcomes),
    )
    num_expected = sum(num_by_source.get(name, num_samples) * len(problems) for name, problems in held_out.items())
    recorder = EpisodeRecorder(directory.episodes, num_finished=summary.num_resumed, num_expected=num_expected)
    listeners: tuple[Listener, ...] = (recorder,) if listener is None else (listener, recorder)
    _log.info("evaluating", model=name, episodes=num_expected, finished=summary.num_resumed)
    if summary.num_resumed < num_expected:
        opening = _open_runner(config, held_out, directory, listeners, upstream=upstream, model=location)
        async with opening as runner:
            # Only now: an evaluation that could not begin leaves no directory.
            _write(summary, is_complete=False)
            await runner.ask(wanted)
    summary = evolve(
        summary,
        sets=_summarize(read_outcomes(directory.episodes), config),
        seconds=time.monotonic() - started,
    )
    _write(summary, is_complete=True)
    # The copy of a checkpoint's weights may be hundreds of GiB.
    if model.run is not None:
        for copied in (directory.weights, directory.adapter):
            await to_thread.run_sync(partial(rmtree, copied, ignore_errors=True))
    await to_thread.run_sync(write_report, directory)
    if all(found.num_failed == found.num_episodes for found in summary.sets):
        last = list(read_records(directory.failures))[-1:]
        reason = last[0]["failure"] if last else "see failures.jsonl"
        raise EpisodeError(f"Every episode failed. The last failure: {reason} The results are in {directory.path}.")
    return summary


# ---------------------------------------------------------------------------------------------- what is evaluated


def _identify(config: RunConfig, held_out: Mapping[str, Problems], *, fingerprint: str) -> dict[str, Any]:
    """Return what decides about the samples: two evaluations that differ in it cannot share episodes.

    The number of samples is not part of it, so that more can be added to an evaluation.
    """
    sets = {}
    for name, problems in held_out.items():
        sets[name or "held out"] = f"{len(problems)} problems, {_digest([dict(one.data) for one in problems.all()])}"
    agents: dict[str, str] = {}
    for name, rollout in config.agents.items():
        agent, where = rollout.workflow, f"sources.{name}" if name else "rollout"
        # Hashed: arguments may contain keys, and this is printed.
        told = f"{agent.name} {_digest(agent.plugin)}" if isinstance(agent, PluginWorkflow) else str(agent)
        agents[f"{where}.workflow"] = told
        agents[f"{where}.workflow_kwargs"] = _digest(dict(rollout.workflow_kwargs))
    return {
        "model": fingerprint,
        "seed": config.seed,
        **agents,
        "engine": f"{config.rollout.backend} {config.engine.dtype}",
        "gconfig": repr(config.gconfig),
        "renderer": repr(config.renderer),
        **{f"problems of {name}": told for name, told in sets.items()},
    }


def _digest(value: object) -> str:
    return sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def _check_identity(directory: RunDirectory, identity: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if the evaluation in ``directory`` is another one."""
    try:
        before = json.loads(directory.evaluation.read_text(encoding="utf-8"))["identity"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"There is no evaluation in {directory.path} to resume; leave --resume out.") from error
    keys = sorted({*before, *identity})
    changed = [
        f"{key}: {before.get(key)} -> {identity.get(key)}" for key in keys if before.get(key) != identity.get(key)
    ]
    if changed:
        raise ConfigError(
            f"--resume: the evaluation in {directory.path} is another one; leave --resume out to keep it as "
            f"{directory.path.name}.1 and begin again. It differs in {'; '.join(changed)}"
        )


# ----------------------------------------------------------------------------------------------------- its actors


@asynccontextmanager
async def _open_runner(
    config: RunConfig,
    held_out: Mapping[str, Problems],
    directory: RunDirectory,
    listeners: Sequence[Listener],
    *,
    upstream: Any,
    model: str | None,
) -> AsyncIterator[Ref[Any]]:
    """Open the agents and their runner, at the model behind ``upstream`` or with the weights in ``model``."""
    report = partial(create_reporter, config, directory, resumed_step=_KEEP_ALL, further=listeners)
    async with AsyncExitStack() as stack:
        agents = await stack.enter_async_context(prepare_agents(config, logs=directory.agent_logs))
        if upstream is None:
            inference = await stack.enter_async_context(_open_inference(config, str(model), directory, report))
            system, endpoint = inference.system, inference.endpoint
            engine = EpisodeEngine(inference.generation, inference.renderer, gconfig=config.gconfig)
            peers = Peers(
                sessions=inference.sessions,
                exports=inference.exports,
                capacity=inference.capacity,
                progress=inference.progress,
            )
        else:
            _require_requests(agents)
            proxy = evolve(config.proxy, port=0)
            ref, endpoint = await stack.enter_async_context(upstream.open(proxy))
            system = await stack.enter_async_context(ActorSystem.open(name="evaluation"))
            progress: Ref[Progress] = await system.spawn(report(decode=lambda _: ""), name="progress")
            sessions, exports = cast("Ref[Sessions]", ref), cast("Ref[Exports]", ref)
            peers = Peers(sessions=sessions, exports=exports, capacity=None, progress=progress)
            engine = None
        runner = RolloutRunner(
            agents,
            peers=peers,
            endpoint=endpoint,
            http_client=await stack.enter_async_context(create_agent_http_client()),
            engine=engine,
            configs=config.runners,
            seed=config.seed,
            held_out=held_out,
        )
        yield await system.spawn(runner, name="rollouts")


def _require_requests(agents: Agents) -> None:
    for agent in agents.values():
        if isinstance(agent, RolloutWorkflow):
            raise ConfigError(
                f"rollout.workflow: {type(agent).__name__} samples tokens itself, and a model at a URL has none; "
                "evaluate an agent that sends requests, or a model directory"
            )


@asynccontextmanager
async def _open_inference(
    config: RunConfig, model: str, directory: RunDirectory, report: Callable[..., ProgressReporter]
) -> AsyncIterator[Inference]:
    """Open an engine with the weights in ``model``, and the actors around it."""
    # An evaluation loads whole weights, also those of a run that trains an adapter. Samples must not depend on which
    # requests happen to share a batch, or two evaluations would differ.
    config = evolve(
        config,
        model=ModelName(model),
        trainer=evolve(config.trainer, lora=None),
        engine=evolve(config.engine, deterministic=True),
    )
    renderer = await to_thread.run_sync(load_rendering, config)
    settings = evolve(
        settings_of(config, proxy=evolve(config.proxy, port=0), intake=None),
        create_accounts=None,
        models=ModelsConfig(),
        limits=InferenceConfig().limits,
    )
    served = config.served_engine(directory.path) if config.rollout.backend is not Backend.TORCH else None
    files = await to_thread.run_sync(resolve_model, model)
    async with (
        open_engine(served or config.engine, model=files.path, renderer=renderer) as engine,
        open_actors(settings, engine=engine, renderer=renderer, progress=report(decode=renderer.decode)) as inference,
    ):
        yield inference


# ------------------------------------------------------------------------------------------------------- results


def _summarize(outcomes: tuple[Outcome, ...], config: RunConfig) -> tuple[SetResult, ...]:
    """Return the results of the samples that are asked for; an earlier process may have run more."""
    num_samples = config.evaluation.num_samples
    kept = [outcome for outcome in outcomes if outcome.member < num_samples]
    return summarize_outcomes(kept, solved_reward=config.evaluation.solved_reward)


def _write(summary: EvaluationSummary, *, is_complete: bool) -> None:
    document = json.dumps(summary.to_json(is_complete=is_complete), indent=2)
    atomic_write(summary.directory.evaluation, f"{document}\n", is_durable=True)


def format_evaluation(summary: EvaluationSummary) -> str:
    """Return the results as lines for people."""
    weights = summary.model if summary.step is None else f"{summary.model} (step {summary.step})"
    lines = [f"{weights}, {summary.num_samples} sample{'' if summary.num_samples == 1 else 's'} per problem"]
    for found in summary.sets:
        lines.append(
            f"{found.source or 'held out'}: {found.num_problems} problems, {found.num_episodes} episodes, "
            f"{found.num_failed} of them failed"
        )
        lines.append(f"  avg@{summary.num_samples}   {_format_estimate(found.mean)}")
        if found.num_failed and found.completed_mean is not None:
            lines.append(f"  without failed episodes   {_format_estimate(found.completed_mean)}")
        lines += [f"  pass@{k}  {_format_estimate(estimate)}" for k, estimate in found.passes.items()]
    lines.append(f"{_FAILED} Intervals: 95 %, clustered by problem.")
    if not summary.are_tokens_known:
        lines.append(_TOKENS_UNKNOWN)
    lines.append(f"Report: {summary.directory.report}")
    return "\n".join(lines)


def _format_estimate(found: Estimate) -> str:
    if found.low is None or found.high is None:
        return f"{found.value:.4f} (one problem: no interval)"
    return f"{found.value:.4f} [{found.low:.4f}, {found.high:.4f}]"
