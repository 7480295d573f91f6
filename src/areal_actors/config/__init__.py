"""The configuration of a run: one frozen class, a YAML file, dotted overrides, and all mistakes reported at once.

``schema`` defines the settings, ``documents`` reads YAML, ``structure`` converts it to attrs classes, ``reference``
lists settings, and ``loading`` combines them.
"""

from __future__ import annotations

from areal_actors.config.loading import (
    create_config,
    format_config,
    load_config,
    read_defaults,
    save_config,
    settings_class,
)
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
    "format_config",
    "format_reference",
    "load_config",
    "read_defaults",
    "save_config",
    "settings_class",
]
