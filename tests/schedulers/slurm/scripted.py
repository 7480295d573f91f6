"""Slurm's commands as small scripts, to have a cluster say whatever it may."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from areal_actors.schedulers.slurm.commands import SlurmCommands

__all__ = ["commands"]


def commands(
    directory: Path, *, timeout_seconds: float = 5.0, environment: Mapping[str, str] | None = None, **programs: str
) -> SlurmCommands:
    """Commands whose programs are these scripts."""
    for name in ("sbatch", "squeue", "scancel", "scontrol", "sinfo"):
        program = directory / name
        program.write_text(f"#!/bin/bash\n{programs.get(name, 'exit 0')}\n")
        program.chmod(0o755)
    path = {"PATH": f"{directory}:{os.environ['PATH']}"}
    return SlurmCommands(environment=path | (environment or {}), timeout_seconds=timeout_seconds, user="1000")
