"""The configuration of a run: one frozen class, a YAML file, dotted overrides, and every mistake at once.

``schema`` is what there is to set; the rest is the machinery, which knows none of it: ``documents`` reads YAML,
``structure`` makes attrs classes of it, ``overrides`` and ``loading`` put both together, ``reference`` lists settings.
"""

from __future__ import annotations

from areal_actors.config.host import HostConfig
from areal_actors.config.reference import format_reference
from areal_actors.config.schema import (
    AgentConfig,
    AgentMode,
    LoggingConfig,
    ModelName,
    RolloutConfig,
    RunConfig,
    ServeConfig,
    WorkflowReference,
    create_config,
    load_config,
    save_config,
    settings_class,
)

__all__ = [
    "AgentConfig",
    "AgentMode",
    "HostConfig",
    "LoggingConfig",
    "ModelName",
    "RolloutConfig",
    "RunConfig",
    "ServeConfig",
    "WorkflowReference",
    "create_config",
    "format_reference",
    "load_config",
    "save_config",
    "settings_class",
]
