"""The arithmetic of capacity: bounds that hold over any history."""

from __future__ import annotations

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from areal_actors.rollouts.staleness import CapacityLimits, CapacityState, is_too_stale, leaves_time

limits = st.builds(
    CapacityLimits,
    max_concurrent=st.integers(1, 8),
    max_staleness=st.integers(0, 3),
    batch_size=st.integers(1, 4),
)


@given(limits)
def test_fresh_run_has_room_for_what_the_first_versions_consume(bounds: CapacityLimits) -> None:
    """At version 0 there is room for η + 1 batches, but for no more groups than may run at once."""
    state = CapacityState(limits=bounds)

    assert min(bounds.max_concurrent, (bounds.max_staleness + 1) * bounds.batch_size) == state.available


@given(limits, st.integers(0, 50))
def test_recovery_does_not_inflate_capacity(bounds: CapacityLimits, version: int) -> None:
    """A run that is recovered at any version has exactly the room of a fresh one."""
    assert CapacityState(limits=bounds).available == CapacityState.at_version(bounds, version).available


events = st.sampled_from(["start", "accept", "reject", "drop", "advance"])


@given(limits, st.integers(1, 20), st.lists(events, max_size=60))
def test_run_of_so_many_steps_admits_so_many_groups(bounds: CapacityLimits, steps: int, history: list[str]) -> None:
    """Whatever happens, the groups that were trained, wait or run are never more than the run will consume."""
    state = CapacityState(limits=evolve(bounds, max_groups=steps * bounds.batch_size))
    for event in history:
        if event == "start" and state.available > 0:
            state = state.start()
        elif event in {"accept", "reject"} and state.running:
            state = state.settle(is_accepted=event == "accept")
        elif event == "drop" and state.accepted > state.version * bounds.batch_size:
            state = state.refund()
        elif event == "advance" and state.accepted >= (state.version + 1) * bounds.batch_size:
            state = state.advance(state.version + 1)

        assert state.accepted + state.running <= steps * bounds.batch_size
        assert state.available <= CapacityState(limits=bounds, version=state.version).available


class CapacityHistory(RuleBasedStateMachine):
    """Groups end in any order, are dropped or lost; steps wait for those whose time has come. None becomes too old."""

    @initialize(bounds=limits)
    def begin(self, bounds: CapacityLimits) -> None:
        """A fresh run."""
        self.bounds = bounds
        self.state = CapacityState(limits=bounds)
        self.running: list[int] = []
        self.ready: list[int] = []

    @precondition(lambda self: self.state.available > 0)
    @rule()
    def start(self) -> None:
        """A group is admitted."""
        self.state = self.state.start()
        self.running.append(self.state.version)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_accepted=st.sampled_from([True, True, True, False]))
    def settle(self, *, data: st.DataObject, is_accepted: bool) -> None:
        """Any running group ends."""
        admitted = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.state = self.state.settle(is_accepted=is_accepted)
        if is_accepted:
            self.ready.append(admitted)

    @precondition(lambda self: self.can_train())
    @rule()
    def train(self) -> None:
        """The oldest ready groups are trained."""
        self.ready.sort()
        batch, self.ready = self.ready[: self.bounds.batch_size], self.ready[self.bounds.batch_size :]
        for admitted in batch:
            assert not is_too_stale(admitted, version=self.state.version, max_staleness=self.bounds.max_staleness), (
                "a group became too old"
            )
        self.state = self.state.advance(self.state.version + 1)

    @precondition(lambda self: self.ready)
    @rule()
    def drop(self) -> None:
        """A finished group is dropped and refunded."""
        self.ready.pop()
        self.state = self.state.refund()

    @rule()
    def crash(self) -> None:
        """Everything in memory is lost; recovery starts from the version alone."""
        self.state = CapacityState.at_version(self.bounds, self.state.version)
        self.running.clear()
        self.ready.clear()

    def can_train(self) -> bool:
        """Whether there is a batch, and time for the others."""
        return len(self.ready) >= self.bounds.batch_size and leaves_time(
            self.ready,
            self.running,
            version=self.state.version,
            batch_size=self.bounds.batch_size,
            max_staleness=self.bounds.max_staleness,
        )

    @invariant()
    def nothing_stands_still(self) -> None:
        """Where nothing runs, more may start or a step can be made; and every group can still be trained in time."""
        if not hasattr(self, "state"):
            return
        assert self.running or self.state.available > 0 or self.can_train()
        assert all(
            not is_too_stale(admitted, version=self.state.version, max_staleness=self.bounds.max_staleness)
            for admitted in (*self.running, *self.ready)
        )

    @invariant()
    def bounds_hold(self) -> None:
        """Neither more groups than may run at once, nor more than η + 1 batches ahead of what was consumed."""
        if not hasattr(self, "state"):
            return
        ahead = self.state.accepted + self.state.running - self.state.version * self.bounds.batch_size

        assert len(self.running) == self.state.running <= self.bounds.max_concurrent
        assert ahead <= (self.bounds.max_staleness + 1) * self.bounds.batch_size


TestCapacityHistory = CapacityHistory.TestCase
