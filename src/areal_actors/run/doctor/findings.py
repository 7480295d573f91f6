"""The findings of `areal-actors doctor`, one line per check."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Self

import click
from attrs import asdict, frozen

from areal_actors.errors import ArealError


class Verdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    """The job can run, but may not do what its author expects."""
    FAILED = "failed"
    """The job cannot run with these settings."""
    SKIPPED = "skipped"
    """The check was not possible, or not requested."""


@frozen(kw_only=True)
class Finding:
    """The result of one check. ``advice`` says what to do about a problem."""

    check: str
    verdict: Verdict
    detail: str
    advice: str = ""

    def to_json(self) -> str:
        """Return the finding as one line of JSON."""
        return json.dumps(asdict(self))


_COLOURS = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "red", Verdict.SKIPPED: "bright_black"}


def format_finding(finding: Finding) -> str:
    """Return the finding as a line of text, followed by a line with the advice."""
    verdict = click.style(f"{finding.verdict:<8}", fg=_COLOURS[finding.verdict])
    lines = [*finding.detail.splitlines(), *([f"-> {finding.advice}"] if finding.advice else [])]
    return f"{verdict} {finding.check:<21}" + f"\n{'':<9}{'':<21}".join(lines)


class Examination:
    """A context manager that collects the findings of one check, in ``findings``.

    An error that its block raises becomes a finding, so that the checks after it still run.
    """

    def __init__(self, check: str) -> None:
        self.findings: list[Finding] = []
        self._check = check

    def add(self, verdict: Verdict, detail: str, advice: str = "", *, check: str | None = None) -> None:
        """Add a finding. ``check`` replaces the name of the check."""
        self.findings.append(Finding(check=check or self._check, verdict=verdict, detail=detail, advice=advice))

    @property
    def has_failed(self) -> bool:
        """Whether a finding says that the job cannot run."""
        return any(finding.verdict is Verdict.FAILED for finding in self.findings)

    def __enter__(self) -> Self:
        """Return the examination."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        """Turn an error into a finding."""
        # The message of an ArealError says what to do; others need the name of their class to be understood.
        if isinstance(error, ArealError):
            self.add(Verdict.FAILED, str(error))
        elif isinstance(error, OSError | ImportError):
            self.add(Verdict.FAILED, f"{type(error).__name__}: {error}")
        else:
            return False
        return True
