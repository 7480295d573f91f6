"""What a run of benchmarks found: figures, failures, the machine; its file, its table, and two of them compared.

How figures come about is each benchmark's own matter; here they are only kept, shown and put side by side.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from benchmarks.harness import Result

# rich is imported where a table is made: the GPU benchmark writes reports on machines without it.
if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["NOISE_OF_RATIOS", "NOISE_OF_TIMES", "Change", "Report", "compare", "create_changes_table", "create_table"]

NOISE_OF_TIMES = 0.25
"""On shared machines an absolute figure of one and the same revision moves by as much from run to run."""
NOISE_OF_RATIOS = 0.10
"""What is measured against a baseline in the same run moves less."""

_VERDICTS = {None: ("", ""), True: ("pass", "green"), False: ("FAIL", "bold red")}
"""The text and the style of a verdict."""


@frozen(kw_only=True)
class Report:
    """One run; ``facts`` hold machine, date and load.

    ``failures`` maps a benchmark that raised to the reason, ``skips`` one that cannot run on this machine.
    """

    results: tuple[Result, ...] = ()
    failures: Mapping[str, str] = field(factory=dict)
    skips: Mapping[str, str] = field(factory=dict)
    facts: Mapping[str, Any] = field(factory=dict)

    @property
    def num_missed(self) -> int:
        """Figures that do not respect their gates."""
        return sum(result.passed is False for result in self.results)

    def save(self, path: Path) -> None:
        """Write it as JSON. Raises ``OSError``."""
        document = {
            "facts": dict(self.facts),
            "results": [result.to_json() for result in self.results],
            "failures": dict(self.failures),
            "skips": dict(self.skips),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read what ``save`` wrote. Raises ``OSError``, or ``ValueError`` for another kind of file."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                results=tuple(map(Result.from_json, document["results"])),
                failures=document["failures"],
                skips=document.get("skips", {}),  # older files have none
                facts=document["facts"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a report of benchmarks: {error!r}. Name a file that --json wrote."
            ) from error


def create_table(report: Report) -> Table:
    """All figures, each with what it is a multiple of, its gate and whether it respects that."""
    from rich.table import Table
    from rich.text import Text

    table = Table("benchmark", "figure", box=None, pad_edge=False, header_style="bold")
    for column in ("value", "unit", "of", "gate", ""):
        table.add_column(column, justify="right" if column in {"value", "gate"} else "left")
    for result in report.results:
        gate = "" if result.gate is None else f"{'≥' if result.higher_is_better else '≤'} {format_number(result.gate)}"
        verdict = Text(*_VERDICTS[result.passed])
        cells = (format_number(result.value), result.unit, result.baseline or "", gate, verdict)
        table.add_row(result.benchmark, result.name, *cells)
    for name, reason in report.skips.items():
        table.add_row(name, Text(reason, style="yellow"), "", "", "", "", Text("SKIPPED", style="yellow"))
    for name, reason in report.failures.items():
        table.add_row(name, Text(reason, style="red"), "", "", "", "", Text("ERROR", style="bold red"))
    return table


def format_number(value: float) -> str:
    """Three digits or more: ``0.0123``, ``1.23``, ``12.3``, ``1,234``."""
    if value == 0 or not abs(value) < float("inf"):
        return f"{value:g}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.{2 if abs(value) < 10 else 1}f}"


@frozen(kw_only=True)
class Change:
    """One figure of two runs; ``None`` where a run did not measure it."""

    old: Result | None
    new: Result | None
    noise: float

    @property
    def ratio(self) -> float | None:
        """New over old; ``None`` where there is nothing to divide."""
        if self.old is None or self.new is None or self.old.value == 0:
            return None
        return self.new.value / self.old.value

    @property
    def verdict(self) -> str:
        """``better``, ``worse``, ``new``, ``gone``; empty within noise."""
        if self.old is None or self.new is None:
            return "new" if self.old is None else "gone"
        ratio = self.ratio
        if ratio is None or 1 / (1 + self.noise) <= ratio <= 1 + self.noise:
            return ""
        return "better" if (ratio > 1) == self.new.higher_is_better else "worse"


def compare(old: Report, new: Report, *, noise: float | None = None) -> tuple[Change, ...]:
    """Every figure of both, in the order of the new report; those that are gone come last.

    ``noise`` is how much a figure may change by chance; ``None`` takes what is usual for ratios and for times.
    """
    before = {_key(result): result for result in old.results}
    after = {_key(result): result for result in new.results}
    changes = []
    for key in [*after, *(key for key in before if key not in after)]:
        is_ratio = (after.get(key) or before[key]).baseline is not None
        usual = NOISE_OF_RATIOS if is_ratio else NOISE_OF_TIMES
        changes.append(Change(old=before.get(key), new=after.get(key), noise=usual if noise is None else noise))
    return tuple(changes)


def _key(result: Result) -> tuple[str, str, str]:
    return result.benchmark, result.name, result.unit


def create_changes_table(changes: tuple[Change, ...]) -> Table:
    """Two runs side by side; what changed beyond noise is marked."""
    from rich.table import Table
    from rich.text import Text

    table = Table("benchmark", "figure", box=None, pad_edge=False, header_style="bold")
    for column in ("old", "new", "unit", "new/old", ""):
        table.add_column(column, justify="left" if column in {"unit", ""} else "right")
    styles = {"better": "green", "worse": "bold red"}
    for change in changes:
        shown = change.new or change.old
        assert shown is not None
        old, new = ("" if result is None else format_number(result.value) for result in (change.old, change.new))
        ratio = "" if change.ratio is None else f"{change.ratio:.2f}"
        mark = Text(change.verdict, style=styles.get(change.verdict, "dim"))
        table.add_row(shown.benchmark, shown.name, old, new, shown.unit, ratio, mark)
    return table
