"""Reading run directories for the page: everything as plain data, from files that may grow or be replaced meanwhile."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from attrs import Factory, asdict, evolve, field, frozen

from areal_actors.dashboard import RunDirectory, summarize_run
from areal_actors.dashboard.metrics import RunSummarizer, read_new_records
from areal_actors.dashboard.record import RunStatus, read_record
from areal_actors.dashboard.records import read_records
from areal_actors.errors import RunDirectoryError
from areal_actors.lib.telemetry import redact, redact_settings

__all__ = ["Access", "Status", "ViewedRun", "describe_runs", "find_runs", "format_runs", "is_run", "view_run"]

Status = Callable[[], Mapping[str, Mapping[str, Any]]]
"""Returns the statistics of each actor of a run in this process, by name."""

_MAX_TASKS = 256
_MAX_STALENESS = 16
"""Steps after which a group is looked for that began under a version."""
_MAX_CONFIG = 40_000
_MAX_FAILURES = 200


class Access(StrEnum):
    """What a visitor may see of a run."""

    ALL = "all"
    NO_SETTINGS = "no settings"
    """All but ``config.yaml``, which is that of the host's operator."""
    CURVES = "curves"
    """Neither settings nor texts of episodes."""


@frozen(kw_only=True)
class ViewedRun:
    """A run to look at: its name on the page, its directory, and the status of its actors if it is live."""

    name: str
    directory: RunDirectory
    status: Status | None = None
    access: Access = Access.ALL
    _summarizer: RunSummarizer = field(
        default=Factory(lambda run: RunSummarizer(run.directory), takes_self=True), eq=False, repr=False
    )

    def describe(self) -> dict[str, Any]:
        """Return the summary, the verdict, the settings without secrets, and what there is to look at."""
        summary = self._summarizer.summarize().to_json()
        config = self.directory.config
        is_shown = self.access is Access.ALL and config.exists()
        text = config.read_text(encoding="utf-8", errors="replace") if is_shown else ""
        return {
            "name": self.name,
            "is_live": self.status is not None,
            "record": None if (record := read_record(self.directory)) is None else asdict(record),
            **summary,
            "config": redact_settings(text)[:_MAX_CONFIG],
            "versions": {
                "rollout": _versions(self.directory.rollouts),
                "eval-rollout": _versions(self.directory.eval_rollouts),
            },
            "actors": {} if self.status is None else dict(self.status()),
        }

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
                # A directory of groups changes with its newest version, whose own directory has the time of its newest
                # file.
                times = (child.stat().st_mtime_ns for child in path.iterdir()) if path.is_dir() else ()
                found[part] = f"{own.st_ino}:{own.st_size}:{own.st_mtime_ns}:{max(times, default=0)}"
        return found

    def read_metrics(self, cursor: str) -> dict[str, Any]:
        """Return the records of ``metrics.jsonl`` after ``cursor``, as ``read_new_records`` does."""
        return asdict(read_new_records(self.directory.metrics, cursor))

    def list_failures(self) -> list[dict[str, Any]]:
        """Return the kinds of failures: how often each happened, and the first episode that had it."""
        kinds: dict[str, dict[str, Any]] = {}
        for record in read_records(self.directory.failures):
            reason = str(record.get("failure"))
            if reason not in kinds:
                # Tracebacks quote the source line, which may contain a key.
                first = {key: redact(value) if isinstance(value, str) else value for key, value in record.items()}
                kinds[reason] = {"reason": redact(reason), "count": 0, "first": first}
            kind = kinds[reason]
            kind["count"] += 1
            kind["last_version"] = record.get("version")
        return sorted(kinds.values(), key=lambda kind: -kind["count"])[:_MAX_FAILURES]

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

    def list_groups(self, kind: str, version: int) -> list[dict[str, Any]]:
        """Return the groups of episodes that began under ``version``: each problem with the rewards of its rows."""
        root = (self.directory.eval_rollouts if kind == "eval-rollout" else self.directory.rollouts) / str(version)
        paths = sorted(root.glob("*.jsonl"), key=lambda path: (len(path.stem), path.stem))
        groups = []
        for path in paths[:_MAX_TASKS]:
            rows = list(read_records(path))
            rewards = [float(row.get("reward") or 0.0) for row in rows]
            groups.append({"task": path.stem, "rewards": rewards, "tokens": [_num_trained(row) for row in rows]})
        return groups

    def read_group(self, kind: str, version: int, task: str) -> list[dict[str, Any]]:
        """Return the rows of one problem with the texts that the model read and wrote."""
        root = self.directory.eval_rollouts if kind == "eval-rollout" else self.directory.rollouts
        # A problem of a named source is "source-5"; a task never leaves its directory.
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", task) is None:
            return []
        rows = list(read_records(root / str(version) / f"{task}.jsonl"))
        mean = sum(float(row.get("reward") or 0.0) for row in rows) / max(len(rows), 1)
        kept = ("sample_idx", "reward", "seqlen", "prompt_len", "head_version", "tail_version", "prompt", "completion")
        keys = [(row.get("sample_idx"), row.get("seqlen")) for row in rows]
        advantages = self._read_advantages(version, task, keys) if kind == "rollout" else {}
        return [
            {name: row.get(name) for name in kept}
            # Rows of equal length of one episode have been trained in their order.
            | {"advantage": (advantages.get(key) or [None]).pop(0)}
            | {"above_mean": float(row.get("reward") or 0.0) - mean, "trained_tokens": _num_trained(row)}
            for key, row in zip(keys, rows, strict=True)
        ]

    def _read_advantages(
        self, version: int, task: str, keys: Sequence[tuple[Any, Any]]
    ) -> dict[tuple[Any, Any], list[float | None]]:
        """Return the advantages of a problem's rows by episode and length, from the step that trained ``keys``.

        The problem may have been trained by several of the steps after ``version``, from groups of other versions.
        """
        best: dict[tuple[Any, Any], list[float | None]] = {}
        for step in range(version + 1, version + 2 + _MAX_STALENESS):
            found: dict[tuple[Any, Any], list[float | None]] = {}
            for row in read_records(self.directory.advantages / f"{step}.jsonl"):
                if row.get("task") == task:
                    found.setdefault((row.get("member"), row.get("num_tokens")), []).append(row.get("advantage"))
            if sum(key in found for key in keys) > sum(key in best for key in keys):
                best = found
        return best


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
        state = {"status": "unknown" if record is None else record.status, "reason": record and record.reason}
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
        notes = (run["reason"] if ended_badly else None, run["verdict"] and f"did not learn: {run['verdict']}")
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
    return sorted(int(path.name) for path in root.glob("*") if path.name.isdecimal()) if root.is_dir() else []


def _num_trained(row: Mapping[str, Any]) -> int:
    return sum(end - start for start, end in row.get("trained") or ())
