"""The directory of a run: created and locked at its start, put back if it fails to begin, checked when it resumes."""

from __future__ import annotations

import errno
import hashlib
import json
import sqlite3
from collections.abc import Iterator
from contextlib import (
    ExitStack,
    closing,
    contextmanager,
    suppress,
)
from itertools import count
from pathlib import Path
from shutil import rmtree
from typing import Any

import yaml

from areal_actors import __version__
from areal_actors.config import RunConfig, save_config
from areal_actors.dashboard import RunDirectory, require_trackers
from areal_actors.dashboard.run_record import RunRecord, read_record
from areal_actors.dashboard.trackers import flatten_settings
from areal_actors.errors import (
    CheckpointError,
    ConfigError,
    CustomFunctionError,
    DatasetError,
    ModelError,
    RunDirectoryError,
    SandboxError,
    WorkflowError,
)
from areal_actors.interchange import INSTALL_PARQUET, has_parquet
from areal_actors.journal.sqlite import filesystem_of, is_network
from areal_actors.lib.atomic_write import atomic_write
from areal_actors.lib.locks import NO_LOCKS, HeldLock, LockHeld, hold
from areal_actors.lib.scratch import remove_empty
from areal_actors.lib.telemetry import get_logger, redact_settings

_log = get_logger(__name__)

_BAD_INPUT = (ConfigError, ModelError, DatasetError, WorkflowError, SandboxError, CustomFunctionError)
"""Errors of the user's input, whose messages refer to no file of the run."""


_MAX_TRIES = 16
"""How often a start locks its directory while others, which fail, remove the directories above."""


def directory_of(config: RunConfig, run_dir: Path | None) -> RunDirectory:
    """Return the run directory as an absolute path, so that reports and exports name it wherever they are read."""
    return config.run_directory if run_dir is None else RunDirectory(path=run_dir.absolute())


def find_run(path: Path) -> RunDirectory:
    """Return the directory of an existing run. Raises ``RunDirectoryError`` if ``path`` holds none."""
    directory = RunDirectory(path=path.absolute())
    if not directory.config.exists():
        raise RunDirectoryError(f"There is no run in {path}; name a directory such as runs/<experiment>/<trial>.")
    return directory


@contextmanager
def prepared_directory(config: RunConfig, directory: RunDirectory, *, resume: bool) -> Iterator[None]:
    """Create the run directory and lock it while the block runs; two runs in it would prune each other's checkpoints.

    An earlier run of the same name is moved aside unless ``resume`` is set. If the block finds bad input or is
    interrupted before the run has begun, what was made for it is removed and the earlier run moved back; a run that is
    not resumed keeps its settings. Settings of the steps before a resumption are kept as ``config.<n>.yaml`` if they
    differ. Raises ``ConfigError`` if the directory is in use, cannot be written, or has no run to resume, and if a
    package is missing; ``RunDirectoryError`` if the disk is full.
    """
    require_packages(config)
    path, former, is_created, lock = directory.path, None, False, None
    foreign: frozenset[Path] = frozenset()
    parents: list[Path] = []
    with ExitStack() as stack:
        stack.callback(remove_empty, parents)
        try:
            try:
                lock = _lock(directory, stack, parents)
                if resume:
                    stack.enter_context(_resumed_settings(config, directory))
                else:
                    # Only after the lock is held: the earlier run may still be writing to this directory.
                    former, is_created = directory.set_aside(), True
                    if former is not None:
                        _log.info("earlier_run_kept", path=str(former))
                    path.mkdir(parents=True, exist_ok=True)
                    foreign = frozenset(path.iterdir()) - {directory.config, directory.logs}
                    save_config(config, directory.config)
            except OSError as error:
                # A disk that is full may have room later, so that a restart helps; other reasons stay.
                kind = RunDirectoryError if error.errno in (errno.ENOSPC, errno.EDQUOT) else ConfigError
                raise kind(
                    f"{path} cannot be written: {error.strerror}; set fileroot or --run-dir to a directory that can"
                ) from error
            yield
        except BaseException as error:
            # Bad input that shows when the model is loaded or the agent is started, and interrupts. Errors of engines
            # and workers are not among them: their messages name logs in this directory.
            is_bad_input = isinstance(error, (*_BAD_INPUT, RunDirectoryError)) or not isinstance(error, Exception)
            if is_bad_input and not _has_work(directory):
                if is_created:
                    _remove(path, except_for=foreign)
                    if former is not None:
                        former.rename(path)
                if lock is not None:
                    lock.is_removed = not is_network(filesystem_of(path.parent.resolve()))
            raise


def require_packages(config: RunConfig) -> None:
    """Raise ``ConfigError`` if an optional package that the configuration needs is not installed."""
    require_trackers(list(config.logging.tracker_options))
    if config.logging.row_dumps.every_steps and not has_parquet():
        raise ConfigError(f"logging.row_dumps writes parquet, which needs pyarrow: {INSTALL_PARQUET}")


def _remove(path: Path, *, except_for: frozenset[Path]) -> None:
    """Remove a run directory, but for what was in it before: its user may have put files there."""
    if not except_for:
        rmtree(path, ignore_errors=True)
        return
    for entry in set(path.iterdir()) - except_for:
        if entry.is_dir() and not entry.is_symlink():
            rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _has_work(directory: RunDirectory) -> bool:
    """Return whether a run has sampled or trained anything. It may have a record, a report and empty files before."""
    files = (directory.metrics, directory.failures, directory.sessions)
    directories = (directory.checkpoints, directory.weights, directory.adapter, directory.captures)
    dumps = (directory.rollouts, directory.eval_rollouts)
    try:
        if any(path.is_file() and path.stat().st_size > 0 for path in files):
            return True
        if any(path.is_dir() and any(path.iterdir()) for path in (*directories, *dumps)):
            return True
        # Sessions of external agents, and groups that a resumed run would not sample again.
        for path, table in ((directory.journal, "sessions"), (directory.groups, "groups")):
            if path.is_file():
                with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as journal:
                    if journal.execute(f"SELECT EXISTS (SELECT 1 FROM {table})").fetchone() == (1,):  # noqa: S608 - one of the two names above
                        return True
    except (OSError, sqlite3.Error):
        return True
    return False


def _lock(directory: RunDirectory, stack: ExitStack, made: list[Path]) -> HeldLock | None:
    """Lock the directory until ``stack`` closes. A file system without locks costs a warning, not the run.

    Directories that are made for it are appended to ``made``.
    """
    try:
        for num_tries in count(1):
            try:
                for parent in reversed(directory.path.parents):
                    with suppress(FileExistsError):
                        if not parent.is_dir():
                            parent.mkdir()
                            made.append(parent)
                return stack.enter_context(hold(directory.lock))
            except FileNotFoundError:
                # Another start, which failed, has just removed the parent that it had made.
                if num_tries == _MAX_TRIES:
                    raise
    except LockHeld as held:
        raise ConfigError(
            f"{directory.path} is in use by {held.holder}, which runs there; end that run, or give this one another "
            "trial_name or --run-dir"
        ) from None
    except OSError as error:
        # A file system that cannot lock is not a directory in use.
        if error.errno not in NO_LOCKS:
            raise
        _log.warning("run_directory_not_locked", path=str(directory.path), reason=error.strerror)
    return None


@contextmanager
def _resumed_settings(config: RunConfig, directory: RunDirectory) -> Iterator[None]:
    """Save the settings of a resumed run, and those of the steps before as ``config.<n>.yaml`` if they differ.

    If the run has not begun when the block is left, its former settings are put back. Raises ``ConfigError`` if there
    is no run.
    """
    if not directory.has_run:
        raise ConfigError(f"There is no run in {directory.path} to resume; leave --resume out, or check --run-dir.")
    match read_record(directory):
        case RunRecord(library_version=earlier_version) if earlier_version != __version__:
            _log.warning("resumed_with_another_version", before=earlier_version, now=__version__)
    before = directory.config.read_text(encoding="utf-8") if directory.config.is_file() else None
    begun_at = _written_at(directory.metrics)
    directory.path.mkdir(parents=True, exist_ok=True)
    numbered = (directory.path / f"config.{number}.yaml" for number in count(1))
    earlier = next(path for path in numbered if not path.exists())
    if before is not None:
        # Before the new settings are written: a crash between the two writes must not lose the former ones.
        atomic_write(earlier, before, mode=0o600)
    save_config(config, directory.config)
    now = directory.config.read_text(encoding="utf-8")
    if before is None or before == now:
        earlier.unlink(missing_ok=True)
        yield
        return
    for change in find_changes(before, now):
        _log.warning("resumed_with_another_setting", setting=change)
    try:
        yield
    finally:
        # The first step of the resumed run writes metrics; without one, the new settings have had no effect.
        if _written_at(directory.metrics) == begun_at:
            earlier.replace(directory.config)


def _written_at(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def find_changes(before: str, now: str) -> tuple[str, ...]:
    """Return the settings in which two configuration files differ, each as ``name: before -> now``, without secrets."""
    try:
        old, new = parse_settings(before), parse_settings(now)
    except (yaml.YAMLError, AttributeError):
        # A file that was damaged, or is not a mapping.
        return ("the settings of the steps before cannot be read",)
    return tuple(
        f"{name}: {old.get(name, 'not set')} -> {new.get(name, 'not set')}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    )


def parse_settings(text: str) -> dict[str, Any]:
    """Return the settings of a configuration file by their dotted names, without secrets.

    Raises ``YAMLError``, or ``AttributeError`` for a file that is not a mapping.
    """
    return flatten_settings(yaml.safe_load(redact_settings(text)) or {})


_SAMPLING = (
    *("seed", "batch_size", "model", "tokenizer", "dataset", "sources", "rollout", "gconfig", "renderer"),
    *("phases", "distillation"),
)
"""The settings that decide how groups are sampled, and how many of them a step trains."""


def sampling_digest(path: Path) -> str:
    """Return a digest of the settings in ``path`` that groups are sampled with. Blocks."""
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    chosen = {name: settings.get(name) for name in _SAMPLING}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True, default=str).encode()).hexdigest()


def no_checkpoint(directory: RunDirectory) -> CheckpointError:
    """Return the error for a run without a checkpoint. It names the run that was moved aside, if that has one."""
    former = directory.former
    has_one = former is not None and any(former.checkpoints.glob("step-*"))
    advice = f"--run-dir {former.path} goes on with the run before" if former and has_one else "leave --resume out"
    return CheckpointError(f"There is no complete checkpoint in {directory.checkpoints} to go on from; {advice}.")
