"""Change the number of workers of a role while its run goes on: ``areal-actors scale``.

::

    scale ── scale/<id>.json ──▶ controller ── the same file, with the answer ──▶ scale
                                     └── replicas.json: wanted and serving ──▶ runs, page, the next controller

The request is a file in the run's directory: on a cluster, the controller may be on another host than its user, and the
directory is what both of them reach. Its permissions decide who may scale.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from shutil import rmtree
from typing import Any
from uuid import uuid4

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup
from attrs import asdict, define, evolve, field, frozen

from areal_actors.config import RunConfig, load_config
from areal_actors.dashboard import RunDirectory
from areal_actors.dashboard.records import load_object
from areal_actors.dashboard.run_record import (
    ReplicaCount,
    RunStatus,
    read_record,
    read_replicas,
    write_replicas,
)
from areal_actors.domain import Role
from areal_actors.errors import ArealError, ConfigError, RunDirectoryError, SchedulerError
from areal_actors.lib.atomic_write import atomic_write
from areal_actors.lib.telemetry import get_logger
from areal_actors.run.plan import PlacedRole, RunPlan

__all__ = ["Scaled", "Scaling", "check_scalable", "parse_sizes", "restore_replicas", "scale_run", "wait_scaled"]

_log = get_logger(__name__)

_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 20.0
_MAX_REPLICAS = 256
"""More is a slip of the keyboard: with ``oversubscribe``, no resource would refuse it."""
_SCALABLE = (Role.GENERATION, Role.PROXY)


@frozen(kw_only=True)
class Scaled:
    """The number of workers of a role before and after a change, and of those that served at that moment."""

    before: int
    wanted: int
    serving: int


# ------------------------------------------------------------------------------------------------ the command


def parse_sizes(words: Sequence[str]) -> dict[str, int]:
    """Parse ``generation=4``. Raises ``ConfigError``."""
    sizes = {}
    for word in words:
        name, equals, number = word.partition("=")
        if not equals or not number.strip().lstrip("+-").isdecimal():
            raise ConfigError(f"{word!r} is not a ROLE=NUMBER, such as generation=4")
        sizes[name.strip()] = int(number)
    return sizes


def check_scalable(config: RunConfig, sizes: Mapping[str, int]) -> None:
    """Check that a run with these settings can have ``sizes`` workers of each role. Raises ``ConfigError``."""
    placed = config.scheduler.roles.placed
    for name, number in sizes.items():
        if name not in [*Role]:
            close = get_close_matches(name, [*Role], n=1)
            guess = f"; did you mean {close[0]}?" if close else "."
            raise ConfigError(
                f"{name!r} is not a role of a run{guess} Roles that can be scaled: {', '.join(_SCALABLE)}."
            )
        role = Role(name)
        if role not in _SCALABLE:
            raise ConfigError(f"{role} cannot be scaled: a run has exactly one. {' and '.join(_SCALABLE)} can.")
        if role not in placed:
            raise ConfigError(
                f"{role} runs in the controller process of this run, where its number is fixed. Set "
                f"scheduler.roles.{role}, and start the run again with --resume."
            )
        if not 1 <= number <= _MAX_REPLICAS:
            raise ConfigError(f"{role}={number}: a run can have 1 to {_MAX_REPLICAS} of them; pause it with Ctrl-C.")


def scale_run(path: Path, sizes: Mapping[str, int], *, answer_seconds: float = _ANSWER_SECONDS) -> dict[str, Scaled]:
    """Have the controller of the run in ``path`` change the number of workers by role, and return what it changed.

    Blocks until the controller has answered; new workers serve later (``wait_scaled``).

    Raises:
        ConfigError: the run cannot have these numbers.
        RunDirectoryError: there is no run, it does not run, or its controller does not answer.
        SchedulerError: there are too few resources.
    """
    directory = RunDirectory(path=path.absolute())
    _check_running(directory)
    check_scalable(load_config(directory.config), sizes)
    request = directory.scale_requests / f"{uuid4().hex}.json"
    try:
        directory.scale_requests.mkdir(exist_ok=True)
        atomic_write(request, json.dumps({"sizes": dict(sizes)}))
    except OSError as error:
        raise RunDirectoryError(
            f"{directory.scale_requests} cannot be written: {error.strerror}. A run is scaled by the user who may "
            "write its directory."
        ) from error
    try:
        deadline = time.monotonic() + answer_seconds
        while time.monotonic() < deadline:
            answer = load_object(request)
            if "refused" in answer:
                raise SchedulerError(str(answer["refused"]))
            if "scaled" in answer:
                return {role: Scaled(**scaled) for role, scaled in answer["scaled"].items()}
            _check_running(directory)
            time.sleep(_POLL_SECONDS / 5)
    finally:
        request.unlink(missing_ok=True)
    raise RunDirectoryError(
        f"The controller of {path} has not answered within {answer_seconds:g} s. It may still be starting, or be of an "
        f"earlier version; see {directory.log}."
    )


def wait_scaled(path: Path, sizes: Mapping[str, int], *, seconds: float) -> None:
    """Block until as many workers of each role serve as ``sizes`` says.

    Raises ``RunDirectoryError`` if the run ends, and ``SchedulerError`` if a worker is given up or time is up.
    """
    directory = RunDirectory(path=path.absolute())
    deadline = time.monotonic() + seconds
    while True:
        counts = read_replicas(directory)
        missing = {role: number for role, number in sizes.items() if counts[role].serving != number}
        if not missing:
            return
        for role in missing:
            if counts[role].wanted != sizes[role]:
                raise SchedulerError(counts[role].error or f"{role} was scaled to {counts[role].wanted} meanwhile.")
        if time.monotonic() > deadline:
            raise SchedulerError(f"Not all serve after {seconds:g} s: {', '.join(missing)}. See {directory.logs}.")
        _check_running(directory)
        time.sleep(_POLL_SECONDS / 5)


def _check_running(directory: RunDirectory) -> None:
    """Raise ``RunDirectoryError`` unless a controller runs in the directory."""
    if not directory.config.is_file():
        raise RunDirectoryError(f"{directory.path} is not the directory of a run; runs are listed by areal-actors runs")
    record = read_record(directory)
    if record is None:
        raise RunDirectoryError(f"The run in {directory.path} has not begun; try again once it serves.")
    if record.status not in (RunStatus.RUNNING, RunStatus.SERVING):
        raise RunDirectoryError(
            f"The run in {directory.path} is {record.status}, so there is nothing to scale. To go on with another "
            "number, resume it with scheduler.roles.ROLE.replicas."
        )


# ---------------------------------------------------------------------------------------------- the controller


def restore_replicas(plan: RunPlan) -> RunPlan:
    """Return the plan of a resumed run with the numbers that it was scaled to. Blocks.

    A number that is changed in the configuration wins.
    """
    placed = plan.config.scheduler.roles.placed
    if not plan.resume:
        return plan
    # Requests that a killed command has left for a killed controller.
    rmtree(plan.directory.scale_requests, ignore_errors=True)
    found = {Role(name): count for name, count in read_replicas(plan.directory).items() if name in _SCALABLE}
    replicas = {
        role: count.wanted
        for role, count in found.items()
        if role in placed and placed[role].replicas == count.configured != count.wanted
    }
    for role, number in replicas.items():
        advice = f"a change of scheduler.roles.{role}.replicas replaces it"
        _log.info("scaled_number_kept", role=role, replicas=number, advice=advice)
    return evolve(plan, replicas=replicas)


@define(eq=False)
class _Member:
    """A worker of a scalable role."""

    index: int
    is_added: bool
    """Whether it was added by scaling: if it cannot run, the others go on."""
    is_leaving: bool = False
    scope: anyio.CancelScope = field(factory=anyio.CancelScope)


class Scaling:
    """The workers of a run that are replaced individually. It adds and removes some when that is asked for."""

    def __init__(
        self,
        plan: RunPlan,
        roles: Collection[Role],
        *,
        keep: Callable[[Role, str], Awaitable[None]],
        drain: Callable[[Role, str], Awaitable[None]],
        find_serving: Callable[[Role], Awaitable[Collection[str]]],
        check_fits: Callable[[Mapping[Role, PlacedRole]], None],
    ) -> None:
        """Use ``start``.

        Args:
            plan: the run.
            roles: those of the plan whose workers are replaced individually.
            keep: keeps the worker of this name running until it is cancelled, or raises why it cannot.
            drain: has the requests of a worker continue at others, and returns when it has none.
            find_serving: returns the names of the workers that serve.
            check_fits: raises ``SchedulerError`` if the workers of these roles cannot run at the same time.
        """
        self._plan = plan
        self._keep, self._drain, self._find_serving, self._check_fits = keep, drain, find_serving, check_fits
        self._members: dict[Role, dict[int, _Member]] = {role: {} for role in roles if role in plan.placed}
        self._errors: dict[Role, str] = {}
        self._counts: dict[str, ReplicaCount] = {}
        self._tasks: TaskGroup

    def start(self, tasks: TaskGroup) -> None:
        """Start the workers of the plan, and the task that answers requests, in ``tasks``."""
        self._tasks = tasks
        for role in self._members:
            for index in range(self._plan.placed[role].config.replicas):
                self._add(role, index, is_added=False)
        if self._members:
            tasks.start_soon(self._watch)

    def _add(self, role: Role, index: int, *, is_added: bool) -> None:
        member = self._members[role][index] = _Member(index, is_added)
        self._tasks.start_soon(self._hold, role, member)

    async def _hold(self, role: Role, member: _Member) -> None:
        """Keep one worker running until it is removed."""
        name = f"{role}-{member.index}"
        try:
            with member.scope:
                await self._keep(role, name)
        except ArealError as error:
            if not member.is_added or len(self._active(role)) == 1:
                raise
            # The run has the workers that it began with.
            self._errors[role] = f"{name} was given up: {error}"
            _log.warning("worker_given_up", worker=name, reason=str(error))
        finally:
            del self._members[role][member.index]

    async def _remove(self, role: Role, member: _Member) -> None:
        """End one worker, once its requests have moved."""
        name = f"{role}-{member.index}"
        _log.info("worker_leaves", worker=name)
        await self._drain(role, name)
        member.scope.cancel()

    def _active(self, role: Role) -> list[_Member]:
        return [member for member in self._members[role].values() if not member.is_leaving]

    async def _resize(self, role: Role, number: int) -> Scaled:
        """Add workers, or have some leave: first those that do not serve yet, then the youngest."""
        active, serving = self._active(role), await self._find_serving(role)
        self._errors.pop(role, None)
        for index in range(_MAX_REPLICAS * 2):
            if len(self._active(role)) >= number:
                break
            # A worker that leaves keeps its name until it has ended.
            if index not in self._members[role]:
                self._add(role, index, is_added=True)
        by_worth = sorted(active, key=lambda member: (f"{role}-{member.index}" not in serving, member.index))
        for member in by_worth[number:]:
            member.is_leaving = True
            self._tasks.start_soon(self._remove, role, member)
        if len(active) != number:
            _log.info("role_scaled", role=role, before=len(active), wanted=number)
        return Scaled(before=len(active), wanted=number, serving=len(serving))

    async def _watch(self) -> None:
        """Answer requests, and write down how many workers there are."""
        while True:
            try:
                for request, sizes in await to_thread.run_sync(self._list_requests):
                    await self._answer(request, sizes)
                await self._record()
            except OSError as error:
                # A full disk does not end a run. Requests that cannot be answered time out.
                _log.warning("scaling_not_recorded", reason=str(error))
            await anyio.sleep(_POLL_SECONDS)

    def _list_requests(self) -> list[tuple[Path, dict[str, int]]]:
        """Return the requests that are not answered. Other files are left alone."""
        folder, found = self._plan.directory.scale_requests, []
        for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
            with suppress(KeyError, TypeError, ValueError, AttributeError):
                found.append((path, {str(name): int(number) for name, number in load_object(path)["sizes"].items()}))
        return found

    async def _answer(self, request: Path, sizes: Mapping[str, int]) -> None:
        """Scale as a request says, or refuse, and replace the request by the answer."""
        answer: dict[str, Any] = {}
        try:
            check_scalable(self._plan.config, sizes)
            placed = self._plan.placed
            wanted = {role: len(self._active(role)) for role in self._members}
            wanted |= {Role(name): number for name, number in sizes.items()}
            resized = {
                role: evolve(placed[role], config=evolve(placed[role].config, replicas=number))
                for role, number in wanted.items()
            }
            self._check_fits(placed | resized)
        except (ConfigError, SchedulerError) as error:
            answer["refused"] = str(error)
        else:
            answer["scaled"] = {name: asdict(await self._resize(Role(name), num)) for name, num in sizes.items()}
            # Before the answer: the command finds the new numbers, and a later controller keeps them.
            await self._record()
        await to_thread.run_sync(atomic_write, request, json.dumps(answer))

    async def _record(self) -> None:
        """Write the numbers if they have changed."""
        configured = self._plan.config.scheduler.roles.placed
        counts = {
            str(role): ReplicaCount(
                configured=configured[role].replicas,
                wanted=len(self._active(role)),
                serving=len(await self._find_serving(role)),
                error=self._errors.get(role),
            )
            for role in self._members
        }
        # A start that fails because of its settings leaves no files, and a run that has begun has a record.
        if counts != self._counts and self._plan.directory.record.exists():
            await to_thread.run_sync(write_replicas, self._plan.directory, counts)
            self._counts = counts
