"""Services as child processes: ``areal-actors serve`` in a fresh interpreter per trial, each in its own process group.

A service reads all settings from one file and prints its address as one line of JSON once it listens. It generates its
admin key, which is read from its directory, so that no secret is on a command line. The process group is ended when
this process exits for any reason (``lib.child_process``).
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, closing, suppress
from hashlib import sha256
from pathlib import Path
from subprocess import DEVNULL
from urllib.parse import quote

import anyio
from anyio import to_thread
from attrs import field, frozen

from areal_actors.dashboard import RunDirectory
from areal_actors.errors import SessionEnded, Unavailable
from areal_actors.lib.child_process import LAST_WORDS_SECONDS, BoundedLog, Child
from areal_actors.lib.task_groups import open_tasks
from areal_actors.lib.telemetry import get_logger
from areal_actors_service.messages import TrialId

_log = get_logger(__name__)

_LINE_BYTES = 64 * 1024
_QUERY = """
SELECT 1 FROM sessions s WHERE (s.session = ?1 OR s.key_digest = ?2 OR s.completion_digest = ?2)
    AND NOT EXISTS (SELECT 1 FROM forgotten f WHERE f.session = s.session) LIMIT 1
"""


@frozen(kw_only=True)
class ServiceProcess:
    """A running service that listens."""

    url: str
    admin_key: str = field(repr=False)
    child: Child
    directory: RunDirectory

    @property
    def pid(self) -> int:
        """The process id."""
        return self.child.process.pid

    async def wait(self) -> str | None:
        """Wait until the process has exited, and return the reason, or ``None`` if its training is finished."""
        await self.child.wait_for_leader()
        await _learn_status(self.child)
        return None if _is_finished(self.child, self.directory) else self.child.describe_end()


@frozen(kw_only=True)
class ServiceProcesses:
    """Starts services. ``settings`` is the file that all services share; their directories are in ``fileroot``."""

    settings: Path
    fileroot: Path
    max_start_seconds: float = 600.0
    stop_timeout_seconds: float = 120.0
    is_over: Callable[[RunDirectory], bool] = field(default=lambda _: False)
    """Whether the run in a directory has ended for good, so that no process is started for it. Called on a thread."""
    environment: Mapping[str, str] = field(factory=lambda: dict(os.environ), repr=False)

    @asynccontextmanager
    async def open(self, trial: TrialId) -> AsyncIterator[ServiceProcess]:
        """Start the service of ``trial``; see ``ServiceProvider.open``.

        Its output is in ``logs/service.log`` of its directory.
        """
        directory = self._directory(trial)
        if await to_thread.run_sync(self.is_over, directory):
            raise SessionEnded(f"The training of {trial.name} is finished.")
        child = await self._start(trial, directory)
        async with open_tasks() as tasks:
            # Shielded: a process whose output is not read while it stops would block on a full pipe.
            errors, output = anyio.CancelScope(shield=True), anyio.CancelScope(shield=True)
            tasks.start_soon(_run_within, errors, child.listen)
            try:
                url = await self._address(trial, child, directory)
                # The rest of the output, after the address.
                tasks.start_soon(_run_within, output, child.drain)
                key = await to_thread.run_sync(directory.admin_key.read_text)
                yield ServiceProcess(url=url, admin_key=key.strip(), child=child, directory=directory)
            finally:
                await child.kill(grace_seconds=self.stop_timeout_seconds)
                errors.cancel()
                output.cancel()

    async def list_trials(self) -> tuple[TrialId, ...]:
        """Return the trials whose directories contain the admin key of a service."""
        return await to_thread.run_sync(self._find_trials)

    async def has_session(self, trial: TrialId, name: str) -> bool:
        """Return whether the trial's journal contains the session. The journal may be in use by a service."""
        return await to_thread.run_sync(_find_session, self._directory(trial).journal, name)

    def _directory(self, trial: TrialId) -> RunDirectory:
        return RunDirectory(path=self.fileroot / trial.experiment / trial.trial)

    def _find_trials(self) -> tuple[TrialId, ...]:
        paths = (RunDirectory(path=path) for path in sorted(self.fileroot.glob("*/*")))
        # The file root may also contain runs that are not services, and directories whose names are not valid trials.
        found = [path.path for path in paths if path.admin_key.is_file() and path.has_run]
        trials: list[TrialId] = []
        for path in found:
            with suppress(ValueError):
                trials.append(TrialId(path.parent.name, path.name))
        return tuple(trials)

    async def _start(self, trial: TrialId, directory: RunDirectory) -> Child:
        # A run over a dataset has no journal, and a user's key must not continue its training.
        if directory.metrics.exists() and not directory.journal.exists():
            raise Unavailable(
                f"{directory.path} holds a run that is not a service of a host. Move it away, or name another trial "
                f"than {trial.name} for the user's key."
            )
        # Quoted as JSON, because YAML reads ``2026`` and ``1e5`` as numbers.
        own = {"experiment_name": trial.experiment, "trial_name": trial.trial, "sessions.service_name": trial.home}
        settings = [str(self.settings), *(f"{path}={json.dumps(value)}" for path, value in own.items())]
        log = await to_thread.run_sync(BoundedLog, directory.service_log)
        # A service continues from its journal, whether it was stopped or has died.
        resume = ["--resume"] if directory.has_run else []
        command = [sys.executable, "-m", "areal_actors", "serve", *settings]
        try:
            return await Child.start(
                lambda _: [*command, *resume, "--json"], log=log, environment=self.environment, stdin=DEVNULL
            )
        except OSError as error:
            raise Unavailable(f"{trial.name} could not be started: {error}") from error

    async def _address(self, trial: TrialId, child: Child, directory: RunDirectory) -> str:
        """Return the URL at which the service listens, once it reports it. Raises the same errors as ``open``."""
        assert child.process.stdout is not None
        line = b""
        # Loading the model comes before the address, so this may take minutes.
        with anyio.move_on_after(self.max_start_seconds) as scope:
            # Output that ends before its first line is complete is read up to its end.
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                while b"\n" not in line and len(line) < _LINE_BYTES:
                    line += await child.process.stdout.receive()
        if scope.cancelled_caught:
            raise Unavailable(f"{trial.name} did not listen within {self.max_start_seconds:g} s.")
        try:
            return str(json.loads(line.partition(b"\n")[0])["url"])
        except (ValueError, KeyError, TypeError):
            # Not an address: the process has printed something else, or has exited without any output.
            pass
        await _learn_status(child)
        if _is_finished(child, directory):
            raise SessionEnded(f"The training of {trial.name} is finished.")
        raise Unavailable(f"{trial.name} did not start. {child.describe_end()}")


async def _learn_status(child: Child) -> None:
    """Wait for the exit status of an exited process, for a bounded time."""
    # A daemon that the process left behind may keep its pipes open, and ``wait`` would not return.
    with anyio.move_on_after(LAST_WORDS_SECONDS):
        await child.process.wait()


def _is_finished(child: Child, directory: RunDirectory) -> bool:
    """Return whether training is finished. A process that was told to stop also exits with 0, but leaves no weights."""
    return child.process.returncode == 0 and directory.model is not None


async def _run_within(scope: anyio.CancelScope, read: Callable[[], Awaitable[None]]) -> None:
    with scope:
        await read()


def _find_session(journal: Path, name: str) -> bool:
    if not journal.is_file():
        return False
    digest = sha256(name.encode("utf-8", "surrogatepass")).digest()
    try:
        # Opened read-only, since a running service may be writing to the journal.
        with closing(sqlite3.connect(f"file:{quote(str(journal))}?mode=ro", uri=True, timeout=5.0)) as connection:
            return connection.execute(_QUERY, (name, digest)).fetchone() is not None
    except sqlite3.Error as error:
        _log.warning("journal_unreadable", path=str(journal), error=str(error))
        return False
