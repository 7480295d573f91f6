"""Ending teams of OpenMP workers, so that those of another thread may spin."""

import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.lib.openmp import CpuTime, TeamKeeper, end_team
from areal_actors.lib.threads import OwnThread


def _read_from(times: list[CpuTime | None]) -> Iterator[CpuTime | None]:
    return iter(times)


@given(
    seconds=st.floats(0.5, 100),
    own=st.floats(0, 4),
    others=st.floats(0, 4),
)
def test_a_team_is_ended_only_if_others_leave_the_cores_alone(seconds: float, own: float, others: float) -> None:
    """What counts is the CPU time of other processes in the time since the last look; our own does not."""
    readings = _read_from(
        [
            CpuTime(at=7.0, machine=100.0, own=3.0),
            CpuTime(at=7.0 + seconds, machine=100.0 + (own + others) * seconds, own=3.0 + own * seconds),
        ]
    )
    ended: list[bool] = []
    keeper = TeamKeeper(lambda: next(readings), lambda: not ended.append(True))
    settled = keeper.settle()
    assert settled is bool(ended)
    if abs(others - 0.15) > 1e-6:
        assert settled is (others < 0.15)


def test_two_looks_in_one_moment_give_one_verdict() -> None:
    """The kernel counts in hundredths of a second: within a moment, one tick would decide."""
    readings = _read_from(
        [
            CpuTime(at=0.0, machine=0.0, own=0.0),
            CpuTime(at=10.0, machine=12.0, own=12.0),
            CpuTime(at=10.1, machine=12.2, own=12.0),
        ]
    )
    keeper = TeamKeeper(lambda: next(readings), lambda: True)
    assert [keeper.settle(), keeper.settle()] == [True, True]


@pytest.mark.parametrize("first", [None, CpuTime(at=0.0, machine=0.0, own=0.0)])
def test_nothing_is_ended_where_the_system_does_not_report_times(first: CpuTime | None) -> None:
    """On other systems the teams stay as they are."""
    readings = _read_from([first, None])
    assert not TeamKeeper(lambda: next(readings), lambda: True).settle()


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is what PyTorch uses on Linux")
@pytest.mark.anyio
async def test_a_thread_that_ended_its_team_computes_the_same_again() -> None:
    """Only the workers are gone; the next operation starts others."""
    left, right = torch.randn(256, 512), torch.randn(512, 256)

    def compute() -> torch.Tensor:
        return left @ right

    async with OwnThread.open() as thread:
        before = await thread.run(compute)
        assert await thread.run(end_team)
        assert torch.equal(await thread.run(compute), before)
        # Twice in a row, and by a thread that never computed.
        assert await thread.run(end_team)
        assert await thread.run(end_team)


@pytest.mark.skipif(sys.platform != "linux", reason="it is read from /proc")
def test_the_time_of_this_process_is_part_of_that_of_the_machine() -> None:
    """Both clocks run, and the first includes the second."""
    before = CpuTime.read()
    assert before is not None
    assert 0 < before.own <= before.machine + 0.1
