"""Settings for Slurm: what jobs request, time limits, and options that a site needs in addition.

They apply to every job of a run; roles and their resources are configured elsewhere (``schedulers.config``). No setting
holds a secret, because every user of a cluster can read the arguments of jobs.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any

from attrs import Attribute, field, frozen
from attrs.validators import and_, deep_iterable, ge, gt, le, optional

from areal_actors.lib.settings import constant

ALLOWED_ARGUMENTS = frozenset({
    "acctg-freq", "batch", "bb", "begin", "constraint", "contiguous", "core-spec", "cores-per-socket", "cpu-freq",
    "deadline", "delay-boot", "distribution", "exclusive", "extra-node-info", "gpu-bind", "gpu-freq", "gres-flags",
    "hint", "licenses", "mail-type", "mail-user", "mcs-label", "mem-bind", "network", "nice", "nodelist",
    "oversubscribe", "power", "prefer", "priority", "profile", "qos", "reboot", "reservation", "sockets-per-node",
    "spread-job", "switches", "thread-spec", "threads-per-core", "tmp", "use-min-nodes", "wckey",
})  # fmt: skip
"""Options of sbatch that a site may need and that do not take control of the job away from the scheduler."""

_ARGUMENT = re.compile(r"--(?P<option>[a-z][a-z-]*)(=(?P<value>.*))?")
_LINE = re.compile(r"[^\x00-\x1f\x7f]+")


def _is_line(_: object, attribute: Attribute[str], value: str) -> None:
    if not _LINE.fullmatch(value):
        raise ValueError(f"'{attribute.name}' must be one line of text, not {value!r}")


def _is_word(_: object, attribute: Attribute[str], value: str) -> None:
    if not _LINE.fullmatch(value) or any(map(str.isspace, value)):
        raise ValueError(f"'{attribute.name}' must be a word as Slurm knows it, without spaces, not {value!r}")


def _is_allowed(_: object, attribute: Attribute[str], value: str) -> None:
    found = _ARGUMENT.fullmatch(value)
    if found is None or not _LINE.fullmatch(value):
        raise ValueError(f"'{attribute.name}' must be written as --option or --option=value, not {value!r}")
    if found["option"] not in ALLOWED_ARGUMENTS:
        raise ValueError(
            f"'{attribute.name}' cannot have --{found['option']}: it has a setting of its own, or would take the job "
            f"out of our hands. There are {', '.join(sorted(ALLOWED_ARGUMENTS))}"
        )


_word: Any = optional(_is_word)
_lines: Any = deep_iterable(_is_line)


class GpuOption(StrEnum):
    """How GPUs are requested at a site."""

    GPUS_PER_NODE = "gpus-per-node"
    GRES = "gres"
    """``--gres=gpu:N``, for older clusters."""
    NONE = "none"
    """GPUs are not requested: nodes are allocated whole, and the worker uses those that it finds."""


class ContainerType(StrEnum):
    """The program that runs containers."""

    PYXIS = "pyxis"
    """enroot, with the options that the pyxis plugin adds to srun."""
    APPTAINER = "apptainer"
    """It must be in the PATH of the nodes."""


@frozen(kw_only=True)
class ContainerConfig:
    """The container in which workers run; the interpreter and this package are then those of the image."""

    type: ContainerType
    image: str = field(validator=_is_line)
    """The image: for pyxis in the format of --container-image, for apptainer a file or an address."""
    mounts: tuple[str, ...] = field(default=(), validator=_lines)
    """Additional SOURCE:TARGET[:FLAGS]; the run directory and the working directory are always mounted."""


@frozen(kw_only=True)
class SlurmConfig:
    """Settings for Slurm; each worker is a job."""

    partition: str | None = field(default=None, validator=_word)
    account: str | None = field(default=None, validator=_word)
    exclude: str | None = field(default=None, validator=_word)
    """Nodes that must not be used, such as ``node[03-05],node11``."""
    time_minutes: int = field(default=24 * 60, validator=ge(1))
    """Time limit of every job, so that no job runs indefinitely, whatever happens to the run."""
    margin_seconds: int = field(default=180, validator=and_(ge(1), le(65_535)))
    """How long before the time limit a worker is told (SIGUSR1) to write a checkpoint; Slurm may be a minute early."""
    max_requeues: int = field(default=3, validator=ge(0))
    """How often a job is started again after preemption, a node failure or its time limit. 0: never."""
    gpu_option: GpuOption = GpuOption.GPUS_PER_NODE
    ranks_per_node: int | None = field(default=None, validator=optional(ge(1)))
    """Number of processes of a training gang (trainer.gang) that share a node; null: all of them."""
    container: ContainerConfig | None = None
    setup: tuple[str, ...] = field(default=(), validator=_lines)
    """Lines of bash to run before the worker, such as ``module load cuda``. Not for secrets."""
    extra_arguments: tuple[str, ...] = field(default=(), validator=deep_iterable(_is_allowed))
    """Additional options of sbatch, such as ``--qos=high``, ``--constraint=a100&nvlink`` or ``--licenses=matlab``; only
    options that are known to be harmless."""
    poll_seconds: float = field(default=5.0, validator=gt(0))
    """How often the queue is read, once for the whole run. 30 is considerate at a large site."""
    command_timeout_seconds: float = constant(20.0)
    """How long one call of sbatch, squeue, scancel or scontrol may take."""
    submit_timeout_seconds: float = constant(120.0)
    """How long a submission is retried while slurmctld does not answer."""
    cancel_timeout_seconds: float = constant(120.0)
    """How long to wait at the end until all jobs are gone; must be longer than the cluster's KillWait."""
    completing_seconds: float = field(default=60.0, validator=gt(0))
    """How long to wait for the node of a cancelled job to confirm its end. After that, the job is left to the cluster,
    and its node is avoided until the cluster has given it up. Longer than KillWait."""
    lost_seconds: float = constant(60.0)
    """A job counts as lost after this time without a line in the queue and without an exit record."""
    preflight_seconds: float = constant(60.0)
    """How long a job tries to reach the controller before it releases its node."""

    def __attrs_post_init__(self) -> None:
        if self.margin_seconds >= self.time_minutes * 60:
            raise ValueError(
                f"'margin_seconds' must be less than time_minutes ({self.time_minutes}) are, not {self.margin_seconds}"
            )
