"""Runs that wait for each other's resources: a partly placed run releases them, a complete one is left alone."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from areal_actors.domain import Role
from areal_actors.run.supervise import PlacementBarrier
from areal_actors.schedulers.base import PlacementState

NEEDED = (Role.TRAINER, Role.GENERATION, Role.PROXY)
RUNNING, PENDING, UNKNOWN = PlacementState.RUNNING, PlacementState.PENDING, PlacementState.UNKNOWN


class _Placement:
    """One whose state is set by hand."""

    def __init__(self, name, state):
        self.spec, self.state = SimpleNamespace(name=name), state

    @property
    def status(self):
        return SimpleNamespace(state=self.state)


def barrier(*states, seconds=10.0, jitter=0.5):
    """One whose workers are in these states, in the order of the roles; an engine more for a fourth."""
    roles = (*NEEDED, Role.GENERATION)
    one = PlacementBarrier(NEEDED, seconds=seconds, jitter=lambda: jitter)
    placements = [_Placement(f"worker-{number}", state) for number, state in enumerate(states)]
    having = [one.hold(role, placement) for role, placement in zip(roles, placements, strict=False)]
    for block in having:
        block.__enter__()
    one.blocks = having  # left when they are dropped
    return one, placements


def test_barrier_releases_partly_placed_run():
    """Not before its patience is over, which begins anew when the roles are together."""
    one, (_, _, proxy) = barrier(RUNNING, RUNNING, PENDING)
    for now in (0.0, 9.0):
        one.check(now=now)
    proxy.state = RUNNING
    one.check(now=9.5)
    proxy.state = PENDING
    for now in (10.0, 19.0):
        one.check(now=now)

    assert 0 == one.num_releases
    one.check(now=20.0)
    assert 1 == one.num_releases
    assert 30.0 == one.opens_at


@given(st.lists(st.sampled_from(list(PlacementState)), min_size=3, max_size=4))
def test_barrier_releases_only_partly_placed_runs(states):
    """A run is whole with one of each role; it gives back only what it holds while a role is known to wait."""
    one, _ = barrier(*states)
    by_role = {role: {state} for role, state in zip(NEEDED, states, strict=False)}
    by_role[Role.GENERATION] |= set(states[3:])
    for now in (0.0, 1e6):
        one.check(now=now)

    assert one.is_complete is all(RUNNING in found for found in by_role.values())
    if one.num_releases:
        assert not one.is_complete
        assert any(RUNNING in found for found in by_role.values())
        assert any(PENDING in found and not found & {RUNNING, UNKNOWN} for found in by_role.values())
