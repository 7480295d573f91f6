"""Workers as jobs of a Slurm cluster.

``settings`` holds what a site can configure. ``script`` and ``queue`` are pure: they render what is submitted, and
parse and interpret what the cluster reports. ``commands`` runs Slurm's programs, ``files`` is the directory that
controller and jobs share, and ``scheduler`` and ``placement`` combine them.
"""

from __future__ import annotations

from areal_actors.schedulers.slurm.commands import SlurmCommands, clean_environment
from areal_actors.schedulers.slurm.files import JobRecord, SlurmFiles, find_slurm_files
from areal_actors.schedulers.slurm.placement import SlurmPlacement
from areal_actors.schedulers.slurm.scheduler import SlurmScheduler, cancel_records
from areal_actors.schedulers.slurm.settings import ContainerConfig, ContainerType, GpuOption, SlurmConfig

__all__ = [
    "ContainerConfig",
    "ContainerType",
    "GpuOption",
    "JobRecord",
    "SlurmCommands",
    "SlurmConfig",
    "SlurmFiles",
    "SlurmPlacement",
    "SlurmScheduler",
    "cancel_records",
    "clean_environment",
    "find_slurm_files",
]
