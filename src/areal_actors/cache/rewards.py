"""Rewards, and how they flow from answers back to the turns that led to them: pure functions on a tree.

The default rule is ``return(n) = reward(n) + discount * mean(return(children of n))``, leaves first, along the
conversational parents. On a chain with reward 1 at its end and discount 0.9 that is 1.0, 0.9, 0.81, …; nothing flows
between siblings or roots. A rule is a function from a ``RewardTree`` and a discount to returns, chosen by name.

Only completed interactions take part: a pending, cancelled or failed child neither receives nor dilutes rewards.

A number that an agent returned is the *outcome* of the whole episode (``SessionRecord.outcome``), although it is stored
on the last answer. A conversation (a root and all its continuations) in which no answer was rewarded inherits it: each
of its leaves counts as rewarded with the outcome. The same holds for the leaves of the conversation that contains the
last answer, except for answers that continue that one, because they came when the outcome was known. Without an
outcome, and where ``Unrewarded`` says so, a reward that was never set counts as 0. ``export`` decides which tokens
carry the returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from numbers import Real
from statistics import fmean
from typing import Protocol

from attrs import evolve, frozen

from areal_actors.cache.tree import fits_float32, parse_reward, to_scalar
from areal_actors.domain import Credit, InteractionId, InteractionStatus, SessionRecord
from areal_actors.errors import ExportError, RewardError
from areal_actors.lib.references import CustomFunction, is_reference, load_function, shorten


class Unrewarded(StrEnum):
    """Treatment of conversations in which no answer was rewarded."""

    INHERIT = "inherit"
    """They inherit the outcome of the episode; 0 if there is none, as when rewards were given to single answers."""
    SKIP = "skip"
    """They are not trained (``no_reward``)."""
    ZERO = "zero"
    """They return 0, and so does a branch that leads to no reward."""


@frozen(kw_only=True)
class RewardTree:
    """A session as rewards see it: each interaction's parent and its own reward, in order of request.

    ``parents`` are positions in ``ids``, ``None`` for roots. ``heirs`` are the positions of leaves whose reward is the
    inherited outcome of the episode and was not set on them.
    """

    ids: tuple[InteractionId, ...]
    parents: tuple[int | None, ...]
    rewards: tuple[float, ...]
    heirs: frozenset[int] = frozenset()

    @classmethod
    def of(cls, record: SessionRecord, *, unrewarded: Unrewarded = Unrewarded.INHERIT) -> RewardTree:
        """Return the completed interactions of a session, with inherited outcomes unless ``unrewarded`` is ``ZERO``.

        ``Unrewarded.SKIP`` has no effect here: ``export`` skips conversations, and the one that contains the outcome
        still inherits it.
        """
        completed = [turn for turn in record.interactions if turn.status is InteractionStatus.COMPLETED]
        positions = {turn.id: position for position, turn in enumerate(completed)}
        for turn in completed:
            if turn.parent is not None and turn.parent not in positions:
                raise ExportError(
                    f"Interaction {turn.id} continues {turn.parent}, which was not completed; the session's record is "
                    "damaged."
                )
        tree = cls(
            ids=tuple(turn.id for turn in completed),
            parents=tuple(None if turn.parent is None else positions[turn.parent] for turn in completed),
            rewards=tuple(turn.reward or 0.0 for turn in completed),
        )
        outcome = record.outcome
        if outcome is None or outcome.reward is None or unrewarded is Unrewarded.ZERO:
            return tree
        # Leaves inherit in conversations where no answer but that with the outcome was rewarded.
        roots, at = tree.roots(), positions[outcome.id]
        closed = {roots[positions[t.id]] for t in completed if t.reward is not None and t.id != outcome.id}
        # Answers that continue the one with the outcome came when it was known, and do not inherit it.
        later: set[int] = set()
        for position in reversed(tree.leaves_first()):
            parent = tree.parents[position]
            if parent is not None and (parent == at or parent in later):
                later.add(position)
        leaves = set(range(len(tree.ids))) - set(tree.parents)
        heirs = frozenset(leaf for leaf in leaves - later if leaf != at and roots[leaf] not in closed)
        rewards = tuple(outcome.reward if position in heirs else own for position, own in enumerate(tree.rewards))
        return evolve(tree, rewards=rewards, heirs=heirs)

    def roots(self) -> list[int]:
        """Return for each interaction the position of the root of its conversation."""
        roots = list(range(len(self.ids)))
        for position in reversed(self.leaves_first()):
            parent = self.parents[position]
            roots[position] = position if parent is None else roots[parent]
        return roots

    def depths(self) -> list[int]:
        """Return how many interactions precede each one in its conversation; 0 for roots."""
        depths = [0] * len(self.ids)
        for position in reversed(self.leaves_first()):
            parent = self.parents[position]
            depths[position] = 0 if parent is None else depths[parent] + 1
        return depths

    def leaves_first(self) -> list[int]:
        """Return positions such that children precede their parents.

        Raises ``ExportError`` if the parents form a cycle.
        """
        num_open = [0] * len(self.ids)
        for parent in self.parents:
            if parent is not None:
                num_open[parent] += 1
        order = [position for position, num in enumerate(num_open) if num == 0]
        # Grows while it is read: an interaction follows the last of its children.
        for position in order:
            parent = self.parents[position]
            if parent is not None:
                num_open[parent] -= 1
                if num_open[parent] == 0:
                    order.append(parent)
        if len(order) != len(self.ids):
            raise ExportError("Interactions are each other's parents; the session's record is damaged.")
        return order


class Rule(Protocol):
    """A reward rule: maps a tree and a discount to one return per interaction, in the order of the tree.

    It must be a pure function of numbers: it keeps no state between calls and does not change the tree.
    """

    def __call__(self, tree: RewardTree, discount: float, /) -> Sequence[float]:
        """Return the return of each interaction."""
        ...


def _along_tree(combine: Callable[[list[float]], float]) -> Rule:
    """Return the rule that adds the discounted combination of the children's returns to each reward."""

    def rule(tree: RewardTree, discount: float) -> Sequence[float]:
        returns = list(tree.rewards)
        children: list[list[float]] = [[] for _ in tree.ids]
        for position in tree.leaves_first():
            if children[position]:
                returns[position] += discount * combine(children[position])
            parent = tree.parents[position]
            if parent is not None:
                children[parent].append(returns[position])
        return returns

    return rule


def _creation_order(tree: RewardTree, discount: float) -> Sequence[float]:
    """Compute a running value in reverse order of request.

    It ignores the tree: the rewards of later siblings flow into earlier ones.
    """
    returns = list(tree.rewards)
    running = 0.0
    for position in range(len(returns) - 1, -1, -1):
        running = returns[position] + discount * running
        returns[position] = running
    return returns


_CREATION_ORDER = "creation-order"

RULES: Mapping[str, Rule] = {
    # Both sum with fsum, which rounds once, so that the order of siblings changes nothing.
    "mean": _along_tree(fmean),
    "sum": _along_tree(math.fsum),
    "max": _along_tree(max),
    _CREATION_ORDER: _creation_order,
}
"""The rules that can be chosen by name."""


def backpropagate(
    source: SessionRecord | RewardTree,
    discount: float,
    rule: str | Rule = "mean",
    *,
    unrewarded: Unrewarded = Unrewarded.INHERIT,
) -> dict[InteractionId, float]:
    """Return the return of every completed interaction.

    ``rule`` is a name in ``RULES``, or a function of the same type; outcomes that conversations of a record inherit are
    passed to it as rewards of their leaves. Raises ``RewardError`` for a discount that is not finite or returns that do
    not fit into a float32, ``ExportError`` for an unknown rule or a damaged record, ``CustomFunctionError`` for a
    function that raises or does not return one number for each interaction.
    """
    tree = source if isinstance(source, RewardTree) else inherited_tree(source, rule, unrewarded)
    if not math.isfinite(discount):
        raise RewardError(f"The discount must be a finite number, not {discount}.")
    if not isinstance(rule, str):
        is_checked = isinstance(rule, _Checked) or rule in RULES.values()
        name = getattr(rule, "__qualname__", type(rule).__name__)
        function = rule if is_checked else _Checked(function=CustomFunction(name=name, function=rule))
    elif rule in RULES:
        function = RULES[rule]
    else:
        raise ExportError(f"There is no rule {rule!r} for rewards; choose one of {', '.join(sorted(RULES))}.")
    try:
        returns = function(tree, discount)
    except OverflowError:
        # Reported below like any return that does not fit into a float32.
        returns = (math.inf,)
    if not all(map(fits_float32, returns)):
        raise RewardError("The returns of this session exceed every float32; scale its rewards down.")
    return dict(zip(tree.ids, returns, strict=True))


def inherited_tree(record: SessionRecord, rule: str | Rule, unrewarded: Unrewarded) -> RewardTree:
    """Return the tree that is passed to ``rule``.

    With ``creation-order`` nothing is inherited: the rule adds every reward to all earlier requests of any
    conversation, so an inherited one would count twice.
    """
    return RewardTree.of(record, unrewarded=Unrewarded.ZERO if rule == _CREATION_ORDER else unrewarded)


def credits_of(record: SessionRecord, tree: RewardTree, rule: str | Rule) -> dict[InteractionId, Credit]:
    """Return for each interaction of ``tree``, built from ``record``, which reward its return draws on."""
    is_set = {turn.id for turn in record.interactions if turn.reward is not None}
    draws: list[Credit] = [
        Credit.REWARDED if name in is_set else Credit.INHERITED if position in tree.heirs else Credit.NONE
        for position, name in enumerate(tree.ids)
    ]
    if rule == _CREATION_ORDER:
        last = max((position for position, found in enumerate(draws) if found is Credit.REWARDED), default=-1)
        draws[: last + 1] = [Credit.REWARDED] * (last + 1)
        return dict(zip(tree.ids, draws, strict=True))
    for position in tree.leaves_first():
        parent = tree.parents[position]
        if parent is not None:
            draws[parent] = min(draws[parent], draws[position], key=_PRECEDENCE.index)
    return dict(zip(tree.ids, draws, strict=True))


_PRECEDENCE = (Credit.REWARDED, Credit.INHERITED, Credit.NONE)
"""A turn that leads to a reward and to an heir is reported as rewarded; both are the outcome."""


def rewarded_conversations(record: SessionRecord) -> frozenset[InteractionId]:
    """Return the completed interactions of conversations in which an answer was rewarded."""
    tree = RewardTree.of(record, unrewarded=Unrewarded.ZERO)
    rewarded = {turn.id for turn in record.interactions if turn.reward is not None}
    roots = tree.roots()
    found = {root for name, root in zip(tree.ids, roots, strict=True) if name in rewarded}
    return frozenset(name for name, root in zip(tree.ids, roots, strict=True) if root in found)


def load_rule(rule: str) -> str | Rule:
    """Return the rule of a configuration: a built-in name unchanged, or the function behind a reference.

    Raises ``CustomFunctionError`` if it cannot be imported.
    """
    return _Checked(function=load_function(rule)) if rule not in RULES and is_reference(rule) else rule


def try_rule(rule: str | Rule) -> None:
    """Try a rule on an answer, a chain, a branch and a forest.

    Raises ``CustomFunctionError`` for a rule that raises or does not return one number for each interaction.
    """
    for parents in ((None,), (None, 0, 1), (None, 0, 0), (None, None, 1)):
        ids = tuple(InteractionId(str(position)) for position in range(len(parents)))
        backpropagate(RewardTree(ids=ids, parents=parents, rewards=(0.0, 1.0, -1.0)[-len(ids) :]), 0.9, rule)


@frozen(kw_only=True)
class _Checked:
    """A custom rule whose result is checked: one finite number for each interaction."""

    function: CustomFunction

    def __call__(self, tree: RewardTree, discount: float, /) -> Sequence[float]:
        before = (tree.ids, tree.parents, tree.rewards)
        found = self.function(tree, discount)
        if before != (tree.ids, tree.parents, tree.rewards):
            raise self.function.complaint("changed the tree that it was given; a rule returns new numbers.")
        wanted = f"a rule returns one number for each of the {len(tree.ids)} interactions of the tree"
        tolist = getattr(found, "tolist", None)  # an array of numpy or torch
        values = tolist() if callable(tolist) else found
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
            raise self.function.complaint(f"returned {shorten(found)} of type {type(found).__name__}; {wanted}.")
        values = list(values)
        if len(values) != len(tree.ids):
            raise self.function.complaint(f"returned {len(values)} numbers, {shorten(values)}; {wanted}.")
        # Converted one by one, so that the error names the interaction whose return is not a number.
        returns: list[float] = []
        for name, value in zip(tree.ids, values, strict=True):
            number: float | None = None
            # Raised for an array of several numbers, and for an int that no float holds.
            with suppress(RewardError, OverflowError):
                scalar = to_scalar(value)
                number = float(scalar) if isinstance(scalar, Real) else None
            if number is None or not fits_float32(number):
                wanted = "a return is a number that fits into a float32"
                raise self.function.complaint(f"returned {shorten(value)} for interaction {name}; {wanted}.")
            returns.append(number)
        return returns


def total_reward(record: SessionRecord) -> float:
    """Return the sum of the rewards assigned to completed interactions, before any is inherited or propagated.

    Raises ``RewardError`` if it does not fit into a float32.
    """
    try:
        return parse_reward(math.fsum(RewardTree.of(record, unrewarded=Unrewarded.ZERO).rewards))
    except OverflowError:
        raise RewardError("The rewards of this session exceed every float32 together; scale them down.") from None
