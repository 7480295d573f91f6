"""The tool format of GLM: keys and values as tags."""

from __future__ import annotations

import json

import pytest
from tests.rendering.formats.test_laws import parse, said

from areal_actors.domain import Tool
from areal_actors.rendering.parsers import TOOL_FORMATS

TOOL = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": "array"}},
    },
)

ANSWER = """\
Let me look.
<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>12 Rue d'"Été"
75001</arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
<arg_key>units</arg_key>
<arg_value>["°C"]</arg_value>
</tool_call>
<tool_call>now
</tool_call>"""


def read(text):
    """What an answer says."""
    return parse(TOOL_FORMATS["glm"], text, tools=[TOOL])


def test_answer_of_the_family():
    """Text, a call with values of several types, and a call without any."""
    message = read(ANSWER)
    weather, now = said(message)

    assert ("Let me look.", ("now", "{}")) == (message.content, now)
    assert {"city": '12 Rue d\'"Été"\n75001', "days": 3, "units": ["°C"]} == json.loads(weather[1])


def test_later_models_leave_line_breaks_out():
    """And say the same."""
    compact = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"

    assert [("get_weather", '{"city": "Paris"}')] == said(read(compact))


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>get_weather",
        "<tool_call></tool_call>",
        "<tool_call>I call you</tool_call>",
        '<tool_call>{"name": "get_weather"}</tool_call>',
        "<tool_call>f\n<arg_key></arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>",
        "<tool_call>f\n<arg_key>a\n<arg_value>1</arg_value>\n</tool_call>",
        "<tool_call>f" + 2 * "\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>" + "\n</tool_call>",
    ],
)
def test_malformed_call_stays_text(text):
    """Missing tags and names, words in between, and keys that are said twice."""
    message = read(f"so: {text} ok")

    assert (f"so: {text} ok", ()) == (message.content, message.tool_calls)


def test_last_closing_tag_may_be_missing():
    """Behind a value the call is complete; a name alone may be the beginning of anything."""
    text = "<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_value>1</arg_value>\n"

    assert [("get_weather", '{"days": 1}')] == said(read(text))
    assert [] == said(read("<tool_call>get_weather\n"))


def test_tags_within_a_value_are_its_text():
    """A value ends where a key or the end of the call follows."""
    value = "</arg_value> and <tool_call>f</tool_call>"
    text = f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"

    assert [("get_weather", json.dumps({"city": value}))] == said(read(text))
