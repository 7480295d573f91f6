"""Laws of training rows: every sampled token exactly once, the same in every style, exact through JSON."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.cache import (
    STYLES,
    Unrewarded,
    backpropagate,
    export_trajectories,
    to_arrays,
)
from areal_actors.client import format_episode, parse_episode
from areal_actors.domain import (
    Episode,
    FinishReason,
    Interaction,
    InteractionId,
    InteractionStatus,
    SessionRecord,
    UntrainedReason,
    find_truncated,
    mask_truncated,
    unfold,
    withhold_truncated,
)
from areal_actors.domain.rows import path_to
from areal_actors.testing.strategies import session_records

styles = st.sampled_from(sorted(STYLES))


def reference_prompt(turn: Interaction, by_id: dict[InteractionId, Interaction]) -> list[int]:
    """The prompt by recursion on token parents."""
    if turn.token_parent is None:
        return turn.prompt_suffix.tolist()
    parent = by_id[turn.token_parent]
    assert parent.completion is not None
    return [*reference_prompt(parent, by_id), *parent.completion.token_ids.tolist(), *turn.prompt_suffix.tolist()]


def trained_tokens(exported: Episode) -> Counter[tuple[Any, ...]]:
    """(turn, position in its output, id, logprob, version, return) of every trained token, counted."""
    found: Counter[tuple[Any, ...]] = Counter()
    for row in exported.trajectories:
        seen: Counter[int] = Counter()
        for t in range(row.num_tokens):
            turn = int(row.turns[t])
            if turn >= 0 and row.loss_mask[t]:
                columns = (row.input_ids, row.logprobs, row.versions, row.returns)
                found[(row.interactions[turn], seen[turn], *(c[t].item() for c in columns))] += 1
            seen[turn] += 1
    return found


def num_trained(exported: Episode) -> int:
    """The number of sampled tokens that a row trains."""
    return sum(row.num_trained_tokens for row in exported.trajectories)


def sampled_tokens(
    record: SessionRecord, discount: float, unrewarded: Unrewarded = Unrewarded.INHERIT
) -> Counter[tuple[Any, ...]]:
    """What was really sampled in the completed interactions, from the record alone."""
    returns = backpropagate(record, discount, unrewarded=unrewarded)
    found: Counter[tuple[Any, ...]] = Counter()
    for turn in record.interactions:
        if turn.status is InteractionStatus.COMPLETED:
            columns = (turn.completion.token_ids, turn.completion.logprobs, turn.completion.versions)
            for t in range(len(turn.completion.token_ids)):
                value = np.float32(returns[turn.id]).item()
                found[(turn.id, t, *(c[t].item() for c in columns), value)] += 1
    return found


@given(
    record=session_records(),
    discount=st.floats(0, 1),
    style=styles,
    max_tokens=st.none() | st.integers(1, 20),
    unrewarded=st.sampled_from(Unrewarded),
)
def test_sampled_tokens_are_trained_once_or_listed(
    *, record: SessionRecord, discount: float, style: str, max_tokens: int | None, unrewarded: Unrewarded
) -> None:
    exported = export_trajectories(record, discount=discount, style=style, max_tokens=max_tokens, unrewarded=unrewarded)
    left_out = {entry.interaction: entry.num_tokens for entry in exported.untrained}
    expected = {key for key in sampled_tokens(record, discount, unrewarded) if key[0] not in left_out}

    assert dict.fromkeys(expected, 1) == dict(trained_tokens(exported))
    total = sum(len(turn.completion.token_ids) for turn in record.interactions if turn.completion is not None)
    assert total == num_trained(exported) + sum(entry.num_tokens for entry in exported.untrained)
    assert left_out == {turn.id: len(turn.completion.token_ids) for turn in record.interactions if turn.id in left_out}


@given(session_records(), st.floats(0, 1), st.none() | st.integers(1, 20))
def test_styles_agree_on_sampled_tokens(record: SessionRecord, discount: float, max_tokens: int | None) -> None:
    individual, concat, tree = (
        export_trajectories(record, discount=discount, style=style, max_tokens=max_tokens)
        for style in ("individual", "concat", "tree")
    )

    assert trained_tokens(individual) == trained_tokens(concat) == trained_tokens(tree)
    assert individual.untrained == concat.untrained == tree.untrained


@given(session_records(), styles)
def test_rows_hold_the_exact_prompt_and_output(record: SessionRecord, style: str) -> None:
    by_id = {turn.id: turn for turn in record.interactions}
    rows = export_trajectories(record, discount=0.9, style=style).trajectories
    for row in (branch.row for whole in rows for branch in unfold(whole)):
        last = by_id[row.interactions[-1]]
        expected = [*reference_prompt(last, by_id), *last.completion.token_ids.tolist()]

        assert expected == row.input_ids.tolist()
        for column in (row.loss_mask, row.logprobs, row.versions, row.returns, row.turns):
            assert len(column) == row.num_tokens
        assert (row.versions >= 0).tolist() == (row.turns >= 0).tolist()
        assert not row.logprobs[row.loss_mask == 0].any()
        assert not row.loss_mask[row.turns < 0].any()
        assert not row.returns[row.turns < 0].any()
        assert row.num_trained_tokens > 0


@given(session_records(), st.none() | st.integers(1, 20))
def test_tree_branches_equal_concat_rows(record: SessionRecord, max_tokens: int | None) -> None:
    """Token by token, in the same order."""
    concat, tree = (
        export_trajectories(record, discount=0.9, style=style, max_tokens=max_tokens) for style in ("concat", "tree")
    )
    branches = [branch.row for row in tree.trajectories for branch in unfold(row)]
    if len(tree.trajectories) > 1:
        return  # a part may repeat a branch of another one as context

    assert len(concat.trajectories) == len(branches)
    for expected, found in zip(concat.trajectories, branches, strict=True):
        for name in ("input_ids", "loss_mask", "logprobs", "versions", "returns", "raw_logprobs"):
            assert np.array_equal(getattr(expected, name), getattr(found, name)), name
        assert found.interactions == tuple(expected.interactions[t] for t in np.unique(expected.turns) if t >= 0)
        assert np.float32(expected.reward) == np.float32(found.reward)


@given(session_records(), styles)
def test_rows_keep_the_sampling_distribution_of_each_token(record: SessionRecord, style: str) -> None:
    """This holds in each style, and after a document was written and read."""
    asked = {turn.id: turn.sampling for turn in record.interactions}
    exported = export_trajectories(record, discount=1.0, style=style)
    document = orjson.dumps(
        format_episode(Episode(session=record.id, member=0, trajectories=exported.trajectories)),
        option=orjson.OPT_SERIALIZE_NUMPY,
    )
    for rows in (exported.trajectories, parse_episode(orjson.loads(document)).trajectories):
        for row in (branch.row for whole in rows for branch in unfold(whole)):
            for t in np.flatnonzero(row.loss_mask):
                turn = row.turns[t]
                assert row.turn_infos[turn].sampling == asked[row.interactions[turn]]


def attention_mask(predecessors: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Return whether token i attends to token j, bool [T, T]: to itself and its ancestors."""
    seen = np.eye(len(predecessors), dtype=np.bool_)
    for index, before in enumerate(predecessors):
        if before >= 0:
            seen[index] |= seen[before]
    return seen


@given(session_records())
def test_tree_row_holds_each_sampled_token_once(record: SessionRecord) -> None:
    (*rows,) = export_trajectories(record, discount=0.9, style="tree").trajectories

    assert len(rows) <= 1
    for row in rows:
        pasts = [tuple(path_to(t, row.predecessors)[:-1]) for t in range(row.num_tokens)]
        read = [(past, int(row.input_ids[t])) for t, past in enumerate(pasts) if row.turns[t] < 0]
        mask = attention_mask(row.predecessors)

        assert len(read) == len(set(read))
        assert row.position_ids.tolist() == [len(past) for past in pasts]
        assert [np.flatnonzero(seen).tolist() for seen in mask] == [[*past, t] for t, past in enumerate(pasts)]


@given(session_records(), styles, st.integers(1, 20))
def test_rows_are_within_the_maximum_length(record: SessionRecord, style: str, max_tokens: int) -> None:
    """Turns that do not fit are listed."""
    exported = export_trajectories(record, discount=0.9, style=style, max_tokens=max_tokens)

    assert all(row.num_tokens <= max_tokens for row in exported.trajectories)
    for entry in exported.untrained:
        turn = next(t for t in record.interactions if t.id == entry.interaction)
        if entry.reason is UntrainedReason.TOO_LONG:
            assert turn.num_prompt_tokens + entry.num_tokens > max_tokens


@given(session_records(), st.floats(0, 1), styles)
def test_exporting_twice_gives_the_same(record: SessionRecord, discount: float, style: str) -> None:
    """Another discount in between changes nothing."""
    first = export_trajectories(record, discount=discount, style=style)
    export_trajectories(record, discount=discount / 3, style=style)

    assert first == export_trajectories(record, discount=discount, style=style)


@given(session_records(), styles)
def test_arrays_are_padded_rows(record: SessionRecord, style: str) -> None:
    """Each row stands at the beginning of each array."""
    rows = export_trajectories(record, discount=0.9, style=style).trajectories
    arrays = to_arrays(rows)
    pads = {"input_ids": 0, "loss_mask": 0, "logprobs": 0, "versions": -1, "returns": 0}

    for position, row in enumerate(rows):
        assert arrays["attention_mask"][position].tolist() == [
            t < row.num_tokens for t in range(arrays["attention_mask"].shape[1])
        ]
        for name, pad in pads.items():
            assert arrays[name][position, : row.num_tokens].tolist() == getattr(row, name).tolist()
            assert (arrays[name][position, row.num_tokens :] == pad).all()


@given(record=session_records(), style=styles)
def test_cut_answers_can_be_masked(record: SessionRecord, style: str) -> None:
    """Tokens of other answers stay, and each cut answer is listed."""
    exported = export_trajectories(record, style=style, discount=1.0)
    cut = {
        turn.id
        for turn in record.interactions
        if turn.completion is not None and turn.completion.finish is FinishReason.LENGTH
    }
    whole = trained_tokens(exported)
    kept = Counter({key: num for key, num in whole.items() if key[0] not in cut})
    branches = tuple(branch.row for row in exported.trajectories for branch in unfold(row))
    episode = withhold_truncated(Episode(session=record.id, member=0, trajectories=exported.trajectories))
    listed = {entry.interaction: entry.num_tokens for entry in episode.untrained}

    assert kept == trained_tokens(evolve(exported, trajectories=episode.trajectories))
    assert kept == trained_tokens(evolve(exported, trajectories=tuple(map(mask_truncated, branches))))
    assert sum(listed.values()) == whole.total() - kept.total()
    assert set(listed) == {key[0] for key in whole} & cut
    assert all(not find_truncated(row) or sum(find_truncated(row).values()) == 0 for row in episode.trajectories)
