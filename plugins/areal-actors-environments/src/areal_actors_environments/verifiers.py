"""Agents that are environments of the library verifiers: ``{verifiers: {taskset: gsm8k, harness: bash}}``.

A taskset has the tasks and their rubric, and a harness is the program that solves a task. Model calls of the harness go
by way of verifiers' own interception server, which keeps the trace that the rubric reads, to the session of the
episode. The reward is the weighted total of the rubric; each of its functions is logged as a number of the episode. The
harness has no key: verifiers gives it a secret of its interception server.

verifiers is imported on first use (``verifiers_parts``), and runs on asyncio only.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from contextvars import copy_context
from typing import Any

import anyio
from attrs import field, frozen

from areal_actors.datasets import DatasetConfig
from areal_actors.domain import MAX_NUMBERS, InteractionId
from areal_actors.errors import EpisodeError, WorkflowError
from areal_actors.sandbox import SandboxConfig
from areal_actors.workflows import Agent, AgentPool, PoolConfig, serialize_agent
from areal_actors.workflows import context as workflow_context
from areal_actors_environments.tasksets import VerifiersPlugin, check_options, import_verifiers, plugin_id

_DEFAULT = "default"
_CHAT = "chat"
_MAX_TRACEBACK = 8000
_MODEL = "policy"
"""The name of the model in requests; a session serves the model of the run under any name."""


@frozen(kw_only=True)
class VerifiersConfig:
    """An environment of verifiers."""

    taskset: VerifiersPlugin
    """The tasks and their rubric: the id of a package, file.py:Class or module:Class; or {id, options}."""
    harness: VerifiersPlugin | None = field(factory=lambda: VerifiersPlugin(id=_DEFAULT))  # type: ignore[arg-type]
    """The program that solves a task: the id of one of verifiers' or of a package, file.py:Class, or chat, which is a
    chat without tools in this process. default is that of the taskset, or bash; null is verifiers' null."""
    env: VerifiersPlugin = field(factory=lambda: VerifiersPlugin(id=_DEFAULT))  # type: ignore[arg-type]
    """How agents play a task: default is that of the taskset, which mostly has one agent; or an id, such as best_of_n,
    or file.py:Class. Its options have the settings of each agent, such as {agent: {max_turns: 8}}."""

    @property
    def problems(self) -> DatasetConfig:
        """The problems of its taskset."""
        return DatasetConfig(plugins={"verifiers": self.taskset})

    def describe(self) -> str:
        """Name the taskset and the harness."""
        return f"taskset {self.taskset.id} with the harness {'null' if self.harness is None else self.harness.id}"

    def prepare(self, sandbox: SandboxConfig, pool: PoolConfig | None) -> AbstractAsyncContextManager[Agent]:
        """Return a context manager that opens the agent, in processes if ``pool`` is given.

        Raises ``WorkflowError`` for errors that can be found without starting a process.
        """
        create_environment(self, sandbox)
        if pool is not None:
            return AgentPool.open(serialize_agent(BlockingVerifiersAgent, {"config": self, "sandbox": sandbox}), pool)
        return VerifiersAgent.open(self, sandbox)


def create_environment(config: VerifiersConfig, sandbox: SandboxConfig) -> Any:
    """Return the environment, whose agents run in boxes of ``sandbox`` unless the options of ``env`` name a runtime.

    Raises ``WorkflowError`` with what is missing or does not fit: the package, a plugin, an option, or a container.
    """
    vf = import_verifiers(WorkflowError)
    from pydantic import ValidationError

    from areal_actors_environments import verifiers_parts as parts

    if fixed := {"id", "taskset", "interception"} & set(config.env.options):
        raise WorkflowError(
            f"The options of env set {', '.join(sorted(fixed))}, which the run sets itself; remove them."
        )
    taskset = plugin_id(config.taskset.id, vf.Taskset, error=WorkflowError)
    ident = "" if config.env.id == _DEFAULT else plugin_id(config.env.id, vf.Env, error=WorkflowError)
    try:
        kind = vf.env_config_type(taskset, ident)
        check_options(config.taskset, vf.taskset_config_type(taskset), taskset, error=WorkflowError)
        settings = {
            **config.env.options,
            "id": ident,
            "taskset": {**config.taskset.options, "id": taskset},
            "interception": {"type": "server"},
        }
        harness = _harness_settings(config.harness, vf, parts)
        is_boxed = sandbox.is_isolated
        for seat in _seats(kind, vf):
            # By default verifiers would run each agent in a remote container.
            runtime = {"runtime": {"type": "docker" if is_boxed else "subprocess"}}
            settings[seat] = runtime | harness | dict(settings.get(seat, {}))
        environment = parts.attached(vf.environment_class(taskset, ident))
        created = environment(kind.model_validate(settings))
        for seat in _seats(kind, vf):
            spec = getattr(created.config, seat)
            program = vf.load_harness(spec.harness or vf.default_agent_harness(taskset))
            needs = next((one for one in (program, vf.task_type(taskset)) if one.NEEDS_CONTAINER), None)
            if needs is not None and isinstance(spec.runtime, vf.SubprocessConfig):
                what = f"harness {program.config.id}" if needs is program else f"taskset {config.taskset.id}"
                raise WorkflowError(f"The {what} needs a container; set rollout.openai.sandbox: bubblewrap.")
    except ValidationError as failure:
        said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in failure.errors())
        raise WorkflowError(f"verifiers does not take these settings of {config.taskset.id}: {said}") from failure
    except (ImportError, AttributeError, TypeError, ValueError) as failure:
        raise WorkflowError(f"The environment of {config.taskset.id} cannot be loaded: {failure}") from failure
    return created


def _seats(kind: Any, vf: Any) -> list[str]:
    return [name for name, setting in kind.model_fields.items() if isinstance(setting.default, vf.AgentConfig)]


def _harness_settings(plugin: VerifiersPlugin | None, vf: Any, parts: Any) -> dict[str, Any]:
    """Return the settings of a seat that name the harness; none for the default one."""
    if plugin is not None and plugin.id == _DEFAULT:
        if plugin.options:
            raise WorkflowError("The harness has options and no id; name the harness that they are for.")
        return {}
    plugin = plugin or VerifiersPlugin(id="null")  # type: ignore[arg-type]
    # A harness in this process: verifiers' ``null`` starts a Python of 2 s for each turn of the user.
    reference = f"{parts.__name__}:ChatHarness" if plugin.id == _CHAT else plugin.id
    ident = plugin_id(reference, vf.Harness, error=WorkflowError)
    check_options(plugin, vf.harness_config_type(ident), ident, error=WorkflowError)
    return {"harness": {**plugin.options, "id": ident}}


class VerifiersAgent:
    """Plays the tasks of one environment, concurrently. ``data`` of an episode is a row of ``tasksets``."""

    def __init__(self, config: VerifiersConfig, sandbox: SandboxConfig, environment: Any, http_client: Any) -> None:
        self._config = config
        self._sandbox = sandbox
        self._environment = environment
        self._http_client = http_client

    @classmethod
    @asynccontextmanager
    async def open(cls, config: VerifiersConfig, sandbox: SandboxConfig) -> AsyncIterator[VerifiersAgent]:
        """Open the servers that all episodes share: verifiers' interception, and tools of the taskset.

        Raises ``WorkflowError`` on an event loop that is not asyncio's.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise WorkflowError(
                "verifiers runs on asyncio, and this run is on trio; set rollout.openai.mode: subprocess."
            ) from None
        environment = create_environment(config, sandbox)
        from areal_actors_environments import verifiers_parts as parts

        async with parts.create_http_client() as http_client, environment.serving():
            yield cls(config, sandbox, environment, http_client)

    async def run(self, data: Any, **extra_kwargs: Any) -> float | dict[InteractionId, float]:
        """Play one task, and return its reward, or one for each trained agent of an environment that has several.

        Raises ``EpisodeError`` with verifiers' own error and traceback if the harness or the rubric failed.
        """
        from areal_actors_environments import verifiers_parts as parts

        play = parts.Play(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=self._http_client,
            sandbox=self._sandbox,
            given=self._config.env.options,
        )
        # The problem becomes a task again, as in verifiers' own workers.
        taskset = self._environment.taskset
        kind = type(taskset).task_type()
        try:
            content = {"idx": data.get("metadata", {}).get("idx"), **data["task"]}
            task = kind(kind.data_type().model_validate(content), taskset.config.task)
        except Exception as error:
            raise EpisodeError(
                f"The problem is not of the taskset {self._config.taskset.id} ({type(error).__name__}: {error}); "
                "leave dataset out, or name the same taskset there."
            ) from error
        # A task of asyncio's own: verifiers shields its cleanup from one cancellation, and a scope of anyio cancels
        # again at each turn of the event loop.
        playing = asyncio.create_task(play.run(self._environment, task, _MODEL))
        try:
            episode = await asyncio.shield(playing)
        except asyncio.CancelledError:
            playing.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait({playing})
            raise
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        self._log(traces, has_names=len({trace.agent.name for trace in traces}) > 1)
        _check(episode, play.last_output)
        if len(episode.traces) == 1:
            return float(traces[0].reward) if traces else {}
        last = play.last_completions
        return {InteractionId(last[trace.id]): float(trace.reward) for trace in traces if trace.id in last}

    def _log(self, traces: list[Any], *, has_names: bool) -> None:
        """Log what each function of the rubric returned, as ``reward.name`` and ``metric.name``."""
        numbers: dict[str, list[float]] = {}
        for trace in traces:
            seat = f"{trace.agent.name}." if has_names else ""
            found = {f"reward.{name}": reward and reward.score for name, reward in trace.rewards.items()}
            found |= {f"metric.{name}": value for name, value in trace.metrics.items()}
            for name, value in found.items():
                if value is None:  # it was not called
                    continue
                if not math.isfinite(value):
                    raise EpisodeError(f"The rubric of {self._config.taskset.id} returned {value} as {name}.")
                numbers.setdefault(re.sub(r"[^A-Za-z0-9_.-]", "_", f"{seat}{name}")[:64], []).append(float(value))
        # Several traces of one seat are several attempts at the task.
        logged = {name: sum(values) / len(values) for name, values in list(numbers.items())[:MAX_NUMBERS]}
        workflow_context.log(**logged)


def _check(episode: Any, last_output: str) -> None:
    """Raise ``EpisodeError`` if the episode has no reward that counts."""
    errors = [*episode.errors, *(trace.last_error for trace in episode.traces if not trace.ok)]
    failed = next((error for error in errors if error is not None), None)
    said = f" The end of its output:\n{last_output}" if last_output else ""
    if failed is not None:
        traceback = (failed.traceback or "").rstrip()
        shortened = traceback if len(traceback) <= _MAX_TRACEBACK else f"…{traceback[-_MAX_TRACEBACK:]}"
        raise EpisodeError(f"{failed.type}: {failed.message.rstrip()}", traceback=shortened)
    # In an environment of several agents, one may have had no turn, such as the loser of a game of one move.
    if not any(trace.num_turns for trace in episode.traces):
        ends = ", ".join(f"{trace.agent.config.harness.id}: {trace.stop_condition}" for trace in episode.traces)
        raise EpisodeError(f"The harness ended and never called the model ({ends}).{said}")
    for trace in episode.traces:
        missing = ", ".join(name for name, reward in trace.rewards.items() if reward is None)
        if missing:
            raise EpisodeError(f"The rubric has no value of {missing}: it ended with {trace.stop_condition}.")


class BlockingVerifiersAgent:
    """The same agent for a process with one episode at a time (``rollout.openai.mode: subprocess``).

    It has an event loop of its own, which lives as long as the process: that of an agent's process cancels all
    tasks between episodes, those of the shared servers included.
    """

    def __init__(self, config: VerifiersConfig, sandbox: SandboxConfig) -> None:
        # Created now, so that its errors end the run before the first step.
        create_environment(config, sandbox)
        self._config = config
        self._sandbox = sandbox
        self._loop = asyncio.Runner()
        # Held: without a reference, its context managers are collected and close.
        self._servers = AsyncExitStack()
        self._agent: VerifiersAgent | None = None

    def run(self, data: Any, **extra_kwargs: Any) -> float | dict[InteractionId, float]:
        """Play one task, as ``VerifiersAgent.run`` does."""
        # In the context of the episode, to which numbers are logged; the loop has that of its first use.
        return self._loop.run(self._play(data, extra_kwargs), context=copy_context())

    async def _play(self, data: Any, link: Mapping[str, Any]) -> float | dict[InteractionId, float]:
        if self._agent is None:
            self._agent = await self._servers.enter_async_context(VerifiersAgent.open(self._config, self._sandbox))
        return await self._agent.run(data, **link)
