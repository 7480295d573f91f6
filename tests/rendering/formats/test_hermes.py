"""The Hermes tool format: calls are found, and everything else stays text."""

from __future__ import annotations

from itertools import count

import pytest
from tests.rendering.conversations import TOOL

from areal_actors.domain import TextDelta, ToolArgumentsDelta, ToolCallStarted
from areal_actors.rendering.formats.json_calls import parse_call
from areal_actors.rendering.formats.json_families import HERMES
from areal_actors.rendering.parsers import join_deltas


def parse(*pieces):
    """What the pieces of an answer say, calls numbered."""
    numbers = count()
    parser = HERMES.open_parser(lambda: f"call_{next(numbers)}", [TOOL])
    return join_deltas([delta for piece in pieces for delta in parser.feed(piece)] + list(parser.finish()))


def call(text: str) -> str:
    """The text between tags."""
    return f"<tool_call>{text}</tool_call>"


def test_calls_and_the_text_around_them():
    """Several calls, text before and after: white space next to calls is format, the rest is content."""
    answer = parse(
        'Let me see.\n<tool_call>\n{"name": "a", "arguments": {"x":  1}}\n</tool_call>\n'
        '<tool_call>{"arguments": {}, "name": "b"}</tool_call>\n\nDone.'
    )

    assert ("Let me see.\n\n\n\nDone.", "a", '{"x":  1}', "b", "{}") == (
        answer.content,
        answer.tool_calls[0].name,
        answer.tool_calls[0].arguments,
        answer.tool_calls[1].name,
        answer.tool_calls[1].arguments,
    )


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "null",
        "[]",
        '{"name": "a", "arguments": {"b": 1}',
        '{"name": "a", "arguments": [1]}',
        '{"name": "a", "arguments": null}',
        '{"name": "a", "arguments": "no json"}',
        '{"name": "a", "arguments": "[1]"}',
        '{"name": "", "arguments": {}}',
        '{"name": 1, "arguments": {}}',
        '{"name": "a\\u0000", "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "a", "arguments": {"b": NaN}}',
        '{"name": "a", "arguments": {"b": 1e999}}',
        '{"name": "a", "arguments": {}} and more',
        '{"name": "a", "arguments": {"b": 1}, "arguments": {"b": 2}}',
        '{"name": "a", "arguments": {"b": "line\nbreak"}}',
        "[" * 100_000,
        '{"name": "a", "arguments": ' + '{"b": ' * 200 + "1" + "}" * 201,
        '{"name": "a", "arguments": {"b": ' + "9" * 5000 + "}}",
    ],
)
def test_malformed_call_stays_text(body):
    """Broken JSON, wrong shapes and impossible values are content, tags and all."""
    text = f"so: {call(body)} ok"

    assert (text, ()) == (parse(text).content, parse(text).tool_calls)


def test_broken_call_does_not_hide_the_next_one():
    """An opening tag that leads nowhere is text; the call that follows is found."""
    answer = parse('<tool_call>oops <tool_call>{"name": "a"}</tool_call>')

    assert ("<tool_call>oops", "a", "{}") == (answer.content, answer.tool_calls[0].name, answer.tool_calls[0].arguments)


def test_last_closing_tag_may_be_missing():
    """A complete call counts although the answer ended before its tag; an incomplete one is text."""
    assert ("a",) == tuple(c.name for c in parse('<tool_call>\n{"name": "a"}\n').tool_calls)
    assert '<tool_call>{"name": "a"' == parse('<tool_call>{"name": "a"').content
    assert '<tool_call>{"name": "a"}</tool' == parse('<tool_call>{"name": "a"}</tool').content


def test_closing_tag_within_a_string_closes_nothing():
    """The call ends at the tag behind its JSON; a string that is never closed does not hide the call after it."""
    answer = parse(call('{"name": "a", "arguments": {"b": "x\\"</tool_call>"}}'))
    broken = parse(call('{"name": "a') + call('{"name": "b"}'))

    assert '{"b": "x\\"</tool_call>"}' == answer.tool_calls[0].arguments
    assert ('<tool_call>{"name": "a</tool_call>', "b") == (broken.content, broken.tool_calls[0].name)


def test_deltas_are_emitted_as_soon_as_they_are_certain():
    """Text flows, a possible tag waits, and a call is said at its closing tag."""
    parser = HERMES.open_parser(lambda: "call_0", [TOOL])

    assert (TextDelta(text="abc"),) == parser.feed("abc <tool")
    assert (TextDelta(text=" <tools"),) == parser.feed("s")
    assert () == parser.feed('<tool_call>{"name": "a"}</tool_call')
    started, arguments = parser.feed(">")
    assert ToolCallStarted(index=0, id="call_0", name="a") == started
    assert ToolArgumentsDelta(index=0, text="{}") == arguments
    assert () == parser.finish()


def test_slices_keep_the_model_s_spelling():
    """White space, key order, escapes and keys within the arguments do not confuse their text."""
    parsed = parse_call(' { "arguments" :{ "b":"\\u00e9" , "name" :[1.50,{}]} ,\n"name":"a" , "id": { "d" : 1 } } ')

    assert ("a", '{ "b":"\\u00e9" , "name" :[1.50,{}]}') == (parsed.name, parsed.arguments)
