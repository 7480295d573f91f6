"""The values of problems: what the loader accepts reaches an agent unchanged, in whichever process it runs."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import IntEnum, StrEnum
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_actors.dashboard.records import format_record, read_records
from areal_actors.datasets import DatasetConfig, load_problems
from areal_actors.domain import Group, GroupId, Problem
from areal_actors.errors import DatasetError
from areal_actors.kernel.remote.codec import Codec
from areal_actors.messages import DeliverGroup

TEXTS = st.text(st.characters(), max_size=5)
"""Half a surrogate pair included, which JSON can escape."""
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**130), 2**130)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


class Level(IntEnum):
    """A number with a name."""

    HARD = 3


class Kind(StrEnum):
    """A text with a name."""

    SUM = "sum"


def loaded(rows: list[Any]) -> list[Any]:
    config = DatasetConfig(python="problems.py:make", is_shuffled=False)
    problems = load_problems(config, import_reference=lambda _reference: lambda **_arguments: rows)
    return [problem.data for problem in problems.all()]


def sent(problem: Problem) -> Any:
    """The data of a problem in another process."""
    codec = Codec()
    message = DeliverGroup(group=Group(id=GroupId("g"), problem=problem, episodes=()))
    (words,) = codec.decode(codec.encode([codec.to_data(message, DeliverGroup, "DeliverGroup")]))
    return codec.from_data(words, DeliverGroup, "DeliverGroup").group.problem.data


@settings(deadline=None)
@given(st.dictionaries(TEXTS, JSON, min_size=1, max_size=3))
def test_values_are_equal_in_other_processes_and_records(tmp_path_factory, row):
    """Through the file, the codec of connections and of the journal, and a line of a dump."""
    directory = tmp_path_factory.mktemp("problems")
    (directory / "p.jsonl").write_text(json.dumps(row) + "\n")
    (problem,) = load_problems(DatasetConfig(jsonl="p.jsonl"), import_reference=str, directory=directory).all()

    assert row == problem.data
    assert row == sent(problem)
    (directory / "dump.jsonl").write_text(format_record({"data": problem.data}), encoding="utf-8")
    assert [{"data": row}] == list(read_records(directory / "dump.jsonl"))


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.bytes_(b"a"), b"a"),
        (np.datetime64("2026-01-02T03:04"), "2026-01-02T03:04"),
        (np.timedelta64(1500, "ms"), 1.5),
        (date(2026, 1, 2), "2026-01-02"),
        (datetime(2026, 1, 2, 3, tzinfo=UTC), "2026-01-02T03:00:00+00:00"),
        (time(3, 4), "03:04:00"),
        (timedelta(minutes=1), 60.0),
        (Decimal("1.50"), "1.50"),
        (Level.HARD, 3),
        (Kind.SUM, "sum"),
        ((1, [Decimal(2)]), (1, ["2"])),
        ({Kind.SUM: {np.int64(1): np.int64(2)}}, {"sum": {1: 2}}),
        (b"\x00\xff", b"\x00\xff"),
        (inf, inf),
    ],
    ids=repr,
)
def test_values_of_other_classes_become_plain(value, plain):
    """The agent sees the same value, of the same class, in the process of the trainer and in a worker."""
    (data,) = loaded([{"value": value}])

    assert plain == data["value"]
    assert type(plain) is type(data["value"])
    assert data == sent(Problem(position=0, data=data))


def test_arrays_and_nan_are_sent():
    """They are compared by what they hold."""
    (data,) = loaded([{"array": np.arange(3), "value": nan}])
    arrived = sent(Problem(position=0, data=data))

    assert np.array_equal(np.arange(3), arrived["array"])
    assert isnan(arrived["value"])


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"tags": [{"a", "b"}]}, r"problem 1 has a set in value\.tags\.0, which cannot be sent"),
        (object(), "problem 1 has a object in value"),
        (Path("a"), "problem 1 has a PosixPath in value"),
        (np.array(["a"], dtype=object), "problem 1 has a ndarray in value"),
        ({(1, 2): 3}, r"problem 1 has the key \(1, 2\)"),
    ],
)
def test_unsendable_values_are_refused_on_loading(value, complaint):
    """By the problem and the path in it, in runs of one process, too."""
    with pytest.raises(DatasetError, match=complaint):
        loaded([{"value": 1}, {"value": value}])


def test_deeply_nested_line_is_refused_by_number(tmp_path):
    """Python's parser reads more levels than copies and messages have the stack for."""
    (tmp_path / "p.jsonl").write_text('{"a": 1}\n{"a": ' + "[" * 400 + "]" * 400 + "}\n")

    with pytest.raises(DatasetError, match=r"p\.jsonl, line 2 is nested more than 128 levels"):
        load_problems(DatasetConfig(jsonl="p.jsonl"), import_reference=str, directory=tmp_path)


# ------------------------------------------------------------------------------------------------------------- tables


def save_table(directory: Path, rows: list[dict[str, Any]], **casts: Any) -> Path:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(rows)
    for column, feature in casts.items():
        table = table.cast_column(column, feature)
    table.save_to_disk(directory / "table")
    return directory / "table"


def test_tools_of_a_table_keep_their_parameters(tmp_path):
    """Arrow gives each mapping in a column the keys of all others; a column of a row may be null."""
    rows = [
        {"tools": [{"name": "add", "parameters": {"a": {"type": "number"}}}], "day": date(2026, 1, 2), "hint": None},
        {"tools": [{"name": "find", "parameters": {"text": {"type": "string"}}}, {"name": "stop"}], "hint": "h"},
    ]
    config = DatasetConfig(huggingface=str(save_table(tmp_path, rows)))
    first, second = load_problems(config, import_reference=str).all()

    assert {**rows[0], "day": "2026-01-02"} == first.data == sent(first)
    assert {**rows[1], "day": None} == second.data == sent(second)


def test_column_of_objects_is_refused_by_name(tmp_path):
    """Before the first episode, and with what makes it usable."""
    datasets = pytest.importorskip("datasets")
    rows = [{"question": "q", "image": {"bytes": b"png", "path": None}}]
    path = save_table(tmp_path, rows, image=datasets.Image())

    with pytest.raises(DatasetError, match=r"The column image of .* is decoded to an object \(Image\)"):
        load_problems(DatasetConfig(huggingface=str(path)), import_reference=str)
