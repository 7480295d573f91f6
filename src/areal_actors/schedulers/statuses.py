"""Exit statuses of a worker, in addition to 0 for done and 1 for failed.

When the cluster, not the controller, asks a worker to end (SIGTERM) or warns it of a time limit (SIGUSR1), the worker
saves its state and exits with ``RUN_AGAIN``. With status 0, the cluster would consider the work done and not start it
again.
"""

from __future__ import annotations

__all__ = ["HOME_LOST", "NOT_BEGUN", "RUN_AGAIN"]

RUN_AGAIN = 75
"""The worker has saved its state, and asks to be started again (``EX_TEMPFAIL``)."""

NOT_BEGUN = 76
"""The worker could not start: the controller cannot be reached, or a required directory cannot be written."""

HOME_LOST = 77
"""The worker lost its controller for longer than its lease, and exited. It is not started again."""
