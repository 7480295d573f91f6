"""Task directories: an agent works in a box with the task's environment, and a verifier in a second box rewards it.

The second box gets the files that the agent left in the working directory and in /logs/artifacts, and the task's
tests, which the first box never had. The reward is read from there, so that an agent can write neither tests nor
reward. Paths are Harbor's: the working directory (/app), /tests, /logs/agent, /logs/artifacts and /logs/verifier.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from importlib.util import cache_from_source
from pathlib import Path
from secrets import token_hex
from typing import Any

from anyio import to_thread
from attrs import evolve, field, frozen

from areal_actors.errors import DatasetError, EpisodeError, SandboxError, SandboxLimit
from areal_actors.lib.scratch import scratch_directory
from areal_actors.sandbox import (
    BoxRequest,
    Completed,
    Network,
    Sandbox,
    SandboxConfig,
    create_sandbox,
)
from areal_actors.workflows import BoxedCommand
from areal_actors_environments.harbor import TaskDirectory, load_task, resolve_variables

_LOGS, _TESTS, _SOLUTION = "/logs", "/tests", "/solution"
_REWARD = "reward"
_MAX_REWARD_BYTES = 1024 * 1024

Write = Callable[[bytes], None]


@frozen(kw_only=True)
class Verdict:
    """The reward and the numbers that a verifier wrote."""

    reward: float
    numbers: Mapping[str, float] = field(factory=dict)
    """The other numbers of reward.json."""


@frozen(kw_only=True)
class TaskBox:
    """An open box with the environment of a task."""

    box: Sandbox
    logs: str
    """The directory of logs inside: /logs, except without a sandbox."""
    environment: Mapping[str, str]
    """The variables of its commands."""


class TaskEnvironment:
    """Runs commands on problems that are task directories."""

    def check(self, data: Any, sandbox: SandboxConfig) -> None:
        """Raise ``DatasetError`` if the task cannot run in boxes of this kind. Blocks."""
        check_task(load_task(Path(data["task_directory"])), sandbox)

    async def run(self, command: BoxedCommand, data: Any, *, base_url: str, api_key: str) -> float:
        """Run the agent in the environment of its task, and return the reward of the task's verifier.

        An agent that exceeds the task's limit is graded for what it left, as Harbor does. Raises ``EpisodeError`` for a
        task that is not there, or cannot run in such boxes.
        """
        try:
            task = load_task(Path(data["task_directory"]))
            check_task(task, command.sandbox)
        except DatasetError as error:
            raise EpisodeError(str(error)) from error
        if command.command.grader:
            raise EpisodeError(f"{task.path} has a verifier, and the command has a grader, too; leave the grader out.")
        # Not the metadata, which may say how the task is solved.
        problem = json.dumps({"name": task.name, "instruction": task.instruction}).encode()
        with scratch_directory() as result:
            opening = open_task_box(task, command.sandbox, proxy_url=base_url, readable=command.files)
            async with opening as opened:
                await opened.box.copy_in(task.path / "instruction.md", f"{opened.logs}/agent")
                given = {**opened.environment, "AREAL_INSTRUCTION": f"{opened.logs}/agent/instruction.md"}
                seconds = (task.agent_seconds, command.sandbox.timeout_seconds)
                try:
                    await command.run_agent(
                        opened.box,
                        problem,
                        api_key,
                        environment=given,
                        timeout_seconds=min((limit for limit in seconds if limit), default=None),
                        is_graded=True,
                    )
                except SandboxLimit as limit:
                    if limit.limit != "timeout_seconds":
                        raise
                    command.log.write(f"{limit}\n".encode())
                    command.log_numbers(agent_timeout=1.0)
                left_out = await take_files(opened, task, result)
            command.log_left_out(left_out)
            verdict = await grade_files(
                task, result, command.sandbox, write=lambda chunk: command.log.write(chunk, is_last_words=False)
            )
        command.log_numbers(**verdict.numbers)
        return verdict.reward


environment = TaskEnvironment()
"""What the entry point names."""


def check_task(task: TaskDirectory, config: SandboxConfig) -> None:
    """Raise ``DatasetError`` if the task cannot run in boxes of this kind."""
    if not config.is_isolated and not task.is_relocatable:
        raise DatasetError(
            f"The task {task.path} has its files in {task.work_directory}, {_TESTS} and {_LOGS}, which exist only in a "
            "sandbox; set it to bubblewrap."
        )
    for variables in (task.environment, task.verifier_environment):
        resolve_variables(variables)


@asynccontextmanager
async def open_task_box(
    task: TaskDirectory,
    config: SandboxConfig,
    *,
    proxy_url: str | None = None,
    readable: tuple[Path, ...] = (),
    mounts: Mapping[str, Path] | None = None,
    files: Path | None = None,
) -> AsyncIterator[TaskBox]:
    """Open a box with the environment of a task; or with ``files`` instead, the result of ``take_files``.

    Limits are the smaller ones of the settings and of the task; without ``proxy_url``, nothing can be reached unless
    both allow the network of the host.
    """
    is_open = config.network is Network.HOST and task.allows_internet
    closed = Network.NONE if proxy_url is None or config.network is Network.NONE else Network.PROXY
    if config.is_isolated:
        config = evolve(
            config,
            network=Network.HOST if is_open else closed,
            memory_mib=min(config.memory_mib, task.memory_mib or config.memory_mib),
            disk_mib=min(config.disk_mib, task.disk_mib or config.disk_mib),
            cpus=min((number for number in (config.cpus, task.cpus) if number), default=None),
        )
    request = BoxRequest(
        config=config,
        proxy_url=proxy_url,
        readable=readable,
        mounts={**(_masks(task) if files is None else {}), **(mounts or {})},
        directories=(*task.directories, _LOGS),
        work_directory=task.work_directory,
    )
    async with create_sandbox(config.backend).open(request) as box:
        # Without a sandbox, a name that the files of an agent cannot contain: they would be read as the verifier's.
        logs = _LOGS if config.is_isolated else f"{box.work_directory}/.logs-{token_hex(8)}"
        environment = resolve_variables(task.environment) | {"LOGS_DIR": logs}
        if config.backend in ("none", "bubblewrap"):
            # python3 is the run's Python, with its packages, wherever the run was started from.
            path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
            environment.setdefault(
                "PATH", os.pathsep.join(one for one in path.split(os.pathsep) if one.startswith("/"))
            )
        made = await box.run(["mkdir", "-p", *(f"{logs}/{name}" for name in ("agent", "artifacts", "verifier"))])
        if not made.is_successful:
            raise SandboxError(f"The directories of logs cannot be made. {made.describe()}")
        if files is None:
            for copied in task.copies:
                await box.copy_in(copied.source, _place(box, task, copied.target))
        else:
            for number, inside in enumerate(_carried(task, logs)):
                if (files / str(number)).exists():
                    await box.copy_in(files / str(number), _place(box, task, inside))
        yield TaskBox(box=box, logs=logs, environment=environment)


async def take_files(opened: TaskBox, task: TaskDirectory, target: Path) -> tuple[str, ...]:
    """Copy the directories of the environment and /logs/artifacts to ``target``.

    Returns the names that were left out: devices, and links that lead out of these directories.
    """
    left_out: list[str] = []
    for number, inside in enumerate(_carried(task, opened.logs)):
        if inside != f"{opened.logs}/artifacts" or opened.logs == _LOGS:
            left_out += await opened.box.copy_out(_place(opened.box, task, inside), target / str(number))
    return tuple(left_out)


async def grade_files(
    task: TaskDirectory, files: Path, config: SandboxConfig, *, write: Write = lambda _: None
) -> Verdict:
    """Run the task's verifier on ``files`` (from ``take_files``) in a box of its own, and read the reward it wrote.

    A verifier that exceeds a limit rewards 0 with the number ``grader_limit``: it runs what the agent wrote.

    Raises:
        EpisodeError: it wrote no reward, or something else than a number.
        SandboxError: the box cannot be opened, or ended.
    """
    tests = _TESTS if config.is_isolated else str(task.tests)
    async with open_task_box(task, config, mounts={_TESTS: task.tests}, files=files) as opened:
        variables = resolve_variables(task.verifier_environment)
        try:
            ended = await opened.box.run(
                _script(task.tests / "test.sh", tests),
                environment={**opened.environment, "TEST_DIR": tests, **variables},
                timeout_seconds=task.verifier_seconds,
                on_stdout=write,
                on_stderr=write,
            )
            with scratch_directory() as directory:
                await opened.box.copy_out(f"{opened.logs}/verifier", directory)
                return await to_thread.run_sync(_read_reward, directory, ended)
        except SandboxLimit as limit:
            write(f"The verifier was ended: {limit}\n".encode())
            return Verdict(reward=0.0, numbers={"grader_limit": 1.0})


async def grade_solution(
    task: TaskDirectory, config: SandboxConfig, *, is_solved: bool = True, write: Write = lambda _: None
) -> Verdict:
    """Grade the result of the reference solution; with ``is_solved=False``, the environment as it is.

    Raises ``DatasetError`` for a task without a solution, or whose solution fails, and what ``grade_files`` raises.
    """
    if is_solved and task.solution is None:
        raise DatasetError(f"The task {task.path} has no solution/solve.sh.")
    solution = task.solution if is_solved else None
    with scratch_directory() as files:
        mounts = {} if solution is None else {_SOLUTION: solution.parent}
        async with open_task_box(task, config, mounts=mounts) as opened:
            if solution is not None:
                ended = await opened.box.run(
                    _script(solution, _SOLUTION if opened.logs == _LOGS else str(solution.parent)),
                    environment={**opened.environment, **resolve_variables(task.solution_environment)},
                    timeout_seconds=task.agent_seconds,
                    on_stdout=write,
                    on_stderr=write,
                )
                if not ended.is_successful:
                    raise DatasetError(f"solution/solve.sh of {task.path} failed. {ended.describe()}")
            await take_files(opened, task, files)
        return await grade_files(task, files, config, write=write)


def _masks(task: TaskDirectory) -> dict[str, Path]:
    """Return the mounts that hide installed modules and their compiled forms behind files of the task."""
    found = {}
    for name, shown in task.masks.items():
        for entry in sys.path:
            installed = Path(entry, name)
            if entry and installed.is_file():
                found[str(installed)] = shown
                # Not valid as a compiled file, so that the interpreter compiles what is shown.
                compiled = Path(cache_from_source(str(installed)))
                found |= {str(compiled): shown} if compiled.is_file() else {}
    return found


def _carried(task: TaskDirectory, logs: str) -> Iterable[str]:
    return (task.work_directory, *task.directories, f"{logs}/artifacts")


def _place(box: Sandbox, task: TaskDirectory, inside: str) -> str:
    """Return where a directory of the environment is in this box: without a sandbox, below its working directory."""
    if inside == task.work_directory or inside.startswith(f"{task.work_directory}/"):
        return box.work_directory + inside.removeprefix(task.work_directory)
    return inside


def _script(script: Path, directory: str) -> list[str]:
    """Return the command that runs a script of a task, by its first line if it may be executed."""
    inside = f"{directory}/{script.name}"
    return [inside] if os.access(script, os.X_OK) else ["bash", inside]


def _read_reward(directory: Path, ended: Completed) -> Verdict:
    """Read reward.json, or else reward.txt, as Harbor does. Raises ``EpisodeError`` for anything but numbers."""
    for name in ("reward.json", "reward.txt"):
        path = directory / name
        if path.is_symlink() or not path.is_file():
            continue
        if path.stat().st_size > _MAX_REWARD_BYTES:
            raise EpisodeError(f"The verifier wrote {path.stat().st_size} bytes to {name}; a reward is a number.")
        text = path.read_text(encoding="utf-8", errors="replace")
        try:
            return _parse_object(text) if name == "reward.json" else Verdict(reward=_finite(float(text)))
        except ValueError as error:
            raise EpisodeError(f"The verifier wrote {text[:80]!r} to {name}: {error}. {ended.describe()}") from error
    raise EpisodeError(
        f"The verifier wrote no reward to {_LOGS}/verifier/reward.txt or reward.json. {ended.describe()}"
    )


def _parse_object(text: str) -> Verdict:
    """Parse the numbers of an object; other values describe them, and are left out."""
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(found, dict):
        raise ValueError("it must be an object of numbers")  # noqa: TRY004 - all mistakes in the file are one kind
    numbers = {
        name: _finite(float(value))
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    if _REWARD not in numbers and len(numbers) != 1:
        raise ValueError(f"it has the numbers {', '.join(numbers) or 'of nothing'}; name one of them {_REWARD}")
    name = _REWARD if _REWARD in numbers else next(iter(numbers))
    return Verdict(reward=numbers.pop(name), numbers=numbers)


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError("a reward is finite")
    return number
