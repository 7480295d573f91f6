"""Tensors of workflows: conversion to rows, joining, padding, and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.cache import from_tensors, pad_together, to_tensors
from areal_actors.domain import SamplingDistribution, SessionId, Trajectory, TurnInfo
from areal_actors.errors import ArealError, ExportError

SESSION = SessionId("train-7-0")


def tensors(**changes: Any) -> dict[str, Any]:
    """One row of two prompt tokens and two sampled ones, then a padded place."""
    columns = {
        "input_ids": torch.tensor([[5, 6, 7, 2, 0]], dtype=torch.int32),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0]], dtype=torch.bool),
        "loss_mask": torch.tensor([[0, 0, 1, 1, 0]], dtype=torch.int32),
        "logprobs": torch.tensor([[0.0, 0.0, -0.5, -0.25, 0.0]]),
        "versions": torch.tensor([[-1, -1, 3, 4, -1]], dtype=torch.int32),
        "rewards": torch.tensor([0.5]),
    } | changes
    return {name: value for name, value in columns.items() if value is not None}


_SAMPLINGS = st.builds(  # what float32 holds exactly, and tensors say
    SamplingDistribution,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.25]),
    top_p=st.sampled_from([1.0, 0.5]),
    top_k=st.sampled_from([0, 5]),
    min_p=st.sampled_from([0.0, 0.125]),
)


@st.composite
def rows(draw: st.DrawFn) -> Trajectory:
    """A row of any shape whose tokens were sampled in runs, each with the row's reward."""
    mask = np.array([0, *draw(st.lists(st.integers(0, 1), min_size=1, max_size=12))])
    reward = draw(st.floats(-4, 4, width=32))
    num = len(mask)
    turns = np.where(mask == 1, np.cumsum(np.diff(mask, prepend=0) == 1) - 1, -1)
    return Trajectory(
        session=SESSION,
        interactions=tuple(f"turn-{turn}" for turn in range(max(int(turns.max()) + 1, 1))),
        input_ids=draw(st.lists(st.integers(0, 99), min_size=num, max_size=num)),
        loss_mask=mask,
        logprobs=np.where(mask == 1, draw(st.floats(-9, 0, width=32)), 0),
        versions=np.where(mask == 1, draw(st.integers(0, 9)), -1),
        returns=np.where(mask == 1, reward, 0),
        turns=turns,
        reward=reward,
        turn_infos=tuple(TurnInfo(sampling=draw(st.none() | _SAMPLINGS)) for _ in range(int(turns.max()) + 1)),
    )


def columns_of(row: Trajectory) -> dict[str, list[Any]]:
    names = ("input_ids", "loss_mask", "logprobs", "versions", "returns", "turns")
    samplings = [_as_tensors_say(info.sampling) for info in row.turn_infos]
    known = samplings if any(samplings) else []
    return {name: getattr(row, name).tolist() for name in names} | {"reward": [row.reward], "samplings": known}


def _as_tensors_say(sampling: SamplingDistribution | None) -> SamplingDistribution | None:
    """A greedy turn is not cut off."""
    return SamplingDistribution(temperature=0.0) if sampling is not None and sampling.is_greedy else sampling


@given(st.lists(rows(), min_size=1, max_size=5), st.data())
def test_rows_round_trip_through_tensors(made: list[Trajectory], data: st.DataObject) -> None:
    """They may be cut into dictionaries and joined again."""
    cut = data.draw(st.integers(0, len(made)))
    parts = [to_tensors(part) for part in (made[:cut], made[cut:]) if part]
    read = from_tensors(pad_together(parts), session=SESSION)

    assert [columns_of(row) for row in made] == [columns_of(row) for row in read]


@given(st.lists(rows(), min_size=1, max_size=4))
def test_joining_single_rows_pads_them(made: list[Trajectory]) -> None:
    joined, together = pad_together([to_tensors([row]) for row in made]), to_tensors(made)

    assert together.keys() == joined.keys()
    assert all(torch.equal(together[name], joined[name]) for name in together)
    assert all(together[name].dtype == joined[name].dtype for name in together)


def test_left_padding_is_removed() -> None:
    mirrored = {name: value.flip(1) if value.ndim == 2 else value for name, value in tensors().items()}
    mirrored["loss_mask"] = torch.tensor([[0, 0, 0, 1, 0]])
    (row,) = from_tensors(mirrored | {"versions": torch.full((1, 5), 3)}, session=SESSION)

    assert [2, 7, 6, 5] == row.input_ids.tolist()
    assert [0, 0, 1, 0] == row.loss_mask.tolist()


@pytest.mark.parametrize("version", [None, 9])
def test_input_ids_and_attention_mask_are_enough_for_a_row(version: int | None) -> None:
    """Nothing of it is trained."""
    tensors = {"input_ids": [[1, 2, 3]], "attention_mask": [[True] * 3]}
    (row,) = from_tensors(tensors, session=SESSION, version=version)

    assert (0, -1, 0.0) == (row.num_trained_tokens, row.head_version, row.reward)


def test_missing_versions_are_those_of_the_engine() -> None:
    """Only sampled tokens have one."""
    (row,) = from_tensors(tensors(versions=None), session=SESSION, version=9)

    assert [-1, -1, 9, 9] == row.versions.tolist()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"input_ids": None}, "lack input_ids; there are attention_mask"),
        ({"attention_mask": None}, "lack attention_mask"),
        ({"input_ids": torch.tensor([5, 6, 7, 2, 0])}, r"input_ids must be \[batch, seq\]"),
        ({"loss_mask": torch.zeros(1, 4)}, r"loss_mask is \[1, 4\], but input_ids is \[1, 5\]"),
        ({"rewards": torch.tensor([0.5, 0.5])}, r"rewards must be \[batch\], here \[1\], not \[2\]"),
        ({"rewards": torch.tensor([float("nan")])}, "must be finite"),
        ({"temperatures": torch.full((1, 5), float("nan"))}, "sampled with its temperatures"),
        ({"temperatures": torch.full((1, 5), -0.5)}, "sampled with its temperatures"),
        ({"top_ps": torch.zeros(1, 5)}, "sampled with its top_ps"),
        ({"attention_mask": torch.zeros(1, 5)}, "no token under its attention_mask"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1, 0]])}, "has a gap"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 0, 0]])}, "trains padding"),
        ({"input_ids": torch.tensor([[5, 6, -100, 2, 0]])}, "negative id"),
        ({"input_ids": torch.tensor([[5, 6, 7.5, 2, 0]])}, "input_ids must be int32"),
        ({"input_ids": [["a"] * 5]}, "input_ids is a list that is not a tensor of numbers"),
        ({"loss_mask": torch.tensor([[1, 0, 1, 1, 0]])}, "trains the first token"),
        ({"loss_mask": torch.tensor([[0, 0, 2, 1, 0]])}, "something else than 0 and 1"),
        ({"logprobs": None}, "there are no logprobs"),
        ({"versions": None}, "there are no versions"),
        ({"logprobs": torch.full((1, 5), float("nan"))}, "log-probability that cannot be one"),
        ({"logprobs": torch.full((1, 5), 0.5)}, "log-probability that cannot be one"),
        ({"versions": torch.full((1, 5), -1)}, "nothing sampled it"),
        ({"advantages": torch.zeros(1, 5)}, "Unknown columns 'advantages'"),
    ],
)
def test_malformed_tensors_are_refused_by_name(changes: dict[str, Any], complaint: str) -> None:
    """The error names the tensor and the row."""
    with pytest.raises(ArealError, match=complaint):
        from_tensors(tensors(**changes), session=SESSION)


def test_outputs_with_two_distributions_are_two_turns() -> None:
    (row,) = from_tensors(tensors(temperatures=[[-1, -1, 0.5, -1, -1]]), session=SESSION)

    assert [-1, -1, 0, 1] == row.turns.tolist()
    assert (SamplingDistribution(temperature=0.5), None) == tuple(info.sampling for info in row.turn_infos)
    assert () == from_tensors(tensors(), session=SESSION)[0].turn_infos


def test_distribution_of_a_turn_is_found_by_its_ids() -> None:
    """The tensors do not contain it."""
    asked = {(7, 2): SamplingDistribution(temperature=0.5)}
    (row,) = from_tensors(tensors(), session=SESSION, sampling_of=lambda ids: asked[tuple(ids.tolist())])

    assert (SamplingDistribution(temperature=0.5),) == tuple(info.sampling for info in row.turn_infos)


def test_results_with_different_tensors_are_not_joined() -> None:
    with pytest.raises(ExportError, match="different tensors"):
        pad_together([tensors(), tensors(rewards=None)])
    with pytest.raises(ExportError, match="no tensors"):
        pad_together([])
