"""The variables of the run that commands in a sandbox get."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from areal_actors.sandbox.config import SandboxConfig

__all__ = ["passed_environment"]

_PASSED = re.compile(r"PATH|LANG|LANGUAGE|LC_\w+|TZ|TERM")


def passed_environment(config: SandboxConfig, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of the run that commands in a sandbox get: those that hold no secrets, and those named."""
    passed = {
        name: value for name, value in environment.items() if _PASSED.fullmatch(name) or name in config.environment
    }
    if "PATH" in passed:
        # A relative entry would let a grader find programs that the agent left in its working directory.
        passed["PATH"] = os.pathsep.join(entry for entry in passed["PATH"].split(os.pathsep) if entry.startswith("/"))
    return passed
