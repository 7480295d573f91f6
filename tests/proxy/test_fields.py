"""The table of parameters."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from openai.resources.chat.completions import AsyncCompletions

from areal_actors.proxy.dialects.chat.request import CHAT_FIELDS
from areal_actors.proxy.dialects.fields import Support

_OF_THE_SDK_ALONE = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
_DOCS = Path(__file__).parents[2] / "docs" / "http.md"


def test_every_parameter_of_the_sdk_is_decided():
    """Whatever ``chat.completions.create`` takes has a row: nothing is ignored by oversight."""
    parameters = set(inspect.signature(inspect.unwrap(AsyncCompletions.create)).parameters) - _OF_THE_SDK_ALONE
    table = {parameter.name for parameter in CHAT_FIELDS.fields}

    assert parameters - table == set()


def test_names_are_unique():
    """One row decides."""
    names = [parameter.name for parameter in CHAT_FIELDS.fields]

    assert len(set(names)) == len(names)


def test_refusals_and_indifference_have_reasons():
    """A client reads why, and so does the documentation."""
    assert all(p.note for p in CHAT_FIELDS.fields if p.support is not Support.HONOURED)


@pytest.mark.parametrize("parameter", [p for p in CHAT_FIELDS.fields if p.neutral], ids=lambda p: p.name)
def test_neutral_values_are_accepted(parameter):
    """Asking for what happens anyway is not a reason to refuse."""
    for value in parameter.neutral:
        CHAT_FIELDS.read({"messages": [{"role": "user", "content": "hi"}], parameter.name: value})


def test_the_documentation_has_the_table():
    """``docs/http.md`` lists every parameter with its support and its note, word for word."""
    text = _DOCS.read_text()
    rows = [f"| `{p.name}` | {p.support} | {p.note} |" for p in CHAT_FIELDS.fields]

    assert [row for row in rows if row not in text] == []
