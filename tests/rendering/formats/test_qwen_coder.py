"""The tool format of Qwen3-Coder: values are typed by the schema, text is raw."""

from __future__ import annotations

import json

import pytest
from tests.rendering.formats.test_laws import parse, said

from areal_actors.domain import Tool
from areal_actors.rendering.parsers import TOOL_FORMATS

TOOL = Tool(
    name="edit",
    parameters={
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "line": {"type": "integer"},
            "all": {"type": "boolean"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "either": {"type": ["string", "integer"]},
            "parts": {"type": "array", "items": {"type": "string"}},
            "kind": {"enum": ["1", "2"]},
            "point": {"$ref": "#/$defs/point"},
            "lost": {"$ref": "#/$defs/missing"},
            "round": {"$ref": "#/$defs/round"},
            "loop": {"$ref": "#/$defs/loop"},
            "nested": {"allOf": [{"anyOf": [{"const": "x"}, {"type": "null"}]}]},
            "anything": {},
            "odd": None,
        },
        "$defs": {
            "point": {"type": "string"},
            "loop": {"$ref": "#/$defs/loop"},
            "round": {"anyOf": [{"$ref": "#/$defs/round"}] * 3},
        },
    },
)

ANSWER = """\
I'll change the line.

<tool_call>
<function=edit>
<parameter=text>
def f():
    return "<b>" if x else {'a': 1}
</parameter>
<parameter=line>
12
</parameter>
<parameter=all>
True
</parameter>
<parameter=parts>
["a", "b"]
</parameter>
</function>
</tool_call>
<tool_call>
<function=list_files>
</function>
</tool_call>"""


def read(text, tools=(TOOL,)):
    """What an answer says."""
    return parse(TOOL_FORMATS["qwen-coder"], text, tools=tools)


def call(**values):
    """A call of the tool with these values, as the model writes them."""
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=edit>\n{written}</function>\n</tool_call>"


def test_answer_of_the_family():
    """Text, a call with values of several types, and a call without any."""
    message = read(ANSWER)
    edit, files = said(message)

    assert "I'll change the line." == message.content
    assert ("list_files", "{}") == files
    assert {
        "text": "def f():\n    return \"<b>\" if x else {'a': 1}",
        "line": 12,
        "all": True,
        "parts": ["a", "b"],
    } == json.loads(edit[1])


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("text", "12", "12"),
        ("text", '"quoted"', '"quoted"'),
        ("text", "null", "null"),
        ("text", "", ""),
        ("text", "\n a \n", "\n a \n"),
        ("text", "</parameter> is a tag, <tool_call> too", "</parameter> is a tag, <tool_call> too"),
        ("text", "</tool_call>", "</tool_call>"),
        ("line", " 12 ", 12),
        ("line", "twelve", "twelve"),
        ("line", "1e999", "1e999"),
        ("line", "NaN", "NaN"),
        ("line", "9" * 5000, "9" * 5000),
        ("all", "true", True),
        ("all", "False", False),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("maybe", "12", "12"),
        ("maybe", "word", "word"),
        ("either", "12", 12),
        ("either", "1.5", "1.5"),
        ("either", '"a"', '"a"'),
        ("parts", '["a", "\\ud800"]', ["a", "\ufffd"]),
        ("parts", "[" * 1000 + "]" * 1000, "[" * 1000 + "]" * 1000),
        ("kind", "1", "1"),
        ("point", "1", "1"),
        ("lost", "1", 1),
        ("round", "1", 1),
        ("loop", "1", 1),
        ("nested", "null", None),
        ("nested", "1", "1"),
        ("anything", '"a"', "a"),
        ("anything", "a", "a"),
        ("odd", "{}", {}),
        ("unknown", "[1]", [1]),
    ],
)
def test_values_have_the_types_of_the_schema(key, written, value):
    """Text is raw where the schema has text; what suits no type is text as well, for the tool to complain about."""
    [(_, arguments)] = said(read(call(**{key: written})))

    assert {key: value} == json.loads(arguments)
    assert arguments.encode()


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\n<function=edit>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=a\nb>\n</function>\n</tool_call>",
        '<tool_call>\n{"name": "edit", "arguments": {}}\n</tool_call>',
        "<tool_call>\n<function=edit>\n</tool_call>",
        "<tool_call>\n<function=edit>\n<parameter=>\nx\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=edit>\nwords\n</function>\n</tool_call>",
        "<tool_call>\n<function=edit>\n</function>\nwords</tool_call>",
        f"<tool_call>\n<function={'f' * 2000}>\n</function>\n</tool_call>",
        "<function=edit>\n</function>",
        call(text="a", line=1).replace("line", "text"),
    ],
)
def test_malformed_call_stays_text(text):
    """Missing tags, other formats, words in between, and parameters that are said twice."""
    message = read(f"so: {text} ok")

    assert (f"so: {text} ok", ()) == (message.content, message.tool_calls)


def test_last_closing_tag_may_be_missing():
    """Where the answer ends behind the function, the call is complete."""
    assert [("edit", '{"line": 1}')] == said(read(call(line=1).removesuffix("</tool_call>") + "\n"))
    assert [("edit", '{"line": 1')] == said(read(call(line=1).removesuffix("</function>\n</tool_call>")))


def test_line_breaks_around_values_are_not_needed():
    """All on one line is the same call."""
    assert said(read(call(text="a", line=1))) == said(read(call(text="a", line=1).replace("\n", "")))
