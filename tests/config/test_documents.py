"""YAML: what is read, what is refused, and that what is written is read back equal."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.config.documents import format_yaml, parse_yaml, read_document
from areal_actors.errors import ConfigError

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
data = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(min_size=1), inner, max_size=4),
    max_leaves=12,
)


@given(data)
def test_formatted_yaml_is_read_back_equal(value):
    """Any plain data survives, texts that look like numbers or words of YAML among them."""
    assert parse_yaml(format_yaml(value), source="here").data == value


@given(st.from_regex(r"[-+]?[0-9]{1,3}(\.[0-9]{1,3})?[eE][-+]?[0-9]{1,2}", fullmatch=True))
def test_scientific_notation_is_a_number(text):
    """``2e-5`` is the number that Python reads, however it is spelt; in quotes it is text."""
    assert math.isclose(parse_yaml(text, source="here").data, float(text))
    assert parse_yaml(f"'{text}'", source="here").data == text


def test_duplicate_key_is_refused_with_both_lines():
    """The second would silently win."""
    with pytest.raises(ConfigError, match=r"run.yaml:3: seed was given before, on line 1"):
        parse_yaml("seed: 1\nsteps: 3\nseed: 2\n", source="run.yaml")


def test_cyclic_section_is_refused():
    """It could not be written out."""
    with pytest.raises(ConfigError, match=r"run.yaml holds .* a section contains itself"):
        parse_yaml("a: &a\n  b: *a\n", source="run.yaml")


@pytest.mark.parametrize(
    ("text", "place", "quoted"),
    [
        ("a: [1\nb: {c", "run.yaml:2:2", "the line reads: 'b: {c'"),
        ("a: b: c", "run.yaml:1:5", "the line reads: 'a: b: c'"),
        ("a:\n\t- 1", "run.yaml:2:1", "the line reads: '- 1'"),
        ("a: !!python/object:os.system x", "run.yaml:1:4", "os.system"),
        ("a: *nowhere", "run.yaml:1:4", "nowhere"),
        ("a: 'open", "run.yaml:1:9", "'open"),
    ],
)
def test_malformed_yaml_is_reported_with_its_place(text, place, quoted):
    """File, line, column and the text of the line."""
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, source="run.yaml")

    assert place in str(caught.value)
    assert quoted in str(caught.value)


@given(st.text())
def test_parser_reads_or_refuses_any_text(text):
    """Nothing but ``ConfigError`` comes out of a file, whatever is in it."""
    with suppress(ConfigError):
        parse_yaml(text, source="here")


def test_missing_file_names_similar_files(tmp_path):
    """Those who mistype a name find the right one in the message."""
    (tmp_path / "train.yaml").touch()

    with pytest.raises(ConfigError, match=r"There is no file .*trian.yaml; .* has train.yaml"):
        read_document(tmp_path / "trian.yaml")


def test_document_locates_values():
    """The innermost section that the file has is where a missing value is looked for."""
    document = parse_yaml("a: 1\nb:\n  c: 2\n  d: [3,\n      4]\n", source="run.yaml")

    assert document.locate(("b", "c")) == "run.yaml:3"
    assert document.locate(("b", "d", 1)) == "run.yaml:5"
    assert document.locate(("b", "missing")) == "run.yaml:2"
    assert document.locate(("missing",)) == "run.yaml"
