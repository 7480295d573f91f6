"""The exact bias of an estimator's expected update, by enumeration of small episodes.

::

    from areal_actors_testing.gradients import SHAPES, Estimator, measure

    measure(SHAPES["sub-agent decides"], Estimator(), group_size=4)   # Bias(scale=…, cosine=…)

``enumeration`` plays small agents along every path, ``estimators`` computes the expected update of an estimator and
compares it with the true gradient, and ``shapes`` has the agents of the published table.
"""

from __future__ import annotations

from areal_actors_testing.gradients.enumeration import Play, Shape, Turn, enumerate_episodes
from areal_actors_testing.gradients.estimators import EXACT, Bias, Enumeration, Estimator, Rule, measure
from areal_actors_testing.gradients.shapes import SHAPES

__all__ = [
    "EXACT",
    "SHAPES",
    "Bias",
    "Enumeration",
    "Estimator",
    "Play",
    "Rule",
    "Shape",
    "Turn",
    "enumerate_episodes",
    "measure",
]
