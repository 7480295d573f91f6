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

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from areal_actors.cache.history import Lookup, ancestry, lookup_in
from areal_actors.cache.rewards import (
    Rule,
    Unrewarded,
    backpropagate,
    credits_of,
    inherited_tree,
    rewarded_conversations,
    total_reward,
)
from areal_actors.cache.roles import role_of, select_roles
from areal_actors.domain import (
    Completion,
    Credit,
    Episode,
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


def export_trajectories(
    record: SessionRecord,
    *,
    discount: float,
    style: str,
    rule: str | Rule = "mean",
    max_tokens: int | None = None,
    unrewarded: Unrewarded | str = Unrewarded.INHERIT,
    train_roles: Collection[str] | None = None,
    member: int = 0,
) -> Episode:
    """Return the episode of a session, with its training rows. This is a pure function of the record.

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
        member: The member of its group that the episode is.

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
    create_row = partial(
        _Row,
        session=record.id,
        returns=returns,
        depths=dict(zip(tree.ids, tree.depths(), strict=True)),
        credits_of_turns=credits_of(selected, tree, rule),
        lookup=lookup_in(record),
    )
    return Episode(
        session=record.id,
        member=member,
        reward=total_reward(record),
        trajectories=tuple(STYLES[style](trained, create_row, max_tokens)),
        untrained=tuple(untrained),
        num_turns=len(record.interactions),
        num_empty_turns=record.num_empty_turns,
        is_restored=record.is_restored,
        logged=record.logged,
        limit=record.limit,
    )


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


def _individual_rows(trained: Sequence[Interaction], create_row: CreateRow, _: int | None) -> list[Trajectory]:
    rows: list[Trajectory] = []
    for turn in trained:
        row = create_row()
        row.add(turn)
        # Earlier outputs are part of the prompt.
        row.turns, row.starts, row.paths = row.turns[-1:], row.starts[-1:], row.paths[-1:]
        rows.append(row.build())
    return rows


def _concat_rows(trained: Sequence[Interaction], create_row: CreateRow, _: int | None) -> list[Trajectory]:
    eligible = frozenset(turn.id for turn in trained)
    # The token paths to the trained turns that no other trained turn extends.
    inner: set[InteractionId] = set()
    rows: list[_Row] = []
    # Descendants first, so that an inner turn is known when it comes up.
    for turn in reversed(trained):
        if turn.id not in inner:
            rows.append(create_row())
            rows[-1].add(turn)
            inner.update(ancestor.id for ancestor in rows[-1].turns)
    rows.reverse()
    # In order of request, so that an output that several leaves share is trained in the first of them.
    for row in rows:
        row.trained = {turn.id for turn in row.turns} & eligible
        eligible -= row.trained
    return [row.build() for row in rows]


def _tree_rows(trained: Sequence[Interaction], create_row: CreateRow, max_tokens: int | None) -> list[Trajectory]:
    """Return one row of all turns to train and their context, or several if it would be longer than allowed.

    A turn that is trained in one row is context in the next.
    """
    trees = [create_row()]
    for turn in trained:
        if max_tokens is not None and trees[-1].size_with(turn) > max_tokens:
            trees.append(create_row())
        trees[-1].add(turn)
    return [tree.build(is_tree=True) for tree in trees if tree.turns]


class _Row:
    """A row under construction, as the tree of its tokens. Without branches, each token follows the one before.

    ``returns``, ``depths`` and ``credits_of_turns`` are those of all completed turns; ``lookup`` finds every turn.
    """

    def __init__(
        self,
        *,
        session: SessionId,
        returns: Mapping[InteractionId, float],
        depths: Mapping[InteractionId, int],
        credits_of_turns: Mapping[InteractionId, Credit],
        lookup: Lookup,
    ) -> None:
        self.turns: list[Interaction] = []
        self.starts: list[int] = []
        """For each turn, the position of its output."""
        self.paths: list[Indices] = []
        """For each turn, its nodes: the one before its prompt part, the prompt part and the output."""
        self.trained: set[InteractionId] = set()
        self._session = session
        self._returns = returns
        self._depths = depths
        self._credits = credits_of_turns
        self._lookup = lookup
        self._ends: dict[InteractionId | None, tuple[int, int]] = {None: (-1, 0)}
        """For each turn, its last node (-1: none yet) and that node's depth."""
        self._readings: defaultdict[InteractionId | None, list[tuple[Ints, Indices]]] = defaultdict(list)
        """For each turn, the ids of the prompt parts that were read after it, and the nodes that hold them."""
        self._ids: list[Ints] = []
        self._predecessors: list[npt.NDArray[np.integer]] = []
        self._size = 0

    def size_with(self, turn: Interaction) -> int:
        """Return the number of tokens of the row after ``turn`` was added."""
        missing = self._missing(turn)
        shared = self._shared(missing[0])
        return self._size - len(shared) + sum(len(t.prompt_suffix) + _num_sampled(t) for t in missing)

    def add(self, turn: Interaction) -> None:
        """Add the context of ``turn``, and its output, which is trained here."""
        for each in self._missing(turn):
            parent, depth = self._ends[each.token_parent]
            shared = self._shared(each)
            before = int(shared[-1]) if len(shared) else parent
            nodes = np.concatenate([shared, self._append(each.prompt_suffix[len(shared) :], after=before)])
            if len(shared) < len(nodes):
                self._readings[each.token_parent].append((each.prompt_suffix, nodes))
            depth += len(nodes)
            completion = checked_completion(each, depth)
            self.turns.append(each)
            self.starts.append(self._size)
            # Sampled tokens are never shared, even if two answers are equal: each has its own return.
            sampled = self._append(completion.token_ids, after=int(nodes[-1]) if len(nodes) else parent)
            path = np.concatenate([[parent], nodes, sampled])
            self.paths.append(path)
            self._ends[each.id] = int(path[-1]), depth + len(sampled)
        self.trained.add(turn.id)

    def build(self, *, is_tree: bool = False) -> Trajectory:
        """Return the finished row."""
        last = self.turns[-1]
        return Trajectory(
            session=self._session,
            interactions=tuple(turn.id for turn in self.turns),
            input_ids=np.concatenate(self._ids),
            **self._columns(),
            reward=self._returns[last.id],
            tag=last.tag,
            predecessors=np.concatenate(self._predecessors) if is_tree else None,
            routed_experts=experts_of([turn.completion for turn in self.turns], self.paths, self._size),
            turn_infos=tuple(
                TurnInfo(
                    depth=self._depths.get(turn.id, 0),
                    tag=turn.tag,
                    finish=None if turn.completion is None else turn.completion.finish,
                    credit=self._credits.get(turn.id),
                    sampling=turn.sampling,
                    digest=turn.digest,
                )
                for turn in self.turns
            ),
        )

    def _missing(self, turn: Interaction) -> list[Interaction]:
        """Return the turn and its token parents that are not in the row, oldest first."""

        def absent_parent(turn: Interaction) -> InteractionId | None:
            return None if turn.token_parent in self._ends else turn.token_parent

        return ancestry(turn, self._lookup, absent_parent)

    def _shared(self, turn: Interaction) -> Indices:
        """Return the nodes of the longest known prefix of the turn's prompt part."""
        ids, longest = turn.prompt_suffix, _NONE
        for known, nodes in self._readings[turn.token_parent]:
            length = min(len(ids), len(known))
            differs = ids[:length] != known[:length]
            num_shared = int(differs.argmax()) if differs.any() else length
            if num_shared > len(longest):
                longest = nodes[:num_shared]
        return longest

    def _append(self, ids: Ints, *, after: int) -> Indices:
        """Append nodes for ``ids``, the first of them after node ``after``."""
        nodes = np.arange(self._size, self._size + len(ids))
        if len(ids):
            self._ids.append(ids)
            self._predecessors.append(np.concatenate([[after], nodes[:-1]]))
            self._size += len(ids)
        return nodes

    def _columns(self) -> dict[str, npt.NDArray[Any]]:
        """Return the columns other than the ids. Values outside the outputs are neutral."""
        columns: dict[str, npt.NDArray[Any]] = {
            "loss_mask": np.zeros(self._size, np.int32),
            "logprobs": np.zeros(self._size, np.float32),
            "versions": np.full(self._size, -1, np.int32),
            "returns": np.zeros(self._size, np.float32),
            "turns": np.full(self._size, -1, np.int32),
            "raw_logprobs": np.zeros(self._size, np.float32),
        }
        for position, (turn, start) in enumerate(zip(self.turns, self.starts, strict=True)):
            completion = turn.completion
            assert completion is not None  # ``add`` has checked it
            where = slice(start, start + len(completion.token_ids))
            columns["versions"][where] = completion.versions
            columns["turns"][where] = position
            columns["returns"][where] = self._returns.get(turn.id, 0.0)
            if turn.id in self.trained:
                columns["loss_mask"][where] = 1
                columns["logprobs"][where] = completion.logprobs
                columns["raw_logprobs"][where] = completion.raw_logprobs
        return columns


CreateRow = Callable[[], _Row]
_NONE: Indices = np.zeros(0, np.int64)


def experts_of(completions: Sequence[Completion | None], paths: Iterable[Indices], num_tokens: int) -> Experts | None:
    """Return the recorded experts of a row's tokens [num_tokens, layers, k]; ``None`` unless all turns recorded some.

    ``paths`` has for each turn the positions of its context and its output. A token that several turns computed has the
    experts of the first of them, and the last token of a conversation has none.
    """
    recorded = [None if completion is None else completion.routed_experts for completion in completions]
    known = [experts for experts in recorded if experts is not None]
    if not known or len(known) < len(recorded):
        return None
    unknown = np.iinfo(known[0].dtype).max
    result = np.full((num_tokens, *known[0].shape[1:]), unknown, dtype=known[0].dtype)
    for experts, nodes in zip(known, paths, strict=True):
        where = nodes[:-1][len(nodes) - 1 - len(experts) :]
        result[where] = np.where(result[where] == unknown, experts, result[where])
    return result


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


STYLES: Mapping[str, Callable[[Sequence[Interaction], CreateRow, int | None], list[Trajectory]]] = {
    "individual": _individual_rows,
    "concat": _concat_rows,
    "tree": _tree_rows,
}
"""Functions that build rows of the turns to train, in order of request, by style name."""
