"""Rows in parquet files: what was trained, token by token."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attrs import asdict
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.interchange.conftest import branching_row, decode, dumped, row_batches, trained_rows

from areal_actors.cache import STYLES, export_trajectories
from areal_actors.domain import FinishReason, SamplingDistribution, TurnInfo
from areal_actors.errors import ExportError
from areal_actors.interchange import dump_path, dump_row, find_dumps, read_rows, write_rows
from areal_actors.testing.strategies import session_records


@settings(max_examples=25)
@given(row_batches())
def test_dumped_rows_round_trip(tmp_path_factory, rows):
    """Every column of every row, for the rows of any session."""
    path = tmp_path_factory.mktemp("rows") / "step-000001.parquet"
    write_rows(path, rows)
    found = read_rows(path)

    assert found == rows
    for row, expected in zip(found, rows, strict=True):
        np.testing.assert_array_equal(row.trainer_logprobs, expected.trainer_logprobs)
    assert [path.name] == [file.name for file in path.parent.iterdir()]


@given(session_records(), st.sampled_from(sorted(STYLES)))
def test_dumped_rows_train_each_sampled_token_once(record, style):
    """Whatever branches share: the masks of all rows add up to the tokens that the session trains."""
    rows = dumped(trained_rows(record, style))
    exported = export_trajectories(record, style=style, discount=1.0)
    trained = [(row.turn_names[turn], step) for row in rows for turn, step in _trained_places(row)]

    assert len(trained) == sum(row.num_trained_tokens for row in exported.trajectories)
    assert len(set(trained)) == len(trained)


def _trained_places(row):
    """The turn of each trained token and its index among the tokens of that turn."""
    for turn in range(len(row.turn_names)):
        for index, place in enumerate(np.flatnonzero(row.turns == turn)):
            if row.loss_mask[place]:
                yield turn, index


def test_dumped_lists_have_one_entry_per_token(tmp_path):
    """They make a table with a line per token; null stands for what the trainer did not compute."""
    rows = branching_row()
    write_rows(tmp_path / "rows.parquet", rows)
    frame = pq.read_table(tmp_path / "rows.parquet").to_pandas()
    tokens = frame[["row", "token_ids", "pieces", "loss_mask", "logprobs", "trainer_logprobs"]].explode(
        ["token_ids", "pieces", "loss_mask", "logprobs", "trainer_logprobs"]
    )
    trained = tokens[tokens.loss_mask == 1]

    assert len(tokens) == sum(len(row.token_ids) for row in rows)
    assert trained.pieces.tolist() == [decode([token]) for token in trained.token_ids]
    assert trained[trained.row != 1].trainer_logprobs.notna().all()
    assert trained[trained.row == 1].trainer_logprobs.isna().all()


def test_dumped_row_has_temperature_and_finish_of_its_turns(make_trained):
    """Each sampled token the temperature of its turn; the finish is that of the last one."""
    infos = (
        TurnInfo(sampling=SamplingDistribution(temperature=0.7), finish=FinishReason.STOP),
        TurnInfo(finish=FinishReason.LENGTH),
    )
    row = dump_row(make_trained(infos), decode, step=4, row=2, pieces={})

    assert (row.step, row.row, row.finish) == (4, 2, "length")
    np.testing.assert_allclose(row.temperatures, [1, 0.7, 1, 1.5])
    assert row.text == ("[3]", "[4][5][6]")
    assert dump_row(make_trained(()), decode, step=4, row=2, pieces={}).temperatures.tolist() == [1, 1.5, 1, 1.5]


def test_dumps_are_found_by_their_steps(tmp_path):
    """In order of steps, and nothing else."""
    for step in (10, 9, 1_000_000):
        write_rows(dump_path(tmp_path, step), [])
    (tmp_path / "notes.parquet").touch()

    assert list(find_dumps(tmp_path)) == [9, 10, 1_000_000]
    assert find_dumps(tmp_path / "none") == {}


def test_foreign_dump_is_refused_by_name(tmp_path):
    """A damaged file, and a parquet file of something else."""
    damaged, foreign = tmp_path / "damaged.parquet", tmp_path / "foreign.parquet"
    damaged.write_bytes(b"no parquet")
    pq.write_table(pa.table({"step": [1]}), foreign)

    with pytest.raises(ExportError, match=r"damaged\.parquet is not a dump of rows"):
        read_rows(damaged)
    with pytest.raises(ExportError, match=r"foreign\.parquet is not a dump .* lacks the columns row, task"):
        read_rows(foreign)


@pytest.fixture
def make_trained(make_trajectory):
    """A row of four tokens, of which the second and the fourth are trained, with the infos of its two turns."""
    from areal_actors.domain import TrainedRow

    def make(infos):
        return TrainedRow(
            trajectory=make_trajectory(infos),
            advantages=np.zeros(4),
            trainer_logprobs=np.full(4, np.nan),
            task=0,
            member=0,
            episode_reward=0.0,
            temperature=1.5,
        )

    return make


@pytest.fixture
def make_trajectory():
    """A trajectory of two turns."""
    from areal_actors.domain import InteractionId, SessionId, Trajectory

    def make(infos):
        return Trajectory(
            session=SessionId("s"),
            interactions=(InteractionId("a"), InteractionId("b")),
            input_ids=[3, 4, 5, 6],
            loss_mask=[0, 1, 0, 1],
            logprobs=[0, -1, 0, -1],
            versions=[-1, 0, -1, 0],
            returns=[0, 1, 0, 1],
            turns=[-1, 0, -1, 1],
            reward=1.0,
            turn_infos=infos,
        )

    return make


def test_documentation_lists_every_dumped_column():
    """``docs/guides/export.md`` has a line for each."""
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "guides" / "export.md").read_text()

    assert {f"`{name}`" for name in asdict(branching_row()[0])} <= set(page.replace(",", " ").replace("|", " ").split())
