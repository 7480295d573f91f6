"""The directory of a run, and the names of its files, for all code that reads or writes them.

::

    runs/<experiment>/<trial>/
      config.yaml        every setting, written out
      run.json           whether it is running, finished, interrupted or failed, and why it ended
      admin.key          of a service: its admin key, readable by its owner only
      metrics.jsonl      one JSON object per step (docs/metrics.md)
      failures.jsonl     one JSON object for each episode that failed
      sessions.jsonl     a sample of conversations, for the report
      rollout/           <version>/<task>.jsonl: every training row as text
      eval-rollout/      the same of evaluations
      capture/           step-<n>.jsonl: rows that failed the capture check and stopped the run before step n
      exports/           <format>/: rows for other trainers
      checkpoints/       from which a run resumes
      groups.sqlite      of a run over a dataset: finished groups that no checkpoint contains
      weights/           the trained model, as transformers loads it
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
    """Names of the files of one run."""

    path: Path = field(converter=Path)

    config = _Entry("config.yaml")
    """Configuration with every setting written out."""
    record = _Entry("run.json")
    """The state of the run, and why it ended."""

    @property
    def lock(self) -> Path:
        """The file that the process of the run locks. It is next to the directory, which may be set aside."""
        return self.path.with_name(f".{self.path.name}.lock")

    admin_key = _Entry("admin.key")
    """The admin key of the service of this run."""
    journal = _Entry("journal.sqlite")
    """The session journal of a service, which survives a restart."""
    groups = _Entry("groups.sqlite")
    """The journal of a dataset run: groups that are finished, and not in a checkpoint."""
    metrics = _Entry("metrics.jsonl")
    """One JSON object per step."""
    failures = _Entry("failures.jsonl")
    """One JSON object for each episode that failed."""
    sessions = _Entry("sessions.jsonl")
    """A sample of conversations."""
    rollouts = _Entry("rollout")
    """Training rows as text, by version and task."""
    eval_rollouts = _Entry("eval-rollout")
    """Rows of evaluations as text, by version and task."""
    untrained = _Entry("untrained.jsonl")
    """One JSON object for each successful episode that no step trained."""
    rows = _Entry("rows")
    """Training rows with all numbers, one parquet file per step."""
    rows_key = _Entry("rows.key")
    """The key that seals the training rows."""
    exports = _Entry("exports")
    """Rows in the formats of other trainers, one directory each."""
    captures = _Entry("capture")
    """Rows that failed the capture check, by the step that they stopped."""
    checkpoints = _Entry("checkpoints")
    """Checkpoints from which a run resumes."""
    adapter = _Entry("adapter")
    """The trained adapter, if the run trains one."""
    published = _Entry("published")
    """The last versions of the weights, if they are published by disk."""
    weights = _Entry(WEIGHTS_DIRECTORY)
    """The trained model."""

    @property
    def model(self) -> str | None:
        """The name ``experiment/trial`` of the trained model; ``None`` while there are no weights."""
        name = f"{self.path.parent.name}/{self.path.name}"
        return name if is_model_identifier(name) and (self.weights / "config.json").is_file() else None

    logs = _Entry("logs")
    """Log files."""
    log = _Entry("logs/run.jsonl")
    """The log of the run, as JSON lines."""
    agent_logs = _Entry("logs/agents")
    """Output of agents in separate processes, one file per process."""
    service_log = _Entry("logs/service.log")
    """Output of the service of a host."""
    tensorboard = _Entry("tensorboard")
    """Event files of scalars."""
    trackers = _Entry("trackers.json")
    """The names of the run in experiment trackers, for resumed runs."""
    report = _Entry("report.html")
    """The run on one page."""
    episodes = _Entry("episodes.jsonl")
    """One JSON object for each episode of an evaluation that is over."""
    evaluation = _Entry("evaluation.json")
    """The identity of an evaluation, and its results once it is over."""

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
