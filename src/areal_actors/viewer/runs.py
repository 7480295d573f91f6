"""Reading run directories for the page: everything as plain data, from files that may grow or be replaced meanwhile."""

from __future__ import annotations

import json
import math
import os
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, frozen

from areal_actors.dashboard import RunDirectory, summarize_run
from areal_actors.dashboard.metrics import read_new_records
from areal_actors.dashboard.records import read_records
from areal_actors.dashboard.run_record import read_record
from areal_actors.domain import RunStatus
from areal_actors.errors import RunDirectoryError
from areal_actors.lib.telemetry import kind_of, redact, redact_settings

Status = Callable[[], Mapping[str, Mapping[str, Any]]]
"""Returns the statistics of each actor of a run in this process, by name."""

_MAX_TASKS = 256
_MAX_CONFIG = 40_000
_MAX_FAILURES = 200
_MAX_FILES = 4096
"""Files of groups that one search reads, the newest versions first."""
_MAX_EXAMPLES = 20
_MAX_CHANGING = 32
"""Versions whose groups may still be written: more than any staleness."""


class Access(StrEnum):
    """What a visitor may see of a run."""

    ALL = "all"
    NO_SETTINGS = "no settings"
    """All but ``config.yaml``, which is that of the host's operator."""
    CURVES = "curves"
    """Neither settings nor texts of episodes."""


@frozen(kw_only=True)
class RecordFilter:
    """Which groups or failures are listed: those that match all that is set."""

    query: str = ""
    """In the name of the problem, in a reason or traceback, or in what the model read or wrote, in any case."""
    source: str | None = None
    """The dataset of the problem, in a run of several."""
    low: float = -math.inf
    high: float = math.inf
    """Bounds of a group's mean reward."""
    is_equal: bool | None = None
    """Whether all rows of a group have the same reward, so that nothing is learned from them."""
    outcome: str | None = None
    """Of a failure: ``failed``, ``rejected`` or ``cut_short``."""
    is_eval: bool | None = None
    first_version: int = 0
    last_version: float = math.inf
    """The versions under which failed episodes began."""


EVERYTHING = RecordFilter()


@frozen(kw_only=True)
class ViewedRun:
    """A run to look at: its name on the page, its directory, and the status of its actors if it is live."""

    name: str
    directory: RunDirectory
    status: Status | None = None
    access: Access = Access.ALL

    def describe(self) -> dict[str, Any]:
        """Return the summary, the verdict, the settings without secrets, and what there is to look at."""
        summary = summarize_run(self.directory).to_json()
        return {
            "name": self.name,
            "is_live": self.status is not None,
            "record": None if (record := read_record(self.directory)) is None else asdict(record),
            "has_begun": self.directory.is_worth_keeping,
            **summary,
            "config": self._read_settings() if self.access is Access.ALL else "",
            "versions": {
                "rollout": _versions(self.directory.rollouts),
                "eval-rollout": _versions(self.directory.eval_rollouts),
            },
            "actors": {} if self.status is None else dict(self.status()),
        }

    @property
    def changed_at(self) -> float:
        """When the run began, ended or took its last step, in seconds since 1970; 0 if it did not begin."""
        times = [0.0]
        for file in (self.directory.record, self.directory.metrics):
            with suppress(OSError):
                times.append(file.stat().st_mtime)
        return max(times)

    def _read_settings(self) -> str:
        """Return ``config.yaml`` without secrets."""
        path = self.directory.config
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        return redact_settings(text)[:_MAX_CONFIG]

    def signature(self) -> dict[str, str]:
        """Return a text for each part of the run that differs whenever the part has changed. Costs a few stat calls."""
        parts = {
            "record": self.directory.record,
            "metrics": self.directory.metrics,
            "failures": self.directory.failures,
            "sessions": self.directory.sessions,
            "groups": self.directory.rollouts,
            "evaluations": self.directory.eval_rollouts,
        }
        found = dict.fromkeys(parts, "")
        for part, path in parts.items():
            with suppress(OSError):  # there is none yet
                own = path.stat()
                # A directory of groups changes with its newest versions, whose directories have the times of their
                # newest files. Looking at all versions took 18 ms after 3,000 steps, each time.
                newest = _versions(path)[-_MAX_CHANGING:]
                times = ((path / str(version)).stat().st_mtime_ns for version in newest)
                found[part] = f"{own.st_ino}:{own.st_size}:{own.st_mtime_ns}:{max(times, default=0)}"
        return found

    def read_metrics(self, cursor: str) -> dict[str, Any]:
        """Return the records of ``metrics.jsonl`` after ``cursor``, as ``read_new_records`` does."""
        return asdict(read_new_records(self.directory.metrics, cursor))

    def list_failures(self, wanted: RecordFilter = EVERYTHING) -> list[dict[str, Any]]:
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

    def list_sessions(self, query: str = "") -> list[dict[str, Any]]:
        """Return the heads of the sampled conversations, newest first; with ``query``, of those that contain it."""
        heads = []
        for index, record in enumerate(read_records(self.directory.sessions)):
            if query and query.casefold() not in json.dumps(record, ensure_ascii=False).casefold():
                continue
            head = {key: value for key, value in record.items() if key not in ("turns", "untrained")}
            heads.append({**head, "index": index, "has_untrained": bool(record.get("untrained"))})
        return heads[::-1]

    def read_session(self, index: int) -> dict[str, Any] | None:
        """Return one conversation with its tokens; ``None`` if there is none at ``index``."""
        for place, record in enumerate(read_records(self.directory.sessions)):
            if place == index:
                return record
        return None

    def list_groups(self, kind: str, version: int | None, wanted: RecordFilter = EVERYTHING) -> dict[str, Any]:
        """Return the ``groups`` of episodes that began under ``version``: each problem with the rewards of its rows.

        Without a version those of all, the newest first. ``is_cut`` says whether there are too many to list all.
        """
        root = self.directory.eval_rollouts if kind == "eval-rollout" else self.directory.rollouts
        versions = _versions(root)[::-1] if version is None else [version]
        groups: list[dict[str, Any]] = []
        # Problems are in numerical order.
        files = (
            (began, path)
            for began in versions
            for path in sorted((root / str(began)).glob("*.jsonl"), key=lambda path: (len(path.stem), path.stem))
        )
        for number, (began, path) in enumerate(files):
            if len(groups) == _MAX_TASKS or number == _MAX_FILES:
                return {"groups": groups, "is_cut": True}
            if wanted.source not in (None, path.stem.rpartition("-")[0]):
                continue
            rows = list(read_records(path))
            rewards = [float(row.get("reward") or 0.0) for row in rows]
            mean = sum(rewards) / max(len(rewards), 1)
            is_equal = len(rewards) > 1 and len(set(rewards)) == 1
            texts = (path.stem, *(f"{row.get('prompt')}\n{row.get('completion')}" for row in rows))
            is_match = any(wanted.query.casefold() in text.casefold() for text in texts)
            if is_match and wanted.low <= mean <= wanted.high and wanted.is_equal in (None, is_equal):
                facts = {"task": path.stem, "version": began}
                groups.append(facts | {"rewards": rewards, "tokens": list(map(_num_trained, rows))})
        return {"groups": groups, "is_cut": False}

    def read_group(self, kind: str, version: int, task: str) -> list[dict[str, Any]]:
        """Return the rows of one problem with the texts that the model read and wrote."""
        root = self.directory.eval_rollouts if kind == "eval-rollout" else self.directory.rollouts
        # A problem of a named source is "source-5"; a task never leaves its directory.
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", task) is None:
            return []
        rows = list(read_records(root / str(version) / f"{task}.jsonl"))
        mean = sum(float(row.get("reward") or 0.0) for row in rows) / max(len(rows), 1)
        kept = ("sample_idx", "reward", "seqlen", "prompt_len", "head_version", "tail_version", "prompt", "completion")
        untrained = {
            record.get("sample_idx"): record.get("reason")
            for record in (read_records(self.directory.untrained) if kind == "rollout" else ())
            if (record.get("version"), record.get("task_id")) == (version, task)
        }
        return [
            {name: row.get(name) for name in kept}
            | {"untrained": untrained.get(row.get("sample_idx"))}
            | {"above_mean": float(row.get("reward") or 0.0) - mean, "trained_tokens": _num_trained(row)}
            for row in rows
        ]


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
    found = []
    for run in find_runs(paths).values():
        record, summary = read_record(run.directory), summarize_run(run.directory).to_json()
        absent = "unknown" if run.directory.is_worth_keeping else "not begun"
        state = {
            "status": absent if record is None else record.status,
            "reason": record and record.reason,
        }
        found.append({"name": run.name} | state | summary)
    return found


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


def _versions(root: Path) -> list[int]:
    # Of 5,000 names, pathlib makes paths in 40 ms.
    return sorted(int(name) for name in os.listdir(root) if name.isdecimal()) if root.is_dir() else []  # noqa: PTH208


def _is_wanted(record: Mapping[str, Any], wanted: RecordFilter) -> bool:
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


def _num_trained(row: Mapping[str, Any]) -> int:
    return sum(end - start for start, end in row.get("trained") or ())
