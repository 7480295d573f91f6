"""Export of a session as training rows: which tokens are trained, with which return, and why the others are not.

There are three styles, chosen by name. ``individual`` makes a row per interaction in which only its own output is
trained. ``concat`` makes a row per leaf of the token tree, with every output on the path trained; an output that
several leaves share is trained in the first of them (in order of request) and masked in the others::

    A ──▶ B ──▶ C        individual:  A   A·B   A·B·C   A·D        (only the last output of each is trained)
    └───▶ D              concat:      A·B·C   a·D                  (a: masked, trained in the first row)
                         tree:        A·B·C·D                      (D follows A: see ``domain.rows``)

``tree`` makes one row per session, in which every sampled token and every shared prompt token occurs once. If
lengths are limited and that row is too long, it makes several.

All styles train every sampled token exactly once or list it in ``untrained`` with a reason, and all agree on the id,
the log-probability, the version and the return of each. Rows are built front to back from stored ids, in time linear in
their length; lengths are checked against the record of the planned prompt.

``tensors`` builds padded arrays, ``rewards`` computes returns.

In a row of the style ``tree``, a turn's tokens follow those of its token parent. Prompt tokens beyond that are shared
with siblings as far as they are equal, so ``n`` choices of one prompt contain the prompt once. Sampled tokens are never
shared, even if two answers are equal, because each sampled token has its own return. Turns are in order of request, and
therefore after the turns that they follow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import define, field, frozen

from areal_actors.cache.history import Lookup, ancestry, lookup_in, token_path
from areal_actors.cache.rewards import (
    Rule,
    Unrewarded,
    backpropagate,
    credits_of,
    inherited_tree,
    rewarded_conversations,
)
from areal_actors.cache.roles import role_of, select_roles
from areal_actors.domain import (
    Completion,
    Credit,
    Experts,
    Interaction,
    InteractionId,
    InteractionStatus,
    Ints,
    SessionId,
    SessionRecord,
    Trajectory,
    TurnInfo,
    Untrained,
    UntrainedReason,
)
from areal_actors.errors import ExportError


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
    train_roles: Collection[str] | None = None,
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
        train_roles: Roles whose turns are trained (``roles``); those of others are omitted (``other_role``), and take
            no part in rewards. ``None`` trains all.

    Raises:
        ExportError: for an unknown style, rule or treatment, or an inconsistent record.
        RewardError: for a discount or returns that are not finite.
    """
    if style not in STYLES:
        raise ExportError(f"There is no export style {style!r}; choose one of {', '.join(sorted(STYLES))}.")
    if unrewarded not in tuple(Unrewarded):
        raise ExportError(f"There is no treatment {unrewarded!r} of unrewarded turns; choose {', '.join(Unrewarded)}.")
    unrewarded = Unrewarded(unrewarded)
    # Returns are those without the turns of other roles: a judge's answer does not dilute the one that it judges.
    selected = select_roles(record, train_roles)
    tree = inherited_tree(selected, rule, unrewarded)
    returns = backpropagate(tree, discount, rule)
    depths = dict(zip(tree.ids, tree.depths(), strict=True))
    lookup = lookup_in(record)
    rewarded = rewarded_conversations(selected) if unrewarded is Unrewarded.SKIP else None
    trained: list[Interaction] = []
    untrained: list[Untrained] = []
    for turn in record.interactions:
        if num_tokens := _num_sampled(turn):
            is_other = train_roles is not None and role_of(turn) not in train_roles
            reason = UntrainedReason.OTHER_ROLE if is_other else _reason(turn, max_tokens, rewarded)
            if reason is None:
                trained.append(turn)
            else:
                untrained.append(Untrained(interaction=turn.id, num_tokens=num_tokens, reason=reason))
    source = Source(record.id, tuple(trained), returns, depths, credits_of(selected, tree, rule), lookup, max_tokens)
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


Indices = npt.NDArray[np.int64]


def _individual_rows(source: Source) -> list[Trajectory]:
    rows: list[Trajectory] = []
    for turn in source.trained:
        row = _Row(source)
        row.add(turn)
        # Earlier outputs are part of the prompt.
        row.spans, row.paths = row.spans[-1:], row.paths[-1:]
        rows.append(row.build())
    return rows


def _concat_rows(source: Source) -> list[Trajectory]:
    eligible = frozenset(turn.id for turn in source.trained)
    # The token paths to the trained turns that no other trained turn extends.
    inner: set[InteractionId] = set()
    paths: list[list[Interaction]] = []
    # Descendants first, so that an inner turn is known when it comes up.
    for turn in reversed(source.trained):
        if turn.id not in inner:
            path = token_path(turn, source.lookup)
            inner.update(ancestor.id for ancestor in path)
            paths.append(path)
    rows: list[Trajectory] = []
    # In order of request, so that an output that several leaves share is trained in the first of them.
    for path in reversed(paths):
        row = _Row(source)
        row.add(path[-1])
        row.trained = {turn.id for turn in path} & eligible
        eligible -= row.trained
        rows.append(row.build())
    return rows


def _tree_rows(source: Source) -> list[Trajectory]:
    """Return one row of all turns to train and their context, or several if it would be longer than allowed.

    A turn that is trained in one row is context in the next.
    """
    trees = [_Row(source)]
    for turn in source.trained:
        if source.max_tokens is not None and trees[-1].size_with(turn) > source.max_tokens:
            trees.append(_Row(source))
        trees[-1].add(turn)
    return [tree.build(is_tree=True) for tree in trees if tree.spans]


@define(eq=False)
class _End:
    """The end of a turn's tokens: the last node (-1: none yet), its depth, and the prompt parts read after it.

    ``readings`` has the ids of each part and the nodes that hold them.
    """

    node: int = -1
    depth: int = 0
    readings: list[tuple[Ints, Indices]] = field(factory=list)

    def shared(self, ids: Ints) -> Indices:
        """Return the nodes of the longest known prefix of ``ids``."""
        longest = _NONE
        for known, nodes in self.readings:
            length = min(len(ids), len(known))
            differs = ids[:length] != known[:length]
            num_shared = int(differs.argmax()) if differs.any() else length
            if num_shared > len(longest):
                longest = nodes[:num_shared]
        return longest


class _Row:
    """A row under construction, as the tree of its tokens. Without branches, each token follows the one before."""

    def __init__(self, source: Source) -> None:
        self.spans: list[Span] = []
        self.paths: list[Indices] = []
        """For each span, the nodes of its turn: the one before its prompt part, the prompt part and the output."""
        self.trained: set[InteractionId] = set()
        self._source = source
        self._ends: dict[InteractionId | None, _End] = {None: _End()}
        self._ids: list[Ints] = []
        self._predecessors: list[npt.NDArray[np.integer]] = []
        self._size = 0

    def size_with(self, turn: Interaction) -> int:
        """Return the number of tokens of the row after ``turn`` was added."""
        missing = self._missing(turn)
        shared = self._ends[missing[0].token_parent].shared(missing[0].prompt_suffix)
        return self._size - len(shared) + sum(len(t.prompt_suffix) + _num_sampled(t) for t in missing)

    def add(self, turn: Interaction) -> None:
        """Add the context of ``turn``, and its output, which is trained here."""
        for each in self._missing(turn):
            parent = self._ends[each.token_parent]
            shared = parent.shared(each.prompt_suffix)
            before = int(shared[-1]) if len(shared) else parent.node
            nodes = np.concatenate([shared, self._append(each.prompt_suffix[len(shared) :], after=before)])
            if len(shared) < len(nodes):
                parent.readings.append((each.prompt_suffix, nodes))
            depth = parent.depth + len(nodes)
            completion = checked_completion(each, depth)
            self.spans.append(Span(each, completion, self._size))
            # Sampled tokens are never shared, even if two answers are equal: each has its own return.
            sampled = self._append(completion.token_ids, after=int(nodes[-1]) if len(nodes) else parent.node)
            path = np.concatenate([[parent.node], nodes, sampled])
            self.paths.append(path)
            self._ends[each.id] = _End(node=int(path[-1]), depth=depth + len(sampled))
        self.trained.add(turn.id)

    def build(self, *, is_tree: bool = False) -> Trajectory:
        """Return the finished row."""
        last = self.spans[-1].turn
        return Trajectory(
            session=self._source.session,
            interactions=tuple(span.turn.id for span in self.spans),
            input_ids=np.concatenate(self._ids),
            **columns_of(self.spans, self._size, self._source.returns, self.trained),
            reward=self._source.returns[last.id],
            tag=last.tag,
            predecessors=np.concatenate(self._predecessors) if is_tree else None,
            routed_experts=experts_of([span.completion for span in self.spans], self.paths, self._size),
            turn_infos=infos_of(self.spans, self._source),
        )

    def _missing(self, turn: Interaction) -> list[Interaction]:
        """Return the turn and its token parents that are not in the row, oldest first."""

        def absent_parent(turn: Interaction) -> InteractionId | None:
            return None if turn.token_parent in self._ends else turn.token_parent

        return ancestry(turn, self._source.lookup, absent_parent)

    def _append(self, ids: Ints, *, after: int) -> Indices:
        """Append nodes for ``ids``, the first of them after node ``after``."""
        nodes = np.arange(self._size, self._size + len(ids))
        if len(ids):
            self._ids.append(ids)
            self._predecessors.append(np.concatenate([[after], nodes[:-1]]))
            self._size += len(ids)
        return nodes


_NONE: Indices = np.zeros(0, np.int64)


@frozen
class Source:
    """The input for building rows: the turns to train, in order of request, and facts about every completed turn."""

    session: SessionId
    trained: tuple[Interaction, ...]
    returns: Mapping[InteractionId, float]
    depths: Mapping[InteractionId, int]
    credits: Mapping[InteractionId, Credit]
    lookup: Lookup
    max_tokens: int | None = None


@frozen
class Span:
    """The position of a turn's output in a row."""

    turn: Interaction
    completion: Completion
    start: int


def columns_of(
    spans: Sequence[Span], num_tokens: int, returns: Mapping[InteractionId, float], trained: Collection[InteractionId]
) -> dict[str, npt.NDArray[Any]]:
    """Return the columns other than the ids. Values outside the spans are neutral."""
    columns: dict[str, npt.NDArray[Any]] = {
        "loss_mask": np.zeros(num_tokens, np.int32),
        "logprobs": np.zeros(num_tokens, np.float32),
        "versions": np.full(num_tokens, -1, np.int32),
        "returns": np.zeros(num_tokens, np.float32),
        "turns": np.full(num_tokens, -1, np.int32),
        "raw_logprobs": np.zeros(num_tokens, np.float32),
    }
    for position, span in enumerate(spans):
        where = slice(span.start, span.start + len(span.completion.token_ids))
        columns["versions"][where] = span.completion.versions
        columns["turns"][where] = position
        columns["returns"][where] = returns.get(span.turn.id, 0.0)
        if span.turn.id in trained:
            columns["loss_mask"][where] = 1
            columns["logprobs"][where] = span.completion.logprobs
            columns["raw_logprobs"][where] = span.completion.raw_logprobs
    return columns


def experts_of(completions: Sequence[Completion], paths: Iterable[Indices], num_tokens: int) -> Experts | None:
    """Return the recorded experts of a row's tokens [num_tokens, layers, k]; ``None`` unless all turns recorded some.

    ``paths`` has for each turn the positions of its context and its output; it is read only where experts were
    recorded, since together the paths of a conversation are quadratic in its length. A token that several turns
    computed has the experts of the first of them, and the last token of a conversation has none.
    """
    recorded = [completion.routed_experts for completion in completions]
    known = [experts for experts in recorded if experts is not None]
    if not known or len(known) < len(recorded):
        return None
    unknown = np.iinfo(known[0].dtype).max
    result = np.full((num_tokens, *known[0].shape[1:]), unknown, dtype=known[0].dtype)
    for experts, nodes in zip(known, paths, strict=True):
        where = nodes[:-1][len(nodes) - 1 - len(experts) :]
        result[where] = np.where(result[where] == unknown, experts, result[where])
    return result


def infos_of(spans: Sequence[Span], source: Source) -> tuple[TurnInfo, ...]:
    """Return the ``TurnInfo`` of each turn of a row, in order."""
    return tuple(
        TurnInfo(
            depth=source.depths.get(span.turn.id, 0),
            tag=span.turn.tag,
            finish=span.completion.finish,
            credit=source.credits.get(span.turn.id),
            sampling=span.turn.sampling,
            digest=span.turn.digest,
        )
        for span in spans
    )


def checked_completion(turn: Interaction, num_tokens: int) -> Completion:
    """Return the turn's completion, after checking its position and the lengths of its columns.

    Raises:
        ExportError: the record is damaged.
    """
    if turn.completion is None:
        raise ExportError(f"Interaction {turn.id} has no tokens but was continued; the session's record is damaged.")
    if turn.num_prompt_tokens != num_tokens:
        raise ExportError(
            f"Interaction {turn.id} was sampled after {turn.num_prompt_tokens} tokens, but its ancestors hold "
            f"{num_tokens}; the session's record is damaged."
        )
    completion = turn.completion
    columns = (completion.token_ids, completion.logprobs, completion.raw_logprobs, completion.versions)
    lengths = {len(column) for column in columns}
    if len(lengths) > 1:
        raise ExportError(f"The ids, logprobs and versions of interaction {turn.id} differ in number: {lengths}.")
    return turn.completion


STYLES: Mapping[str, Callable[[Source], list[Trajectory]]] = {
    "individual": _individual_rows,
    "concat": _concat_rows,
    "tree": _tree_rows,
}
"""Functions that build rows, by style name."""
