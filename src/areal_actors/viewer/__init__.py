"""The page of runs in a browser: curves, conversations and failures, live or from a run directory alone.

``runs``, ``curves`` and ``conversations`` read run directories as plain data, ``app`` serves that data and the page in
``static`` to the owner of a token, and ``open_page`` holds its server open. Nothing is
read while no browser looks. The page has no build step and loads nothing from other hosts; charts are drawn by the
vendored uPlot (MIT).
"""

from __future__ import annotations

from areal_actors.viewer.app import PollIntervals, create_page, open_page, run_viewer
from areal_actors.viewer.runs import (
    ViewedRun,
    describe_runs,
    find_runs,
    format_runs,
    view_run,
)

__all__ = [
    "PollIntervals",
    "ViewedRun",
    "create_page",
    "describe_runs",
    "find_runs",
    "format_runs",
    "open_page",
    "run_viewer",
    "view_run",
]
