"""The numbers of a run: ``metrics.jsonl``, and a summary computed from the file. ``trackers`` send them elsewhere.

``docs/reference/metrics.md`` explains every key. A record of step 0 has only the evaluation before the first step;
every other record is one training step.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from areal_actors.dashboard.files import RunDirectory
from areal_actors.dashboard.records import RecordFile, read_records, rewrite_records
from areal_actors.dashboard.reporter import Listener
from areal_actors.dashboard.verdict import CAUSES, find_causes, find_verdict
from areal_actors.kernel import Message
from areal_actors.lib.notebooks import format_table
from areal_actors.messages import EvaluationFinished, Progress, StepFinished

STEP_KEYS = (
    "step",
    "version",
    "phase",
    "reward",
    "eval_reward",
    "penalty_mean",
    "loss",
    "kl",
    "reference_kl",
    "teacher_kl",
    "entropy",
    "staleness_mean",
    "staleness_max",
    "tokens",
    "trained_tokens",
    "packed_tokens",
    "sampled_tokens",
    "tokens_per_second",
    "engines",
    "episodes",
    "failed_episodes",
    "rejected_episodes",
    "limited_episodes",
    "groups",
    "zero_variance_groups",
    "truncated_turns",
    "truncated_tokens",
    "replaced_groups",
    "failed_groups",
    "rejected_groups",
    "requeued_groups",
    "dropped_groups",
    "easy_problems",
    "hard_problems",
    "solve_rate",
    "drawn_episodes",
    "drawn_tokens_mean",
    "drawn_tokens_p90",
    "drawn_turns_mean",
    "trained_episodes",
    "trained_tokens_mean",
    "trained_tokens_p90",
    "trained_turns_mean",
    "grad_norm",
    "learning_rate",
    "num_updates",
    "clip_fraction",
    "out_of_range_fraction",
    "importance_mean",
    "importance_max",
    "behaviour_gap_mean",
    "behaviour_gap_max",
    "temperature_mean",
    "greedy_tokens",
    "adjusted_tokens",
    "outside_fraction",
    "rollout_seconds",
    "held_seconds",
    "train_seconds",
    "elapsed_seconds",
)
"""Keys of every record, in this order; null if a step has no such number. Further keys may follow."""

_NUMERIC_KEYS = tuple(key for key in STEP_KEYS if key != "phase")
# A tuple: for each of 300,000 numbers of a long run, int | float | None would be made anew.
_NUMBER_OR_NONE = (int, float, type(None))
_TAIL_BYTES = 256 * 1024
"""A record has about 2 kB, so the latest evaluation is found if it is some hundred steps old at most."""


class MetricsWriter(Listener):
    """Writes ``metrics.jsonl``. ``resumed_step`` is the step of the checkpoint from which a run continues.

    Records that a crashed run wrote after its checkpoint are removed, since those steps are repeated.
    """

    name = "metrics.jsonl"
    is_essential = True

    def __init__(
        self, path: Path, *, resumed_step: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._file = RecordFile(path)
        self._resumed_step = resumed_step
        self._clock = clock
        self._epoch = 0.0

    def open(self) -> None:
        """Truncate the file to the checkpoint; a new run starts a new file. Raises ``OSError``."""
        limit = -1 if self._resumed_step is None else self._resumed_step
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch()
        kept = rewrite_records(self._path, lambda record: record.get("step", 0) <= limit)
        elapsed = kept[-1].get("elapsed_seconds") if kept else None
        self._epoch = self._clock() - (elapsed or 0.0)

    def on_event(self, news: Message[Progress, None]) -> None:
        """Write a step, or the evaluation before the first one. Raises ``OSError``."""
        match news:
            case StepFinished():
                if news.step <= (self._resumed_step or 0):
                    # Its evaluation ran when the checkpoint was written, so a resumed run reports it again.
                    self._file.close()
                    rewrite_records(self._path, lambda record: record.get("step") != news.step)
                self._write({**news.metrics, "step": news.step, "phase": news.phase})
            case EvaluationFinished(version=0):
                self._write({"step": 0, "version": 0, "eval_reward": news.reward, **news.logged})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, metrics: Mapping[str, Any]) -> None:
        elapsed = {"elapsed_seconds": round(self._clock() - self._epoch, 3)}
        self._file.append({**dict.fromkeys(STEP_KEYS), **metrics, **elapsed})


@frozen(kw_only=True)
class RunSummary:
    """A summary of a run. ``seconds`` is its wall-clock time with evaluations; ``version`` that of its weights.

    ``model`` is the name under which the weights can be requested, ``experiment/trial``; ``None`` for a run without
    weights. ``verdict`` says in one sentence why the run did not learn; ``None`` if it did.
    """

    steps: int
    reward_first: float | None
    reward_last: float | None
    eval_first: float | None
    eval_last: float | None
    seconds: float
    run_dir: Path
    version: int
    model: str | None = None
    verdict: str | None = None

    def _repr_html_(self) -> str:
        """Return the summary as a table, for notebooks."""
        return format_table(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict for ``json.dumps``."""
        return asdict(self) | {"run_dir": str(self.run_dir)}


def summarize_run(directory: RunDirectory, *, seconds: float | None = None) -> RunSummary:
    """Return the summary of ``metrics.jsonl``; ``seconds`` is also read from it unless given.

    Raises ``OSError`` if the file cannot be read; a run without steps has none.
    """
    records = read_steps(directory)
    rewards = [record["reward"] for record in records if record.get("reward") is not None]
    evaluations = [record["eval_reward"] for record in records if record.get("eval_reward") is not None]
    last: Mapping[str, Any] = records[-1] if records else {}
    return RunSummary(
        steps=int(last.get("step") or 0),
        reward_first=rewards[0] if rewards else None,
        reward_last=rewards[-1] if rewards else None,
        eval_first=evaluations[0] if evaluations else None,
        eval_last=evaluations[-1] if evaluations else None,
        seconds=round(float(last.get("elapsed_seconds") or 0.0) if seconds is None else seconds, 3),
        run_dir=directory.path,
        version=int(last.get("version") or 0),
        model=directory.model,
        verdict=find_verdict(records),
    )


def read_steps(directory: RunDirectory) -> list[dict[str, Any]]:
    """Return the records of steps without damaged ones, which lack a step, or have texts for numbers."""
    return [
        record
        for record in read_records(directory.metrics)
        if isinstance(record.get("step"), int)
        and all(isinstance(record.get(key), _NUMBER_OR_NONE) for key in _NUMERIC_KEYS)
    ]


def read_gauges(directory: RunDirectory) -> dict[str, float | dict[str, float]]:
    """Return numbers of a run for monitoring: those of its latest step, as ``step_<key>``, and the journal's size.

    Numbers of sources are ``step_source_<key>``, by source. The latest evaluation may be some steps old. Keys of custom
    metrics have every other character replaced by ``_``. ``not_learning`` has for each cause of ``verdict.CAUSES`` 1 if
    the verdict names it, else 0. What cannot be read is left out.
    """
    found: dict[str, float | dict[str, float]] = {}
    with suppress(OSError), directory.metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        for line in file.read().splitlines():
            # The first line is cut, and the last one may be growing.
            with suppress(ValueError):
                record = json.loads(line)
                numbers = {key: value for key, value in record.items() if isinstance(value, (int, float))}
                found = {key: value for key, value in found.items() if key.startswith("step_eval")}
                for key, value in numbers.items():
                    # The name of a source is a label: a-b and a.b would be the same part of a name.
                    match = re.fullmatch(r"source/(.+)/(\w+)", key)
                    if match is None:
                        found[f"step_{re.sub(r'[^A-Za-z0-9_]', '_', key)}"] = value
                    else:
                        by_source = found.setdefault(f"step_source_{match[2]}", {})
                        if isinstance(by_source, dict):  # no custom metric took the name
                            by_source[match[1]] = value
    with suppress(OSError):
        causes = find_causes(read_steps(directory))
        found["not_learning"] = {cause: float(cause in causes) for cause in CAUSES}
    with suppress(OSError):
        found["journal_bytes"] = directory.journal.stat().st_size
    return found
