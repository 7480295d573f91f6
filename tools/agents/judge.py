"""What an agent's episode shows, read off its record and its exported rows.

The judge does not trust the links that it judges: which answer a request continues is read off the labels in its prompt
(see ``play``), and which tokens were sampled off the engine's own log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from attrs import frozen
from tools.agents.play import Cue, Kind

from areal_actors.cache import STYLES, export_trajectories
from areal_actors.domain import Episode, Interaction, InteractionStatus, SessionRecord, Trajectory
from areal_actors_testing.exactness import (
    Recorded,
    find_prompt_violations,
    find_return_violations,
    find_row_violations,
)

__all__ = ["Report", "judge"]


@frozen(kw_only=True)
class Report:
    """The figures of one episode, and what is wrong with it."""

    turns: int
    """Completed turns of the main thread."""
    sub_turns: int
    side_calls: int
    summaries: int
    follow_ups: int
    """Completed requests that continue an answer, in any thread."""
    linked: int
    """Those whose parent is that answer."""
    wrong: int
    """Requests whose parent is another answer."""
    misses: tuple[str, ...]
    """The follow-ups that are not linked, each with what it continues and the reason of its fork."""
    cancelled: int
    forks: Mapping[str, int]
    """The number of follow-ups that do not extend the tokens of their parent, by reason."""
    returns: Mapping[str, float]
    """The smallest return of each kind of request: ``main``, ``sub``, ``side``, ``summary``."""
    tokens: int
    """Sampled tokens that are trained."""
    faults: tuple[str, ...] = ()


def judge(record: SessionRecord, exported: Episode, cues: Mapping[str, Cue], log: Mapping[str, Recorded]) -> Report:
    """Return the report of an episode whose last answer was rewarded with 1.

    Args:
        record: the session before its export.
        exported: its rows in the style ``individual``, as the service exports them.
        cues: what each request asked for, by its id.
        log: the tokens that the engine saw and sampled, by request.
    """
    completed = [turn for turn in record.interactions if turn.status is InteractionStatus.COMPLETED]
    cancelled = [turn for turn in record.interactions if turn.status is InteractionStatus.CANCELLED]
    kinds = Counter(_kind(cues[turn.id]) for turn in completed)
    continued = list(_continued(completed, cues))
    follow_ups = [(turn, parent) for turn, parent, is_compacted in continued if not is_compacted]
    linked = [(turn, parent) for turn, parent in follow_ups if turn.parent == parent.id]
    parents = {turn.id: parent.id for turn, parent, _ in continued}
    returns: dict[str, float] = {}
    for row in exported.trajectories:
        for name, value in _returns(row):
            kind = _kind(cues[name])
            returns[kind] = min(value, returns.get(kind, value))
    return Report(
        turns=kinds["main"],
        sub_turns=kinds["sub"],
        side_calls=kinds["side"],
        summaries=kinds["summary"],
        follow_ups=len(follow_ups),
        linked=len(linked),
        wrong=sum(turn.parent is not None and turn.parent != parents.get(turn.id) for turn in completed),
        misses=tuple(
            f"{cues[turn.id].label} after {cues[parent.id].label}: {turn.fork or 'no reason'}"
            for turn, parent in follow_ups
            if turn.parent != parent.id
        ),
        cancelled=len(cancelled),
        forks=dict(Counter(str(turn.fork) for turn, _ in follow_ups if turn.fork is not None)),
        returns=returns,
        tokens=sum(row.num_trained_tokens for row in exported.trajectories),
        faults=tuple(_faults(record, exported, log, cancelled)),
    )


def _kind(cue: Cue) -> str:
    return cue.thread if cue.kind is Kind.TURN else str(cue.kind)


def _continued(
    completed: Sequence[Interaction], cues: Mapping[str, Cue]
) -> Iterator[tuple[Interaction, Interaction, bool]]:
    """Yield each request whose history has a completed answer, with the interaction of the last one.

    The last value says whether a compaction lies between the two.
    """
    answered: dict[str, Interaction] = {}
    for turn in sorted(completed, key=lambda turn: turn.order):
        cue = cues[turn.id]
        # An agent may echo a part of an answer that it interrupted; the parent is the answer before it. A compaction
        # may keep the last answers beside its summary: what follows may continue them, or be another conversation.
        start = answered[cue.summary].order if cue.summary in answered else -1
        parents = [answered[label] for label in cue.echoes if label in answered]
        if parents:
            yield turn, parents[-1], parents[-1].order < start
        if cue.kind is not Kind.SIDE:
            answered[cue.label] = turn


def _returns(row: Trajectory) -> Iterator[tuple[str, float]]:
    """Yield the turns that a row trains, with their returns."""
    for index, name in enumerate(row.interactions):
        trained = row.returns[(row.turns == index) & (row.loss_mask == 1)]
        if len(trained):
            yield name, float(trained.min())


def _faults(
    record: SessionRecord, exported: Episode, log: Mapping[str, Recorded], cancelled: Sequence[Interaction]
) -> Iterator[str]:
    yield from find_prompt_violations(record, log)
    yield from find_row_violations(exported.trajectories, exported.untrained, log)
    rows = {}
    for style in STYLES:
        again = export_trajectories(record, discount=1.0, style=style)
        rows[style] = again.trajectories
        for violation in find_row_violations(again.trajectories, again.untrained, log):
            yield f"{style}: {violation}"
    yield from find_return_violations(rows)
    if pending := [turn.id for turn in record.interactions if turn.status is InteractionStatus.PENDING]:
        yield f"{len(pending)} requests are still pending"
    if not exported.trajectories:
        yield "nothing is trained"
    listed = Counter(str(entry.interaction) for entry in exported.untrained)
    for turn in cancelled:
        if turn.id in log and len(log[turn.id].token_ids) and listed[turn.id] != 1:
            yield f"{turn.id} was cancelled, and is listed {listed[turn.id]} times as untrained"
    if lost := log.keys() - {turn.id for turn in record.interactions}:
        yield f"{len(lost)} requests are not in the session"
