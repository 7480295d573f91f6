"""How much of a JSON object may be passed on while the rest is missing."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.lib.json_prefix import JsonPrefix

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(max_size=3), values, max_size=3)


def cut(data, text):
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@given(value=objects, indent=st.sampled_from([None, 1]), is_ascii=st.booleans(), data=st.data())
def test_json_prefix_passes_an_object_whole(value, indent, is_ascii, data):
    """However it is cut, all of it is passed on, and its end is recognised."""
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    prefix = JsonPrefix()

    assert "".join(prefix.feed(piece) for piece in cut(data, text)) == text
    assert (prefix.is_complete, prefix.is_broken, prefix.pending) == (True, False, "")


@given(text=st.text(alphabet='{}[]":,\\u0e1n. trufalsex-+', max_size=24), data=st.data())
def test_json_prefix_stops_where_an_object_ends(text, data):
    """Pieces do not matter, nothing is lost, and a complete object is one for Python's parser."""
    whole, piecewise = JsonPrefix(), JsonPrefix()
    certain = whole.feed("{" + text)

    assert certain == "".join(piecewise.feed(piece) for piece in cut(data, "{" + text))
    assert certain + whole.pending == "{" + text
    if whole.is_complete:
        assert isinstance(json.loads(certain), dict)


@pytest.mark.parametrize(
    ("text", "certain"),
    [
        ('{"a": 12', '{"a": '),
        ('{"a": 12,', '{"a": 12,'),
        ('{"a": "x\\u00', '{"a": "x'),
        ('{"a": tru', '{"a": '),
        ('{"a": 1,}', '{"a": 1,'),
        ('{"a" 1}', '{"a" '),
        ('{"a": 01}', '{"a": '),
        ("[1]", ""),
        ('{"a": "\\x"}', '{"a": "'),
        ('{"a": {"b": [1, {}]}} x', '{"a": {"b": [1, {}]}}'),
        ('{"a": 1٣}', '{"a": '),
        ('{"a": 1e400}', '{"a": '),
        ('{"a": ' + "9" * 400 + "}", '{"a": '),
        ('{"a": 98765432109876543210}', '{"a": 98765432109876543210}'),
        (r'{"a": "\ud83d', '{"a": "'),
        (r'{"a": "\ud83d\ude', '{"a": "'),
        (r'{"a": "\ud83d\ude00', r'{"a": "\ud83d\ude00'),
        (r'{"a": "\ud83d\u00', r'{"a": "\ufffd'),
        (r'{"a": "\ud83dx', r'{"a": "\ufffdx'),
        (r'{"a": "\ude00', r'{"a": "\ufffd'),
    ],
)
def test_json_prefix_returns_the_certain_part(text, certain):
    """Tokens are passed on when they are complete, text character by character; nothing after a fault."""
    assert JsonPrefix().feed(text).rstrip() == certain.rstrip()


@given(text=st.text(alphabet='{}[]":,\\\\u0e1n. trufalsex-+', max_size=24))
def test_json_prefix_completes_an_unfinished_object(text):
    """Wherever it breaks off, or whatever breaks it: the result is an object that has the added key."""
    prefix = JsonPrefix()
    certain = prefix.feed("{" + text)
    if not prefix.is_complete:
        assert json.loads(certain + prefix.complete("rest", "a\n"))["rest"] == "a\n"


halves = st.sampled_from([r"\ud83d", r"\uDE00", r"\\", r"\u00e9", r"\n", "x", "ud83d", "\ud83d", "é"])


@given(parts=st.lists(halves, max_size=8), data=st.data())
def test_json_prefix_replaces_lone_surrogates(parts, data):
    """However the text is cut, it is as long as before, the same for strict readers, and whole pairs stay."""
    text = '{"a": "' + "".join(parts) + '"}'
    passed = "".join(map(JsonPrefix().feed, [text]))
    prefix = JsonPrefix()

    assert passed == "".join(prefix.feed(piece) for piece in cut(data, text))
    assert (len(passed), prefix.is_complete) == (len(text), True)
    lenient = json.loads(text)["a"]
    assert orjson.loads(passed)["a"] == "".join("\ufffd" if "\ud800" <= char < "\ue000" else char for char in lenient)
