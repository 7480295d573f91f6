"""The findings of `areal-actors doctor`, one line per check."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from enum import StrEnum

import click
from attrs import asdict, frozen

from areal_actors.errors import ArealError

__all__ = ["Finding", "Verdict", "examined", "format_finding"]


class Verdict(StrEnum):
    """How a check came out."""

    OK = "ok"
    WARNING = "warning"
    """The job can run; a person should know."""
    FAILED = "failed"
    """The job cannot run like this."""
    SKIPPED = "skipped"
    """The check was not possible, or not asked for."""


@frozen(kw_only=True)
class Finding:
    """One thing that was looked at. ``advice`` says what to do, where something is to be done."""

    check: str
    verdict: Verdict
    detail: str
    advice: str = ""

    def to_json(self) -> str:
        """One line of JSON with the same fields."""
        return json.dumps(asdict(self))


_COLOURS = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "red", Verdict.SKIPPED: "bright_black"}


def format_finding(finding: Finding) -> str:
    """A line for people, and one more with the advice."""
    verdict = click.style(f"{finding.verdict:<8}", fg=_COLOURS[finding.verdict])
    lines = [*finding.detail.splitlines(), *([f"-> {finding.advice}"] if finding.advice else [])]
    return f"{verdict} {finding.check:<21}" + f"\n{'':<9}{'':<21}".join(lines)


def examined(check: str, look: Callable[[], Iterator[Finding]]) -> tuple[Finding, ...]:
    """Yield the findings of ``look``; an error that it raises becomes a finding, so that the other checks still run."""
    found: list[Finding] = []
    try:
        found.extend(look())
    except ArealError as error:  # its message says what to do
        found.append(Finding(check=check, verdict=Verdict.FAILED, detail=str(error)))
    except (OSError, ImportError) as error:
        detail = f"{type(error).__name__}: {error}"
        found.append(Finding(check=check, verdict=Verdict.FAILED, detail=detail))
    return tuple(found)
