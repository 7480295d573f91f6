"""The directory that the controller and its jobs share, which also records what a killed controller has left behind.

::

    slurm/                      accessible to its owner only
      controller.lock           lock file of the running controller
      jobs/<name>.json          a record of intent: written before a job is submitted, closed at its end
      bootstrap/<name>.json     the controller's address for the worker, with the secret; removed with the job
      stop/<name>               the job is no longer wanted: it does not start, and does not ask to run again
      exit/<name>.<job>-<n>     how each run of a job ended, written by its script
      scripts/<name>.sh         the script that was submitted, for people to read

The functions here block on a file system that may be slow: call them on a thread.
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
from areal_actors.lib.atomic_write import atomic_write
from areal_actors.lib.locks import NO_LOCKS, LockHeld, hold, is_held
from areal_actors.schedulers.bootstrap import Bootstrap
from areal_actors.schedulers.slurm.queue import ExitStatus, parse_exit_record

_DIRECTORIES = ("jobs", "bootstrap", "stop", "exit", "scripts")


@frozen(kw_only=True)
class JobRecord:
    """A record that a job was requested, with its job number, and how it ended."""

    name: str
    worker: str
    life: int
    created_at: float
    """Seconds since 1970."""
    job: int | None = None
    """``None``: it is unknown whether the job was accepted."""
    ended: str | None = None
    """How the job ended; ``None`` while that is unknown."""


@frozen(kw_only=True)
class SlurmFiles:
    """The files for the jobs of one run. Methods that cannot write raise ``SchedulerError``."""

    path: Path

    def create(self) -> None:
        """Create the directories, accessible to their owner only. Raises ``SchedulerError``."""
        with _on_disk():
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in _DIRECTORIES:
                (self.path / name).mkdir(mode=0o700, exist_ok=True)
            status = self.path.stat()
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise SchedulerError(f"others can enter {self.path}, where secrets are to lie; chmod 700 {self.path}")

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Lock this directory for the block, as its only controller.

        Raises:
            SchedulerError: another controller holds it, or the file system does not support locks.
        """
        with ExitStack() as stack:
            with self._locking():
                try:
                    stack.enter_context(hold(self._lock))
                except LockHeld as held:
                    raise SchedulerError(
                        f"{held.holder} is the controller of the jobs of {self.path}; end that run first, or use "
                        "another trial_name."
                    ) from None
            yield

    @property
    def is_held(self) -> bool:
        """Return whether a controller holds this directory."""
        with self._locking():
            return is_held(self._lock)

    @property
    def _lock(self) -> Path:
        return self.path / "controller.lock"

    @contextmanager
    def _locking(self) -> Iterator[None]:
        with _on_disk():
            try:
                yield
            except OSError as error:
                # A file system without locks must not be mistaken for one that another controller has locked.
                if error.errno not in NO_LOCKS:
                    raise
                raise SchedulerError(
                    f"{self._lock} cannot be locked: {error.strerror}. Two controllers must not share a directory: "
                    "mount its file system with locks that hold on all nodes (Lustre: -o flock), or set fileroot to "
                    "one that has them."
                ) from None

    # ----------------------------------------------------------------------------------------------- records

    def write_record(self, record: JobRecord) -> None:
        """Write a record durably, so that it survives a crash of this machine."""
        _write_durably(self.path / "jobs" / f"{record.name}.json", json.dumps(asdict(record)))

    def forget_record(self, name: str) -> None:
        """Remove the record of a job that was never accepted."""
        with _on_disk():
            (self.path / "jobs" / f"{name}.json").unlink(missing_ok=True)

    def read_records(self) -> tuple[JobRecord, ...]:
        """Return all records, oldest first. Files that cannot be parsed are skipped."""
        found = []
        for path in (self.path / "jobs").glob("*.json"):
            with suppress(OSError, ValueError, TypeError, cattrs.BaseValidationError):
                found.append(cattrs.structure(json.loads(path.read_text(encoding="utf-8")), JobRecord))
        return tuple(sorted(found, key=lambda one: (one.created_at, one.name)))

    # ----------------------------------------------------------------------------------------------- one job

    def write_bootstrap(self, name: str, bootstrap: Bootstrap) -> None:
        """Write the bootstrap message for the worker of a job."""
        _write_durably(self.path / "bootstrap" / f"{name}.json", bootstrap.to_line())

    def write_script(self, name: str, script: str) -> None:
        """Save a copy of the submitted script."""
        with _on_disk():
            (self.path / "scripts" / f"{name}.sh").write_text(script, encoding="utf-8")

    def mark_stopped(self, name: str) -> None:
        """Mark a job as no longer wanted: it does not start, and does not ask to run again."""
        with _on_disk():
            (self.path / "stop" / name).touch()

    def remove_bootstrap(self, name: str) -> None:
        """Remove the bootstrap message of a job that has ended, with its secret."""
        with _on_disk():
            (self.path / "bootstrap" / f"{name}.json").unlink(missing_ok=True)

    def read_exit(self, name: str, job: int) -> ExitStatus | None:
        """Return how the latest run of a job ended, or ``None`` if its script left no record.

        The name and the number identify a job together, because a Slurm controller that has lost its state may assign
        the number again.
        """
        found = []
        for path in (self.path / "exit").glob(f"{name}.{job}-*"):
            restarts = path.name.rpartition("-")[2]
            if restarts.isdecimal():
                with suppress(OSError):
                    found.append(parse_exit_record(path.read_text(errors="replace"), restarts=int(restarts)))
        return max((one for one in found if one is not None), key=lambda one: one.restarts, default=None)


def find_slurm_files(root: Path) -> tuple[SlurmFiles, ...]:
    """Return the files of a run directory, or of every run below a file root."""
    directories = [root, *sorted(root.glob("*")), *sorted(root.glob("*/*"))]
    return tuple(SlurmFiles(path=one / "slurm") for one in directories if (one / "slurm" / "jobs").is_dir())


@contextmanager
def _on_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SchedulerError(f"the files of jobs cannot be written: {error}") from None


def _write_durably(path: Path, text: str) -> None:
    with _on_disk():
        atomic_write(path, text, mode=0o600, is_durable=True)
