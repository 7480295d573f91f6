"""What home and jobs leave for each other in a directory that they share, and what is left of a home that was killed.

::

    slurm/                      its owner's alone
      home                      locked by the home that lives
      jobs/<name>.json          a record of intent: written before a job is submitted, closed at its end
      epoch                     how many homes there have been; one that is not the latest ends itself
      bootstrap/<name>.json     whom the worker shall call, with the secret; gone when the job is
      let-go/<name>.<n>.<rank>  that a process of a job has left its former home (``schedulers.rejoining``)
      stop/<name>               the job is not wanted any longer: it does not begin, and does not ask to run again
      exit/<name>.<job>-<n>     how each of a job's lives ended, written by its script
      scripts/<name>.sh         what was submitted, for people

Everything here blocks, on a file system that may be slow: call it on a thread.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import cattrs
from attrs import asdict, frozen

from areal_actors.errors import SchedulerError
from areal_actors.locks import NO_LOCKS, hold, is_held
from areal_actors.schedulers.bootstrap import Bootstrap
from areal_actors.schedulers.rejoining import read_epoch
from areal_actors.schedulers.slurm.queue import ExitStatus, parse_exit_record

__all__ = ["JobRecord", "SlurmFiles", "find_slurm_files"]

_DIRECTORIES = ("jobs", "bootstrap", "let-go", "stop", "exit", "scripts")


@frozen(kw_only=True)
class JobRecord:
    """That a job was meant to be, which one it became, and whether it is known to be gone."""

    name: str
    worker: str
    life: int
    created_at: float
    """Seconds since 1970."""
    job: int | None = None
    """``None``: it is not known whether the job was taken."""
    ended: str | None = None
    """How it ended; ``None`` while that is not known."""
    num_tasks: int = 1
    traits: dict[str, str] | None = None
    """What it was submitted with (``adoption.traits_of``); ``None``: it ends with its home."""


@frozen(kw_only=True)
class SlurmFiles:
    """The files of the jobs of one run. What cannot be written raises ``SchedulerError``."""

    path: Path

    def create(self) -> None:
        """Make the directories, for their owner alone. Raises ``SchedulerError``."""
        with _on_disk():
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in _DIRECTORIES:
                (self.path / name).mkdir(mode=0o700, exist_ok=True)
            status = self.path.stat()
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise SchedulerError(f"others can enter {self.path}, where secrets are to lie; chmod 700 {self.path}")

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Be the only home of this directory while the block lasts. Raises ``SchedulerError`` if another one lives."""
        with ExitStack() as stack:
            with self._locking():
                stack.enter_context(hold(self._lock, self._complain))
            yield

    @property
    def is_held(self) -> bool:
        """Whether a home lives here."""
        with self._locking():
            return is_held(self._lock)

    @property
    def _lock(self) -> Path:
        return self.path / "home"

    def _complain(self, holder: str) -> SchedulerError:
        return SchedulerError(
            f"{holder} is home to the jobs of {self.path}; end that run first, or use another trial_name."
        )

    @contextmanager
    def _locking(self) -> Iterator[None]:
        with _on_disk():
            try:
                yield
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                raise SchedulerError(
                    f"{self._lock} cannot be locked: {error.strerror}. Two homes must not share a directory: mount its "
                    "file system with locks that hold on all nodes (Lustre: -o flock), or set fileroot to one that has "
                    "them."
                ) from None

    def begin_epoch(self) -> int:
        """Be the latest home, for whoever holds the directory. Earlier ones, if they live, have to end themselves.

        Raises:
            SchedulerError: it cannot be known which one is the latest.
        """
        epoch = read_epoch(self.path) + 1
        if epoch == 1 and (self.path / "epoch").exists():
            raise SchedulerError(
                f"{self.path / 'epoch'} does not say how many homes there were. End their jobs (areal-actors slurm "
                f"cancel {self.path.parent}), and remove the file."
            )
        _write_durably(self.path / "epoch", f"{epoch}\n")
        return epoch

    # ----------------------------------------------------------------------------------------------- records

    def write_record(self, record: JobRecord) -> None:
        """Keep a record so that it outlives this machine."""
        _write_durably(self.path / "jobs" / f"{record.name}.json", json.dumps(asdict(record)))

    def forget_record(self, name: str) -> None:
        """There is no such job, and never was."""
        with _on_disk():
            (self.path / "jobs" / f"{name}.json").unlink(missing_ok=True)

    def read_records(self) -> tuple[JobRecord, ...]:
        """All records, oldest first; what is no record is left out."""
        found = [_read_record(path) for path in (self.path / "jobs").glob("*.json")]
        return tuple(sorted((one for one in found if one is not None), key=lambda one: (one.created_at, one.name)))

    # ----------------------------------------------------------------------------------------------- one job

    def write_bootstrap(self, name: str, bootstrap: Bootstrap) -> None:
        """Tell the worker where home is."""
        _write_durably(self.path / "bootstrap" / f"{name}.json", bootstrap.to_line())

    def write_script(self, name: str, script: str) -> None:
        """Keep what is submitted."""
        with _on_disk():
            (self.path / "scripts" / f"{name}.sh").write_text(script, encoding="utf-8")

    def mark_stopped(self, name: str) -> None:
        """Have the job not begin, and not ask to run again."""
        with _on_disk():
            (self.path / "stop" / name).touch()

    def is_stopped(self, name: str) -> bool:
        """Whether the job is not to begin."""
        return (self.path / "stop" / name).exists()

    def remove_bootstrap(self, name: str) -> None:
        """The secret is not needed any more."""
        with _on_disk():
            (self.path / "bootstrap" / f"{name}.json").unlink(missing_ok=True)
            for path in (self.path / "let-go").glob(f"{name}.*"):
                path.unlink(missing_ok=True)

    def read_exit(self, name: str, job: int) -> ExitStatus | None:
        """How the latest life of a job ended, if its script could say so.

        A controller that has lost its state may give the number to another job.
        """
        found = []
        for path in (self.path / "exit").glob(f"{name}.{job}-*"):
            restarts = path.name.rpartition("-")[2]
            if restarts.isdecimal():
                with suppress(OSError):
                    found.append(parse_exit_record(path.read_text(errors="replace"), restarts=int(restarts)))
        return max((one for one in found if one is not None), key=lambda one: one.restarts, default=None)


def find_slurm_files(root: Path) -> tuple[SlurmFiles, ...]:
    """Those of a run directory, or of every run below a file root."""
    directories = [root, *sorted(root.glob("*")), *sorted(root.glob("*/*"))]
    return tuple(SlurmFiles(path=one / "slurm") for one in directories if (one / "slurm" / "jobs").is_dir())


def _read_record(path: Path) -> JobRecord | None:
    try:
        return cattrs.structure(json.loads(path.read_text(encoding="utf-8")), JobRecord)
    except (OSError, ValueError, TypeError, cattrs.BaseValidationError):
        return None


@contextmanager
def _on_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SchedulerError(f"the files of jobs cannot be written: {error}") from None


def _write_durably(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with _on_disk():
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
