"""What a machine has is handed out exactly."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from areal_actors.errors import SchedulerError
from areal_actors.schedulers.accounting import Inventory, Machine, find_machine
from areal_actors.schedulers.base import Resources

WANTED = st.builds(
    Resources,
    cpus=st.integers(1, 5),
    memory_mib=st.none() | st.integers(1, 50),
    gpus=st.integers(0, 3),
)
MACHINE = Machine(cpus=8, memory_mib=100, gpus=("0", "2", "GPU-abc"))


class Takes(RuleBasedStateMachine):
    """Shares are taken and given back in any order."""

    shares = Bundle("shares")

    def __init__(self) -> None:
        super().__init__()
        self.inventory = Inventory(MACHINE)
        self.taken = []

    @rule(target=shares, wanted=WANTED)
    def take(self, wanted):
        """A worker that fits gets its whole share, another one nothing."""
        free = self.inventory.free
        fits = (
            wanted.cpus <= free.cpus and wanted.gpus <= len(free.gpus) and (wanted.memory_mib or 0) <= free.memory_mib
        )
        share = self.inventory.take(wanted)

        assert fits is (share is not None)
        if share is None:
            return multiple()
        assert wanted.gpus == len(share.gpus)
        self.taken.append(share)
        return share

    @rule(share=consumes(shares))
    def give_back(self, share):
        """Once or twice is the same."""
        self.inventory.give_back(share)
        self.inventory.give_back(share)
        self.taken.remove(share)

    @invariant()
    def nothing_is_owned_twice(self):
        """What is taken and what is free are the machine."""
        free = self.inventory.free
        gpus = Counter(free.gpus) + Counter(gpu for share in self.taken for gpu in share.gpus)

        assert Counter(MACHINE.gpus) == gpus
        assert MACHINE.cpus == free.cpus + sum(share.resources.cpus for share in self.taken)
        assert MACHINE.memory_mib == free.memory_mib + sum(share.resources.memory_mib or 0 for share in self.taken)
        assert free.cpus >= 0
        assert free.memory_mib >= 0


TestTakes = Takes.TestCase


@given(st.lists(WANTED, min_size=1, max_size=4))
def test_exactly_what_never_fits_is_refused(wanted):
    """Refusal is exactly what an empty machine says."""
    inventory = Inventory(MACHINE)
    try:
        inventory.check("worker-0", *wanted)
    except SchedulerError:
        assert any(Inventory(MACHINE).take(one) is None for one in wanted) or None in taken_by(wanted)
    else:
        assert None not in taken_by(wanted)


def taken_by(wanted):
    """All of them together, on an empty machine."""
    inventory = Inventory(MACHINE)
    return [inventory.take(one) for one in wanted]


@given(st.lists(WANTED.filter(lambda one: one.gpus <= 2), min_size=1, max_size=12))
def test_shared_machine_spreads_gpus_evenly(wanted):
    """No worker gets a GPU twice, and numbers of users differ by at most one."""
    inventory = Inventory(MACHINE, is_shared=True)
    inventory.check("worker-0", *wanted)
    shares = [inventory.take(one) for one in wanted]
    users = Counter(dict.fromkeys(MACHINE.gpus, 0))
    for share in shares:
        assert len(set(share.gpus)) == share.resources.gpus
        users.update(share.gpus)

    assert max(users.values()) - min(users.values()) <= 1


def test_refusal_names_the_resources_of_the_machine():
    """And what to do."""
    with pytest.raises(SchedulerError, match="worker-0 cannot be placed: 9 CPUs and 0 GPUs are wanted"):
        Inventory(MACHINE).check("worker-0", Resources(cpus=9))
    with pytest.raises(SchedulerError, match="4 GPUs"):
        Inventory(MACHINE, is_shared=True).check("worker-0", Resources(gpus=4))


def test_gpus_are_those_visible_to_this_process():
    """Its own restriction counts, by number or by name; none means none."""
    given = {"CUDA_VISIBLE_DEVICES": "3, GPU-abc"}

    assert ("3", "GPU-abc") == find_machine(environment=given).gpus
    assert () == find_machine(environment={"CUDA_VISIBLE_DEVICES": ""}).gpus
    assert ("7",) == find_machine(environment=given, gpus=["7"]).gpus
    assert find_machine(environment={}).cpus >= 1
