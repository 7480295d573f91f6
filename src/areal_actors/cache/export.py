"""Export of a session as training rows: which tokens are trained, with which return, and why the others are not.

There are three styles, chosen by name. ``individual`` makes a row per interaction in which only its own output is
trained. ``concat`` makes a row per leaf of the token tree, with every output on the path trained; an output that
several leaves share is trained in the first of them (in order of request) and masked in the others::

    A ──▶ B ──▶ C        individual:  A   A·B   A·B·C   A·D        (only the last output of each is trained)
    └───▶ D              concat:      A·B·C   a·D                  (a: masked, trained in the first row)
                         tree:        A·B·C·D                      (D follows A: see ``domain.predecessors``)

``tree`` makes one row per session, in which every sampled token and every shared prompt token occurs once (``trees``).
If lengths are limited and that row is too long, it makes several.

All styles train every sampled token exactly once or list it in ``untrained`` with a reason, and all agree on the id,
the log-probability, the version and the return of each. Rows are built front to back from stored ids, in time linear in
their length; lengths are checked against the record of the planned prompt.

``arrays`` builds padded arrays, ``rewards`` computes returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from attrs import frozen

from areal_actors.cache.columns import Source, Span, checked_completion, columns_of, infos_of
from areal_actors.cache.history import Lookup, lookup_in
from areal_actors.cache.rewards import (
    Rule,
    Unrewarded,
    backpropagate,
    credits_of,
    inherited_tree,
    rewarded_conversations,
)
from areal_actors.cache.tokens import full_ids, token_path
from areal_actors.cache.trees import tree_rows
from areal_actors.domain import (
    Interaction,
    InteractionId,
    InteractionStatus,
    Ints,
    SessionId,
    SessionRecord,
    Trajectory,
    Untrained,
    UntrainedReason,
)
from areal_actors.errors import ExportError

__all__ = ["STYLES", "Exported", "export_trajectories"]


@frozen(kw_only=True)
class Exported:
    """The rows of one session, and the sampled tokens that are in none of them."""

    session: SessionId
    trajectories: tuple[Trajectory, ...] = ()
    untrained: tuple[Untrained, ...] = ()

    @property
    def num_trained_tokens(self) -> int:
        """The number of sampled tokens that a row trains."""
        return sum(row.num_trained_tokens for row in self.trajectories)

    @property
    def num_untrained_tokens(self) -> int:
        """The number of sampled tokens that no row trains."""
        return sum(entry.num_tokens for entry in self.untrained)


def export_trajectories(
    record: SessionRecord,
    *,
    discount: float,
    style: str,
    rule: str | Rule = "mean",
    max_tokens: int | None = None,
    unrewarded: Unrewarded | str = Unrewarded.INHERIT,
) -> Exported:
    """Return the training rows of a session. This is a pure function of the record.

    Args:
        record: The session's current state.
        discount: The share of a child's return that reaches its parent.
        style: A name in ``STYLES``.
        rule: How returns combine: a name in ``rewards.RULES`` or a function of the same type.
        max_tokens: Interactions with a longer prompt and output are omitted (``too_long``).
        unrewarded: Treatment of conversations in which no answer was rewarded, such as side calls, as a member of
            ``Unrewarded`` or its value: they inherit the outcome of the episode, are omitted (``no_reward``), or
            return 0.

    Raises:
        ExportError: for an unknown style, rule or treatment, or an inconsistent record.
        RewardError: for a discount or returns that are not finite.
    """
    if style not in STYLES:
        raise ExportError(f"There is no export style {style!r}; choose one of {', '.join(sorted(STYLES))}.")
    if unrewarded not in tuple(Unrewarded):
        raise ExportError(f"There is no treatment {unrewarded!r} of unrewarded turns; choose {', '.join(Unrewarded)}.")
    unrewarded = Unrewarded(unrewarded)
    tree = inherited_tree(record, rule, unrewarded)
    returns = backpropagate(tree, discount, rule)
    depths = dict(zip(tree.ids, tree.depths(), strict=True))
    lookup = lookup_in(record)
    rewarded = rewarded_conversations(record) if unrewarded is Unrewarded.SKIP else None
    trained: list[Interaction] = []
    untrained: list[Untrained] = []
    for turn in record.interactions:
        if num_tokens := _num_sampled(turn):
            reason = _reason(turn, max_tokens, rewarded)
            if reason is None:
                trained.append(turn)
            else:
                untrained.append(Untrained(interaction=turn.id, num_tokens=num_tokens, reason=reason))
    source = Source(record.id, tuple(trained), returns, depths, credits_of(record, tree, rule), lookup, max_tokens)
    rows = STYLES[style](source)
    return Exported(session=record.id, trajectories=tuple(rows), untrained=tuple(untrained))


def _num_sampled(turn: Interaction) -> int:
    return 0 if turn.completion is None else len(turn.completion.token_ids)


def _reason(
    turn: Interaction, max_tokens: int | None, rewarded: frozenset[InteractionId] | None
) -> UntrainedReason | None:
    """Return why the turn's tokens are not trained; ``None`` if they are."""
    if turn.status is InteractionStatus.FAILED:
        return UntrainedReason.FAILED
    if turn.status is not InteractionStatus.COMPLETED:
        return UntrainedReason.CANCELLED
    if not turn.is_stored:
        return UntrainedReason.NOT_STORED
    if max_tokens is not None and turn.num_prompt_tokens + _num_sampled(turn) > max_tokens:
        return UntrainedReason.TOO_LONG
    if rewarded is not None and turn.id not in rewarded:
        return UntrainedReason.NO_REWARD
    return None


# ------------------------------------------------------------------------------------------------------- rows


def _individual_rows(source: Source) -> list[Trajectory]:
    rows: list[Trajectory] = []
    ids: dict[InteractionId, Ints] = {}  # a child's prompt begins with the ids of its parent's row
    for turn in source.trained:
        prompt = _prompt_ids(turn, ids, source.lookup)
        row = _build_row(source, [prompt, turn], trained=frozenset([turn.id]))
        ids[turn.id] = row.input_ids
        rows.append(row)
    return rows


def _prompt_ids(turn: Interaction, ids: Mapping[InteractionId, Ints], lookup: Lookup) -> Ints:
    if turn.token_parent is None:
        return turn.prompt_suffix
    parent = ids[turn.token_parent] if turn.token_parent in ids else full_ids(lookup(turn.token_parent), lookup)
    return np.concatenate([parent, turn.prompt_suffix])


def _concat_rows(source: Source) -> list[Trajectory]:
    eligible = frozenset(turn.id for turn in source.trained)
    done: set[InteractionId] = set()
    rows: list[Trajectory] = []
    for path in _leaf_paths(source):
        trained = frozenset(turn.id for turn in path if turn.id in eligible and turn.id not in done)
        done |= trained
        parts: list[_Part] = []
        for turn in path:
            parts += [turn.prompt_suffix, turn]
        rows.append(_build_row(source, parts, trained=trained))
    return rows


def _leaf_paths(source: Source) -> list[list[Interaction]]:
    """Return the token paths to the trained turns that no other trained turn extends, in order of request."""
    inner: set[InteractionId] = set()
    paths: list[list[Interaction]] = []
    for turn in reversed(source.trained):  # descendants first, so that an inner turn is known when it comes up
        if turn.id in inner:
            continue
        path = token_path(turn, source.lookup)
        inner.update(ancestor.id for ancestor in path)
        paths.append(path)
    paths.reverse()
    return paths


_Part = Ints | Interaction
"""Either prompt ids, or a turn whose output was sampled."""


def _build_row(source: Source, parts: Sequence[_Part], *, trained: frozenset[InteractionId]) -> Trajectory:
    """Join the parts into a row. Outputs in ``trained`` are trained; other outputs are context."""
    pieces: list[Ints] = []
    spans: list[Span] = []
    num_tokens = 0
    for part in parts:
        if isinstance(part, Interaction):
            spans.append(Span(part, checked_completion(part, num_tokens), num_tokens))
            piece = spans[-1].completion.token_ids
        else:
            piece = part
        pieces.append(piece)
        num_tokens += len(piece)
    last = spans[-1].turn
    return Trajectory(
        session=source.session,
        interactions=tuple(span.turn.id for span in spans),
        input_ids=np.concatenate(pieces),
        **columns_of(spans, num_tokens, source.returns, trained),
        reward=source.returns[last.id],
        tag=last.tag,
        turn_infos=infos_of(spans, source),
    )


STYLES: Mapping[str, Callable[[Source], list[Trajectory]]] = {
    "individual": _individual_rows,
    "concat": _concat_rows,
    "tree": tree_rows,
}
"""Functions that build rows, by style name."""
