"""Agents that plug-ins add: other forms of ``rollout.workflow``, such as ``{verifiers: {taskset: gsm8k}}``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from attrs import frozen

from areal_actors.datasets import DatasetConfig
from areal_actors.lib.plugins import PluginGroup, plugin_settings
from areal_actors.sandbox import SandboxConfig
from areal_actors.workflows.agents import Agent
from areal_actors.workflows.pool import PoolConfig


class WorkflowPlugin(Protocol):
    """An agent that a plug-in adds: an attrs class with its settings."""

    @property
    def problems(self) -> DatasetConfig | None:
        """The problems that it works on, if the configuration names no others."""
        ...

    def describe(self) -> str:
        """Name the agent, for messages."""
        ...

    def prepare(self, sandbox: SandboxConfig, pool: PoolConfig | None) -> AbstractAsyncContextManager[Agent]:
        """Return a context manager that opens the agent, in processes if ``pool`` is given.

        Raises ``WorkflowError`` for errors that can be found without starting a process.
        """
        ...


@frozen(kw_only=True)
class PluginWorkflow:
    """The agent of a plug-in, by its name in ``rollout.workflow``."""

    plugins: Mapping[str, WorkflowPlugin] = plugin_settings(PluginGroup.WORKFLOWS)

    def __attrs_post_init__(self) -> None:
        """Raise ``ValueError`` unless exactly one agent is named."""
        if len(self.plugins) != 1:
            raise ValueError(f"name one agent, and not {len(self.plugins)}")

    @property
    def name(self) -> str:
        """The name of the plug-in's agent."""
        return next(iter(self.plugins))

    @property
    def plugin(self) -> WorkflowPlugin:
        """The agent's settings."""
        return self.plugins[self.name]
