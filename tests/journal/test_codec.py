"""Facts become rows and come back as they were."""

from __future__ import annotations

import math
import sqlite3
from datetime import UTC, datetime

import pytest
from attrs import evolve, has
from attrs import fields as fields_of
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.domain import GroupQueued, TurnEnded
from areal_actors.errors import JournalError
from areal_actors.journal.codec import TABLES, encode
from areal_actors.journal.migrations import migrate
from areal_actors_testing.journal_contract import create_start, create_turn
from areal_actors_testing.journal_events import events, json_values


@pytest.fixture(scope="module")
def connection():
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(connection)
    yield connection
    connection.close()


def written_and_read(connection, event):
    """The rows of one event, decoded."""
    connection.execute("BEGIN")
    try:
        for sql, values in encode(event, 1, 0.0):
            connection.execute(sql, values)
        found = []
        for table in TABLES:
            rows = connection.execute(f"SELECT {', '.join(table.columns)} FROM {table.name}").fetchall()
            found += [table.decode(dict(zip(table.columns, row, strict=True))) for row in rows]
        return found
    finally:
        connection.execute("ROLLBACK")


def exact(value):
    """What tells any two values apart, NaN and types included."""
    if has(type(value)):
        return type(value), {field.name: exact(getattr(value, field.name)) for field in fields_of(type(value))}
    if isinstance(value, dict):
        return {key: exact(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [exact(inner) for inner in value]
    if hasattr(value, "tobytes"):
        return value.dtype, value.tobytes()
    if isinstance(value, float):
        return float, "nan" if math.isnan(value) else value
    return type(value), value


@given(event=events())
def test_every_fact_comes_back_exactly(connection, event):
    """Texts with surrogates, integers of any size, NaN, arrays bit by bit: equal values of equal types."""
    found = written_and_read(connection, event)

    assert [exact(event)] == [exact(each) for each in found]


@given(value=json_values())
def test_problems_come_back_exactly(connection, value):
    """Whatever JSON a problem holds."""
    event = GroupQueued(group="g", position=0, sessions=(), data={"problem": value})

    assert [exact(event)] == [exact(each) for each in written_and_read(connection, event)]


def test_arrays_that_come_back_are_settled(connection):
    """They are read-only and are not copied again by the values that hold them."""
    (turn,) = written_and_read(connection, create_turn("a", 0))
    completion = turn.interaction.completion

    assert isinstance(turn, TurnEnded)
    assert not completion.token_ids.flags.writeable
    assert evolve(completion).token_ids is completion.token_ids


def test_tuples_in_metadata_become_lists(connection):
    """JSON has no tuples."""
    event = evolve(create_start("a"), metadata={"pair": (1, 2)})
    (found,) = written_and_read(connection, event)

    assert {"pair": [1, 2]} == found.metadata


@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param({"when": datetime(2026, 1, 1, tzinfo=UTC)}, id="no JSON"),
        pytest.param({"outer": [{1: "one"}]}, id="a key that is not text"),
        pytest.param({"n": 10**5000}, id="an integer of thousands of digits"),
    ],
)
def test_what_is_no_json_is_refused(metadata):
    """The error names the event and what is wrong with it."""
    with pytest.raises(JournalError, match=r"A SessionStarted cannot be written .* must be JSON"):
        encode(evolve(create_start("a"), metadata=metadata), 1, 0.0)


def test_metadata_that_refers_to_itself_is_refused():
    """It has no end as JSON."""
    loop: dict = {}
    loop["self"] = loop
    with pytest.raises(JournalError, match="cannot be written"):
        encode(evolve(create_start("a"), metadata=loop), 1, 0.0)


@given(st.data())
def test_equal_and_different_logprobs(connection, data):
    """Whether raw log-probabilities are stored on their own does not show."""
    turn = create_turn("a", 0)
    completion = turn.interaction.completion
    raw = data.draw(st.lists(st.floats(-9, 0, width=32), min_size=3, max_size=3))
    event = evolve(turn, interaction=evolve(turn.interaction, completion=evolve(completion, raw_logprobs=raw)))

    assert [exact(event)] == [exact(each) for each in written_and_read(connection, event)]
