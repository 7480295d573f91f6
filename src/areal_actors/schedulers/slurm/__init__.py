"""Workers as jobs of a Slurm cluster.

``settings`` holds what a site can configure. ``script`` and ``queue`` are pure: they render what is submitted, and
parse and interpret what the cluster reports. ``commands`` runs Slurm's programs, ``files`` is the directory that
controller and jobs share, and ``scheduler`` and ``placement`` combine them.
"""

from __future__ import annotations

from areal_actors.schedulers.slurm.commands import SlurmCommands as SlurmCommands
from areal_actors.schedulers.slurm.commands import clean_environment as clean_environment
from areal_actors.schedulers.slurm.files import JobRecord as JobRecord
from areal_actors.schedulers.slurm.files import SlurmFiles as SlurmFiles
from areal_actors.schedulers.slurm.files import find_slurm_files as find_slurm_files
from areal_actors.schedulers.slurm.placement import SlurmPlacement as SlurmPlacement
from areal_actors.schedulers.slurm.scheduler import SlurmScheduler as SlurmScheduler
from areal_actors.schedulers.slurm.scheduler import cancel_records as cancel_records
from areal_actors.schedulers.slurm.settings import ContainerConfig as ContainerConfig
from areal_actors.schedulers.slurm.settings import ContainerType as ContainerType
from areal_actors.schedulers.slurm.settings import GpuOption as GpuOption
from areal_actors.schedulers.slurm.settings import SlurmConfig as SlurmConfig
