"""Events become rows and come back as they were."""

from __future__ import annotations

import math
import sqlite3
from datetime import UTC, datetime

import pytest
from attrs import evolve, has
from attrs import fields as fields_of
from hypothesis import given

from areal_actors.domain import GroupQueued, TurnEnded
from areal_actors.journal.tables import TABLES, RefusedEvent, create_tables, decode_row, encode_event
from areal_actors.kernel.remote.codec import Codec
from areal_actors_testing.journal_contract import create_start, create_turn
from areal_actors_testing.journal_events import events, json_values

CODEC = Codec()


@pytest.fixture(scope="module")
def connection():
    connection = sqlite3.connect(":memory:", isolation_level=None)
    create_tables(connection)
    yield connection
    connection.close()


def encode(event):
    return list(encode_event(CODEC, event, 1, 0.0))


def write_and_read(connection, event):
    """Return the events that are read after ``event`` was written."""
    connection.execute("BEGIN")
    try:
        for sql, values in encode(event):
            connection.execute(sql, values)
        (table,) = (table for table in TABLES if table.event is type(event))
        texts = "messages, output" if table.name == "turns" else "NULL, NULL"
        rows = connection.execute(f"SELECT {texts}, record FROM {table.name}").fetchall()
        return [decode_row(CODEC, table.name, *row) for row in rows]
    finally:
        connection.execute("ROLLBACK")


def exact(value):
    """Return data that differs for any two different values, NaN and types included."""
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
def test_every_event_comes_back_exactly(connection, event):
    """Texts with surrogates, integers of any size, NaN, arrays bit by bit: equal values of equal types."""
    assert [exact(each) for each in write_and_read(connection, event)] == [exact(event)]


@given(value=json_values())
def test_problems_come_back_exactly(connection, value):
    """A problem may hold any JSON."""
    event = GroupQueued(group="g", position=0, sessions=(), data={"problem": value})

    assert [exact(each) for each in write_and_read(connection, event)] == [exact(event)]


def test_arrays_that_come_back_are_read_only(connection):
    """The values that hold them do not copy them again."""
    (turn,) = write_and_read(connection, create_turn("a", 0))
    completion = turn.interaction.completion

    assert isinstance(turn, TurnEnded)
    assert not completion.token_ids.flags.writeable
    assert evolve(completion).token_ids is completion.token_ids


def test_large_arrays_come_back_exactly(connection):
    """Arrays above 8 KiB are separate parts of a record."""
    event = create_turn("a", 0, num_tokens=5000)

    assert write_and_read(connection, event) == [event]


@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param({"when": datetime(2026, 1, 1, tzinfo=UTC)}, id="a date"),
        pytest.param({"outer": [{1.5: "one"}]}, id="a key that is a float"),
    ],
)
def test_metadata_that_is_not_json_is_refused(metadata):
    """The error names the event and the cause."""
    with pytest.raises(RefusedEvent, match=r"A SessionStarted cannot be written .* must be JSON"):
        encode(evolve(create_start("a"), metadata=metadata))


def test_metadata_that_refers_to_itself_is_refused():
    """It has no end as JSON."""
    loop: dict = {}
    loop["self"] = loop
    with pytest.raises(RefusedEvent, match="cannot be written"):
        encode(evolve(create_start("a"), metadata=loop))
