"""Try an agent without training: ``areal-actors try`` and ``try_agent(config)``.

A few problems are run as groups, by the same code as evaluations, and everything that would keep a run from learning is
named: failures with their tracebacks, equal rewards, requests that never came, greedy or truncated answers, an agent
that blocks the event loop.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from anyio import to_thread
from attrs import evolve, frozen

from areal_actors.config import AgentMode, RunConfig
from areal_actors.dashboard import RunDirectory
from areal_actors.dashboard.records import read_records
from areal_actors.dashboard.reporter import Listener
from areal_actors.datasets import Problems
from areal_actors.domain import Episode, FinishReason, Problem, UntrainedReason
from areal_actors.errors import ConfigError, EpisodeError
from areal_actors.kernel import Message
from areal_actors.lib import loops
from areal_actors.lib.scratch import scratch_directory
from areal_actors.lib.task_groups import leaves
from areal_actors.lib.telemetry import kind_of, logging_to_file
from areal_actors.messages import EpisodeFinished, Progress
from areal_actors.rollouts.runner import NEVER_REACHED
from areal_actors.run.advice import compares_members
from areal_actors.run.evaluated_model import EvaluatedModel, find_model
from areal_actors.run.evaluation import run_evaluation
from areal_actors.run.job import load_set
from areal_actors.run.loop_watch import BlockedLoop, watch_loop
from areal_actors.training.metrics import describe_untrained

_BLOCKED_SECONDS = 0.5
"""Delays of the event loop that are reported. Python's lock causes shorter ones."""
_MAX_MESSAGE = 600
"""Characters of a message that are printed."""

OnGroup = Callable[["TrialGroup"], object]


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
    blocked: BlockedLoop
    """The longest time for which the agent kept the event loop waiting."""
    is_interrupted: bool = False
    """Whether Ctrl-C ended it, so that groups or episodes are missing."""
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
            "blocked_seconds": round(self.blocked.seconds, 3),
        }


class _EpisodeCollector(Listener):
    """Collects episodes, and calls ``on_group`` when a group is complete: one of ``sizes``, by source."""

    name = "the trial"
    is_essential = True

    def __init__(self, sizes: Mapping[str, int], on_group: OnGroup | None) -> None:
        self.sizes = sizes
        self.num_found = 0
        self.seconds = 0.0
        self.blocked = BlockedLoop()
        self._on_group = on_group
        self._by_problem: dict[tuple[str, int], list[tuple[Problem, Episode]]] = defaultdict(list)
        self._began = 0.0

    def open(self) -> None:
        """Note that the model is loaded."""
        self._began = time.monotonic()

    def on_event(self, news: Message[Progress, None]) -> None:
        """Keep an episode."""
        if isinstance(news, EpisodeFinished):
            self.num_found += 1
            self.seconds = time.monotonic() - self._began
            members = self._by_problem[news.problem.place]
            members.append((news.problem, news.episode))
            if self._on_group is not None and len(members) == self.sizes[news.problem.source]:
                self._on_group(_group_of(members))

    @property
    def groups(self) -> tuple[TrialGroup, ...]:
        """The groups in the order of their problems, also those that are not complete."""
        return tuple(_group_of(self._by_problem[place]) for place in sorted(self._by_problem))


def _group_of(members: list[tuple[Problem, Episode]]) -> TrialGroup:
    episodes = sorted((episode for _, episode in members), key=lambda episode: episode.member)
    return TrialGroup(problem=members[0][0], episodes=tuple(episodes))


def try_agent(
    config: RunConfig,
    *,
    num_problems: int = 4,
    model: str | None = None,
    served_name: str | None = None,
    output: Path | None = None,
    on_group: OnGroup | None = None,
    backend: str = "asyncio",
) -> TrialSummary:
    """Run the agent on the first ``num_problems`` training problems, as often each as training does.

    ``model`` and ``served_name`` are as for ``evaluate``. Files are written to ``output``, or to a directory that is
    removed again. ``on_group`` is called with each group as it ends, on a thread. After Ctrl-C, the summary is that of
    the episodes that have ended; if none has, ``KeyboardInterrupt`` is raised. Raises ``ConfigError`` if the
    configuration names no agent or no problems.
    """
    missing = [f"{setting} is missing: the agent to try" for setting in config.missing_agents]
    if not config.training_sets:
        missing.append("dataset is missing: the problems to try the agent on")
    if missing:
        raise ConfigError(tuple(missing))
    found = find_model(config, model, served_name=served_name)
    sizes = {name: config.agents[name].group_size for name in config.training_sets}
    collector, is_interrupted = _EpisodeCollector(sizes, on_group), False
    with scratch_directory() as temporary:
        directory = RunDirectory(path=temporary / "try" if output is None else output.absolute())
        if output is not None and output.exists() and any(output.iterdir()):
            raise ConfigError(f"--output: {output} is not empty; name another directory")
        directory.path.mkdir(parents=True, exist_ok=True)
        run = partial(_try, config, found, directory, num_problems, collector)
        try:
            with logging_to_file(directory.log):
                loops.run(run, event_loop=config.event_loop, backend=backend)
        except EpisodeError:
            # If every episode failed, the summary says so in more detail.
            if not collector.num_found:
                raise
        except BaseException as error:
            is_interrupted = any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves(error))
            if not is_interrupted or not collector.num_found:
                raise
        return _summarize(
            config,
            collector,
            is_recorded=found.url is None,
            is_interrupted=is_interrupted,
            directory=directory,
            is_kept=output is not None,
        )


async def _try(
    config: RunConfig,
    model: EvaluatedModel,
    directory: RunDirectory,
    num_problems: int,
    collector: _EpisodeCollector,
) -> None:
    """Run the episodes; ``collector`` has them in whatever way this ends."""
    config = evolve(config, rollout=evolve(config.rollout, is_trial=True))
    chosen: dict[str, Problems] = {}
    for name, source in config.training_sets.items():
        everything = await to_thread.run_sync(partial(load_set, config, source, name=name))
        # The same number of each source, at least one.
        num = max(1, num_problems // len(config.training_sets))
        rows = [dict(problem.data) for problem in islice(everything.all(), num)]
        chosen[name] = Problems(rows, is_shuffled=False)
    async with watch_loop() as watch:
        try:
            await run_evaluation(
                config, model, directory, held_out=chosen, num_by_source=collector.sizes, listener=collector
            )
        finally:
            collector.blocked = watch.longest


def _summarize(
    config: RunConfig,
    collector: _EpisodeCollector,
    *,
    is_recorded: bool,
    is_interrupted: bool,
    directory: RunDirectory,
    is_kept: bool,
) -> TrialSummary:
    groups, sizes = collector.groups, collector.sizes
    weights = {name: source.weight for name, source in config.sources.items()} or {"": 1.0}
    num_per_step = config.batch_size * sum(weights[name] * sizes[name] for name in weights) / sum(weights.values())
    return TrialSummary(
        groups=groups,
        conversations=tuple(read_records(directory.sessions)),
        problems=tuple(_find_problems(groups, config, blocked=collector.blocked, is_recorded=is_recorded)),
        seconds=collector.seconds,
        step_seconds=collector.seconds / collector.num_found * num_per_step,
        blocked=collector.blocked,
        is_interrupted=is_interrupted,
        directory=directory.path if is_kept else None,
    )


def _num_failed(group: TrialGroup) -> int:
    return sum(episode.failure is not None for episode in group.episodes)


def _find_problems(
    groups: tuple[TrialGroup, ...], config: RunConfig, *, blocked: BlockedLoop, is_recorded: bool
) -> Iterator[str]:
    """Yield a sentence for each thing that would keep a run from learning."""
    episodes = [episode for group in groups for episode in group.episodes]
    num_failed = sum(map(_num_failed, groups))
    if num_failed:
        yield f"{num_failed} of {len(episodes)} episodes failed; see above for why."
    num_equal = sum(len(group.rewards) > 1 and not group.has_signal for group in groups)
    # A run that learns may begin with several equal groups.
    if num_equal * 2 >= len(groups):
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
    if blocked.seconds > _BLOCKED_SECONDS and config.rollout.openai.mode is AgentMode.INLINE:
        yield (
            f"{blocked.place}, kept the event loop for {blocked.seconds:.1f} s, in which all other episodes waited. "
            "Use await, anyio.to_thread, or rollout.openai.mode: subprocess."
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
    if (untrained := describe_untrained(episodes)) is not None:
        yield untrained
    elif num_greedy:
        yield (
            f"{num_greedy} of {len(turns)} answers were sampled at temperature 0, and such tokens are not trained: "
            "give requests a temperature, or set rollout.sampling.temperature: override."
        )


# -------------------------------------------------------------------------------------------------- for people


def format_trial(summary: TrialSummary) -> str:
    """Return the trial as lines for people: one conversation per problem, failures, and what is wrong."""
    lines: list[str] = []
    for group in summary.groups:
        lines += [f"=== problem {group.problem.task}", *_format_conversation(group, summary.conversations)]
    kinds: Counter[str] = Counter()
    first: dict[str, Episode] = {}
    for group in summary.groups:
        for episode in group.episodes:
            if episode.failure is not None:
                kind = kind_of(episode.failure)
                kinds[kind] += 1
                first.setdefault(kind, episode)
    for kind, count in kinds.most_common():
        times = "once" if count == 1 else f"{count} times"
        lines += [f"=== failed {times}: {first[kind].failure}", (first[kind].traceback or "").rstrip()]
    lines.append(
        f"=== {summary.seconds:.1f} s; the episodes of a training step take about {summary.step_seconds:.0f} s"
    )
    found = [f"- {sentence}" for sentence in summary.problems]
    if summary.is_interrupted:
        lines.append("Interrupted: the rest was not run.")
    elif not found:
        lines.append("Ready to train.")
    lines += ["What to look at:", *found] if found else []
    if summary.directory is not None:
        lines.append(f"Everything is in {summary.directory}; areal-actors view {summary.directory} shows it.")
    return "\n".join(line for line in lines if line)


def format_group(group: TrialGroup) -> str:
    """Return the rewards of a group as a line."""
    rewards = " ".join(f"{reward:.3g}" for reward in group.rewards) or "none"
    note = "" if group.has_signal or len(group.rewards) < 2 else "   equal: no signal"  # noqa: PLR2004
    failed = f"   {_num_failed(group)} failed" if _num_failed(group) else ""
    return f"problem {group.problem.task}: {rewards}{note}{failed}"


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
