"""The law of credit: for sessions of any shape, the default estimator's expected update is the policy gradient.

Each example is computed exactly, over all groups that a small agent can have: ``areal_actors_testing.gradients``.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.training.episode_shapes import DrawnShape, episode_shapes

from areal_actors.cache import STYLES
from areal_actors_testing.gradients import EXACT, Estimator, Play, Shape, measure

_NUM_SHAPES = {40: 250}.get(settings().max_examples, min(settings().max_examples, 10_000))
"""A few hundred where every change is tested, ten thousand each night."""


@settings(max_examples=_NUM_SHAPES)
@given(episode_shapes(), st.sampled_from(sorted(STYLES)))
def test_default_gain_of_what_decides_is_positive(drawn: DrawnShape, style: str) -> None:
    """Every default, any shape.

    With one returned number and discount 1, the update points along the gradient of the expected reward. Otherwise it
    points along that of the returns, which are what is asked for; one returned number is a positive part of every
    turn's return then, so that what decides it is never trained the wrong way.
    """
    estimator = Estimator(export={"discount": drawn.discount, "style": style})

    bias = measure(drawn.shape, estimator, group_size=drawn.group_size, num_groups=1)

    if drawn.is_outcome and drawn.discount == 1:
        assert bias.is_right, bias
        return
    assert bias.estimand_cosine >= EXACT, bias
    if drawn.is_outcome and drawn.is_steady:
        assert bias.scale > 0, bias


def test_choice_that_a_later_reward_makes_up_for_is_not_trained() -> None:
    """Both options return the same number, so that the gradient of the returns is zero, and the update as well."""

    def script(play: Play) -> None:
        first = play.turn("first", (0.5, 0.5))
        play.reward(first, 0.5 * (1 - first.option))
        if first.option:
            play.reward(play.turn("second", after=first), 0.5)

    shape = Shape(name="even", statement="Both options earn 0.5, at different turns.", problems=(script,))
    bias = measure(shape, Estimator(export={"discount": 1.0}), group_size=2, num_groups=1)

    assert (0.0, 1.0) == (bias.cosine, bias.estimand_cosine)
