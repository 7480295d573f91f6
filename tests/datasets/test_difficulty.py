"""Pools of problems by solve rate: shares, order, and draws that a resumed run repeats."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from attrs import asdict
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.datasets.difficulty import DifficultyConfig, Pool, ProblemPools
from areal_actors.domain import DataPosition, Episode, Group, GroupId, PoolsState, Problem, SessionId
from areal_actors.training.actor import parse_position

ON = DifficultyConfig(enabled=True)


def group_of(*rewards: float, failed: int = 0) -> Group:
    """A group whose episodes earned ``rewards``; ``failed`` more failed."""
    episodes = [Episode(session=SessionId(f"s{n}"), member=n, reward=reward) for n, reward in enumerate(rewards)]
    episodes += [Episode(session=SessionId(f"f{n}"), member=n, failure="lost") for n in range(failed)]
    return Group(id=GroupId("g"), problem=Problem(position=0, data={}), episodes=tuple(episodes))


SOLVED, HALF, UNSOLVED = group_of(1, 1), group_of(1, 0), group_of(0, 0.5)

events = st.lists(st.sampled_from(["draw", "solved", "half", "unsolved"]), max_size=40)


def reload(state: PoolsState) -> PoolsState:
    """The state after it was written to a checkpoint and read again."""
    found = parse_position({"position": json.loads(json.dumps(asdict(DataPosition(pools=state))))}).pools
    assert found is not None
    return found


def play(pools: ProblemPools, history: list[str], *, position: int, running: list[int]) -> tuple[list[int], int]:
    """Draw at one position after the other, and learn of the oldest that runs; returns the rows that were drawn."""
    rows = []
    for event in history:
        if event == "draw":
            rows.append(pools.draw(position))
            running.append(position)
            position += 1
        elif running:
            pools.learn(running.pop(0), {"solved": SOLVED, "half": HALF, "unsolved": UNSOLVED}[event])
    return rows, position


@given(before=events, after=events, size=st.integers(1, 12), seed=st.integers(0, 99))
def test_draws_of_a_resumed_run_are_equal(before: list[str], after: list[str], size: int, seed: int) -> None:
    """From the summary at any moment: what runs is run again as it was, and what follows is the same."""
    pools = ProblemPools(ON, num_problems=size, seed=seed)
    running: list[int] = []
    _, position = play(pools, before, position=0, running=running)
    state = pools.summary()
    resumed = ProblemPools(ON, num_problems=size, seed=seed, start=reload(state))

    assert [pools.draw(at) for at in running] == [resumed.draw(at) for at in running]
    assert state == resumed.summary()
    expected = play(pools, after, position=position, running=list(running))
    assert expected == play(resumed, after, position=position, running=list(running))
    assert pools.summary() == resumed.summary()


@given(size=st.integers(1, 30), seed=st.integers(0, 99))
def test_draws_have_every_problem_before_one_twice(size: int, seed: int) -> None:
    """As long as nothing is known, the pools are one, and its problems are drawn in turn."""
    pools = ProblemPools(ON, num_problems=size, seed=seed)

    assert set(range(size)) == {pools.draw(position) for position in range(size)}


def learnt(config: DifficultyConfig) -> ProblemPools:
    """Thirty problems: ten each of easy, normal and hard ones, in this order."""
    pools = ProblemPools(config, num_problems=30, seed=3)
    rows = [pools.draw(position) for position in range(30)]
    for position, row in enumerate(rows):
        pools.learn(position, (SOLVED, HALF, UNSOLVED)[row // 10])
    return pools


def test_draws_give_each_pool_its_share() -> None:
    """Of 3,000 draws from three known pools, within three standard deviations."""
    config = DifficultyConfig(enabled=True, easy_fraction=0.1, hard_fraction=0.25)
    pools = learnt(config)
    drawn = Counter(pools.draw(position) // 10 for position in range(30, 3030))

    assert [10, 10] == [pools.count(Pool.EASY), pools.count(Pool.HARD)]
    assert abs(drawn[0] - 300) < 50
    assert abs(drawn[2] - 750) < 72


def test_draws_move_problems_between_pools() -> None:
    """The last group counts, and one whose episodes all failed says nothing."""
    pools = ProblemPools(ON, num_problems=1)
    sizes = []
    for position, group in enumerate([SOLVED, group_of(failed=2), HALF, group_of(0, failed=1)]):
        pools.draw(position)
        pools.learn(position, group)
        sizes.append((pools.count(Pool.EASY), pools.count(Pool.HARD)))

    assert [(1, 0), (1, 0), (0, 0), (0, 1)] == sizes


def test_draws_of_an_empty_pool_go_to_others() -> None:
    """With easy problems alone, they are drawn all the same."""
    pools = ProblemPools(DifficultyConfig(enabled=True, easy_fraction=0.0), num_problems=2)
    for position in range(2):
        pools.draw(position)
        pools.learn(position, SOLVED)

    assert {0, 1} == {pools.draw(position) for position in range(2, 4)}


def test_draws_forget_problems_of_a_smaller_dataset() -> None:
    """A run may be resumed with fewer problems; what was assigned there is drawn anew."""
    pools = ProblemPools(ON, num_problems=9)
    rows = [pools.draw(position) for position in range(9)]
    smaller = ProblemPools(ON, num_problems=3, start=pools.summary())

    assert all(smaller.draw(position) < 3 for position in range(9))
    assert [smaller.draw(at) for at, row in enumerate(rows) if row < 3] == [row for row in rows if row < 3]


def test_contradicting_difficulty_settings_are_refused() -> None:
    """Pools do not overlap, and get no more than all draws."""
    with pytest.raises(ValueError, match="hard_below"):
        DifficultyConfig(easy_above=0.2, hard_below=0.2)
    with pytest.raises(ValueError, match=r"add up to 1\.5"):
        DifficultyConfig(easy_fraction=0.75, hard_fraction=0.75)
    assert PoolsState() == ProblemPools(ON, num_problems=2).summary()
