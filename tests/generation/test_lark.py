"""Grammars as Lark text: what each word of ours becomes."""

from __future__ import annotations

import pytest

from areal_actors.domain import Exactly, FreeText, Grammar, InOrder, JsonText, MatchingRegex, OneOf, Repeated
from areal_actors.errors import InvalidRequest
from areal_actors.generation.lark import format_lark

JSON = JsonText(schema={"type": "object"})
JSON_RULE = r"""%json {"type": "object", "x-guidance": {"whitespace_pattern": "[ ]|\\n[ ]{0,32}", "lenient": false}}"""
NOT_B = r"(/(?s:.*)/ & ~/(?s:.*)\x{3c}b\x{3e}(?s:.*)/)"


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (Exactly(text='say "é"\n'), 'start: "say \\"é\\"\\n"\n'),
        (Exactly(text=""), 'start: ""\n'),
        (Exactly(text="<a>x"), 'start: <[7]> "x"\n'),
        (JSON, f"start: {JSON_RULE}\n"),
        (JsonText(schema={"type": "object"}, is_strict=False), f"start: {JSON_RULE.replace('false', 'true')}\n"),
        (MatchingRegex(pattern="a/b\\/[\n]"), "start: T0\nT0: /a\\/b\\/[\\n]/\n"),
        (FreeText(), "start: T0\nT0: /(?s:.*)/\n"),
        (FreeText(excluding=("<b>",)), f"start: T0\nT0: {NOT_B}\n"),
        (OneOf(parts=(Exactly(text="<a>"), JSON)), f"start: (<[7]> | {JSON_RULE})\n"),
        (InOrder(parts=(Exactly(text="x"), JSON)), f'start: "x" {JSON_RULE}\n'),
        (InOrder(parts=()), 'start: ""\n'),
        (Repeated(part=JSON), f"start: ({JSON_RULE} ({JSON_RULE}){{0,}})\n"),
        (Repeated(part=JSON, at_least=0, at_most=1), f"start: ({JSON_RULE})?\n"),
        (Repeated(part=JSON, at_most=0), 'start: ""\n'),
        (
            Repeated(part=JSON, at_least=2, at_most=3, separator=";"),
            f'start: ({JSON_RULE} (";" {JSON_RULE}){{1,2}})\n',
        ),
    ],
)
def test_lark_text_of_each_grammar(grammar: Grammar, expected: str) -> None:
    """Texts of added tokens are the tokens; white space in JSON is bounded."""
    assert expected == format_lark(grammar, tokens={"<a>": 7})


def test_free_text_ends_where_the_next_text_begins() -> None:
    """A text and what follows it are one terminal: as two, the first would swallow the beginning of the second."""
    thought = InOrder(parts=(FreeText(excluding=("<b>",)), InOrder(parts=(Exactly(text="<b>"), JSON))))

    assert f'start: T0 {JSON_RULE}\nT0: {NOT_B} "<b>"\n' == format_lark(thought, tokens={})
    assert f"start: T0 <[9]> {JSON_RULE}\nT0: {NOT_B}\n" == format_lark(thought, tokens={"<b>": 9})


def test_optional_parts_are_not_part_of_a_terminal() -> None:
    """A terminal is as long as it can be: it would take what begins alike for what was left out."""
    text = InOrder(parts=(FreeText(excluding=("<b>",)), Exactly(text="<b>"), Repeated(part=FreeText(), at_least=0)))

    assert f'start: T0 (T1 (T1){{0,}})?\nT0: {NOT_B} "<b>"\nT1: /(?s:.*)/\n' == format_lark(text, tokens={})


def test_schema_cannot_set_options_of_the_library() -> None:
    """What a client writes into its schema changes nothing but the language."""
    text = format_lark(JsonText(schema={"x-guidance": {"whitespace_flexible": False}}), tokens={})

    assert "whitespace_flexible" not in text


def test_grammar_that_cannot_be_written_is_refused() -> None:
    """A schema that is nested without end, or that holds what is not JSON."""
    endless: dict[str, object] = {}
    endless["not"] = endless
    for schema in (endless, {"const": float("nan")}, {"const": object()}):
        with pytest.raises(InvalidRequest, match="cannot be written down"):
            format_lark(JsonText(schema=schema), tokens={})
