"""Reading run directories for the page: everything as plain data, from files that may grow or be replaced meanwhile."""

from __future__ import annotations

import math
import re
import sqlite3
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from attrs import Factory, evolve, field, frozen

from areal_actors.config import read_defaults
from areal_actors.dashboard import RunDirectory, summarize_run
from areal_actors.dashboard.records import read_records
from areal_actors.dashboard.run_record import read_record
from areal_actors.domain import RunStatus
from areal_actors.errors import RunDirectoryError
from areal_actors.lib.telemetry import kind_of, redact, redact_settings
from areal_actors.viewer.conversations import MAX_CHANGING, Conversations, list_versions
from areal_actors.viewer.curves import MetricsTable

T = TypeVar("T")
Status = Callable[[], Mapping[str, Mapping[str, Any]]]
"""Returns the statistics of each actor of a run in this process, by name."""

_MAX_FAILURES = 200
_MAX_EXAMPLES = 20
_MAX_SERVED = 200
"""Sessions of a service that are listed, the newest first."""
_NAMES = ("experiment_name", "trial_name", "fileroot")
"""Settings that differ between any two runs."""


class Access(StrEnum):
    """What a visitor may see of a run."""

    ALL = "all"
    NO_SETTINGS = "no settings"
    """All but ``config.yaml``, which is that of the host's operator."""
    CURVES = "curves"
    """Neither settings nor texts of episodes."""


@frozen(kw_only=True)
class FailureFilter:
    """Which failures are listed: those that match all that is set."""

    query: str = ""
    """In the name of the problem, in a reason or a traceback, in any case."""
    source: str | None = None
    """The dataset of the problem, in a run of several."""
    outcome: str | None = None
    """``failed``, ``rejected`` or ``cut_short``."""
    is_eval: bool | None = None
    first_version: int = 0
    last_version: float = math.inf
    """The versions under which failed episodes began."""


ALL_FAILURES = FailureFilter()


class FileCache:
    """What was read from files, until they change."""

    def __init__(self) -> None:
        self._known: dict[tuple[Path, str], tuple[tuple[int, int, int], Any]] = {}

    def get(self, path: Path, read: Callable[[], T]) -> T:
        """Return what ``read`` reads from ``path``, which need not exist."""
        state = (0, 0, 0)
        with suppress(OSError):
            found = path.stat()
            state = (found.st_ino, found.st_size, found.st_mtime_ns)
        name = (path, getattr(read, "__name__", ""))
        known = self._known.get(name)
        if known is None or known[0] != state:
            known = self._known[name] = (state, read())
        value: T = known[1]
        return value


@frozen(kw_only=True)
class ViewedRun:
    """A run to look at: its name on the page, its directory, and the status of its actors if it is live."""

    name: str
    directory: RunDirectory
    status: Status | None = None
    access: Access = Access.ALL
    metrics: MetricsTable = field(
        default=Factory(lambda self: MetricsTable(self.directory.metrics), takes_self=True), eq=False, repr=False
    )
    _cache: FileCache = field(factory=FileCache, eq=False, repr=False)

    @property
    def conversations(self) -> Conversations:
        """The groups and conversations of the run."""
        return Conversations(self.directory)

    def summarize(self) -> dict[str, Any]:
        """Return a row of the table of runs: state, steps, rewards, verdict, times, and changed settings by path."""
        record = read_record(self.directory)
        settings = self._read_settings()
        status = "unknown" if self.directory.is_worth_keeping else "not begun"
        return {
            "name": self.name,
            "is_live": self.status is not None,
            "status": status if record is None else record.status,
            "reason": record and record.reason,
            "is_service": bool(record and record.is_service) or self.directory.journal.exists(),
            "began": record and record.began,
            "ended": record and record.ended,
            "changed_at": self.changed_at,
            **self._cache.get(self.directory.metrics, self._summarize),
            "model": self.directory.model,  # written after the last step
            "total_steps": settings.get("total_steps", {}).get("value"),
            # For groups of seeds; runs of one experiment differ in few settings.
            "settings": {
                path: setting["value"]
                for path, setting in settings.items()
                if (setting["is_changed"] or path == "seed") and path not in _NAMES and self.access is Access.ALL
            },
        }

    def describe(self) -> dict[str, Any]:
        """Return the row of the run, all settings without secrets, and what there is to look at."""
        sources = {match[1] for key in self.metrics.read() if (match := re.match(r"source/([^/]+)/", key))}
        return {
            **self.summarize(),
            "all_settings": self._read_settings() if self.access is Access.ALL else {},
            "versions": {
                "rollout": list_versions(self.directory.rollouts),
                "eval-rollout": list_versions(self.directory.eval_rollouts),
            },
            "sources": sorted(sources),
            "actors": {} if self.status is None else dict(self.status()),
        }

    def _summarize(self) -> dict[str, Any]:
        return summarize_run(self.directory).to_json()

    @property
    def changed_at(self) -> float:
        """When the run began, ended or took its last step, in seconds since 1970; 0 if it did not begin."""
        times = [0.0]
        for file in (self.directory.record, self.directory.metrics):
            with suppress(OSError):
                times.append(file.stat().st_mtime)
        return max(times)

    def _read_settings(self) -> dict[str, dict[str, Any]]:
        """Return each setting by its path, without secrets: its ``value``, and whether it ``is_changed``."""
        return self._cache.get(self.directory.config, self._parse_settings)

    def _parse_settings(self) -> dict[str, dict[str, Any]]:
        path = self.directory.config
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        return compare_with_defaults(text)

    def signature(self) -> dict[str, str]:
        """Return a text for each part of the run that differs whenever the part has changed. Costs a few stat calls."""
        parts = {
            "record": self.directory.record,
            "metrics": self.directory.metrics,
            "failures": self.directory.failures,
            "sessions": self.directory.sessions,
            "advantages": self.directory.advantages,
            "groups": self.directory.rollouts,
            "evaluations": self.directory.eval_rollouts,
            "served": self.directory.journal.with_name(f"{self.directory.journal.name}-wal"),
        }
        found = dict.fromkeys(parts, "")
        for part, path in parts.items():
            with suppress(OSError):  # there is none yet
                own = path.stat()
                # A directory of groups changes with its newest versions, whose directories have the times of their
                # newest files. Looking at all versions took 18 ms after 3,000 steps, each time.
                newest = list_versions(path)[-MAX_CHANGING:]
                times = ((path / str(version)).stat().st_mtime_ns for version in newest)
                found[part] = f"{own.st_ino}:{own.st_size}:{own.st_mtime_ns}:{max(times, default=0)}"
        return found

    def list_failures(self, wanted: FailureFilter = ALL_FAILURES) -> list[dict[str, Any]]:
        """Return the kinds of failures: how often each happened, the first episode that had it, and the newest."""
        kinds: dict[str, dict[str, Any]] = {}
        for record in read_records(self.directory.failures):
            if not _is_wanted(record, wanted):
                continue
            reason = str(record.get("failure"))
            if (masked := kind_of(reason)) not in kinds:
                # Tracebacks quote the source line, which may contain a key.
                first = {key: redact(value) if isinstance(value, str) else value for key, value in record.items()}
                newest = deque[dict[str, Any]](maxlen=_MAX_EXAMPLES)
                kinds[masked] = {"reason": redact(reason), "count": 0, "first": first, "newest": newest}
            kind = kinds[masked]
            kind["count"] += 1
            kind["last_version"] = record.get("version")
            kind["newest"].appendleft(
                {name: record.get(name) for name in ("task_id", "sample_idx", "version", "is_eval")}
            )
        found = sorted(kinds.values(), key=lambda kind: -kind["count"])[:_MAX_FAILURES]
        return [kind | {"newest": list(kind["newest"])} for kind in found]

    def list_served(self) -> list[dict[str, Any]]:
        """Return the sessions of a service from its journal, the newest first: user, turns, tokens, reward, state."""
        if not self.directory.journal.exists():
            return []
        with (
            suppress(sqlite3.Error),
            closing(sqlite3.connect(f"{self.directory.journal.as_uri()}?mode=ro", uri=True)) as db,
        ):
            db.row_factory = sqlite3.Row
            return [
                dict(row) | {"session": redact(f"session {row['session']}").removeprefix("session ")}
                for row in db.execute(_SERVED, {"num": _MAX_SERVED})
            ]
        return []  # a service with another version of the journal, or one that holds it for itself


_SERVED = """
SELECT s.session, s.user, s.started_at, e.ended_at, f.forgotten_at IS NOT NULL AS is_exported,
    count(t.seq) AS num_turns, max(t.ended_at) AS last_turn_at, total(t.num_output_tokens) AS num_tokens,
    (SELECT reward FROM rewards r WHERE r.session = s.session ORDER BY r.seq DESC LIMIT 1) AS reward,
    (SELECT count(*) FROM rewards r WHERE r.session = s.session) AS num_rewards
FROM (SELECT * FROM sessions ORDER BY seq DESC LIMIT :num) s
LEFT JOIN turns t ON t.session = s.session
LEFT JOIN endings e ON e.session = s.session
LEFT JOIN forgotten f ON f.session = s.session
GROUP BY s.session ORDER BY max(s.started_at, ifnull(max(t.ended_at), 0)) DESC
"""


def find_runs(paths: Sequence[Path]) -> dict[str, ViewedRun]:
    """Return the runs at ``paths`` and up to two directories below them, by name: ``experiment/trial``.

    Raises ``RunDirectoryError`` for a path without any run.
    """
    found: dict[str, ViewedRun] = {}
    for path in paths:
        # Experiments are directories of trials, so runs are found two levels below a directory of runs.
        candidates = (path, *sorted(path.glob("*/")), *sorted(path.glob("*/*/"))) if path.is_dir() else ()
        runs = [where for where in candidates if is_run(RunDirectory(path=where))]
        if not runs:
            raise RunDirectoryError(
                f"{path} holds no run: there is no metrics.jsonl or config.yaml in it or below it. Give the directory "
                "of a run, as in runs/<experiment>/<trial>, or one that contains runs."
            )
        for where in runs:
            run = view_run(RunDirectory(path=where.resolve()))
            if run.name in found and found[run.name].directory != run.directory:
                run = evolve(run, name=str(run.directory.path))
            found[run.name] = run
    return found


def view_run(directory: RunDirectory, *, status: Status | None = None) -> ViewedRun:
    """Return the run in ``directory`` under its name ``experiment/trial``; ``status`` is that of a live one."""
    path = directory.path.absolute()
    return ViewedRun(name=f"{path.parent.name}/{path.name}", directory=directory, status=status)


def describe_runs(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the state, the steps and the rewards of each run at ``paths`` or below, by name. Errors: ``find_runs``."""
    return [run.summarize() for run in find_runs(paths).values()]


def format_runs(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of ``describe_runs`` as text, with what needs attention below each run."""
    width = max(len("run"), *(len(run["name"]) for run in runs))
    lines = [f"{'run':{width}}  {'state':11}  {'steps':>5}  {'reward':>15}  {'held out':>15}"]
    for run in runs:
        rewards = (f"{_format(run[f'{kind}_first'])} -> {_format(run[f'{kind}_last'])}" for kind in ("reward", "eval"))
        state = f"{run['name']:{width}}  {run['status']:11}  {run['steps']:5}"
        lines.append(state + "".join(f"  {text:>15}" for text in rewards))
        ended_badly = run["status"] in (RunStatus.FAILED, RunStatus.KILLED)
        notes = (
            run["reason"] if ended_badly else None,
            run["verdict"] and f"did not learn: {run['verdict']}",
        )
        lines += [f"{'':{width}}  {note}" for note in notes if note]
    return "\n".join(lines)


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def is_run(directory: RunDirectory) -> bool:
    """Return whether ``directory`` is that of a run."""
    # A directory of agents may have a config.yaml, too; that of a run has the logs of the run next to it.
    return (
        directory.metrics.exists()
        or directory.evaluation.exists()
        or (directory.config.exists() and directory.logs.is_dir())
    )


def _is_wanted(record: Mapping[str, Any], wanted: FailureFilter) -> bool:
    version, task = int(record.get("version") or 0), str(record.get("task_id"))
    is_wanted = (
        wanted.outcome in (None, record.get("outcome"))
        and wanted.is_eval in (None, record.get("is_eval", False))
        and wanted.source in (None, task.rpartition("-")[0])
        and wanted.first_version <= version <= wanted.last_version
    )
    # Only what is shown is searched: a search for the beginning of a key must not find it.
    texts = (task, redact(str(record.get("failure"))), redact(str(record.get("traceback") or "")))
    return is_wanted and wanted.query.casefold() in "\n".join(texts).casefold()


def compare_with_defaults(text: str) -> dict[str, dict[str, Any]]:
    """Return the settings in the YAML ``text`` by their path: the ``value`` of each, and whether it ``is_changed``.

    Keys and passwords are shortened.
    """
    try:
        # The loader in C takes 5 ms for the settings of a run; that in Python 90 ms, for each of dozens of runs.
        given = flatten(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))  # noqa: S506 - both are safe
    except yaml.YAMLError:
        return {}  # not a configuration
    defaults = default_settings()
    return {
        path: {"value": _redact_setting(path, value), "is_changed": defaults.get(path) != value}
        for path, value in given.items()
    }


def _redact_setting(path: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_redact_setting(path, item) for item in value]
    if isinstance(value, str):
        for name in path.split("."):  # keys may be named in a section of keys
            value = redact_settings(f"{name}: {value}").partition(": ")[2]
    return value


@cache
def default_settings() -> Mapping[str, Any]:
    """Return the defaults of all settings by their path."""
    return flatten(read_defaults())


def flatten(value: Any, above: str = "") -> dict[str, Any]:
    """Return the values below a mapping by their dotted path."""
    if not isinstance(value, Mapping) or (above and not value):
        return {above: value} if above else {}
    return {
        path: item for name, part in value.items() for path, item in flatten(part, f"{above}.{name}".strip(".")).items()
    }
