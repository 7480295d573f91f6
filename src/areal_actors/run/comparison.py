"""Comparing runs: the mean of each metric over runs of equal settings, with its interval.

Runs that differ only in their seed and their names are samples of one setting, and form a group.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from statistics import fmean
from typing import Any

from attrs import asdict, frozen

from areal_actors.dashboard.records import read_records
from areal_actors.dashboard.run_record import read_record
from areal_actors.domain import RunStatus
from areal_actors.domain.evaluation import Estimate, estimate_runs
from areal_actors.errors import RunDirectoryError
from areal_actors.run.directory import parse_settings
from areal_actors.viewer import ViewedRun, find_runs

_SAMPLES = frozenset({"seed", "experiment_name", "trial_name", "fileroot"})
"""Settings in which the runs of one group may differ."""
_MAX_SHOWN = 40
"""Characters of a setting in the table."""
_MAX_COLUMNS = 5
"""Settings that the table has room for. Runs of two experiments differ in dozens."""
_DEFAULT_METRICS = ("reward", "eval_reward")


@frozen(kw_only=True)
class RunGroup:
    """Runs with equal settings. ``settings`` are those in which the groups of a comparison differ."""

    settings: Mapping[str, Any]
    runs: tuple[str, ...]
    steps: tuple[int, int]
    """The least and the most steps of its runs."""
    metrics: Mapping[str, Estimate]


@frozen(kw_only=True)
class Comparison:
    """The groups of the compared runs, and the state of each run that has not finished."""

    groups: tuple[RunGroup, ...]
    unfinished: Mapping[str, str]
    num_last: int

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain data."""
        return {"interval": "95 %, Student's t over runs", **asdict(self)}


def compare_runs(paths: Sequence[Path], *, num_last: int = 1) -> Comparison:
    """Return the metrics of the runs at ``paths`` or below, each the mean of its ``num_last`` last values. Blocks.

    Raises ``RunDirectoryError`` if a path has no run, or none has made a step.
    """
    runs = [run for run in find_runs(paths).values() if run.directory.metrics.exists()]
    if not runs:
        raise RunDirectoryError("No run has made a step.")
    settings = {run.name: _read_settings(run) for run in runs}
    names = sorted(set().union(*settings.values()) - _SAMPLES)
    differing = [name for name in names if len({repr(own.get(name)) for own in settings.values()}) > 1]
    groups: dict[str, list[ViewedRun]] = defaultdict(list)
    for run in runs:
        groups[repr([settings[run.name].get(name) for name in differing])].append(run)
    records = {run.name: read_record(run.directory) for run in runs}
    return Comparison(
        groups=tuple(
            _summarize(members, {name: settings[members[0].name].get(name) for name in differing}, num_last)
            for members in groups.values()
        ),
        unfinished={
            name: "unknown" if record is None else record.status
            for name, record in records.items()
            if record is None or record.status is not RunStatus.FINISHED
        },
        num_last=num_last,
    )


def _read_settings(run: ViewedRun) -> dict[str, Any]:
    config = run.directory.config
    return parse_settings(config.read_text(encoding="utf-8")) if config.exists() else {}


def _summarize(runs: Sequence[ViewedRun], settings: Mapping[str, Any], num_last: int) -> RunGroup:
    values: dict[str, list[float]] = defaultdict(list)
    steps = []
    for run in runs:
        last: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=num_last))
        for record in read_records(run.directory.metrics):
            for name, value in record.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    last[name].append(value)
        for name, found in last.items():
            values[name].append(fmean(found))
        steps.append(int(max(last.get("step", (0,)))))
    return RunGroup(
        settings=settings,
        runs=tuple(run.name for run in runs),
        steps=(min(steps), max(steps)),
        metrics={name: estimate_runs(found) for name, found in values.items()},
    )


def format_comparison(comparison: Comparison, metrics: Sequence[str] = ()) -> str:
    """Return the table of a comparison, of rewards unless ``metrics`` are named.

    Raises ``RunDirectoryError`` for a metric that no run has.
    """
    known = sorted(set().union(*(group.metrics for group in comparison.groups)))
    if absent := sorted({*metrics} - {*known}):
        close = get_close_matches(absent[0], known, n=1)
        advice = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}."
        raise RunDirectoryError(f"No run has the metric {absent[0]}; {advice}")
    shown = metrics or [name for name in _DEFAULT_METRICS if name in known]
    settings = tuple(comparison.groups[0].settings)
    is_wide = len(settings) > _MAX_COLUMNS
    lines = [[*(("first run",) if is_wide else settings), "runs", "steps", *shown]]
    for group in comparison.groups:
        least, most = group.steps
        values = group.runs[:1] if is_wide else group.settings.values()
        chosen = (_shorten(value) for value in values)
        steps = str(most) if least == most else f"{least}-{most}"
        lines.append([*chosen, str(len(group.runs)), steps, *(_format(group.metrics.get(name)) for name in shown)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    of = "the last value" if comparison.num_last == 1 else f"the mean of the last {comparison.num_last} values"
    table.append(f"Mean over runs of {of}, and half of its 95 % interval (Student's t).")
    if is_wide:
        table.append(f"The groups differ in {len(settings)} settings; --json has them all.")
    table += [f"{name} is not finished: {status}" for name, status in comparison.unfinished.items()]
    return "\n".join(table)


def _shorten(value: Any) -> str:
    """Return a setting as text; a long one, such as a path, differs at its end."""
    text = "null" if value is None else str(value)
    return text if len(text) <= _MAX_SHOWN else f"…{text[1 - _MAX_SHOWN :]}"


def _format(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    if estimate.high is None:
        return f"{estimate.value:.4g}"
    return f"{estimate.value:.4g} ± {estimate.high - estimate.value:.2g}"
