"""Training rows, and the episodes and groups that they belong to.

A row of T tokens is usually one sequence. The row of a tree holds each token once, even if several branches share it.
``predecessors`` int32 [T] is the index of the token before each one, -1 where a branch begins at a root. It is less
than the token's own index, so ancestors come first, and a token attends to its ancestors and itself::

    ids            s  u  a  b  c  d          s u a b c    and    s u a d
    predecessors  -1  0  1  2  3  2
    positions      0  1  2  3  4  3

All functions work on runs, in which each token follows its neighbour in the row: long rows have few runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import evolve, field, frozen
from attrs.converters import optional

from areal_actors.domain.chat import InteractionId, SessionId
from areal_actors.domain.sampling import (
    Experts,
    FinishReason,
    Floats,
    Ints,
    SamplingDistribution,
    array_equality,
    as_experts,
    as_floats,
    as_ints,
)
from areal_actors.domain.tree import GroupId
from areal_actors.lib.notebooks import format_table
from areal_actors.lib.telemetry import redact

_MAX_SHOWN = 64
"""Tokens of a row in a notebook."""


class UntrainedReason(StrEnum):
    """Reasons why sampled tokens are in no training row, or are masked in it."""

    CANCELLED = "cancelled"
    FAILED = "failed"
    NOT_STORED = "not_stored"
    NO_REWARD = "no_reward"
    TOO_LONG = "too_long"
    TRUNCATED = "truncated"
    OTHER_ROLE = "other_role"
    """Its role is not in ``rollout.train_roles``."""


@frozen(kw_only=True)
class Untrained:
    """Sampled tokens that no row trains, with the reason for the report."""

    interaction: InteractionId
    num_tokens: int
    reason: UntrainedReason


class Credit(StrEnum):
    """The reward that a turn's return draws on."""

    REWARDED = "rewarded"
    """A reward set on the turn's answer, or on one that continues it."""
    INHERITED = "inherited"
    """The outcome of the episode, set on an answer that does not continue this one."""
    NONE = "none"
    """No reward: the return is 0."""


@frozen(kw_only=True)
class TurnInfo:
    """Facts about one turn of a row that all of its sampled tokens share.

    ``depth`` counts the completed turns before it in its conversation, 0 for the first. It is the depth in the
    conversation tree, not the index within the row, so that it is the same in every export style. ``tag`` names the
    requesting agent (``x-areal-agent``). ``finish`` is the engine's reason for stopping, ``None`` if unknown.
    ``sampling`` is the distribution that the tokens were sampled from, ``None`` if unknown. ``credit`` is the reward
    that its return draws on, ``None`` if unknown. ``digest`` is that of the recorded turn (see ``domain.digests``),
    ``None`` if it has none.
    """

    depth: int = 0
    tag: str | None = None
    finish: FinishReason | None = None
    sampling: SamplingDistribution | None = None
    credit: Credit | None = None
    digest: str | None = None


@frozen(kw_only=True)
class Trajectory:
    """One training row of T tokens: their ids, loss mask, sampling data and returns.

    ``input_ids`` int32 [T]; ``loss_mask`` int32 [T], 1 on sampled tokens that this row trains; ``logprobs`` float32
    [T], 0 off the mask; ``versions`` int32 [T], -1 on tokens that were not sampled; ``returns`` float32 [T], each
    turn's return on its sampled tokens; ``turns`` int32 [T], the index into ``interactions`` of the turn that sampled
    the token, -1 elsewhere. ``reward`` is the return of the row's last interaction.

    ``predecessors`` int32 [T], if set, make the row a tree (see ``domain.predecessors``). ``raw_logprobs`` float32 [T],
    if the engine knows them, are those of the plain softmax on the mask, and 0 off it. ``teacher_logprobs`` float32
    [T], if a teacher has scored the row, are those of its plain softmax on the mask, and 0 off it. ``routed_experts``
    uint8 or uint16 [T, layers, k], if the engine of a mixture of experts recorded them, are the experts that each token
    was routed to, in each layer with a router.

    ``turn_infos`` are aligned with ``interactions``; empty if nothing is known about the turns, as in rows that a
    workflow built from its own tensors.
    """

    session: SessionId
    interactions: tuple[InteractionId, ...]
    input_ids: Ints = field(converter=as_ints, eq=array_equality)
    loss_mask: Ints = field(converter=as_ints, eq=array_equality)
    logprobs: Floats = field(converter=as_floats, eq=array_equality)
    versions: Ints = field(converter=as_ints, eq=array_equality)
    returns: Floats = field(converter=as_floats, eq=array_equality)
    turns: Ints = field(converter=as_ints, eq=array_equality)
    reward: float
    tag: str | None = None
    predecessors: Ints | None = field(default=None, converter=optional(as_ints), eq=array_equality)
    raw_logprobs: Floats | None = field(default=None, converter=optional(as_floats), eq=array_equality)
    turn_infos: tuple[TurnInfo, ...] = ()
    teacher_logprobs: Floats | None = field(default=None, converter=optional(as_floats), eq=array_equality)
    routed_experts: Experts | None = field(default=None, converter=optional(as_experts), eq=array_equality, repr=False)

    @property
    def position_ids(self) -> Ints:
        """The number of tokens before each one in its branch, int32 [T]."""
        if self.predecessors is None:
            return np.arange(self.num_tokens, dtype=np.int32)
        return tree_position_ids(self.predecessors)

    @property
    def num_tokens(self) -> int:
        """The length T of the row."""
        return len(self.input_ids)

    @property
    def num_trained_tokens(self) -> int:
        """The number of tokens with ``loss_mask`` 1."""
        return int(self.loss_mask.sum())

    def _repr_html_(self) -> str:
        """Return the first tokens as a table, for notebooks; the trained ones are bold."""
        columns = ("input_ids", "loss_mask", "logprobs", "versions", "returns", "turns")
        head = "".join(f"<th>{name}</th>" for name in ("", *columns))
        lines = []
        for index in range(min(self.num_tokens, _MAX_SHOWN)):
            cells = "".join(f"<td>{getattr(self, name)[index]:.6g}</td>" for name in columns)
            weight = ' style="font-weight: bold"' if self.loss_mask[index] else ""
            lines.append(f"<tr{weight}><th>{index}</th>{cells}</tr>")
        more = f"<p>{self.num_tokens - len(lines)} more tokens</p>" if self.num_tokens > len(lines) else ""
        facts = f"{self.num_tokens} tokens, {self.num_trained_tokens} trained, reward {self.reward:g}"
        return f"<p>{facts}</p><table><tr>{head}</tr>{''.join(lines)}</table>{more}"

    @property
    def head_version(self) -> int:
        """The oldest version that sampled a token of this row; -1 if none did."""
        sampled = self.versions[self.versions >= 0]
        return int(sampled.min()) if len(sampled) else -1

    @property
    def tail_version(self) -> int:
        """The newest version that sampled a token of this row; -1 if none did."""
        return int(self.versions.max()) if len(self.versions) else -1


@frozen(kw_only=True)
class Problem:
    """One item of a dataset. ``position`` counts its problems over all epochs; ``data`` is what ``run`` receives."""

    position: int
    data: Mapping[str, Any]
    source: str = ""
    """The name of its dataset, if that has one."""

    @property
    def task(self) -> str:
        """The id of the problem among those of all datasets, as in names of files and in ``task_id``."""
        return f"{self.source}-{self.position}" if self.source else str(self.position)

    @property
    def place(self) -> tuple[str, int]:
        """The source and the position, which no two problems of a run have in common."""
        return self.source, self.position


@frozen(kw_only=True)
class Episode:
    """One run of an agent on a problem. A failed one has a ``failure`` and no trajectories.

    ``reward`` is the sum of the rewards assigned to its interactions, before any propagation. With ``is_rejected``, its
    workflow discarded it on purpose; ``failure`` is set as well. ``cut_short`` is the reason why an episode ended early
    that is nevertheless trained as far as it went. ``traceback`` is that of the agent's exception, if it raised one.
    These texts have no keys and no id of the session. ``is_restored`` is that of its session. ``num_empty_turns``
    counts answers that were completed without a sampled token, which a working engine never produces.
    """

    session: SessionId
    member: int
    reward: float = 0.0
    trajectories: tuple[Trajectory, ...] = ()
    untrained: tuple[Untrained, ...] = ()
    num_turns: int = 0
    num_empty_turns: int = 0
    seconds: float = 0.0
    failure: str | None = None
    traceback: str | None = None
    is_rejected: bool = False
    cut_short: str | None = None
    is_restored: bool = False
    logged: Mapping[str, float] = field(factory=dict)
    """Named numbers that the agent logged, including those of a failed episode."""
    limit: str | None = None
    """The limit that refused a request of its agent, such as ``max_turns``."""

    def __attrs_post_init__(self) -> None:
        """Shorten keys and the session's id: an agent's exception may quote anything that it knows."""
        for name in ("failure", "traceback", "cut_short"):
            if (text := getattr(self, name)) is not None:
                object.__setattr__(self, name, redact(text, session=self.session))

    def _repr_html_(self) -> str:
        """Return the episode and its rows as tables, for notebooks."""
        facts = {"session": self.session, "reward": self.reward, "turns": self.num_turns, "seconds": self.seconds}
        ends = {"failure": self.failure, "cut short": self.cut_short} if self.failure or self.cut_short else {}
        return format_table({**facts, **self.logged, **ends}) + "".join(row._repr_html_() for row in self.trajectories)


@frozen(kw_only=True)
class Group:
    """The episodes of one problem: the unit of capacity, of staleness and of group-relative advantages."""

    id: GroupId
    problem: Problem
    episodes: tuple[Episode, ...]

    @property
    def rows(self) -> tuple[Trajectory, ...]:
        """The rows of the episodes that did not fail, in order."""
        return tuple(row for episode in self.episodes if episode.failure is None for row in episode.trajectories)

    @cached_property
    def head_version(self) -> int:
        """The oldest version that sampled a token of the group; -1 if there is none.

        It is cached, because it is read repeatedly and rows are long.
        """
        versions = [trajectory.head_version for episode in self.episodes for trajectory in episode.trajectories]
        return min((version for version in versions if version >= 0), default=-1)


@frozen(kw_only=True)
class DrawnProblem:
    """Statistics of a problem: how often it was drawn, and the share of its last group that solved it."""

    row: int
    num_drawn: int
    solve_rate: float | None = None


@frozen(kw_only=True)
class AssignedProblem:
    """The problem that runs, or will run, at a position."""

    position: int
    row: int


@frozen(kw_only=True)
class PoolsState:
    """The state of draws by difficulty (``datasets.difficulty``)."""

    problems: tuple[DrawnProblem, ...] = ()
    assigned: tuple[AssignedProblem, ...] = ()


@frozen(kw_only=True)
class PoolSizes:
    """The numbers of problems in the pools of a source; all others are normal.

    ``solve_rate`` is the mean solve rate of the ``num_run`` problems that have been run.
    """

    easy: int
    hard: int
    num_run: int
    solve_rate: float | None = None


@frozen(kw_only=True)
class SourcePosition:
    """How far the problems of a source have been consumed: all below ``next`` except ``pending``, which run first.

    ``pools`` is set if problems are drawn by difficulty. ``num_counted`` is the number of problems consumed since the
    sources have their present weights, of which this one's is ``weight``; 0 for a source that the run does not have.
    """

    next: int = 0
    pending: tuple[int, ...] = ()
    pools: PoolsState | None = None
    weight: float = 0.0
    num_counted: int = 0


@frozen(kw_only=True)
class DataPosition:
    """How far the problems have been consumed: all below ``next`` except ``pending``, which run first.

    ``pools`` is set if problems are drawn by difficulty. Problems of ``sources`` have a position for each.
    """

    next: int = 0
    pending: tuple[int, ...] = ()
    pools: PoolsState | None = None
    sources: Mapping[str, SourcePosition] = field(factory=dict)


Indices = npt.NDArray[np.int64]


def is_tree_order(predecessors: npt.NDArray[Any]) -> bool:
    """Return whether each of ``predecessors`` [T] is -1 or the index of an earlier token."""
    return bool(((predecessors >= -1) & (predecessors < np.arange(len(predecessors)))).all())


def tree_position_ids(predecessors: Ints) -> Ints:
    """Return the number of ancestors of each token, int32 [T]."""
    depths = np.zeros(len(predecessors), np.int32)
    for start, stop in _runs(predecessors):
        before = int(predecessors[start])
        first = 0 if before < 0 else int(depths[before]) + 1
        depths[start:stop] = np.arange(first, first + stop - start)
    return depths


def context_digests(input_ids: Ints, predecessors: Ints | None = None) -> npt.NDArray[np.uint64]:
    """Return a digest of each token with its context, the tokens that it follows: uint64 [T].

    Tokens of any rows have the same digest if a model of the same weights computes the same distribution for them and
    they have the same id. It is a sum over the path to the token, so it costs a few vector operations for each branch.
    """
    predecessors = np.arange(-1, len(input_ids) - 1, dtype=np.int32) if predecessors is None else predecessors
    places = (tree_position_ids(predecessors).astype(np.uint64) << np.uint64(32)) | input_ids.astype(np.uint64)
    digests = _mixed(places)
    for start, stop in _runs(predecessors):
        np.cumsum(digests[start:stop], out=digests[start:stop])
        if (before := int(predecessors[start])) >= 0:
            digests[start:stop] += digests[before]
    return digests


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the output of SplitMix64 (Steele, Lea and Flood 2014) for each state: equal states, equal outputs."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def branch_ends(predecessors: Ints) -> Indices:
    """Return the tokens without a successor, in order, int64 [number of branches]."""
    is_end = np.ones(len(predecessors), np.bool_)
    is_end[predecessors[predecessors >= 0]] = False
    return np.flatnonzero(is_end)


def path_to(end: int, predecessors: Ints) -> Indices:
    """Return the ancestors of token ``end``, root first, and the token itself: int64 [depth + 1]."""
    starts = _run_starts(predecessors)
    # One run of neighbours at a time, instead of one token: rows have few branches.
    parts: list[Indices] = []
    while end >= 0:
        start = int(starts[np.searchsorted(starts, end, side="right") - 1])
        parts.append(np.arange(start, end + 1))
        end = int(predecessors[start])
    return np.concatenate(parts[::-1])


def _runs(predecessors: Ints) -> list[tuple[int, int]]:
    starts = _run_starts(predecessors).tolist()
    return list(zip(starts, [*starts[1:], len(predecessors)], strict=True)) if starts else []


def _run_starts(predecessors: Ints) -> Indices:
    """Return where tokens do not follow their neighbour. The first token of the row always begins a run."""
    follows = predecessors == np.arange(-1, len(predecessors) - 1)
    follows[:1] = False
    return np.flatnonzero(~follows)


@frozen(kw_only=True)
class Branch:
    """One branch: a linear row, and the indices, int64 [T], of its tokens in the tree row."""

    row: Trajectory
    places: npt.NDArray[np.int64] = field(eq=False)


def unfold(row: Trajectory) -> tuple[Branch, ...]:
    """Return the branches of ``row``, in the order of their ends. A linear row is its only branch.

    A token that several branches share is trained in the first of them and masked in the others. Branches with nothing
    left to train are omitted, unless the row trains nothing at all.
    """
    if row.predecessors is None:
        return (Branch(row=row, places=np.arange(row.num_tokens)),)
    # A shared token is trained in the first branch that has it, so that each is trained once.
    is_done = np.zeros(row.num_tokens, np.bool_)
    branches: list[Branch] = []
    for end in branch_ends(row.predecessors).tolist():
        places = path_to(end, row.predecessors)
        branch = _branch(row, places, is_done[places])
        is_done[places] = True
        if branch.num_trained_tokens or not row.num_trained_tokens:
            branches.append(Branch(row=branch, places=places))
    return tuple(branches)


def _branch(row: Trajectory, places: npt.NDArray[np.int64], is_done: npt.NDArray[np.bool_]) -> Trajectory:
    mask = np.where(is_done, 0, row.loss_mask[places])
    sampled = row.turns[places] >= 0
    kept, turns = np.unique(row.turns[places][sampled], return_inverse=True)
    renumbered = np.full(len(places), -1, np.int32)
    renumbered[sampled] = turns
    # The reward of a row is the return of its last turn, which differs from branch to branch.
    last = int(places[sampled][-1]) if sampled.any() else None
    is_whole = last is not None and int(row.turns[last]) == len(row.interactions) - 1
    return evolve(
        row,
        interactions=tuple(row.interactions[turn] for turn in kept) or row.interactions[-1:],
        turn_infos=(tuple(row.turn_infos[turn] for turn in kept) or row.turn_infos[-1:]) if row.turn_infos else (),
        input_ids=row.input_ids[places],
        loss_mask=mask,
        logprobs=np.where(mask == 1, row.logprobs[places], 0),
        versions=row.versions[places],
        returns=row.returns[places],
        turns=renumbered,
        reward=row.reward if last is None or is_whole else float(row.returns[last]),
        predecessors=None,
        raw_logprobs=None if row.raw_logprobs is None else np.where(mask == 1, row.raw_logprobs[places], 0),
        teacher_logprobs=None if row.teacher_logprobs is None else np.where(mask == 1, row.teacher_logprobs[places], 0),
        routed_experts=None if row.routed_experts is None else row.routed_experts[places],
    )


def unfold_group(group: Group) -> Group:
    """Return the group with each tree row replaced by its branches, or the group itself if all rows are linear."""
    rows = [row for episode in group.episodes for row in episode.trajectories]
    if all(row.predecessors is None for row in rows):
        return group
    return evolve(group, episodes=tuple(map(_unfold_episode, group.episodes)))


def _unfold_episode(episode: Episode) -> Episode:
    rows = tuple(branch.row for row in episode.trajectories for branch in unfold(row))
    return evolve(episode, trajectories=rows)


def find_truncated(row: Trajectory) -> dict[InteractionId, int]:
    """Return the turns of ``row`` that ended at their token limit, with the number of their tokens that the row trains.

    Turns without information, such as those of a workflow's own tensors, do not count as truncated.
    """
    cut = [index for index, info in enumerate(row.turn_infos) if info.finish is FinishReason.LENGTH]
    trained = row.turns[row.loss_mask == 1]
    return {row.interactions[index]: int((trained == index).sum()) for index in cut}


def mask_truncated(row: Trajectory) -> Trajectory:
    """Return the row with truncated turns masked in the loss; returns stay.

    Returns the row itself if there are none.
    """
    cut = [index for index, info in enumerate(row.turn_infos) if info.finish is FinishReason.LENGTH]
    if not cut:
        return row
    return _masked(row, np.where(np.isin(row.turns, cut), 0, row.loss_mask))


def mask_row(row: Trajectory) -> Trajectory:
    """Return the row with all of its tokens masked in the loss; returns stay."""
    return _masked(row, np.zeros_like(row.loss_mask))


def _masked(row: Trajectory, mask: npt.NDArray[Any]) -> Trajectory:
    raw = row.raw_logprobs
    return evolve(
        row,
        loss_mask=as_ints(mask),
        logprobs=as_floats(np.where(mask == 1, row.logprobs, 0)),
        raw_logprobs=None if raw is None else as_floats(np.where(mask == 1, raw, 0)),
    )


def withhold_truncated(episode: Episode) -> Episode:
    """Return the episode with truncated turns masked and listed as untrained."""
    found = [entry for row in episode.trajectories for entry in find_truncated(row).items()]
    listed = tuple(
        Untrained(interaction=interaction, num_tokens=num_tokens, reason=UntrainedReason.TRUNCATED)
        for interaction, num_tokens in found
        if num_tokens
    )
    rows = tuple(map(mask_truncated, episode.trajectories))
    return evolve(episode, trajectories=rows, untrained=episode.untrained + listed)


@frozen(kw_only=True)
class TrainedRow:
    """A row of T tokens as a step trained it: one branch of a session, never a tree.

    ``advantages`` float32 [T] are 0 off the loss mask. ``trainer_logprobs`` float32 [T] are the trainer's
    log-probabilities of the trained tokens, under the distributions that they were sampled from and, unless a step
    makes several updates without scoring its rows first, the weights before the step. They are nan off the mask and in
    rows that the step skipped because they could not change the gradient. ``task`` is the position of the row's
    problem in its ``source``, ``member`` the index of its episode in the group, and ``episode_reward`` the reward that
    the agent reported; ``trajectory.reward`` is the return of the row's last turn.
    """

    trajectory: Trajectory
    advantages: Floats = field(converter=as_floats, eq=array_equality)
    trainer_logprobs: Floats = field(converter=as_floats, eq=array_equality)
    task: int
    member: int
    episode_reward: float
    source: str = ""
    temperature: float = 1.0
    """The temperature of turns that do not record the one they were sampled at."""
