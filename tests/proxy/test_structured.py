"""Forms of answers and choices of tools, in the words of every vendor."""

from __future__ import annotations

from typing import Any

import pytest

from areal_actors.domain import Exactly, JsonText, MatchingRegex, OneOf, Tool, ToolChoice
from areal_actors.errors import InvalidRequest, UnsupportedParameter
from areal_actors.proxy.dialects.chat.answer import ChatDialect
from areal_actors.proxy.dialects.structured import ToolSelection, parse_response_format, parse_tool_choice

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
F, G = Tool(name="f"), Tool(name="g")


@pytest.mark.parametrize("value", [None, {"type": "text"}, {}])
def test_format_defaults_to_text(value: Any) -> None:
    """No format is not a grammar."""
    assert parse_response_format(value) is None


def test_json_object_format() -> None:
    """``json_object`` asks for nothing but an object; some servers' clients send a schema with it."""
    assert JsonText(schema={"type": "object"}) == parse_response_format({"type": "json_object"})
    assert JsonText(schema=SCHEMA) == parse_response_format({"type": "json_object", "schema": SCHEMA})


@pytest.mark.parametrize(
    "value",
    [
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
        {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True},
    ],
)
def test_json_schema_format_is_parsed(value: Any) -> None:
    """Chat completions nest the schema, Responses and Messages do not."""
    assert JsonText(schema=SCHEMA, is_strict=True) == parse_response_format(value)


def test_json_schema_is_lenient_unless_strict() -> None:
    """Without ``strict``, keywords that no engine can hold are ignored, as OpenAI does."""
    value = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}

    assert JsonText(schema=SCHEMA, is_strict=False) == parse_response_format(value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("json", "must be an object"),
        ({"type": "json_schema"}, "needs a schema"),
        ({"type": "json_schema", "json_schema": 3}, "json_schema must be an object"),
        ({"type": "json_schema", "json_schema": {"schema": [1]}}, "a JSON schema"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": 1}}, "strict must be true or false"),
        ({"type": "json_object", "schema": "{"}, "not valid JSON"),
        ({"type": "xml"}, "not 'xml'"),
        ({"type": ["text"]}, "a list of 1"),
    ],
)
def test_invalid_format_is_refused(value: Any, words: str) -> None:
    """The error names the field, under the name that the dialect has for it."""
    with pytest.raises(InvalidRequest, match=words) as caught:
        parse_response_format(value, param="text.format")

    assert "text.format" in str(caught.value)


def _read_format(body: dict[str, Any]) -> Any:
    return ChatDialect().parse({"messages": [{"role": "user", "content": "hi"}], **body}).request.response_format


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"guided_json": None}, None),
        ({"guided_json": SCHEMA}, JsonText(schema=SCHEMA)),
        ({"json_schema": '{"type": "object"}'}, JsonText(schema={"type": "object"})),
        ({"guided_regex": "a+"}, MatchingRegex(pattern="a+")),
        ({"regex": "a+"}, MatchingRegex(pattern="a+")),
        ({"guided_choice": ["x", "y", "x"]}, OneOf(parts=(Exactly(text="x"), Exactly(text="y")))),
        ({"structured_outputs": {"regex": "a+", "json": None}}, MatchingRegex(pattern="a+")),
        ({"structured_outputs": {"json_object": True}}, JsonText(schema={"type": "object"})),
        ({"structured_outputs": {"choice": ["x"]}}, OneOf(parts=(Exactly(text="x"),))),
        ({"structured_outputs": {}}, None),
    ],
)
def test_guided_fields_are_parsed(body: dict[str, Any], expected: Any) -> None:
    """The fields of vLLM and SGLang say what those of OpenAI have no word for."""
    assert expected == _read_format(body)


@pytest.mark.parametrize(
    "body",
    [
        {"guided_json": SCHEMA, "regex": "a"},
        {"guided_choice": []},
        {"guided_choice": ["x", ""]},
        {"guided_choice": "x"},
        {"guided_regex": 3},
        {"structured_outputs": []},
        {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
        {"structured_outputs": {"grammar": "root ::= x"}},
    ],
)
def test_conflicting_guided_fields_are_refused(body: dict[str, Any]) -> None:
    """One answer matches one form."""
    with pytest.raises(InvalidRequest):
        _read_format(body)


@pytest.mark.parametrize(
    ("value", "choice"),
    [
        (None, ToolChoice.AUTO),
        ("auto", ToolChoice.AUTO),
        ("none", ToolChoice.NONE),
        ("required", ToolChoice.REQUIRED),
        ("any", ToolChoice.REQUIRED),
        ({"type": "any"}, ToolChoice.REQUIRED),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice.AUTO),
        ({"type": "function", "function": {"name": "g"}}, "g"),
        ({"type": "function", "name": "g"}, "g"),
        ({"type": "tool", "name": "g"}, "g"),
    ],
)
def test_tool_choice_forms_are_parsed(value: Any, choice: ToolChoice | str) -> None:
    """OpenAI's two APIs and Anthropic's say the same in different words."""
    assert ToolSelection(tools=(F, G), choice=choice) == parse_tool_choice(value, (F, G))


@pytest.mark.parametrize(
    "value",
    [
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"function": {"name": "g"}}]}},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]},
    ],
)
def test_tools_that_are_not_allowed_are_left_out(value: Any) -> None:
    """What may not be called is not offered."""
    assert ToolSelection(tools=(G,), choice=ToolChoice.REQUIRED) == parse_tool_choice(value, (F, G))


@pytest.mark.parametrize(
    "value",
    [
        3,
        "sometimes",
        {},
        {"type": "function"},
        {"type": "function", "function": {"name": "h"}},
        {"type": "function", "function": "f"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "never", "tools": [{"name": "f"}]}},
        {"type": "allowed_tools", "allowed_tools": {"tools": []}},
        {"type": "allowed_tools", "allowed_tools": {"tools": ["f"]}},
        {"type": "allowed_tools", "allowed_tools": 3},
    ],
)
def test_invalid_tool_choice_is_refused(value: Any) -> None:
    """Unknown names and types are the client's mistakes, and are told as such."""
    with pytest.raises(InvalidRequest, match=r"^tool_choice"):
        parse_tool_choice(value, (F, G))


def test_required_tool_choice_needs_tools() -> None:
    """A call of nothing cannot be made."""
    with pytest.raises(InvalidRequest, match="no tools"):
        parse_tool_choice("required", ())


def test_plain_name_is_not_a_tool_choice() -> None:
    """A function called ``auto`` cannot be told from the choice of that name."""
    with pytest.raises(InvalidRequest, match="rename"):
        parse_tool_choice({"type": "function", "name": "auto"}, (Tool(name="auto"),))


@pytest.mark.parametrize("choice", [{"type": "custom", "custom": {"name": "f"}}, {"type": "custom", "name": "f"}])
def test_custom_tool_choice_is_parsed(choice) -> None:
    """The model knows both as functions."""
    assert parse_tool_choice(choice, (F,)).choice == "f"


def test_server_tool_choice_is_refused() -> None:
    """Nothing here runs it."""
    with pytest.raises(UnsupportedParameter, match="'web_search_preview'"):
        parse_tool_choice({"type": "web_search_preview"}, (F,))
