"""Mistral's tool formats: calls in a list, or each behind its name."""

from __future__ import annotations

import pytest
from tests.rendering.formats.laws import parse

from areal_actors.domain import ToolCall
from areal_actors.rendering.parsers import TOOL_FORMATS

LIST, NAMED = TOOL_FORMATS["mistral"], TOOL_FORMATS["mistral-args"]


def test_list_of_calls():
    """All calls of the list, with text in front; the arguments keep their spelling."""
    text = 'Hm. [TOOL_CALLS] [{"name": "a", "arguments": {"b":  1}}, {"arguments": {}, "name": "c", "id": "abcdef012"}]'
    answer = parse(LIST, text)

    assert "Hm." == answer.content
    assert (
        ToolCall(id="call_0", name="a", arguments='{"b":  1}'),
        ToolCall(id="abcdef012", name="c", arguments="{}"),
    ) == answer.tool_calls


def test_calls_behind_their_names():
    """One marker a call; an id that the model wrote is the call's id."""
    answer = parse(NAMED, '[TOOL_CALLS]a[ARGS]{"b": "}"}[TOOL_CALLS]c.d[CALL_ID]abcdef012[ARGS] {}')

    assert (
        ToolCall(id="call_0", name="a", arguments='{"b": "}"}'),
        ToolCall(id="abcdef012", name="c.d", arguments="{}"),
    ) == answer.tool_calls
    assert answer.content is None


@pytest.mark.parametrize("form", [LIST, NAMED])
def test_either_form_is_read(form):
    """Whatever the template shows."""
    assert [("a", "{}")] == [(c.name, c.arguments) for c in parse(form, '[TOOL_CALLS][{"name": "a"}]').tool_calls]
    assert [("a", "{}")] == [(c.name, c.arguments) for c in parse(form, "[TOOL_CALLS]a[ARGS]{}").tool_calls]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[",
        "[]",
        "[1]",
        '[{"name": "a"}',
        '[{"name": "a"} {"name": "b"}]',
        '[{"name": "a"}, {"no": "name"}]',
        '[{"name": "a", "arguments": [1]}]',
        '[{"name": "a", "arguments": {"b": NaN}}]',
        "[}",
        '[{"name": "a"}}',
        "a[ARGS]",
        "a[ARGS]1",
        "a[ARGS]{1}",
        "a b[ARGS]{}",
        "[ARGS]{}",
        "[CALL_ID]123456789[ARGS]{}",
        "a[b[ARGS]{}",
        '{"name": "a"}',
        "[" * 100_000,
        "[" * 100_000 + "]" * 100_000,
    ],
)
def test_malformed_call_stays_text(body):
    """Broken JSON, missing names and impossible values are content, marker and all."""
    text = f"so: [TOOL_CALLS]{body}"

    assert (text, ()) == (parse(LIST, text).content, parse(LIST, text).tool_calls)


def test_odd_id_is_replaced():
    """Templates would refuse it."""
    assert "call_0" == parse(NAMED, "[TOOL_CALLS]a[CALL_ID]short[ARGS]{}").tool_calls[0].id
    assert "call_0" == parse(LIST, '[TOOL_CALLS][{"name": "a", "id": 7}]').tool_calls[0].id
