"""Try an agent without training: ``areal-actors try`` and ``try_agent(config)``.

A few problems are run as groups, by the same code as evaluations, and everything that would keep a run from learning is
named: failures with their tracebacks, equal rewards, requests that never came, greedy or truncated answers, an agent
that blocks the event loop.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread
from attrs import frozen

from areal_actors.config import AgentMode, RunConfig
from areal_actors.dashboard import RunDirectory
from areal_actors.dashboard.display import kind_of
from areal_actors.dashboard.records import read_records
from areal_actors.dashboard.reporter import Listener
from areal_actors.datasets import Problems
from areal_actors.domain import Episode, FinishReason, Problem, UntrainedReason
from areal_actors.errors import ConfigError, EpisodeError
from areal_actors.kernel import Message
from areal_actors.lib import loops
from areal_actors.lib.scratch import scratch_directory
from areal_actors.lib.telemetry import logging_to_file, redact
from areal_actors.messages import EpisodeFinished, Progress
from areal_actors.rollouts.runner import NEVER_REACHED
from areal_actors.run.advice import compares_members
from areal_actors.run.evaluated_model import EvaluatedModel, find_model
from areal_actors.run.evaluation import run_evaluation
from areal_actors.run.job import load_set
from areal_actors.training.metrics import describe_untrained

_LOOP_CHECK_SECONDS = 0.05
_BLOCKED_SECONDS = 0.5
"""Delays of the event loop that are reported. Loading of modules and Python's lock cause shorter ones."""
_MAX_MESSAGE = 600
"""Characters of a message that are printed."""


@frozen(kw_only=True)
class TrialGroup:
    """The episodes of one problem, in the order of their samples."""

    problem: Problem
    episodes: tuple[Episode, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        """The rewards of the episodes that did not fail."""
        return tuple(episode.reward for episode in self.episodes if episode.failure is None)

    @property
    def has_signal(self) -> bool:
        """Whether the rewards differ, so that something could be learned from them."""
        return len(set(self.rewards)) > 1


@frozen(kw_only=True)
class TrialSummary:
    """The result of trying an agent. ``seconds`` is the wall-clock time of all episodes, without loading."""

    groups: tuple[TrialGroup, ...]
    conversations: tuple[Mapping[str, Any], ...]
    """The recorded conversations, as in ``sessions.jsonl``; none if the model answered at a URL."""
    problems: tuple[str, ...]
    """Obstacles to learning, a sentence each."""
    seconds: float
    step_seconds: float
    """An estimate of the time that the episodes of one training step take."""
    blocked_seconds: float
    """The longest time for which the event loop stood still."""
    directory: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the summary as plain data."""
        return {
            "groups": [
                {"task": group.problem.task, "rewards": list(group.rewards), "failed": _num_failed(group)}
                for group in self.groups
            ],
            "problems": list(self.problems),
            "seconds": round(self.seconds, 3),
            "step_seconds": round(self.step_seconds, 3),
            "blocked_seconds": round(self.blocked_seconds, 3),
        }


class _EpisodeCollector(Listener):
    """Collects episodes, and knows when they run."""

    name = "the trial"
    is_essential = True

    def __init__(self) -> None:
        self.found: list[tuple[Problem, Episode]] = []
        self.is_open = False
        self.seconds = 0.0
        self._began = 0.0

    def open(self) -> None:
        """Note that the model is loaded."""
        self.is_open, self._began = True, time.monotonic()

    def on_event(self, news: Message[Progress, None]) -> None:
        """Keep an episode."""
        if isinstance(news, EpisodeFinished):
            self.found.append((news.problem, news.episode))
            self.seconds = time.monotonic() - self._began

    def close(self) -> None:
        """Note that all episodes are over."""
        self.is_open = False


def try_agent(
    config: RunConfig,
    *,
    num_problems: int = 4,
    model: str | None = None,
    served_name: str | None = None,
    output: Path | None = None,
    backend: str = "asyncio",
) -> TrialSummary:
    """Run the agent on the first ``num_problems`` training problems, as often each as training does.

    ``model`` and ``served_name`` are as for ``evaluate``. Files are written to ``output``, or to a directory that is
    removed again. Raises ``ConfigError`` if the configuration names no agent or no problems.
    """
    missing = [f"{setting} is missing: the agent to try" for setting in config.missing_agents]
    if not config.training_sets:
        missing.append("dataset is missing: the problems to try the agent on")
    if missing:
        raise ConfigError(tuple(missing))
    found = find_model(config, model, served_name=served_name)
    with scratch_directory() as temporary:
        directory = RunDirectory(path=temporary / "try" if output is None else output.absolute())
        if output is not None and output.exists() and any(output.iterdir()):
            raise ConfigError(f"--output: {output} is not empty; name another directory")
        directory.path.mkdir(parents=True, exist_ok=True)
        with logging_to_file(directory.log):
            return loops.run(
                _try,
                config,
                found,
                directory,
                num_problems,
                output,
                event_loop=config.event_loop,
                backend=backend,
            )


async def _try(
    config: RunConfig, model: EvaluatedModel, directory: RunDirectory, num_problems: int, output: Path | None
) -> TrialSummary:
    chosen: dict[str, Problems] = {}
    for name, source in config.training_sets.items():
        everything = await to_thread.run_sync(partial(load_set, config, source, name=name))
        # The same number of each source, at least one.
        num = max(1, num_problems // len(config.training_sets))
        rows = [dict(problem.data) for problem in islice(everything.all(), num)]
        chosen[name] = Problems(rows, is_shuffled=False)
    sizes = {name: config.agents[name].group_size for name in chosen}
    heard, lags = _EpisodeCollector(), [0.0]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_watch_loop, lags, heard)
        try:
            await run_evaluation(config, model, directory, held_out=chosen, num_by_source=sizes, listener=heard)
        except EpisodeError:
            if not heard.found:
                raise
            # Every episode failed, which the summary says in more detail.
        tasks.cancel_scope.cancel()
    by_task: dict[str, list[tuple[Problem, Episode]]] = defaultdict(list)
    for problem, episode in sorted(heard.found, key=lambda one: (one[0].position, one[1].member)):
        by_task[problem.task].append((problem, episode))
    groups = tuple(
        TrialGroup(problem=found[0][0], episodes=tuple(episode for _, episode in found)) for found in by_task.values()
    )
    weights = {name: source.weight for name, source in config.sources.items()} or {"": 1.0}
    num_per_step = config.batch_size * sum(weights[name] * sizes[name] for name in weights) / sum(weights.values())
    return TrialSummary(
        groups=groups,
        conversations=tuple(read_records(directory.sessions)),
        problems=tuple(_find_problems(groups, config, blocked_seconds=lags[0], is_recorded=model.url is None)),
        seconds=heard.seconds,
        step_seconds=heard.seconds / max(len(heard.found), 1) * num_per_step,
        blocked_seconds=lags[0],
        directory=None if output is None else directory.path,
    )


async def _watch_loop(longest: list[float], heard: _EpisodeCollector) -> None:
    """Keep the longest delay of a short sleep in ``longest``. Delays before the model is loaded do not count."""
    while True:
        asked = anyio.current_time()
        await anyio.sleep(_LOOP_CHECK_SECONDS)
        if heard.is_open:
            longest[0] = max(longest[0], anyio.current_time() - asked - _LOOP_CHECK_SECONDS)


def _num_failed(group: TrialGroup) -> int:
    return sum(episode.failure is not None for episode in group.episodes)


def _find_problems(
    groups: tuple[TrialGroup, ...], config: RunConfig, *, blocked_seconds: float, is_recorded: bool
) -> Iterator[str]:
    """Yield a sentence for each thing that would keep a run from learning."""
    episodes = [episode for group in groups for episode in group.episodes]
    num_failed = sum(map(_num_failed, groups))
    if num_failed:
        yield f"{num_failed} of {len(episodes)} episodes failed; see above for why."
    num_equal = sum(len(group.rewards) > 1 and not group.has_signal for group in groups)
    if num_equal:
        rewards = {reward for group in groups for reward in group.rewards}
        advice = (
            "No episode was rewarded: use easier problems, or show the model answers first"
            if rewards == {0.0}
            else "Use harder or easier problems, larger groups, or a reward with more levels"
        )
        yield f"{num_equal} of {len(groups)} groups had equal rewards, from which nothing is learned. {advice}."
    for name, rollout in config.agents.items():
        if rollout.group_size == 1 and compares_members(config.trainer.advantages):
            setting = f"sources.{name}.group_size" if name else "rollout.group_size"
            yield f"{setting} is 1: a group of one has nothing to compare its reward with."
    num_silent = sum(
        episode.num_turns == 0 and (episode.traceback is None or NEVER_REACHED in f"{episode.failure}")
        for episode in episodes
    )
    if num_silent and is_recorded:
        yield (
            f"{num_silent} of {len(episodes)} episodes ended without an answer of the model: use the base_url and "
            "api_key that run receives."
        )
    turns = [info for episode in episodes for row in episode.trajectories for info in row.turn_infos]
    num_cut = sum(info.finish is FinishReason.LENGTH for info in turns)
    if num_cut * 10 > len(turns):
        yield f"{num_cut} of {len(turns)} answers were cut at their limit of tokens: raise max_tokens of the requests."
    yield from _find_untrained(episodes)
    if blocked_seconds > _BLOCKED_SECONDS and config.rollout.openai.mode is AgentMode.INLINE:
        yield (
            f"The event loop stood still for {blocked_seconds:.1f} s: the agent blocks it, so episodes wait for one "
            "another. Use await, anyio.to_thread, or rollout.openai.mode: subprocess."
        )


def _find_untrained(episodes: Sequence[Episode]) -> Iterator[str]:
    """Yield a sentence for each reason why tokens would not be trained, and one if they are most."""
    turns = [info for episode in episodes for row in episode.trajectories for info in row.turn_infos]
    num_unstored = sum(one.reason is UntrainedReason.NOT_STORED for episode in episodes for one in episode.untrained)
    if num_unstored:
        yield (
            f"{num_unstored} answers are not trained because the agent sends store: false; change that in the agent, "
            "or set proxy.honour_store to ignore it."
        )
    num_greedy = sum(info.sampling is not None and info.sampling.temperature == 0 for info in turns)
    if num_greedy:
        yield f"{num_greedy} of {len(turns)} answers were sampled at temperature 0, and such tokens are not trained."
    if (untrained := describe_untrained(episodes)) is not None:
        yield untrained


# -------------------------------------------------------------------------------------------------- for people


def format_trial(summary: TrialSummary) -> str:
    """Return the trial as lines for people: one conversation per problem, rewards, failures, and what is wrong."""
    lines: list[str] = []
    for group in summary.groups:
        lines += [f"=== problem {group.problem.task}", *_format_conversation(group, summary.conversations)]
    kinds: Counter[str] = Counter()
    first: dict[str, Episode] = {}
    for group in summary.groups:
        for episode in group.episodes:
            if episode.failure is not None:
                kind = kind_of(redact(episode.failure))
                kinds[kind] += 1
                first.setdefault(kind, episode)
    for kind, count in kinds.most_common():
        times = "once" if count == 1 else f"{count} times"
        lines += [f"=== failed {times}: {redact(str(first[kind].failure))}", (first[kind].traceback or "").rstrip()]
    lines.append("=== rewards of each group")
    for group in summary.groups:
        rewards = " ".join(f"{reward:.3g}" for reward in group.rewards) or "none"
        note = "" if group.has_signal or len(group.rewards) < 2 else "   equal: no signal"  # noqa: PLR2004
        failed = f"   {_num_failed(group)} failed" if _num_failed(group) else ""
        lines.append(f"problem {group.problem.task}: {rewards}{note}{failed}")
    lines.append(
        f"=== {summary.seconds:.1f} s; the episodes of a training step take about {summary.step_seconds:.0f} s"
    )
    found = [f"- {sentence}" for sentence in summary.problems]
    lines += ["What to look at:", *found] if found else ["Nothing stands in the way of training."]
    if summary.directory is not None:
        lines.append(f"Everything is in {summary.directory}; areal-actors view {summary.directory} shows it.")
    return "\n".join(line for line in lines if line)


def _format_conversation(group: TrialGroup, conversations: tuple[Mapping[str, Any], ...]) -> Iterator[str]:
    """Yield the conversation of the best episode."""
    best = max(group.episodes, key=lambda episode: (episode.failure is None, episode.reward))
    for session in conversations:
        if session["task_id"] != group.problem.task or session["sample_idx"] != best.member:
            continue
        for turn in session["turns"]:
            for message in (*turn["messages"], *([turn["answer"]] if turn["answer"] else ())):
                parts = [message.get("reasoning"), message.get("content")]
                parts += [f"{call['name']}({call['arguments']})" for call in message.get("tool_calls") or ()]
                for text in map(str, filter(None, parts)):
                    shown = text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]} …"
                    yield f"{message['role']:>11}: " + shown.replace("\n", f"\n{'':>13}")
        yield f"  -> reward {best.reward:.3g}" if best.failure is None else "  -> failed"
        return
