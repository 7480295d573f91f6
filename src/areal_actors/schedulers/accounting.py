"""Resource accounting for one machine: pure arithmetic, without processes or clocks.

A share is allocated as a whole or not at all, and released once. No resource is allocated twice, unless sharing is
enabled.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from attrs import frozen

from areal_actors.errors import SchedulerError
from areal_actors.schedulers.base import Resources

_MIB = 1 << 20


@frozen(kw_only=True)
class Machine:
    """The resources of a machine.

    ``gpus`` are names as in ``CUDA_VISIBLE_DEVICES``; ``memory_mib`` is ``None`` if it is unknown.
    """

    cpus: int
    memory_mib: int | None = None
    gpus: tuple[str, ...] = ()

    def __str__(self) -> str:
        return _in_words(self.cpus, self.memory_mib, len(self.gpus))


@frozen(eq=False)
class Share:
    """Resources that a worker holds until they are given back."""

    resources: Resources
    gpus: tuple[str, ...] = ()


class Inventory:
    """The allocated and the free resources of a machine. With ``is_shared``, workers may hold the same resources."""

    def __init__(self, machine: Machine, *, is_shared: bool = False) -> None:
        self.machine = machine
        self._is_shared = is_shared
        self._shares: set[Share] = set()

    @property
    def free(self) -> Machine:
        """Return the resources that are not allocated; counts may be negative where resources are shared."""
        taken = [share.resources for share in self._shares]
        memory = self.machine.memory_mib
        used = Counter(gpu for share in self._shares for gpu in share.gpus)
        return Machine(
            cpus=self.machine.cpus - sum(one.cpus for one in taken),
            memory_mib=None if memory is None else memory - sum(one.memory_mib or 0 for one in taken),
            gpus=tuple(gpu for gpu in self.machine.gpus if not used[gpu]),
        )

    def check(self, name: str, *wanted: Resources) -> None:
        """Check that the resources ``wanted``, taken together, fit the empty machine.

        With sharing, only a single worker that wants more GPUs than there are is rejected.

        Raises:
            SchedulerError: the message names the resources wanted, those of the machine, and how to fix it.
        """
        total = Resources(
            cpus=sum(one.cpus for one in wanted),
            memory_mib=sum(one.memory_mib or 0 for one in wanted) or None,
            gpus=sum(one.gpus for one in wanted),
        )
        # Sharing does not create GPUs: a single worker still needs as many devices as it asks for.
        if self._is_shared and not any(one.gpus > len(self.machine.gpus) for one in wanted):
            return
        if not _fits(total, self.machine):
            raise SchedulerError(
                f"{name} cannot be placed: {_words_of(total)} are wanted, and this machine has {self.machine}. Ask for "
                "less in scheduler.roles, or set scheduler.local.oversubscribe: true, which lets workers share all "
                "but missing GPUs."
            )

    def take(self, wanted: Resources) -> Share | None:
        """Allocate a share and return it, or return ``None`` while too little is free."""
        if not self._is_shared and not _fits(wanted, self.free):
            return None
        used = Counter(gpu for share in self._shares for gpu in share.gpus)
        # With sharing, hand out the least used GPUs first, so that workers spread over all devices.
        least = sorted(self.machine.gpus, key=lambda gpu: (used[gpu], self.machine.gpus.index(gpu)))
        share = Share(wanted, tuple(least[: wanted.gpus]))
        self._shares.add(share)
        return share

    def give_back(self, share: Share) -> None:
        """Release a share. Releasing it again has no effect."""
        self._shares.discard(share)

    def describe_wait(self, wanted: Resources) -> str:
        """Return a sentence that explains why ``wanted`` cannot be allocated at present."""
        return f"It waits for {_words_of(wanted)}; of {self.machine}, {self.free} are free."


def find_machine(
    *,
    cpus: int | None = None,
    memory_mib: int | None = None,
    gpus: Iterable[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Machine:
    """Return the resources of this machine; arguments that are given replace the values detected."""
    if cpus is None:
        # The affinity mask, not the number of cores: containers and Slurm steps restrict a process to some of them.
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if memory_mib is None:
        # Some systems do not say how much memory they have.
        with suppress(ValueError, OSError):
            memory_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _MIB
    if gpus is None:
        given = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
        # An empty variable hides all GPUs; only if it is not set, the devices of the NVIDIA driver decide.
        if given is not None:
            gpus = [name.strip() for name in given.split(",") if name.strip() and name.strip() != "-1"]
        else:
            devices = (re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia*"))
            gpus = map(str, sorted(int(match[1]) for match in devices if match))
    return Machine(cpus=cpus, memory_mib=memory_mib, gpus=tuple(gpus))


def _fits(wanted: Resources, machine: Machine) -> bool:
    # Unknown memory, of the worker or of the machine, does not restrict placement.
    has_memory = wanted.memory_mib is None or machine.memory_mib is None or wanted.memory_mib <= machine.memory_mib
    return wanted.cpus <= machine.cpus and wanted.gpus <= len(machine.gpus) and has_memory


def _words_of(resources: Resources) -> str:
    return _in_words(resources.cpus, resources.memory_mib, resources.gpus)


def _in_words(cpus: int, memory_mib: int | None, gpus: int) -> str:
    words = [f"{cpus} CPU{'' if cpus == 1 else 's'}", f"{gpus} GPU{'' if gpus == 1 else 's'}"]
    if memory_mib is not None:
        words.append(f"{memory_mib} MiB")
    return ", ".join(words[:-1]) + f" and {words[-1]}"
