"""Rows are verified against the digests of their turns, their seals and the journal."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from attrs import evolve, fields
from click.testing import CliRunner
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.cache.conftest import new_talk
from tests.interchange.conftest import dumped, row_batches, trained_rows
from tests.run.trained import train

from areal_actors.cache import ConversationTree
from areal_actors.cli import cli
from areal_actors.dashboard import RunDirectory
from areal_actors.domain import (
    ChatMessage,
    InteractionId,
    JournalEvent,
    RewardSet,
    SampleKey,
    SessionId,
    SessionStarted,
    TurnEnded,
)
from areal_actors.interchange import (
    DumpedRow,
    changed_columns,
    dump_path,
    find_dumps,
    open_seal_key,
    read_rows,
    seal_row,
    write_rows,
)
from areal_actors.journal import SqliteJournal, as_of

__all__ = ["new_talk"]

KEY = bytes(32)


def verify(run: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the counts of the command."""
    result = CliRunner().invoke(cli, ["verify", str(run), "--json", *options])
    return result.exit_code, json.loads(result.stdout)


def sealed(rows: list[DumpedRow]) -> list[DumpedRow]:
    """The rows with seals."""
    return [evolve(row, seal=seal_row(row, KEY, num_rows=len(rows))) for row in rows]


def other(value: Any, data: st.DataObject) -> Any:
    """A value that differs in one place."""
    if isinstance(value, np.ndarray):
        changed = value.copy()
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at] = 7 if np.isnan(changed[at]) else changed[at] + 1
        return changed
    if isinstance(value, tuple):
        return (*value[:-1], f"{value[-1]}x")
    return f"{value}x" if isinstance(value, str | None) else value + 1


@given(rows=row_batches(), data=st.data())
@settings(max_examples=80, deadline=None)
def test_seal_detects_change_of_any_field(rows: list[DumpedRow], data: st.DataObject):
    """The changed column is named, and no other."""
    assume(rows)
    rows = sealed(rows)
    row = data.draw(st.sampled_from(rows))
    name = data.draw(st.sampled_from([column.name for column in fields(DumpedRow) if column.name != "seal"]))
    value = getattr(row, name)
    assume(value is None or not hasattr(value, "__len__") or len(value))
    changed = evolve(row, **{name: other(value, data)})

    assert changed_columns(row, KEY, num_rows=len(rows)) is None
    assert changed_columns(changed, KEY, num_rows=len(rows)) == (name,)
    assert changed_columns(row, KEY, num_rows=len(rows) + 1) == ()
    assert changed_columns(row, bytes([1] * 32), num_rows=len(rows))


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the rows of two steps."""
    root = tmp_path_factory.mktemp("verified")
    result = train(root, "rows/one", "logging.row_dumps.every_steps=1", "total_steps=2", "checkpoint.every_steps=1")
    assert result.exit_code == 0, result.output
    return root / "rows" / "one"


def test_verify_accepts_run(trained_run: Path):
    """Every trained token is bound to its turn, and every row is sealed; a resumed run is verified as well."""
    code, found = verify(trained_run, "--strict")

    assert code == 0, found["differences"]
    assert found["is_complete"]
    assert found["num_dumps"] == 2
    assert found["num_checked_tokens"] == found["num_trained_tokens"] > 0

    resumed = train(
        trained_run.parents[1],
        "rows/one",
        *("logging.row_dumps.every_steps=1", "total_steps=3", "checkpoint.every_steps=1", "--resume"),
    )
    assert resumed.exit_code == 0, resumed.output
    code, found = verify(trained_run, "--strict")
    assert (code, found["num_dumps"]) == (0, 3), found["differences"]


@pytest.mark.parametrize(
    "column", ["token_ids", "logprobs", "versions", "loss_mask", "reward", "returns", "advantages"]
)
@pytest.mark.parametrize("has_key", [True, False])
def test_verify_finds_changed_number(trained_run: Path, column: str, *, has_key: bool):
    """With the key all columns; without it, those that the digests of the turns bind."""
    directory = RunDirectory(path=trained_run)
    path = next(iter(find_dumps(directory.rows).values()))
    rows, key = read_rows(path), directory.rows_key.read_bytes()
    row = rows[1]
    token = int(np.flatnonzero(row.loss_mask)[0])
    value = getattr(row, column)
    if isinstance(value, np.ndarray):
        value = value.copy()
        value[token] = 1 - value[token] if column == "loss_mask" else value[token] + 1
    else:
        value += 1
    try:
        write_rows(path, [rows[0], evolve(row, **{column: value}), *rows[2:]])
        if not has_key:
            directory.rows_key.unlink()
        code, found = verify(trained_run)
        text = CliRunner().invoke(cli, ["verify", str(trained_run)]).stdout
    finally:
        write_rows(path, rows)
        directory.rows_key.write_bytes(key)

    is_bound = column not in ("reward", "returns", "advantages")
    assert code == int(has_key or is_bound)
    if has_key:
        first = found["differences"][0]
        assert (first["row"], first["column"], first["where"]) == (1, column, path.name)
        assert f"{path.name}, row 1, column {column}" in text
    elif is_bound:
        assert {difference["row"] for difference in found["differences"]} == {1}


def test_verify_finds_removed_repeated_and_unsealed_rows(trained_run: Path):
    """The seals count the rows; a turn is trained by one row; rows without seals are counted, and strictly refused."""
    directory = RunDirectory(path=trained_run)
    path = next(iter(find_dumps(directory.rows).values()))
    rows = read_rows(path)
    try:
        write_rows(path, rows[:-1])
        removed = verify(trained_run)
        write_rows(path, [*rows[:-1], evolve(rows[0], row=len(rows) - 1)])
        repeated = verify(trained_run)
        write_rows(path, [evolve(row, seal="", turn_digests=()) for row in rows])
        old, strict = verify(trained_run), verify(trained_run, "--strict")
        path.write_bytes(b"no parquet")
        damaged = verify(trained_run)
    finally:
        write_rows(path, rows)

    assert removed[0] == 1
    assert "another number of rows" in json.dumps(removed[1])
    assert "row 0 trains the same turn" in json.dumps(repeated[1])
    assert (0, 1) == (old[0], strict[0])
    assert old[1]["num_unsealed_rows"] == len(rows)
    assert old[1]["num_turns_without_digest"] >= len(rows)
    assert "cannot be read" in damaged[1]["differences"][0]["what"]


@pytest.mark.parametrize(("is_run", "words"), [(False, "There is no run in"), (True, "has nothing to verify")])
def test_verify_refuses_directory_without_rows(tmp_path: Path, *, is_run: bool, words: str):
    """The error names the directory; nothing checked is not the same as no difference."""
    if is_run:
        RunDirectory(path=tmp_path).config.write_text("experiment_name: sums\n")
    result = CliRunner().invoke(cli, ["verify", str(tmp_path)])

    assert result.exit_code == 1
    assert words in result.output
    assert str(tmp_path) in result.output


# ------------------------------------------------------------------------------------------------------- journal


def write_run(path: Path, events: Sequence[JournalEvent]) -> None:
    """A run directory with a journal, and the rows of its session as a dump."""

    async def write() -> None:
        async with SqliteJournal.open(directory.journal) as journal:
            await journal.write(*events)

    directory = RunDirectory(path=path)
    path.mkdir(parents=True)
    directory.config.write_text("")
    anyio.run(write)
    turns = [event for event in events if isinstance(event, TurnEnded)]
    tree = ConversationTree.restore(SessionId("s"), turns)
    rows = dumped(trained_rows(tree.snapshot(), "concat"))
    key = open_seal_key(directory.rows_key)
    write_rows(dump_path(directory.rows, 1), [evolve(row, seal=seal_row(row, key, num_rows=len(rows))) for row in rows])


def told(new_talk: Any, version: int | None = None) -> list[JournalEvent]:
    """Three turns, a tool's answer among them, of which the last one forks; sampled by version 3."""
    talk = new_talk()
    messages = [ChatMessage(role="user", content="go")]
    for index, role in enumerate(("tool", "user", "user")):
        turn = talk.turn(f"t{index}", messages, "yes") if index < 2 else talk.turn("t2", messages[:1], "no")
        messages += [ChatMessage(role="assistant", content="yes"), ChatMessage(role=role, content="ok")]
        assert turn.digest is not None
    started = SessionStarted(
        session=SessionId("s"), key_digest=b"k", sample_key=SampleKey(seed=1, path=("s",)), started_at=0.0
    )
    turns = [
        TurnEnded(session=SessionId("s"), interaction=turn, frame=None, ended_at=1.0)
        for turn in talk.tree.snapshot().interactions
    ]
    events: list[JournalEvent] = [started, *turns]
    return events if version is None else [as_of(event, version) for event in events]


@pytest.mark.parametrize("version", [None, -1])
def test_verify_compares_rows_with_journal(tmp_path: Path, new_talk: Any, version: int | None):
    """This also holds after a resume from older weights, whose earlier versions the digest chain binds."""
    reward = RewardSet(session=SessionId("s"), interaction=InteractionId("t1"), reward=1.0)
    write_run(tmp_path / "run", [*told(new_talk, version), reward])
    code, found = verify(tmp_path / "run", "--strict")

    assert code == 0, found["differences"]
    assert found["num_recorded_tokens"] == found["num_trained_tokens"] > 0
    assert found["num_turns"] == 3
    assert found["num_restated_turns"] == (0 if version is None else 3)


def write_again(path: Path, *events: JournalEvent) -> None:
    """Replace turns in the journal at ``path``."""

    async def write() -> None:
        async with SqliteJournal.open(path) as journal:
            await journal.write(*events)

    anyio.run(write)


@pytest.mark.parametrize(
    ("column", "what"),
    [
        ("prompt_suffix", "its ids, or those before it"),
        ("token_ids", "its ids, or those before it"),
        ("logprobs", "its log-probabilities or versions"),
        ("raw_logprobs", "its log-probabilities or versions"),
        ("versions", "its log-probabilities or versions"),
    ],
)
def test_verify_finds_changed_turn_of_journal(tmp_path: Path, new_talk: Any, column: str, what: str):
    """The turn is named; where the row shows the change as well, also the token with both values."""
    events = told(new_talk)
    write_run(tmp_path / "run", events)
    event = events[1]
    assert isinstance(event, TurnEnded)
    turn, completion = event.interaction, event.interaction.completion
    assert completion is not None
    array = (turn.prompt_suffix if column == "prompt_suffix" else getattr(completion, column)).copy()
    array[0] += 1
    changed = {column: array} if column == "prompt_suffix" else {"completion": evolve(completion, **{column: array})}
    write_again(tmp_path / "run" / "journal.sqlite", evolve(event, interaction=evolve(turn, **changed)))
    code, found = verify(tmp_path / "run")
    first = found["differences"][0]

    assert (code, first["turn"], first["where"]) == (1, "t0", "journal.sqlite")
    assert what in first["what"]
    in_row = [entry for entry in found["differences"] if entry["where"].startswith("step") and entry["token"]]
    if column in ("token_ids", "logprobs"):
        assert {entry["column"] for entry in in_row} == {column}
        assert in_row[0]["there"] != in_row[0]["here"]


def test_verify_finds_damaged_turn_of_journal(tmp_path: Path, new_talk: Any):
    """The other turns are verified."""
    write_run(tmp_path / "run", told(new_talk))
    with closing(sqlite3.connect(tmp_path / "run" / "journal.sqlite")) as connection, connection:
        connection.execute("UPDATE turns SET record = x'05' WHERE interaction = 't0'")
    code, found = verify(tmp_path / "run")

    assert (code, found["differences"][0]["turn"]) == (1, "t0")
    assert "cannot be read" in found["differences"][0]["what"]


def test_verify_finds_reward_missing_in_journal(tmp_path: Path, new_talk: Any):
    """The rows of the session have the reward 1.0, and its turns have none."""
    write_run(tmp_path / "run", told(new_talk))
    code, found = verify(tmp_path / "run")

    assert code == 1
    assert {(one["column"], one["there"], one["here"]) for one in found["differences"]} == {("reward", "0.0", "1.0")}
