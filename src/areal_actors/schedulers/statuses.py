"""What a worker's exit status says to whatever started it, beside 0 for done and 1 for failed.

Told to end (SIGTERM) or warned of a time limit (SIGUSR1) by the cluster, and not by home, a worker writes what it has
to keep and leaves with ``RUN_AGAIN``. With 0 the cluster would take its work for done, and not start it again.
"""

from __future__ import annotations

__all__ = ["HOME_LOST", "NOT_BEGUN", "RUN_AGAIN"]

RUN_AGAIN = 75
"""It has kept what it has to keep, and wants to be started again (``EX_TEMPFAIL``)."""

NOT_BEGUN = 76
"""It could not begin: home cannot be reached, or nothing can be written where it has to be."""

HOME_LOST = 77
"""It has lost home for longer than its lease, and has ended itself. Nobody is there who could want it again."""
