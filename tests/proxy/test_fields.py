"""The tables of request fields of all dialects: complete, documented, and neutral values are accepted."""

from __future__ import annotations

import inspect

import anthropic
import pytest
from openai.resources.chat.completions import AsyncCompletions as AsyncChatCompletions
from openai.resources.completions import AsyncCompletions
from openai.resources.responses import AsyncResponses

from areal_actors.proxy.dialects import ROUTES
from areal_actors.proxy.dialects.fields import Support

_OF_THE_SDK_ALONE = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
_HELLO = [{"role": "user", "content": "hi"}]
TABLES = {route.operation: route.fields for route in ROUTES}
BODIES = {
    "chat/completions": {"messages": _HELLO},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {"messages": _HELLO, "max_tokens": 8},
}
METHODS = [
    ("chat/completions", AsyncChatCompletions.create),
    ("completions", AsyncCompletions.create),
    ("responses", AsyncResponses.create),
    *(
        ("messages", getattr(resource.AsyncMessages, name))
        for resource in (anthropic.resources.messages, anthropic.resources.beta.messages)
        for name in ("create", "stream", "count_tokens")
    ),
]


@pytest.mark.parametrize(("operation", "method"), METHODS)
def test_fields_decide_every_parameter_of_the_sdk(operation, method):
    """Nothing is ignored by oversight."""
    parameters = set(inspect.signature(inspect.unwrap(method)).parameters) - _OF_THE_SDK_ALONE

    assert parameters - {each.name for each in TABLES[operation].fields} == set()


@pytest.mark.parametrize("operation", TABLES)
def test_fields_are_unique_and_give_reasons(operation):
    """One row decides about a name. A client reads the note of a row that is refused or ignored."""
    fields = TABLES[operation].fields

    assert len({each.name for each in fields}) == len(fields)
    assert all(each.note for each in fields if each.support is not Support.HONOURED)


@pytest.mark.parametrize(
    ("operation", "field"), [(name, each) for name, table in TABLES.items() for each in table.fields if each.neutral]
)
def test_fields_accept_neutral_values(operation, field):
    """A value that asks for what happens anyway is no reason to refuse."""
    for value in field.neutral:
        TABLES[operation].read(BODIES[operation] | {field.name: value})
