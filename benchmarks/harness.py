"""How this project measures: CPU time per operation, the minimum of several rounds, and ratios taken in one run.

Machines that run this are noisy, so absolute times mean little; a ratio against a baseline measured a moment ago means
more. A benchmark module exposes ``run(quick) -> list[Result]``; ``python -m benchmarks`` runs them all, prints one
table with the gates beside the figures, and writes JSON (``report``) that ``python -m benchmarks compare`` reads. A
module that needs what a machine may not have raises ``Skipped``, and the table says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from attrs import asdict, field, frozen

__all__ = ["Result", "Skipped", "cpu_us_per_operation"]


class Skipped(Exception):
    """Raised by a benchmark that cannot run on this machine; its text says what is missing."""


@frozen(kw_only=True)
class Result:
    """One figure. ``unit`` names what ``value`` counts; ``gate`` is the bound that it should respect, if any."""

    benchmark: str
    name: str
    value: float
    unit: str
    gate: float | None = None
    higher_is_better: bool = False
    baseline: str | None = None
    """Name of the figure of the same run that ``value`` is a multiple of, where it is a ratio."""
    detail: dict[str, Any] = field(factory=dict)

    @property
    def passed(self) -> bool | None:
        """Whether the gate is respected; ``None`` without a gate."""
        if self.gate is None:
            return None
        return self.value >= self.gate if self.higher_is_better else self.value <= self.gate

    def to_json(self) -> dict[str, Any]:
        """A plain dict for ``json.dump``."""
        return asdict(self) | {"passed": self.passed}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Result:
        """What ``to_json`` wrote. Raises ``TypeError`` for a document that is not such a dict."""
        return cls(**{key: value for key, value in document.items() if key != "passed"})


def cpu_us_per_operation(operation: Callable[[], object], *, num_operations: int, rounds: int = 5) -> float:
    """CPU microseconds (user + system, this process) per operation: the minimum of ``rounds`` runs of ``operation``.

    ``operation`` performs ``num_operations`` operations each time that it is called.
    """
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        operation()
        best = min(best, time.process_time() - start)
    return best / num_operations * 1e6
