"""Workers as jobs of a Slurm cluster.

``settings`` is what a site can choose; ``script``, ``queue`` and ``view`` are pure: what is submitted, what the cluster
says, what that means. ``commands`` runs Slurm's programs, ``files`` is what home and jobs leave for each other, and
``scheduler`` with its ``placement`` puts them together. ``reaping`` ends what a home has left that was killed.
"""

from __future__ import annotations

from areal_actors.schedulers.slurm.commands import SlurmCommands, clean_environment
from areal_actors.schedulers.slurm.files import JobRecord, SlurmFiles, find_slurm_files
from areal_actors.schedulers.slurm.placement import SlurmPlacement
from areal_actors.schedulers.slurm.reaping import cancel_records
from areal_actors.schedulers.slurm.scheduler import SlurmScheduler
from areal_actors.schedulers.slurm.settings import ApptainerConfig, GpuOption, PyxisConfig, SlurmConfig

__all__ = [
    "ApptainerConfig",
    "GpuOption",
    "JobRecord",
    "PyxisConfig",
    "SlurmCommands",
    "SlurmConfig",
    "SlurmFiles",
    "SlurmPlacement",
    "SlurmScheduler",
    "cancel_records",
    "clean_environment",
    "find_slurm_files",
]
