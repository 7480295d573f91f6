"""Settings of Slurm: what jobs ask for, how long things may take, what a site wants beside.

Roles, and what each of them needs, are told elsewhere: these settings hold for every job of a run. None of them ever
holds a secret, because arguments of jobs are seen by everybody on a cluster.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any

from attrs import Attribute, field, frozen
from attrs.validators import and_, deep_iterable, ge, gt, le, optional

__all__ = ["ALLOWED_ARGUMENTS", "ApptainerConfig", "GpuOption", "PyxisConfig", "SlurmConfig"]

ALLOWED_ARGUMENTS = frozenset(
    {
        "acctg-freq",
        "batch",
        "bb",
        "begin",
        "contiguous",
        "core-spec",
        "cores-per-socket",
        "cpu-freq",
        "deadline",
        "delay-boot",
        "distribution",
        "exclusive",
        "extra-node-info",
        "gpu-bind",
        "gpu-freq",
        "gres-flags",
        "hint",
        "licenses",
        "mail-type",
        "mail-user",
        "mcs-label",
        "mem-bind",
        "network",
        "nice",
        "nodelist",
        "oversubscribe",
        "power",
        "prefer",
        "priority",
        "profile",
        "reboot",
        "sockets-per-node",
        "spread-job",
        "switches",
        "thread-spec",
        "threads-per-core",
        "tmp",
        "use-min-nodes",
        "wckey",
    }
)
"""Options of sbatch that a site may need and that take nothing out of our hands."""

_ARGUMENT = re.compile(r"--(?P<option>[a-z][a-z-]*)(=(?P<value>.*))?")
_LINE = re.compile(r"[^\x00-\x1f\x7f]+")


def _is_line(_: Any, attribute: Attribute[str], value: str) -> None:
    if not _LINE.fullmatch(value):
        raise ValueError(f"'{attribute.name}' must be one line of text, not {value!r}")


def _is_word(_: Any, attribute: Attribute[str], value: str) -> None:
    if not _LINE.fullmatch(value) or any(map(str.isspace, value)):
        raise ValueError(f"'{attribute.name}' must be a word as Slurm knows it, without spaces, not {value!r}")


def _is_allowed(_: Any, attribute: Attribute[str], value: str) -> None:
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
    """How a site wants to be asked for GPUs."""

    GPUS_PER_NODE = "gpus-per-node"
    GRES = "gres"
    """``--gres=gpu:N``: older clusters."""
    NONE = "none"
    """Not at all: nodes are given out whole, and the worker takes what it finds."""


@frozen(kw_only=True)
class PyxisConfig:
    """Workers in a container of enroot, by the options that the pyxis plugin adds to srun."""

    image: str = field(validator=_is_line)
    """As ``--container-image`` takes it."""
    mounts: tuple[str, ...] = field(default=(), validator=_lines)
    """Further ``SOURCE:TARGET[:FLAGS]``; the run directory and the working directory are mounted in any case."""


@frozen(kw_only=True)
class ApptainerConfig:
    """Workers in a container of Apptainer, which has to be in the PATH of the nodes."""

    image: str = field(validator=_is_line)
    """File or address of the image."""
    mounts: tuple[str, ...] = field(default=(), validator=_lines)
    """Further ``SOURCE[:TARGET[:OPTIONS]]``; the run directory and the working directory are mounted in any case."""


@frozen(kw_only=True)
class SlurmConfig:
    """Jobs of a Slurm cluster: one for each worker."""

    partition: str | None = field(default=None, validator=_word)
    account: str | None = field(default=None, validator=_word)
    qos: str | None = field(default=None, validator=_word)
    constraint: str | None = field(default=None, validator=_word)
    """Features that nodes must have, as ``a100&nvlink``."""
    exclude: str | None = field(default=None, validator=_word)
    """Nodes that are not to be used, as ``node[03-05],node11``."""
    reservation: str | None = field(default=None, validator=_word)
    time_minutes: int = field(default=24 * 60, validator=ge(1))
    """Every job has a limit, so that nothing runs for ever, whatever happens to the run."""
    margin_seconds: int = field(default=180, validator=and_(ge(1), le(65_535)))
    """So long before the limit a worker is told (SIGUSR1) to write a checkpoint; Slurm may be a minute early."""
    max_requeues: int = field(default=3, validator=ge(0))
    """How often a job is started again after preemption, a failed node or its time limit. 0: never."""
    gpu_option: GpuOption = GpuOption.GPUS_PER_NODE
    ranks_per_node: int | None = field(default=None, validator=optional(ge(1)))
    """How many processes of a training gang (trainer.gang) share a node; null has all of them on one."""
    container: PyxisConfig | ApptainerConfig | None = None
    """Where workers run; the interpreter and this package are then those of the image."""
    setup: tuple[str, ...] = field(default=(), validator=_lines)
    """Lines of bash that come before the worker, as ``module load cuda``. Not for secrets."""
    extra_arguments: tuple[str, ...] = field(default=(), validator=deep_iterable(_is_allowed))
    """Further options of sbatch, as ``--licenses=matlab``; those that are known to be harmless."""
    poll_seconds: float = field(default=5.0, validator=gt(0))
    """How often the queue is looked at, once for the whole run. 30 is kind to a large site."""
    command_timeout_seconds: float = field(default=20.0, validator=gt(0))
    """How long one call of sbatch, squeue, scancel or scontrol may take."""
    submit_timeout_seconds: float = field(default=120.0, validator=gt(0))
    """How long a controller that does not answer is asked to take a job."""
    cancel_timeout_seconds: float = field(default=120.0, validator=gt(0))
    """How long leaving waits until jobs are gone; longer than the cluster's KillWait."""
    completing_seconds: float = field(default=60.0, validator=gt(0))
    """A cancelled job whose node does not confirm its end for so long is left to the cluster, and its node is avoided
    until the cluster has given it up. Longer than KillWait."""
    lost_seconds: float = field(default=60.0, validator=gt(0))
    """A job that has not been in the queue for so long, and has left no word, counts as lost."""
    preflight_seconds: float = field(default=60.0, validator=gt(0))
    """How long a job tries to reach home before it gives its node back."""
    rejoin_seconds: float = field(default=300.0, validator=ge(0))
    """How long a job that has lost home keeps its nodes for the next one, which is the same run, started again with
    --resume; longer than two steps of the trainer. 0: it ends with its lease, and the next home submits another."""

    def __attrs_post_init__(self) -> None:
        if self.margin_seconds >= self.time_minutes * 60:
            raise ValueError(
                f"'margin_seconds' must be less than time_minutes ({self.time_minutes}) are, not {self.margin_seconds}"
            )
