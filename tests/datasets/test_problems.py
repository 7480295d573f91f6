"""Which problem stands where: a pure function of the position, a permutation in every epoch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.datasets import Problems, find_overlap
from areal_actors.errors import DatasetError

sizes = st.integers(1, 60)
seeds = st.integers(0, 2**32)


def rows(num: int) -> list[dict[str, int]]:
    return [{"n": n} for n in range(num)]


@given(size=sizes, seed=seeds, epoch=st.integers(0, 1000))
def test_epoch_has_every_problem_once(size: int, seed: int, epoch: int) -> None:
    """Each epoch is a bijection, whatever the seed and however late."""
    problems = Problems(rows(size), seed=seed)
    seen = [problems.at(position).data["n"] for position in range(epoch * size, (epoch + 1) * size)]

    assert list(range(size)) == sorted(seen)


@given(size=sizes, seed=seeds, positions=st.lists(st.integers(0, 500), max_size=20))
def test_position_determines_the_problem(size: int, seed: int, positions: list[int]) -> None:
    """Asked in any order, by another process, again: the same problem, which knows its position."""
    first, second = Problems(rows(size), seed=seed), Problems(rows(size), seed=seed)
    expected = {position: first.at(position) for position in sorted(set(positions))}

    assert all(expected[position] == second.at(position) for position in positions)
    assert all(position == expected[position].position for position in positions)


def test_epochs_and_seeds_have_different_orders() -> None:
    """The order is another one in each epoch, and with each seed."""

    def order(seed: int, epoch: int) -> list[int]:
        problems = Problems(rows(50), seed=seed)
        return [problems.at(epoch * 50 + index).data["n"] for index in range(50)]

    orders = [order(0, 0), order(0, 1), order(1, 0)]

    assert len({tuple(o) for o in orders}) == 3


@given(size=sizes, position=st.integers(0, 500))
def test_unshuffled_epochs_keep_the_order_of_the_source(size: int, position: int) -> None:
    """The order of the source, again and again."""
    assert Problems(rows(size), is_shuffled=False).at(position).data["n"] == position % size


@given(size=sizes, seed=seeds)
def test_evaluation_keeps_the_order_of_the_source(size: int, seed: int) -> None:
    """Shuffled or not."""
    problems = Problems(rows(size), seed=seed)

    assert [(n, n) for n in range(size)] == [(p.position, p.data["n"]) for p in problems.all()]
    assert size == len(problems)


def test_problem_is_a_copy_for_each_agent() -> None:
    """The next epoch, and a resumed run, see the problem as the source has it."""
    problems = Problems([{"numbers": [1, 2]}])
    problems.at(0).data["numbers"].append(3)

    assert [1, 2] == problems.at(1).data["numbers"]


def test_dataset_without_problems_is_refused() -> None:
    """At once, not at the first step."""
    with pytest.raises(DatasetError, match="no problems"):
        Problems([])


def test_negative_position_is_refused() -> None:
    """A negative one is a mistake of the caller, not the last problem."""
    with pytest.raises(IndexError, match="-1"):
        Problems(rows(3)).at(-1)


@given(train=st.sets(st.integers(0, 30), min_size=1), held_out=st.sets(st.integers(0, 30), min_size=1), seed=seeds)
def test_overlap_is_the_intersection(train: set[int], held_out: set[int], seed: int) -> None:
    """However either is shuffled."""
    trained = Problems([{"n": n, "text": "é"} for n in sorted(train)], seed=seed)
    tested = Problems([{"text": "é", "n": n} for n in sorted(held_out, reverse=True)])

    assert len(train & held_out) == find_overlap(tested, trained)


def test_problem_identity_ignores_how_it_was_made() -> None:
    """The metadata of a generator are not compared; values that are not JSON are, and do not fail."""
    trained = Problems([{"question": "1 + 1", "metadata": {"source_index": 0}, "big": 10**30, "set": {1}}])
    tested = Problems([{"question": "1 + 1", "metadata": {"source_index": 7}, "big": 10**30, "set": {1}}])

    assert find_overlap(tested, trained) == 1
