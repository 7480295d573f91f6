"""Hypothesis strategies for sessions of any shape that are small enough to be enumerated.

``episode_shapes()`` draws agents for ``gradients.measure``: forests with sub-agents before, after and between the turns
of another conversation, forks and compactions, branches and retries, answers of several lengths, answers that are cut,
turns that the policy asks for or not, members that fail::

    from hypothesis import given
    from areal_actors_testing.gradients import Estimator, measure
    from tests.training.episode_shapes import DrawnShape, episode_shapes

    @given(episode_shapes())
    def test_my_advantages(drawn: DrawnShape) -> None:
        estimator = Estimator(rule=my_advantages, export={"discount": drawn.discount})
        assert measure(drawn.shape, estimator, group_size=drawn.group_size, num_groups=1).scale > 0
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from attrs import frozen
from hypothesis import strategies as st

from areal_actors_testing.gradients import Play, Shape, Turn

__all__ = ["DrawnShape", "episode_shapes"]

_MAX_GROUPS = 130
"""Maximum number of groups, up to the order of their members, that are enumerated; a shape takes some 30 ms then."""
_REWARDS = (-1.0, -0.25, 0.0, 0.5, 1.0, 2.0)


@frozen(kw_only=True)
class DrawnShape:
    """A shape with the discount and the group size to measure it with.

    ``is_outcome`` means that the agent returns one number, rather than a reward for each of several answers.
    ``is_steady`` means that the set of turns never varies: each is at a fixed distance from the end.
    """

    shape: Shape
    discount: float
    group_size: int
    is_outcome: bool
    is_steady: bool


@frozen(kw_only=True)
class _TurnPlan:
    """One turn.

    ``parent`` is the number of an earlier plan; ``condition`` is one and the option that must be taken there.
    """

    probabilities: tuple[float, ...]
    parent: int | None
    condition: tuple[int, int] | None
    lengths: tuple[int, ...]
    cut: tuple[int, ...]
    is_fork: bool
    tag: str | None
    rewards: tuple[float, ...] | None


@frozen(kw_only=True)
class _Agent:
    """A script made of plans. ``outcomes`` are the numbers that it returns, by the option of the turn ``decider``."""

    plans: tuple[_TurnPlan, ...]
    decider: int
    outcomes: tuple[float, ...] | None
    failure_rate: float

    def __call__(self, play: Play) -> float | Mapping[Turn, float]:
        if self.failure_rate and play.chance((1 - self.failure_rate, self.failure_rate)):
            play.fail()
        taken: dict[int, Turn] = {}
        for number, plan in enumerate(self.plans):
            if plan.condition is None or _has_taken(taken, *plan.condition):
                taken[number] = self._take(play, number, plan, taken)
        if self.outcomes is not None:
            return self.outcomes[taken[self.decider].option]
        return {
            turn: plan.rewards[turn.option]
            for number, turn in taken.items()
            if (plan := self.plans[number]).rewards is not None
        }

    def _take(self, play: Play, number: int, plan: _TurnPlan, taken: Mapping[int, Turn]) -> Turn:
        parent = plan.parent
        while parent is not None and parent not in taken:
            parent = self.plans[parent].parent
        return play.turn(
            f"turn {number}",
            plan.probabilities,
            after=None if parent is None else taken[parent],
            lengths=plan.lengths,
            is_fork=plan.is_fork and parent is not None,
            cut=plan.cut,
            tag=plan.tag,
        )


def _has_taken(taken: Mapping[int, Turn], number: int, option: int) -> bool:
    return number in taken and taken[number].option == option


@st.composite
def episode_shapes(draw: st.DrawFn, *, max_turns: int = 7) -> DrawnShape:
    """Shapes of up to ``max_turns`` turns, up to three of which are choices, for groups of 2 to 8."""
    num_turns = draw(st.integers(1, max_turns))
    choices = draw(st.sets(st.integers(0, num_turns - 1), min_size=1, max_size=3))
    decider = draw(st.sampled_from(sorted(choices)))
    is_outcome = draw(st.booleans())
    plans: list[_TurnPlan] = []
    for number in range(num_turns):
        earlier = sorted(choice for choice in choices if choice < number)
        is_optional = number != decider and bool(earlier) and draw(st.integers(0, 3)) == 0
        num_options = draw(st.sampled_from([2, 2, 3])) if number in choices else 1
        is_rewarded = not is_outcome and (number == decider or draw(st.booleans()))
        plans.append(
            _TurnPlan(
                probabilities=draw(_distributions(num_options)),
                parent=draw(st.none() | st.integers(0, number - 1)) if number else None,
                condition=(draw(st.sampled_from(earlier)), draw(st.integers(0, 1))) if is_optional else None,
                lengths=tuple(draw(st.lists(st.integers(1, 4), min_size=num_options, max_size=num_options))),
                cut=tuple(draw(st.sets(st.integers(0, num_options - 1)))),
                is_fork=draw(st.booleans()),
                tag=draw(st.sampled_from([None, None, "planner", "searcher"])),
                rewards=draw(_rewards(num_options)) if is_rewarded else None,
            )
        )
    agent = _Agent(
        plans=tuple(plans),
        decider=decider,
        outcomes=draw(_rewards(len(plans[decider].probabilities))) if is_outcome else None,
        failure_rate=draw(st.sampled_from([0.0, 0.0, 0.0, 0.25])),
    )
    shape = Shape(name="drawn", statement=repr(agent), problems=(agent,))
    return DrawnShape(
        shape=shape,
        discount=draw(st.sampled_from([1.0, 1.0, 0.9, 0.5])),
        group_size=draw(st.integers(2, _largest_group(len(shape.episodes[0])))),
        is_outcome=is_outcome,
        is_steady=all(plan.condition is None for plan in plans),
    )


def _distributions(num_options: int) -> st.SearchStrategy[tuple[float, ...]]:
    weights = st.lists(st.integers(1, 4), min_size=num_options, max_size=num_options)
    return weights.map(lambda found: tuple(weight / sum(found) for weight in found))


def _rewards(num_options: int) -> st.SearchStrategy[tuple[float, ...]]:
    """Return a reward for each option; they are not all equal if there are several."""
    is_unique = num_options > 1
    return st.lists(st.sampled_from(_REWARDS), min_size=num_options, max_size=num_options, unique=is_unique).map(tuple)


def _largest_group(num_episodes: int) -> int:
    """Return the largest group size from 2 to 8 for which ``num_episodes`` episodes do not make too many groups."""
    sizes = (size for size in range(2, 9) if math.comb(num_episodes + size - 1, size) <= _MAX_GROUPS)
    return max(sizes, default=2)
