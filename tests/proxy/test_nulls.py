"""``null`` is absent, at any depth of a request and on every route."""

from __future__ import annotations

from copy import deepcopy

import pytest

from areal_actors.errors import RequestError
from areal_actors.proxy.dialects.chat.answer import ChatDialect
from areal_actors.proxy.dialects.completions import CompletionsDialect
from areal_actors.proxy.dialects.fields import without_nulls
from areal_actors.proxy.dialects.messages.answer import MessagesDialect
from areal_actors.proxy.dialects.responses.answer import ResponsesDialect

SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "default": None}}}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: x"}
FORMAT = {"type": "json_schema", "name": "n", "description": "d", "schema": SCHEMA, "strict": True}
BODIES = {
    ChatDialect: {
        "messages": [
            {"role": "system", "content": "be kind", "name": "n"},
            {"role": "user", "content": [{"type": "text", "text": "hi", "annotations": []}], "name": "n"},
            {
                "role": "assistant",
                "content": "let me look",
                "refusal": "",
                "audio": {},
                "annotations": [],
                "reasoning_content": "hm",
                "reasoning": "hm",
                "tool_calls": [
                    {"id": "c1", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}},
                    {"id": "c2", "type": "custom", "custom": {"name": "p", "input": "x"}},
                ],
            },
            {"role": "tool", "content": "seen", "tool_call_id": "c1", "name": "f"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": False}},
            {"type": "custom", "custom": {"name": "p", "description": "d", "format": GRAMMAR}},
        ],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"name": "f"}]}},
        "response_format": {"type": "json_schema", "json_schema": {k: v for k, v in FORMAT.items() if k != "type"}},
        "stream_options": {"include_usage": True, "include_obfuscation": False},
        "metadata": {"user_id": "u", "agent": "a"},
        "logit_bias": {"7": 1.0},
        "reasoning": {"effort": "low", "enabled": True, "max_tokens": 5, "exclude": False},
        "thinking": {"type": "enabled", "budget_tokens": 9},
        "usage": {"include": True},
        "provider": {"order": ["x"]},
    },
    ResponsesDialect: {
        "input": [
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "hi"}],
                "id": "m",
                "status": "x",
            },
            {
                "type": "reasoning",
                "id": "rs",
                "summary": [],
                "content": [],
                "encrypted_content": "",
                "status": "completed",
            },
            {
                "type": "function_call",
                "call_id": "c1",
                "name": "f",
                "arguments": "{}",
                "id": "x",
                "status": "completed",
            },
            {"type": "custom_tool_call", "call_id": "c2", "name": "p", "input": "x", "id": "y", "namespace": "n"},
            {"type": "function_call_output", "call_id": "c1", "output": "seen", "id": "z", "status": "completed"},
            {
                "type": "shell_call",
                "call_id": "c3",
                "action": {"commands": ["ls"], "timeout_ms": 1, "max_output_length": 2},
                "status": "completed",
                "environment": {"type": "local"},
            },
        ],
        "tools": [
            {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": False},
            {"type": "custom", "name": "p", "description": "d", "format": GRAMMAR},
            {"type": "shell", "environment": {"type": "local"}},
            {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", "name": "g"}]},
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": FORMAT, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto", "context": "x"},
        "metadata": {"user_id": "u"},
        "thinking": {"type": "disabled"},
    },
    MessagesDialect: {
        "system": [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}, "citations": []}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {}, "citations": []}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {
                        "type": "tool_use",
                        "id": "c1",
                        "name": "f",
                        "input": {"a": None},
                        "caller": {},
                        "cache_control": {},
                    },
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [], "is_error": False}],
            },
        ],
        "tools": [
            {
                "type": "custom",
                "name": "f",
                "description": "d",
                "input_schema": SCHEMA,
                "cache_control": {},
                "strict": True,
            },
            {
                "type": "bash_20250124",
                "name": "c",
            },
        ],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "x"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        "metadata": {"user_id": "u"},
    },
    CompletionsDialect: {
        "prompt": "hi",
        "metadata": {"user_id": "u"},
        "logit_bias": {"7": 1.0},
        "stream_options": {"include_usage": True},
    },
}
OF_USERS = {"parameters", "input_schema", "schema", "arguments"}


def places_of(value, path=()):
    """The paths of all keys within the objects of a body, except in values that belong to the user."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (*path, name)
            if name not in OF_USERS and not (name == "input" and path[-2:-1] == ("content",)):
                yield from places_of(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places_of(inner, (*path, index))


def changed(body, paths, *, keep: bool):
    """The body with ``null`` at these places, or without them."""
    body = deepcopy(body)
    # Inner places first, so that each still exists.
    for path in sorted(paths, key=len, reverse=True):
        inner = body
        for step in path[:-1]:
            inner = inner[step]
        if keep:
            inner[path[-1]] = None
        else:
            del inner[path[-1]]
    return body


def outcome(dialect, body):
    """The parsed request, or the field that an error names."""
    try:
        parsed = dialect().parse(body, tag=None)
    except RequestError as error:
        return type(error), error.param
    return parsed


@pytest.mark.parametrize("dialect", BODIES)
def test_bodies_without_nulls_are_valid(dialect):
    """So that the law is about more than errors."""
    assert not isinstance(outcome(dialect, BODIES[dialect]), tuple)


@pytest.mark.parametrize("dialect", BODIES)
def test_null_equals_absence_at_one_place(dialect):
    """Every place, required ones included: the same request, or an error about the same field."""
    for path in places_of(BODIES[dialect]):
        null, absent = (outcome(dialect, changed(BODIES[dialect], [path], keep=keep)) for keep in (True, False))

        assert null == absent, path


def test_nulls_in_user_data_are_kept():
    """A schema's default may be ``null``, and so may an option of a chat template."""
    body = {"input": "hi", "tools": [BODIES[ResponsesDialect]["tools"][0]], "chat_template_kwargs": {"a": None}}
    request = ResponsesDialect().parse(body).request

    assert request.tools[0].parameters == SCHEMA
    assert request.template_kwargs == {"a": None}
    assert without_nulls({"schema": {"default": None}, "x": [{"y": None}]}) == {"schema": {"default": None}, "x": [{}]}
