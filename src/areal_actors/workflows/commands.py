"""Agents in any language: a command for each episode, with the link to the model in its environment.

Inputs of the command: ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL``, ``ANTHROPIC_API_KEY``, and its
problem as JSON on stdin and in the file that ``AREAL_PROBLEM`` names. Outputs: its reward, as the last line of stdout
(a number, or an object from completion ids to numbers) or set over HTTP; and the exit status 0.

A problem may have an environment and a verifier of its own, which take the place of the command's files and grader: a
plug-in runs it (``ProblemEnvironment``).

A command may run in a sandbox (``rollout.openai.sandbox``), and a second command, the grader, may reward it: it runs in
a box of its own that has the files that the agent left.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NewType, Protocol

import anyio
from attrs import evolve, field, frozen
from attrs.validators import min_len

from areal_actors.domain import InteractionId
from areal_actors.errors import EpisodeError, InvalidRequest, SandboxError, SandboxLimit
from areal_actors.lib.child_process import BoundedLog
from areal_actors.lib.plugins import PluginGroup, load_plugin, plugin_names
from areal_actors.lib.scratch import scratch_directory
from areal_actors.sandbox import (
    BoxRequest,
    Completed,
    Network,
    Sandbox,
    SandboxConfig,
    create_sandbox,
)
from areal_actors.workflows import context as workflow_context
from areal_actors.workflows.agents import Agent, LimitedAgent, parse_result
from areal_actors.workflows.pool import PoolConfig
from areal_actors.workflows.processes import check_problem, episode_environment, inherited_environment

CommandWord = NewType("CommandWord", str)
"""A word of a command: a file next to the configuration if there is one with that name, and text otherwise."""

_GIVE_PROBLEM = 'rm -rf "$AREAL_PROBLEM" && cat > "$AREAL_PROBLEM" && exec "$@" < "$AREAL_PROBLEM"'
"""Writes the problem to its file, where an agent may have left something else for its grader, and runs the command."""

_NOT_RUN = (126, 127)
"""Exit statuses of a program that cannot be started."""


@frozen(kw_only=True)
class CommandConfig:
    """An agent that is a command."""

    command: tuple[CommandWord, ...] = field(validator=min_len(1))
    """The program and its arguments. They are not interpreted by a shell, unless it is the program."""
    grader: tuple[CommandWord, ...] = ()
    """A command that rewards the files that the agent left in its working directory: by the last line of its output, or
    1 for exit status 0, and 0 for 1. Another status is an error of the grader, which fails the episode. With a grader,
    the agent's own output is not a reward."""
    files: Path | None = None
    """A directory whose contents the agent finds in its working directory."""


class ProblemEnvironment(Protocol):
    """Runs commands on problems that have an environment of their own, and rewards them (a plug-in)."""

    def check(self, data: object, sandbox: SandboxConfig) -> None:
        """Raise ``DatasetError`` if the problem cannot run in boxes of this kind."""
        ...

    async def run(self, command: BoxedCommand, data: object, *, base_url: str, api_key: str) -> float:
        """Run one episode of ``command``. Raises ``EpisodeError``, or ``SandboxError`` if a box ends."""
        ...


def find_environment(data: object) -> ProblemEnvironment | None:
    """Return the environment of a problem: that of the plug-in which its keys name."""
    if not isinstance(data, Mapping):
        return None
    name = next((name for name in plugin_names(PluginGroup.PROBLEMS) if name in data), None)
    found: ProblemEnvironment | None = None if name is None else load_plugin(PluginGroup.PROBLEMS, name)
    return found


class CommandAgent(LimitedAgent):
    """Runs a command for each episode, at most ``config.num_workers`` at once."""

    def __init__(self, command: CommandConfig, config: PoolConfig, sandbox: SandboxConfig | None = None) -> None:
        self._command = command
        self._sandbox = sandbox or SandboxConfig()
        self._places = anyio.Semaphore(config.num_workers)
        logs = config.logs
        self._logs = [
            BoundedLog(None if logs is None else logs / f"{number}.log") for number in range(config.num_workers)
        ]

    @classmethod
    @asynccontextmanager
    async def open(
        cls, command: CommandConfig, config: PoolConfig | None = None, *, sandbox: SandboxConfig | None = None
    ) -> AsyncIterator[CommandAgent]:
        """Open an agent, whose boxes end with their episodes."""
        yield cls(command, config or PoolConfig(), sandbox)

    @property
    def agent_name(self) -> str:
        """The name of the program."""
        return Path(self._command.command[0]).name

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Agent]:
        """Wait until fewer than ``num_workers`` commands run."""
        async with self._places:
            log = self._logs.pop(0)
            try:
                yield BoxedCommand(self._command, self._sandbox, name=self.agent_name, log=log)
            finally:
                self._logs.append(log)


class BoxedCommand:
    """The command, run in a box for one episode, and its grader in a second box."""

    def __init__(self, command: CommandConfig, sandbox: SandboxConfig, *, name: str, log: BoundedLog) -> None:
        self.command = command
        self.sandbox = sandbox
        self.log = log
        self._backend = create_sandbox(sandbox.backend)
        self._name = name

    async def run(self, data: Any, **extra_kwargs: Any) -> float | dict[InteractionId, float]:
        """Run one episode. Raises ``EpisodeError``; if it is cancelled, its boxes end.

        Returns an empty ``dict`` for a command without a grader that set its reward over HTTP.
        """
        check_problem(data)
        self.log.begin()
        try:
            if (environment := find_environment(data)) is not None:
                link = {name: extra_kwargs[name] for name in ("base_url", "api_key")}
                return await environment.run(self, data, **link)
            problem = json.dumps(data).encode()
            if not self.command.grader:
                # Without isolation, and without files that need a working directory of the episode, the command is a
                # child process like those of a shell: it runs here, with the variables of the run.
                is_plain = not (self.sandbox.is_isolated or self.command.files)
                inherited, directory = (inherited_environment(), str(Path.cwd())) if is_plain else ({}, None)
                async with self._box(extra_kwargs["base_url"]) as box:
                    ended = await self.run_agent(
                        box, problem, extra_kwargs["api_key"], environment=inherited, directory=directory
                    )
                return _parse_reward(_last_line(ended.stdout), name=self._name)
            # By way of a directory of ours: the box of the grader sees nothing of the agent's but these files.
            with scratch_directory() as result:
                async with self._box(extra_kwargs["base_url"]) as box:
                    await self.run_agent(box, problem, extra_kwargs["api_key"], is_graded=True)
                    left_out = await box.copy_out(".", result)
                self.log_left_out(left_out)
                return await self._grade(result, problem)
        except SandboxError as error:
            words = self.log.output_tail
            raise EpisodeError(
                f"{self._name} failed. {error}" + (f" The end of its stderr:\n{words}" if words else "")
            ) from error

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that the command names by their paths, which a box has to see."""
        return _files_of(self.command.command)

    def log_left_out(self, names: Sequence[str]) -> None:
        """Log the first names of files that cannot be graded."""
        if names:
            self.log.write(f"Not graded: {', '.join(names[:20])}\n".encode(errors="replace"))

    def log_numbers(self, **numbers: float) -> None:
        """Log numbers of the episode; outside of a run, and if they cannot be logged, nothing is."""
        with suppress(InvalidRequest):
            workflow_context.log(**numbers)

    def _box(self, base_url: str) -> AbstractAsyncContextManager[Sandbox]:
        request = BoxRequest(config=self.sandbox, proxy_url=base_url, readable=self.files)
        return self._backend.open(request)

    async def run_agent(
        self,
        box: Sandbox,
        problem: bytes,
        api_key: str,
        *,
        environment: Mapping[str, str] | None = None,
        directory: str | None = None,
        timeout_seconds: float | None = None,
        is_graded: bool = False,
    ) -> Completed:
        """Run the agent. Raises ``EpisodeError`` if it fails, unless its work is graded and it had reached a limit."""
        if self.command.files is not None:
            await box.copy_in(self.command.files, ".")
        assert box.proxy_url is not None
        link = episode_environment(base_url=box.proxy_url, api_key=api_key)
        ended = await self._run(
            box,
            self.command.command,
            problem,
            {**(environment or {}), **link},
            directory=directory,
            timeout_seconds=timeout_seconds,
        )
        if ended.is_successful:
            return ended
        # Many agents end with an error when the model refuses to go on; what they have done by then counts.
        limit = await workflow_context.reached_limit() if is_graded else None
        if limit is None:
            raise EpisodeError(f"{self._name} failed. {ended.describe()}")
        self.log.write(f"{self._name} ended at limits.{limit}. {ended.describe()}\n".encode(errors="replace"))
        return ended

    async def _run(
        self,
        box: Sandbox,
        command: Sequence[str],
        problem: bytes,
        environment: dict[str, str],
        *,
        directory: str | None = None,
        timeout_seconds: float | None = None,
    ) -> Completed:
        return await box.run(
            ["sh", "-c", _GIVE_PROBLEM, "sh", *command],
            directory=directory,
            environment={**environment, "AREAL_PROBLEM": f"{box.work_directory}/.problem.json"},
            stdin=problem,
            timeout_seconds=timeout_seconds,
            on_stdout=lambda chunk: self.log.write(chunk, is_last_words=False),
            on_stderr=self.log.write,
        )

    async def _grade(self, result: Path, problem: bytes) -> float | dict[InteractionId, float]:
        """Reward the files in ``result``. The grader has no key, and sees no process of the agent.

        A grader that exceeds a limit gives 0: it runs what the agent wrote, and an agent whose work hangs must not be
        spared its reward.
        """
        grader = self.command.grader
        network = self.sandbox.network if self.sandbox.network is Network.HOST else Network.NONE
        config = self.sandbox if not self.sandbox.is_isolated else evolve(self.sandbox, network=network)
        request = BoxRequest(config=config, readable=_files_of(grader))
        async with self._backend.open(request) as box:
            await box.copy_in(result, ".")
            try:
                ended = await self._run(box, grader, problem, {})
            except SandboxLimit as limit:
                self.log.write(f"The grader was ended: {limit}\n".encode())
                self.log_numbers(grader_limit=1.0)
                return 0.0
        if ended.status in _NOT_RUN:
            raise EpisodeError(f"The grader {grader[0]} cannot be started. {ended.describe()}")
        reward = _parse_reward(_last_line(ended.stdout), name="The grader")
        if reward != {}:
            return reward
        # A Python script of the command that does not catch an exception ends with it on the last line, and a line
        # before names the script. Programs that the grader runs raise in other files, and unittest, which reports
        # exceptions as failed tests, ends with a summary.
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        is_exception = bool(lines) and re.match(r"[A-Za-z_][\w.]*(: |$)", lines[-1]) is not None
        scripts = [f'File "{path}", line ' for path in _files_of(grader)]
        has_raised = is_exception and any(script in line for script in scripts for line in lines)
        # Status 1 is a verdict: that of test, cmp and pytest. The reward 0 for a grader that is missing or raises would
        # teach the model that its answer was wrong.
        if ended.status > 1 or (ended.status == 1 and has_raised):
            raise EpisodeError(
                f"The grader {' '.join(grader)} failed, so that this episode has no reward. {ended.describe()}\n"
                "A grader rewards 0 by printing 0 as its last line, or by exit status 1."
            )
        return float(ended.is_successful)


def _files_of(command: Sequence[str]) -> tuple[Path, ...]:
    """Return the files that a command names by their paths, which a box has to see."""
    return tuple(Path(word) for word in command if word.startswith("/") and os.path.isfile(word))  # noqa: PTH113


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _parse_reward(line: str, *, name: str) -> float | dict[InteractionId, float]:
    """Parse a number, or numbers by completion; other text is ignored. Raises ``EpisodeError`` for other objects."""
    try:
        return float(line)
    except ValueError:
        pass
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return dict(parse_result(found, agent=name).by_interaction) if isinstance(found, dict) else {}
