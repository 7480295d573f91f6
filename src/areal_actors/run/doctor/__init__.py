"""``areal-actors doctor``: check whether a job can run, before it waits in a queue.

``machine`` checks this machine, ``servers`` the inference servers, ``places`` the resources for workers. Each check
returns a ``Finding`` with the result, and advice if there is a problem.
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
    """Check everything that the run of ``config`` needs, and yield each finding when it is known. Blocks.

    With ``has_trial``, jobs are also submitted to the cluster and run.
    """
    yield from examine_machine(config)
    yield from examine_servers(config)
    yield from examine_places(config, has_trial=has_trial)
