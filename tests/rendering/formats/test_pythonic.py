"""The pythonic tool format: literals are read, nothing is evaluated."""

from __future__ import annotations

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rendering.formats.test_laws import parse, said

from areal_actors.rendering.formats.pythonic import Pythonic

PYTHONIC = Pythonic()


def values(text):
    """The arguments of the only call."""
    [(_, arguments)] = said(parse(PYTHONIC, text))
    return json.loads(arguments)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('[get_weather(city="Paris"), f(x=1)]', None, [("get_weather", '{"city": "Paris"}'), ("f", '{"x": 1}')]),
        ("\n[f()]\n", None, [("f", "{}")]),
        ("[ f ( x = 1 , ) , ]", None, [("f", '{"x": 1}')]),
        ("[a.b-c(from=1)]", None, [("a.b-c", '{"from": 1}')]),
        ("<|python_start|>[f(x=None)]<|python_end|>", None, [("f", '{"x": null}')]),
        ("I see. <|tool_call_start|>[f(x=True)]<|tool_call_end|>Done", "I see. Done", [("f", '{"x": true}')]),
        ('[f(x={"a": [1, {"b": "]"}]}, y="[(")]', None, [("f", '{"x": {"a": [1, {"b": "]"}]}, "y": "[("}')]),
        ("[f()] and more", " and more", [("f", "{}")]),
        ("[f(x='a\nb')]", None, [("f", '{"x": "a\\nb"}')]),
        ('[f(**{"a b": 1}, c=2)]', None, [("f", '{"a b": 1, "c": 2}')]),
    ],
)
def test_answers_of_the_family(text, content, calls):
    """One call or several, with tags or without; arguments become JSON."""
    message = parse(PYTHONIC, text)

    assert (content, calls) == (message.content, said(message))


@pytest.mark.parametrize(
    "text",
    [
        "See [f(x=1)]",
        "[]",
        "[1] says so",
        "[f]",
        "[f(1)]",
        "[f(x=y)]",
        "[f(x=g())]",
        "[f(x=1+1)]",
        "[f(x=(1, 2))]",
        "[f(x={1: 2})]",
        "[f(x={1})]",
        "[f(x=b'a')]",
        "[f(x=f'{a}')]",
        "[f(x=1, x=2)]",
        "[f(**{'x': 1}, x=2)]",
        "[f(**[1])]",
        "[f(x={'a': 1, 'a': 2})]",
        "[f(x=1e999)]",
        "[f(x=nan)]",
        "[f(x=007)]",
        "[f(x=1_000)]",
        f"[f(x={'9' * 2000})]",
        "[f(x='a' 'b')]",
        "[f(x='\\x1')]",
        "[f(x='\\U00110000')]",
        "[f(x='\\N{no such character}')]",
        "[f(x='\\N')]",
        "[f(x='\\ud800')]",
        "[f(x='a)]",
        "[f(x='\\",
        "[f(x=1)",
        "[f(x=1), oops]",
        "[f(x=1); g()]",
        "f(x=1)",
        "[__import__('os').system('true')]",
        "[f(x=" + "[" * 5000 + "]" * 5000 + ")]",
        "[f(x=" + "[" * 100_000,
        "[f(x=" + "-" * 100_000 + "1)]",
    ],
)
def test_malformed_list_of_calls_stays_text(text):
    """Expressions, positions, names, values that JSON does not have, mistakes, and depth."""
    message = parse(PYTHONIC, text)

    assert (text, ()) == (message.content, message.tool_calls)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1", 1),
        ("-1.5e3", -1500.0),
        ("+2", 2),
        (".5", 0.5),
        ("1.", 1.0),
        ("0", 0),
        ("1e2", 100.0),
        ("true", True),
        ("null", None),
        ("''", ""),
        ('""', ""),
        ("'it\\'s'", "it's"),
        ('"a\\"b"', 'a"b'),
        ('"""a"b\nc"""', 'a"b\nc'),
        ("''''x'''", "'x"),
        ("'a\\\nb'", "ab"),
        (r"'\t\n\\\d\/'", "\t\n\\\\d\\/"),
        (r"'\x41\u00e9\U0001F600\101\N{BULLET}'", "Aé😀A•"),
        (r"'\ud83d\ude00'", "😀"),
        ("'\ufeff😀'", "\ufeff😀"),
        ("{'a': {}, \"b\": [],}", {"a": {}, "b": []}),
    ],
)
def test_literals_have_the_values_of_python(written, value):
    """Numbers, constants (of JSON, too), strings with all their escapes, lists and dictionaries."""
    assert {"x": value} == values(f"[f(x={written})]")


@given(st.text())
def test_strings_are_read_as_python_reads_them(text):
    """The literal that Python itself would write is the text."""
    assert {"x": ast.literal_eval(repr(text))} == {"x": text} == values(f"[f(x={text!r})]")
