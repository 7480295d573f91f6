"""``areal-actors doctor``: whether a job can run where it is to run, looked at before it waits in a queue.

``machine`` looks at what is here, ``servers`` at what generates, ``places`` at where workers are to live. Each check
ends in a ``Finding`` that says what was seen, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator

from areal_actors.config import RunConfig
from areal_actors.run.doctor.findings import Finding, Verdict, format_finding
from areal_actors.run.doctor.machine import examine_machine
from areal_actors.run.doctor.places import examine_places
from areal_actors.run.doctor.servers import examine_servers

__all__ = ["Finding", "Verdict", "examine", "format_finding"]


def examine(config: RunConfig, *, has_trial: bool = False) -> Iterator[Finding]:
    """Look at everything that the run of ``config`` needs, one after another. Blocks.

    ``has_trial``: jobs are tried out on a cluster, too, not only asked about.
    """
    yield from examine_machine(config)
    yield from examine_servers(config)
    yield from examine_places(config, has_trial=has_trial)
