"""The configuration of a run: one frozen class, a YAML file, dotted overrides, and all mistakes reported at once.

``schema`` defines the settings; the other modules are independent of it: ``documents`` reads YAML, ``structure``
converts it to attrs classes, ``loading`` combines both with overrides, ``reference`` lists settings.
"""

from __future__ import annotations

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
