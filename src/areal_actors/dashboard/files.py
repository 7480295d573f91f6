"""The directory of a run, and the names of its files, for all code that reads or writes them.

::

    runs/<experiment>/<trial>/
      config.yaml        every setting, written out
      run.json           whether it is running, finished, interrupted or failed, and why it ended
      admin.key          of a service: its admin key, readable by its owner only
      journal.sqlite     of a service: the session journal, which survives a restart
      metrics.jsonl      one JSON object per step (docs/reference/metrics.md)
      failures.jsonl     one JSON object for each episode that failed
      untrained.jsonl    one JSON object for each successful episode that no step trained
      sessions.jsonl     a sample of conversations, for the page and the report
      advantages.jsonl   the advantages with which turns of these conversations were trained
      rollout/           <version>/<task>.jsonl: every training row as text
      eval-rollout/      the same of evaluations
      capture/           step-<n>.jsonl: rows that failed the capture check and stopped the run before step n
      exports/           <format>/: rows for other trainers
      checkpoints/       from which a run resumes
      groups.sqlite      of a run over a dataset: finished groups that no checkpoint contains
      weights/           the trained model, as transformers loads it; adapter/: the trained adapter, if there is one
      published/         the last versions of the weights, if they are published by disk
      logs/              run.jsonl: log of the run; agents/<n>.log: output of agents in processes; service.log: output
                         of a service of a host; workers/<name>.log: output of workers
      rows/              step-<n>.parquet: the rows of training steps with all numbers, if logging.row_dumps is set
      rows.key           the key that seals them, readable by its owner only
      tensorboard/       scalars
      trackers.json      the names of the run in other trackers
      report.html        the run on one page, offline

The directory of an evaluation, <trial>.eval/<model>/, has config.yaml, failures.jsonl, sessions.jsonl, eval-rollout/,
logs/ and report.html in the same form, and::

      episodes.jsonl     one JSON object for each episode that is over
      evaluation.json    what was evaluated, and the results
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

from attrs import field, frozen

from areal_actors.domain import is_model_identifier
from areal_actors.models import WEIGHTS_DIRECTORY


class _Entry:
    """A file or directory in the directory of a run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDirectory, _: type) -> Path:
        return run.path / self._name


@frozen(kw_only=True)
class RunDirectory:
    """Names of the files of one run, which the text at the top of this module describes."""

    path: Path = field(converter=Path)

    config = _Entry("config.yaml")
    record = _Entry("run.json")

    @property
    def lock(self) -> Path:
        """The file that the process of the run locks. It is next to the directory, which may be set aside."""
        return self.path.with_name(f".{self.path.name}.lock")

    admin_key = _Entry("admin.key")
    journal = _Entry("journal.sqlite")
    groups = _Entry("groups.sqlite")
    metrics = _Entry("metrics.jsonl")
    failures = _Entry("failures.jsonl")
    sessions = _Entry("sessions.jsonl")
    advantages = _Entry("advantages.jsonl")
    rollouts = _Entry("rollout")
    eval_rollouts = _Entry("eval-rollout")
    untrained = _Entry("untrained.jsonl")
    rows = _Entry("rows")
    rows_key = _Entry("rows.key")
    exports = _Entry("exports")
    captures = _Entry("capture")
    checkpoints = _Entry("checkpoints")
    adapter = _Entry("adapter")
    published = _Entry("published")
    weights = _Entry(WEIGHTS_DIRECTORY)

    @property
    def model(self) -> str | None:
        """The name ``experiment/trial`` of the trained model; ``None`` while there are no weights."""
        name = f"{self.path.parent.name}/{self.path.name}"
        return name if is_model_identifier(name) and (self.weights / "config.json").is_file() else None

    logs = _Entry("logs")
    log = _Entry("logs/run.jsonl")
    agent_logs = _Entry("logs/agents")
    service_log = _Entry("logs/service.log")
    tensorboard = _Entry("tensorboard")
    trackers = _Entry("trackers.json")
    report = _Entry("report.html")
    episodes = _Entry("episodes.jsonl")
    evaluation = _Entry("evaluation.json")

    @property
    def has_run(self) -> bool:
        """Whether a run was started here."""
        return self.metrics.exists() or self.config.exists()

    @property
    def is_worth_keeping(self) -> bool:
        """Whether there is more than settings and logs, which is all that a run leaves that could not begin."""
        return self.has_run and any(path not in (self.config, self.logs) for path in self.path.iterdir())

    def set_aside(self) -> Path | None:
        """Make room for a new run: rename the directory of an earlier one to ``<trial>.<n>``, and return its new path.

        Returns ``None`` if there was no run, or only the logs of one that could not begin. Raises ``OSError``.
        """
        if not self.is_worth_keeping:
            return None
        free = next(path for path in self._names_aside if not path.exists())
        self.path.rename(free)
        return free

    @property
    def former(self) -> RunDirectory | None:
        """The directory that was set aside last, or ``None``."""
        found = None
        for path in self._names_aside:
            if not path.is_dir():
                return found
            found = RunDirectory(path=path)
        return None

    @property
    def _names_aside(self) -> Iterator[Path]:
        return (self.path.with_name(f"{self.path.name}.{number}") for number in count(1))
