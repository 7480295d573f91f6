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
      report.html        the run on one page, offline; curve.svg, curve.png: its learning curve

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

__all__ = ["RunDirectory"]


@frozen(kw_only=True)
class RunDirectory:
    """Names of the files of one run."""

    path: Path = field(converter=Path)

    @property
    def config(self) -> Path:
        """Configuration with every setting written out."""
        return self.path / "config.yaml"

    @property
    def record(self) -> Path:
        """The state of the run, and why it ended."""
        return self.path / "run.json"

    @property
    def lock(self) -> Path:
        """The file that the process of the run locks. It is next to the directory, which may be set aside."""
        return self.path.with_name(f".{self.path.name}.lock")

    @property
    def admin_key(self) -> Path:
        """The admin key of the service of this run."""
        return self.path / "admin.key"

    @property
    def journal(self) -> Path:
        """The session journal of a service, which survives a restart."""
        return self.path / "journal.sqlite"

    @property
    def groups(self) -> Path:
        """The journal of a dataset run: groups that are finished, and not in a checkpoint."""
        return self.path / "groups.sqlite"

    @property
    def metrics(self) -> Path:
        """One JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def failures(self) -> Path:
        """One JSON object for each episode that failed."""
        return self.path / "failures.jsonl"

    @property
    def sessions(self) -> Path:
        """A sample of conversations."""
        return self.path / "sessions.jsonl"

    @property
    def rollouts(self) -> Path:
        """Training rows as text, by version and task."""
        return self.path / "rollout"

    @property
    def eval_rollouts(self) -> Path:
        """Rows of evaluations as text, by version and task."""
        return self.path / "eval-rollout"

    @property
    def advantages(self) -> Path:
        """The advantages of the rows of each step, one file per step."""
        return self.path / "advantages"

    @property
    def untrained(self) -> Path:
        """One JSON object for each successful episode that no step trained."""
        return self.path / "untrained.jsonl"

    @property
    def rows(self) -> Path:
        """Training rows with all numbers, one parquet file per step."""
        return self.path / "rows"

    @property
    def rows_key(self) -> Path:
        """The key that seals the training rows."""
        return self.path / "rows.key"

    @property
    def exports(self) -> Path:
        """Rows in the formats of other trainers, one directory each."""
        return self.path / "exports"

    @property
    def captures(self) -> Path:
        """Rows that failed the capture check, by the step that they stopped."""
        return self.path / "capture"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints from which a run resumes."""
        return self.path / "checkpoints"

    @property
    def adapter(self) -> Path:
        """The trained adapter, if the run trains one."""
        return self.path / "adapter"

    @property
    def published(self) -> Path:
        """The last versions of the weights, if they are published by disk."""
        return self.path / "published"

    @property
    def weights(self) -> Path:
        """The trained model."""
        return self.path / WEIGHTS_DIRECTORY

    @property
    def model(self) -> str | None:
        """The name ``experiment/trial`` of the trained model; ``None`` while there are no weights."""
        name = f"{self.path.parent.name}/{self.path.name}"
        return name if is_model_identifier(name) and (self.weights / "config.json").is_file() else None

    @property
    def logs(self) -> Path:
        """Log files."""
        return self.path / "logs"

    @property
    def log(self) -> Path:
        """The log of the run, as JSON lines."""
        return self.logs / "run.jsonl"

    @property
    def agent_logs(self) -> Path:
        """Output of agents in separate processes, one file per process."""
        return self.logs / "agents"

    @property
    def service_log(self) -> Path:
        """Output of the service of a host."""
        return self.logs / "service.log"

    @property
    def tensorboard(self) -> Path:
        """Event files of scalars."""
        return self.path / "tensorboard"

    @property
    def trackers(self) -> Path:
        """The names of the run in experiment trackers, for resumed runs."""
        return self.path / "trackers.json"

    @property
    def report(self) -> Path:
        """The run on one page."""
        return self.path / "report.html"

    @property
    def episodes(self) -> Path:
        """One JSON object for each episode of an evaluation that is over."""
        return self.path / "episodes.jsonl"

    @property
    def evaluation(self) -> Path:
        """The identity of an evaluation, and its results once it is over."""
        return self.path / "evaluation.json"

    @property
    def curve_svg(self) -> Path:
        """The learning curve, for the report and the web."""
        return self.path / "curve.svg"

    @property
    def curve_png(self) -> Path:
        """The learning curve, for other uses."""
        return self.path / "curve.png"

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
