"""The tool format of Llama 3.x: JSON that is the answer."""

from __future__ import annotations

import pytest
from tests.rendering.formats.test_laws import parse, read, said

from areal_actors.domain import TextDelta
from areal_actors.rendering.parsers import TOOL_FORMATS

LLAMA = TOOL_FORMATS["llama-json"]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "f", "parameters": {"x":  1}}', None, [("f", '{"x":  1}')]),
        ('\n{"name": "f", "parameters": {}}\n', None, [("f", "{}")]),
        ('<|python_tag|>{"name": "f", "parameters": {"x": 1}}', None, [("f", '{"x": 1}')]),
        ('{"type": "function", "name": "f", "parameters": {}}', None, [("f", "{}")]),
        ('{"name": "f", "arguments": {"x": 1}}', None, [("f", '{"x": 1}')]),
        ('{"name": "f", "parameters": "{\\"x\\": 1}"}', None, [("f", '{"x": 1}')]),
        ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', None, [("f", "{}"), ("g", "{}")]),
        ('{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}}', None, [("f", "{}"), ("g", "{}")]),
        (
            '<|python_tag|>{"name": "f", "parameters": {}};<|python_tag|>{"name": "g", "parameters": {}}',
            None,
            [("f", "{}"), ("g", "{}")],
        ),
        ('<|python_start|>{"name": "f", "parameters": {}}<|python_end|>', None, [("f", "{}")]),
        (
            '<|python_start|>Look<|python_end|>{"name": "f", "parameters": {}}',
            "<|python_start|>Look",
            [("f", "{}")],
        ),
        ('Look: <|python_tag|>{"name": "f", "parameters": {}}', "Look:", [("f", "{}")]),
        ('{"name": "f", "parameters": {}}\n\nThat calls f.', "\n\nThat calls f.", [("f", "{}")]),
        ('{"name": "f", "parameters": {}}; and more', "; and more", [("f", "{}")]),
        ('{"name": "f", "parameters": {"x": "};{\\"<|python_tag|>"}}', None, [("f", '{"x": "};{\\"<|python_tag|>"}')]),
    ],
)
def test_answers_of_the_family(text, content, calls):
    """The whole answer, or what follows a tag, or a call; the arguments as the model wrote them."""
    message = parse(LLAMA, text)

    assert (content, calls) == (message.content, said(message))


@pytest.mark.parametrize(
    "text",
    [
        'For example {"name": "f", "parameters": {}}',
        '{"name": "f"}',
        '{"name": "f", "parameters": [1]}',
        '{"name": "f", "parameters": null}',
        '{"name": "", "parameters": {}}',
        '{"parameters": {}}',
        '{"name": "f", "parameters": {}',
        '{"name": "f", "parameters": {"x": NaN}}',
        '{"name": f, "parameters": {}}',
        "{name: 1}",
        '{"a": "line\nbreak"}',
        '{"answer": 42}',
        "{" * 100_000,
        "<|python_tag|>print(1)",
        '<|python_tag|>brave_search.call(query="x")',
        "<|python_end|>",
        "{}; {}",
        ";",
    ],
)
def test_malformed_call_stays_text(text):
    """Other JSON, broken JSON, code, and calls in the middle of a text."""
    message = parse(LLAMA, text)

    assert (text, ()) == (message.content, message.tool_calls)


def test_text_is_emitted_at_once():
    """An answer that begins like no call is said as it comes; one that turns out to be none is not kept for long."""
    parser = LLAMA.open_parser(lambda: "call_0", ())

    assert () == parser.feed("  ")
    assert (TextDelta(text="  Hi"),) == parser.feed("Hi ")
    assert (TextDelta(text=" you"),) == parser.feed("you <|py")
    assert (TextDelta(text=" <|pyx"),) == parser.feed("x")
    assert [TextDelta(text="{"), TextDelta(text="x} is")] == read(LLAMA, "{x} is")
