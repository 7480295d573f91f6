"""Named numbers that agents log about their episodes, such as format checks or a judge's score."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from areal_actors.errors import InvalidRequest
from areal_actors.lib.references import shorten

SCOPE, EVAL_SCOPE = "rollout", "eval-rollout"
"""Name prefixes of the numbers of training episodes and of evaluations."""

MAX_NUMBERS = 64
"""Maximum number of names per episode."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def merge_numbers(kept: Mapping[str, float], new: Mapping[Any, Any]) -> dict[str, float]:
    """Return ``kept`` with the numbers of ``new``; a name that was logged before gets its new value.

    A number is a finite float, int or bool, or a numpy or torch scalar of one. Raises ``InvalidRequest`` for the first
    value that is not a number, for a name with other characters than letters, digits and ``_.-``, and for more than
    ``MAX_NUMBERS`` names together.
    """
    result = dict(kept)
    for name, value in new.items():
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise InvalidRequest(
                f"{name!r} cannot name a number; a name has 1 to 64 letters, digits and '_.-'.", param=str(name)[:64]
            )
        item = getattr(value, "item", None)  # of a numpy or torch scalar
        try:
            scalar = value if isinstance(value, Real) or not callable(item) else item()
            number = float(scalar) if isinstance(scalar, Real) else math.nan
        except (TypeError, ValueError, RuntimeError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise InvalidRequest(f"{name} was logged as {shorten(value)}; log a finite number.", param=name)
        result[name] = number
    if len(result) > MAX_NUMBERS:
        raise InvalidRequest(f"An episode logs at most {MAX_NUMBERS} names, and this would make {len(result)}.")
    return result


def average_numbers(episodes: Iterable[Mapping[str, float]], *, scope: str) -> dict[str, float]:
    """Return the mean of each name over the episodes that logged it, and their count: ``scope/name``, ``…/count``."""
    values: dict[str, list[float]] = {}
    for numbers in episodes:
        for name, value in numbers.items():
            values.setdefault(name, []).append(value)
    result: dict[str, float] = {}
    for name, found in sorted(values.items()):
        result[f"{scope}/{name}"] = math.fsum(value / len(found) for value in found)
        result[f"{scope}/{name}/count"] = len(found)
    return result
