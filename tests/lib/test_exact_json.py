"""JSON in which nothing changes."""

from __future__ import annotations

import json

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.lib.exact_json import dump_json, load_json

texts = st.text(max_size=4)
scalars = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    scalars | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(value=values)
def test_json_round_trips(value):
    """Integers of any size included, beside texts that look like them."""
    assert load_json(dump_json(value)) == load_json(json.dumps(value).encode()) == value
    assert json.loads(dump_json(value)) == value


@given(value=values, mark=st.text(st.characters(categories=["Cs"]), min_size=1, max_size=3))
def test_json_writes_any_text(value, mark):
    """Half of a surrogate pair is replaced, wherever it is; the rest stays."""
    written = dump_json({f"{mark}a": [value, f"b{mark}", 2**64]})

    assert json.loads(written) == {"\ufffd" * len(mark) + "a": [value, "b" + "\ufffd" * len(mark), 2**64]}


@pytest.mark.parametrize("text", [b"1e400", b"9" * 400, b'"\\ud83d"', b"NaN", b"[1,]", b'"\t"', b"\xff"])
def test_json_refuses_what_strict_readers_refuse(text):
    """Also next to an integer of more than 64 bits, which another parser reads."""
    for whole in (text, b"[98765432109876543210, " + text + b"]"):
        with pytest.raises(orjson.JSONDecodeError):
            load_json(whole)


def test_json_writes_numpy_numbers_and_nan():
    """Arrays as lists, and NaN as null, next to a long integer as well."""
    for more in ([], [2**70]):
        value = [np.array([1, 2]), float("nan"), *more]
        assert json.loads(dump_json(value)) == [[1, 2], None, *more]
