"""``areal-actors doctor``: whether a job can run where it is to run, looked at before it waits in a queue.

``machine`` looks at what is here. Each check ends in a ``Finding`` that says what was seen, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator

from areal_actors.config import RunConfig
from areal_actors.run.doctor.findings import Finding, Verdict, format_finding
from areal_actors.run.doctor.machine import examine_machine

__all__ = ["Finding", "Verdict", "examine", "format_finding"]


def examine(config: RunConfig) -> Iterator[Finding]:
    """Look at everything that the run of ``config`` needs, one after another. Blocks."""
    yield from examine_machine(config)
