"""Laws of reward propagation, stated for any rule. Which laws hold characterises a rule.

A law draws its examples from a ``Draw``. ``testing.laws`` draws with Hypothesis, which searches the smallest tree that
breaks a law; ``find_broken`` draws from a seeded generator, within a time limit, to check a run's custom rule.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from attrs import evolve, frozen

from areal_actors.cache.rewards import RewardTree, Rule, backpropagate
from areal_actors.domain import InteractionId

Returns = Mapping[InteractionId, float]


class Draw(Protocol):
    """A source of examples for a law."""

    def number(self, low: float, high: float) -> float:
        """Return a number within the bounds."""
        ...

    def index(self, size: int) -> int:
        """Return one of ``size`` positions."""
        ...

    def order(self, size: int) -> list[int]:
        """Return a permutation of ``size`` positions."""
        ...

    def tree(self) -> RewardTree:
        """Return a small forest of any shape."""
        ...


@frozen
class Law:
    """One law.

    ``statement`` describes it in a sentence; ``holds`` raises ``AssertionError`` for a rule that breaks it.
    """

    name: str
    statement: str
    holds: Callable[[str | Rule, RewardTree, Draw], None]
    needs_chain: bool


LAWS: dict[str, Law] = {}
"""Every law, by name."""


def _law(*, needs_chain: bool = False) -> Callable[[Callable[[str | Rule, RewardTree, Draw], None]], None]:
    """Make a function a law, with its words as the law's name and its docstring as the statement."""

    def add(holds: Callable[[str | Rule, RewardTree, Draw], None]) -> None:
        name = holds.__name__.strip("_").replace("_", " ")
        LAWS[name] = Law(name, holds.__doc__ or "", holds, needs_chain)

    return add


def is_close(left: Returns, right: Returns) -> bool:
    """Return whether two maps of returns agree up to rounding."""
    return left.keys() == right.keys() and all(
        math.isclose(left[name], right[name], rel_tol=1e-9, abs_tol=1e-6) for name in left
    )


def chain(*rewards: float) -> RewardTree:
    """Return a conversation without branches, with turns named by their numbers."""
    return RewardTree(
        ids=tuple(InteractionId(str(number)) for number in range(len(rewards))),
        parents=tuple(number - 1 if number else None for number in range(len(rewards))),
        rewards=rewards,
    )


def _own(tree: RewardTree) -> Returns:
    return dict(zip(tree.ids, tree.rewards, strict=True))


@_law()
def _leaves_keep_their_own(rule: str | Rule, tree: RewardTree, draw: Draw) -> None:
    """An answer without continuations returns its own reward."""
    returns = backpropagate(tree, draw.number(0, 1), rule)
    leaves = [name for position, name in enumerate(tree.ids) if position not in tree.parents]
    own = _own(tree)
    assert {name: own[name] for name in leaves} == {name: returns[name] for name in leaves}


@_law(needs_chain=True)
def _chains_have_a_closed_form(rule: str | Rule, tree: RewardTree, draw: Draw) -> None:
    """On a chain, a return is the sum of later rewards, each discounted once per step."""
    discount = draw.number(0, 1)
    expected = {
        InteractionId(str(k)): math.fsum(reward * discount**i for i, reward in enumerate(tree.rewards[k:]))
        for k in range(len(tree.rewards))
    }
    assert is_close(expected, backpropagate(tree, discount, rule))


@_law()
def _discount_0_is_the_identity(rule: str | Rule, tree: RewardTree, _: Draw) -> None:
    """With discount 0, every answer returns its own reward."""
    assert _own(tree) == backpropagate(tree, 0.0, rule)


@_law()
def _linear(rule: str | Rule, tree: RewardTree, draw: Draw) -> None:
    """The returns of a sum of rewards are the sum of their returns, and scaling goes through."""
    size, scale, discount = len(tree.ids), draw.number(-3, 3), draw.number(0, 1)
    others = tuple(draw.number(-1e3, 1e3) for _ in range(size))
    mixed = tuple(scale * a + b for a, b in zip(tree.rewards, others, strict=True))
    left = backpropagate(tree, discount, rule)
    right = backpropagate(evolve(tree, rewards=others), discount, rule)
    sums = {name: scale * left[name] + right[name] for name in left}
    assert is_close(sums, backpropagate(evolve(tree, rewards=mixed), discount, rule))


@_law()
def _returns_scale_with_rewards(rule: str | Rule, tree: RewardTree, draw: Draw) -> None:
    """Rewards in a larger or smaller unit give returns in that unit, however small they are."""
    # A power of two: floating-point results of a rule that scales are then the same digits.
    scale, discount = 2.0 ** (draw.index(2 * _MAX_EXPONENT + 1) - _MAX_EXPONENT), draw.number(0, 1)
    scaled = evolve(tree, rewards=tuple(scale * reward for reward in tree.rewards))
    before, after = backpropagate(tree, discount, rule), backpropagate(scaled, discount, rule)
    # Not ``is_close``, to which returns below a fixed size are all equal.
    rounding = 1e-9 * max(map(abs, scaled.rewards), default=0.0) + 1e-300
    assert all(math.isclose(scale * before[name], after[name], rel_tol=1e-9, abs_tol=rounding) for name in before)


_MAX_EXPONENT = 40
"""Rewards are made up to 2**40 times as large or small."""


@_law()
def _free_of_order(rule: str | Rule, tree: RewardTree, draw: Draw) -> None:
    """Permuting siblings, roots and arrival changes nothing."""
    discount, order = draw.number(0, 1), draw.order(len(tree.ids))
    places = {old: new for new, old in enumerate(order)}
    parents = (tree.parents[old] for old in order)
    permuted = RewardTree(
        ids=tuple(tree.ids[old] for old in order),
        parents=tuple(None if parent is None else places[parent] for parent in parents),
        rewards=tuple(tree.rewards[old] for old in order),
    )
    assert is_close(backpropagate(tree, discount, rule), backpropagate(permuted, discount, rule))


@_law()
def _bounded(rule: str | Rule, tree: RewardTree, draw: Draw) -> None:
    """No return exceeds the largest reward times the sum of discounts along the longest path."""
    discount = draw.number(0, 0.95)
    largest = max(map(abs, tree.rewards), default=0.0)
    longest = max((len(_line(tree, position)) for position in range(len(tree.ids))), default=0)
    bound = largest * math.fsum(discount**k for k in range(longest))
    assert all(abs(value) <= bound * (1 + 1e-9) for value in backpropagate(tree, discount, rule).values())


@_law()
def _roots_are_independent(rule: str | Rule, tree: RewardTree, draw: Draw) -> None:
    """Rewards of one conversation change nothing in another one of the session."""
    discount, size = draw.number(0, 1), len(tree.ids)
    other = draw.tree()
    both = RewardTree(
        ids=tree.ids + tuple(InteractionId(f"other-{name}") for name in other.ids),
        parents=tree.parents + tuple(None if parent is None else parent + size for parent in other.parents),
        rewards=tree.rewards + other.rewards,
    )
    returns = backpropagate(both, discount, rule)
    assert is_close(backpropagate(tree, discount, rule), {name: returns[name] for name in tree.ids})


@_law()
def _siblings_are_strangers(rule: str | Rule, tree: RewardTree, draw: Draw) -> None:
    """A reward reaches the answer that earned it and its ancestors, and no other answer."""
    if not tree.ids:
        return
    changed = draw.index(len(tree.ids))
    discount = draw.number(0, 1)
    rewards = list(tree.rewards)
    rewards[changed] += draw.number(-1e3, 1e3)
    before = backpropagate(tree, discount, rule)
    after = backpropagate(evolve(tree, rewards=tuple(rewards)), discount, rule)
    concerned = {tree.ids[position] for position in _line(tree, changed)}
    assert all(before[name] == after[name] for name in tree.ids if name not in concerned)


def _line(tree: RewardTree, position: int | None) -> list[int]:
    """Return a turn and its ancestors."""
    line: list[int] = []
    while position is not None:
        line.append(position)
        position = tree.parents[position]
    return line


@_law()
def _pure(rule: str | Rule, tree: RewardTree, draw: Draw) -> None:
    """Asking twice gives the same, also when another discount was asked for in between."""
    first, second = draw.number(0, 1), draw.number(0, 1)
    expected = backpropagate(tree, first, rule)
    backpropagate(tree, second, rule)
    assert expected == backpropagate(tree, first, rule)


# -------------------------------------------------------------------------------------------- without Hypothesis


class _SeededDraw:
    """Examples from a seeded generator: the same on every machine and in every run."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - examples, not secrets

    def number(self, low: float, high: float) -> float:
        return self._random.choice([low, high, self._random.uniform(low, high), self._random.uniform(low, high)])

    def index(self, size: int) -> int:
        return self._random.randrange(size)

    def order(self, size: int) -> list[int]:
        return self._random.sample(range(size), size)

    def tree(self) -> RewardTree:
        size = self._random.randint(1, 8)
        parents = [self._random.choice([None, *range(position)]) for position in range(size)]
        return RewardTree(
            ids=tuple(InteractionId(f"turn-{position}") for position in range(size)),
            parents=tuple(parents),
            rewards=tuple(self._random.choice([0.0, 1.0, self.number(-10, 10)]) for _ in range(size)),
        )

    def chain(self) -> RewardTree:
        return chain(*(self.number(-10, 10) for _ in range(self._random.randint(1, 6))))


@frozen(kw_only=True)
class LawReport:
    """The laws that a rule kept on ``num_trees`` trees, and those that it broke."""

    kept: tuple[str, ...]
    broken: tuple[str, ...]
    num_trees: int


SHAPES: Mapping[str, RewardTree] = {
    "single": chain(1.0),
    "chain": chain(0.0, 0.5, 1.0),
    "branch": RewardTree(
        ids=tuple(map(InteractionId, ("root", "left", "right"))), parents=(None, 0, 0), rewards=(0.0, 0.0, 1.0)
    ),
    "forest": RewardTree(
        ids=tuple(map(InteractionId, ("first", "second", "third"))), parents=(None, None, 1), rewards=(0.0, 1.0, -1.0)
    ),
}
"""Small trees of every kind, on which a rule is tried first."""


def find_broken(
    rule: str | Rule,
    *,
    num_trees: int = 60,
    max_seconds: float = 0.5,
    clock: Callable[[], float] = time.monotonic,
) -> LawReport:
    """Try ``rule`` on ``SHAPES``, then every law on ``num_trees`` trees or as many as ``max_seconds`` allow.

    Raises ``CustomFunctionError`` for a rule that raises or does not return one number for each interaction.
    """
    for tree in SHAPES.values():
        backpropagate(tree, 0.9, rule)
    started, broken, num_done = clock(), set[str](), 0
    for seed in range(num_trees):
        draw = _SeededDraw(seed)
        for law in LAWS.values():
            tree = draw.chain() if law.needs_chain else draw.tree()
            try:
                law.holds(rule, tree, draw)
            except AssertionError:
                broken.add(law.name)
        num_done += 1
        if clock() - started > max_seconds:
            break
    kept = tuple(name for name in LAWS if name not in broken)
    return LawReport(kept=kept, broken=tuple(name for name in LAWS if name in broken), num_trees=num_done)
