"""Output of a run for people: the live display, the metrics, the learning curve and the report.

Every writer here receives the events of a run (``messages.Progress``) from ``reporter``, on a worker thread:
``open`` once, ``on_event`` for each event, ``close`` once. Rich, jinja2 and clients of trackers are loaded
on first use.
"""

from __future__ import annotations

from areal_actors.dashboard.display import DisplayStyle, PlainDisplay, RichDisplay, RunState, create_display
from areal_actors.dashboard.dumps import (
    Decode,
    FailureWriter,
    RolloutDumper,
    RowDumper,
    UntrainedWriter,
)
from areal_actors.dashboard.files import RunDirectory
from areal_actors.dashboard.metrics import (
    STEP_KEYS,
    MetricsWriter,
    RunSummary,
    read_gauges,
    summarize_run,
)
from areal_actors.dashboard.report import write_report
from areal_actors.dashboard.samples import SessionSampler
from areal_actors.dashboard.trackers import (
    TrackedRun,
    TrackerWriter,
    create_trackers,
    parse_trackers,
    require_trackers,
)

__all__ = [
    "STEP_KEYS",
    "Decode",
    "DisplayStyle",
    "FailureWriter",
    "MetricsWriter",
    "PlainDisplay",
    "RichDisplay",
    "RolloutDumper",
    "RowDumper",
    "RunDirectory",
    "RunState",
    "RunSummary",
    "SessionSampler",
    "TrackedRun",
    "TrackerWriter",
    "UntrainedWriter",
    "create_display",
    "create_trackers",
    "parse_trackers",
    "read_gauges",
    "require_trackers",
    "summarize_run",
    "write_report",
]
