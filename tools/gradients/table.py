"""The cells of the table, computed: every shape with every estimator that a setting or another system can name."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from areal_actors.cache.export import STYLES
from areal_actors.cache.rewards import RULES, Unrewarded
from areal_actors.training.config import AdvantageConfig, Aggregation, Normalisation, StatisticsUnit
from areal_actors_testing.gradients import EXACT, SHAPES, Bias, Enumeration, Estimator, Shape
from tools.gradients.rules import SYSTEMS

__all__ = [
    "DEFAULT",
    "FILE",
    "Question",
    "Table",
    "compute",
    "compute_all",
    "estimators",
    "format_table",
    "list_violations",
    "names_of",
    "parse_table",
    "questions",
]

Table = Mapping[str, Mapping[str, Bias]]
"""Biases by question and estimator."""

FILE = Path(__file__).parents[2] / "docs" / "results" / "gradients.json"

DEFAULT = "default"
"""The name of the estimator that a configuration without ``trainer`` and ``rollout.openai`` has."""
_DIGITS = 6
_NUM_GROUPS = (1, 4, 16)
_DISCOUNTED = ("one chain", "first turn decides", "compaction", "dense rewards", "sub-agent decides")
_MAX_EPISODES = 4
_LARGE = 8
_SETTLED = ("reward_rule", "export_style", "unrewarded", "batch of", "/ row", "/ turn_depth")


@frozen(kw_only=True)
class Question:
    """A shape, the size of its groups, and the turn discount: a block of the table."""

    shape: str
    group_size: int
    discount: float = 1.0

    @classmethod
    def parse(cls, key: str) -> Question:
        """The question of a name."""
        shape, size, discount = key.split(" | ")
        return cls(shape=shape, group_size=int(size), discount=float(discount))

    @property
    def key(self) -> str:
        """Its name in the file."""
        return f"{self.shape} | {self.group_size} | {self.discount:g}"


def questions() -> Iterator[Question]:
    """All blocks, in order."""
    for shape in SHAPES.values():
        for size in group_sizes(shape):
            yield Question(shape=shape.name, group_size=size)
        if shape.name in _DISCOUNTED:
            for discount in (0.9, 0.5):
                yield Question(shape=shape.name, group_size=4, discount=discount)


def group_sizes(shape: Shape) -> tuple[int, ...]:
    """Groups of 8 where there are few episodes: the number of groups grows with the power of their number."""
    return (2, 4, 8) if max(map(len, shape.episodes)) <= _MAX_EPISODES else (2, 4)


def estimators() -> Mapping[str, tuple[Estimator, int | None]]:
    """Every estimator by name, with the groups in its batch (``None``: many)."""
    found: dict[str, tuple[Estimator, int | None]] = {DEFAULT: (Estimator(), None)}
    for normalisation in Normalisation:
        for unit in StatisticsUnit:
            advantages = AdvantageConfig(normalisation=normalisation, unit=unit)
            found[f"{normalisation} / {unit}"] = (Estimator(advantages=advantages), None)
    for aggregation in Aggregation:
        found[f"aggregation: {aggregation}"] = (Estimator(aggregation=aggregation), None)
    found["masks_truncated"] = (Estimator(masks_truncated=True), None)
    for aggregation in (Estimator().aggregation, Aggregation.TOKEN_MEAN):
        for num_groups in _NUM_GROUPS:
            found[f"batch of {num_groups}: {aggregation}"] = (Estimator(aggregation=aggregation), num_groups)
    for rule in RULES:
        found[f"reward_rule: {rule}"] = (Estimator(export={"rule": rule}), None)
    for style in STYLES:
        found[f"export_style: {style}"] = (Estimator(export={"style": style}), None)
    for unrewarded in Unrewarded:
        found[f"unrewarded: {unrewarded}"] = (Estimator(export={"unrewarded": unrewarded}), None)
    found |= {f"other: {name}": (estimator, None) for name, estimator in SYSTEMS.items()}
    return found


def names_of(question: Question) -> list[str]:
    """The estimators of a block: in groups of 8, which take most of the time, without those that 2 and 4 settle."""
    if question.group_size < _LARGE:
        return list(estimators())
    return [name for name in estimators() if not name.startswith(_SETTLED) and not name.endswith(_SETTLED)]


def compute(question: Question, names: Collection[str] | None = None) -> dict[str, Bias]:
    """The biases of a block, by the estimator's name; of those in ``names`` alone, where there are any."""
    names = names_of(question) if names is None else names
    shape = SHAPES[question.shape]
    enumerations: dict[tuple[tuple[str, Any], ...], Enumeration] = {}
    result: dict[str, Bias] = {}
    for name, (estimator, num_groups) in estimators().items():
        if name not in names:
            continue
        asked = evolve(estimator, export={**estimator.export, "discount": question.discount})
        key = tuple(sorted(asked.export_settings.items()))
        if key not in enumerations:
            enumerations[key] = Enumeration.create(shape, group_size=question.group_size, **asked.export_settings)
        result[name] = enumerations[key].measure(asked, num_groups=num_groups)
    return result


def compute_all() -> Table:
    """The whole table."""
    return {question.key: compute(question) for question in questions()}


def format_table(table: Table) -> str:
    """The table as JSON, a line for each block.

    Each estimator has four numbers: scale, cosine, cosine to what is asked for, noise.
    """
    blocks = (
        f"{json.dumps(key)}: {json.dumps({name: _numbers(bias) for name, bias in found.items()})}"
        for key, found in table.items()
    )
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def _numbers(bias: Bias) -> list[float | None]:
    numbers = (bias.scale, bias.cosine, bias.estimand_cosine, bias.noise)
    return [round(number, _DIGITS) + 0.0 if math.isfinite(number) else None for number in numbers]


def parse_table(text: str) -> Table:
    """The reverse of ``format_table``, to its rounding."""
    return {
        key: {
            name: Bias(scale=scale, cosine=cosine, estimand_cosine=estimand, noise=math.inf if noise is None else noise)
            for name, (scale, cosine, estimand, noise) in found.items()
        }
        for key, found in json.loads(text).items()
    }


def list_violations(table: Table) -> list[str]:
    """Name the cells in which a default does not point along the gradient, or has no positive scale.

    Where the settings ask for something else than the gradient of the episode's reward (a discount, a mean over
    branches with rewards), the defaults are held to that. Where the policy chooses which episodes are trained, to the
    sign alone.
    """
    return [
        f"{key} | {name}: scale {bias.scale:.4f}, cosine {bias.cosine:.6f} ({bias.estimand_cosine:.6f} to its aim)"
        for key, found in table.items()
        for name, bias in found.items()
        if _is_default(name) and not _holds(Question.parse(key), bias)
    ]


def _is_default(name: str) -> bool:
    """Whether it is the default, in any export style and in a batch of any size."""
    batches = {f"batch of {num_groups}: {Estimator().aggregation}" for num_groups in _NUM_GROUPS}
    return name == DEFAULT or name in batches or name.startswith("export_style")


def _holds(question: Question, bias: Bias) -> bool:
    shape = SHAPES[question.shape]
    if shape.is_selected:
        return bias.scale > 0
    asks_for_another = shape.note is not None or question.discount < 1
    return bias.scale > 0 and (bias.estimand_cosine if asks_for_another else bias.cosine) >= EXACT
