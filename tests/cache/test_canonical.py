"""Canonical forms: every faithful echo is recognised, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from attrs import evolve
from hypothesis import given

from areal_actors.cache.history import (
    DIGEST_SIZE,
    canonical_arguments,
    is_echo,
    message_digest,
    options_digest,
    prefix_digests,
    system_digest,
    tools_digest,
)
from areal_actors.domain import ChatMessage, Tool, ToolCall
from areal_actors.testing.strategies import chat_messages, echo_styles


def is_recognised(stored: ChatMessage, echoed: ChatMessage) -> bool:
    """Whether an echo would be taken for the stored message."""
    return message_digest(stored) == message_digest(echoed) and is_echo(stored, echoed)


def answer(text: str | None = None, *calls: ToolCall, reasoning: str | None = None) -> ChatMessage:
    """An answer of the model."""
    return ChatMessage(role="assistant", content=text, tool_calls=calls, reasoning=reasoning)


def call(arguments: str = "{}", *, name: str = "look", call_id: str = "call_1") -> ToolCall:
    """A tool call."""
    return ToolCall(id=call_id, name=name, arguments=arguments)


@given(chat_messages("assistant"), echo_styles())
def test_faithful_echoes_are_recognised(stored: ChatMessage, echo: Callable[[ChatMessage], ChatMessage]) -> None:
    """Clients re-serialise, trim, drop or add parts."""
    assert is_recognised(stored, echo(stored))


EVERYTHING = answer("Let me check.", call('{"n": 1}'), call('{"n": 2}', call_id="call_2"), reasoning="Hm.")

EDITS = {
    "text changed": lambda m: evolve(m, content="Let me guess."),
    "text in other case": lambda m: evolve(m, content="let me check."),
    "white space within": lambda m: evolve(m, content="Let me  check."),
    "argument changed": lambda m: evolve(m, tool_calls=(call('{"n": 3}'), m.tool_calls[1])),
    "argument became text": lambda m: evolve(m, tool_calls=(call('{"n": "1"}'), m.tool_calls[1])),
    "tool renamed": lambda m: evolve(m, tool_calls=(call('{"n": 1}', name="glance"), m.tool_calls[1])),
    "call dropped": lambda m: evolve(m, tool_calls=m.tool_calls[:1]),
    "calls dropped": lambda m: evolve(m, tool_calls=()),
    "calls swapped": lambda m: evolve(m, tool_calls=m.tool_calls[::-1]),
    "call repeated": lambda m: evolve(m, tool_calls=(*m.tool_calls, m.tool_calls[0])),
    "reasoning changed": lambda m: evolve(m, reasoning="Ha."),
    "role changed": lambda m: evolve(m, role="user"),
    "text lost and ids foreign": lambda m: evolve(
        m, content=None, tool_calls=tuple(evolve(c, id="x" + c.id) for c in m.tool_calls)
    ),
}


@pytest.mark.parametrize("edit", sorted(EDITS))
def test_edited_messages_are_not_echoes(edit: str) -> None:
    """A wrong match is worse than none."""
    assert not is_recognised(EVERYTHING, EDITS[edit](EVERYTHING))


QUOTED = "Calling tools:\n[{'id': '%s', 'type': 'function', 'function': {'name': 'look', 'arguments': {'n': %s}}}]"


@pytest.mark.parametrize("text", ["Let me check.\n", ""])
def test_calls_quoted_in_the_text_are_an_echo_with_the_same_ids(text: str) -> None:
    """Other ids, arguments or words are not."""
    stored = answer("Let me check.", call('{"n": 1.0}', call_id="call_7f3a"))

    assert is_recognised(stored, answer(text + QUOTED % ("call_7f3a", 1)))
    assert not is_recognised(stored, answer(text + QUOTED % ("call_7f3b", 1)))
    assert not is_recognised(stored, answer(text + QUOTED % ("call_7f3a", 2)))
    assert not is_recognised(stored, answer("No: " + QUOTED % ("call_7f3a", 1)))
    assert not is_recognised(answer(text + QUOTED % ("call_7f3a", 1)), stored)


@pytest.mark.parametrize(
    "listing",
    [
        "",
        "[",
        "[]",
        "{}",
        "[1]",
        "3",
        "__import__('os')",
        "[{'id': 1}]",
        "(" * 9999,
        "-" * 60_000 + "1",
        "1" + "+1" * 30_000,
        "\ud800",
    ],
    ids=lambda listing: ascii(listing[:9]),
)
def test_text_after_the_mark_that_is_no_list_of_calls_is_text(listing: str) -> None:
    """Nothing is run and nothing is raised."""
    stored = answer(f"Calling tools:\n{listing}")

    assert is_recognised(stored, stored)
    assert is_recognised(stored, evolve(stored, content=f" {stored.content}\n"))
    assert not is_recognised(stored, evolve(stored, content=f"Calling tools:\n{listing} " + "x"))


def test_echoes_may_drop_but_not_add_text() -> None:
    """Added text or reasoning makes another message."""
    stored = answer(None, call())

    assert is_recognised(evolve(stored, content="x", reasoning="y"), stored)
    assert not is_recognised(stored, evolve(stored, content="x"))
    assert not is_recognised(stored, evolve(stored, reasoning="y"))


@given(chat_messages("user"), chat_messages("user"))
def test_user_messages_are_compared_exactly(left: ChatMessage, right: ChatMessage) -> None:
    """Only answers are stripped."""
    assert (left.content == right.content) == is_recognised(left, right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ('{"b": 1, "a": [1, {"d": 2, "c": 3}]}', '{"a":[1,{"c":3,"d":2}],"b":1}'),
        ('{"city": "Z\\u00fcrich"}', '{"city": "Zürich"}'),
        ('{"days": 2.0}', '{"days": 2}'),
        ('{"x": 1e2}', '{"x": 100}'),
        ('{"id": 12345678901234567890123}', '{"id": 1.2345678901234568e+22}'),
        ("", "{}"),
        ("  ", "{}"),
    ],
)
def test_equal_json_arguments_have_one_form(left: str, right: str) -> None:
    """Order of keys, white space, escapes and the spelling of numbers do not matter."""
    assert canonical_arguments(left) == canonical_arguments(right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ('{"a": 1}', '{"a": true}'),
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": null}', "{}"),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": 1e400}', '{"a": 1e500}'),
        ('{"a": NaN}', '{"a": nan}'),
        ('{"a": 18446744073709551615}', '{"a": 18446744073709551614}'),
        ('{"a": 9007199254740993}', '{"a": 9007199254740992.0}'),
        ("{", "{ "),
        ("null", ""),
        ('"{"', "{"),
        ("[" * 100_000, "[" * 99_999),
        ("1" * 5000, "1" * 5001),
    ],
)
def test_different_arguments_have_different_forms(left: str, right: str) -> None:
    """Text that is not JSON is compared as text."""
    assert canonical_arguments(left) != canonical_arguments(right)


def test_digest_separates_the_parts_of_a_message() -> None:
    """Text that looks like the encoding of two parts is one part."""
    calls = answer(None, call("{}", name="a"), call("{}", name="b"))
    one = answer(None, call("{}", name="a7:json:{}1:b"))

    assert message_digest(calls) != message_digest(one)


def test_lone_surrogates_are_digested() -> None:
    """JSON may hold half a character."""
    broken, other = (ChatMessage(role="user", content=text) for text in ("\ud800", "\udc00"))

    assert message_digest(broken) != message_digest(other)
    assert canonical_arguments('{"a": "\\ud800"}') == canonical_arguments('{"a":"\\ud800"}')


def test_tool_results_are_digested_by_the_position_of_their_call() -> None:
    """Ids may be dropped or renamed; swapped results are another history."""
    asked = answer(None, call(call_id="a"), call(call_id="b"))

    def digest(*results: tuple[str | None, str]) -> bytes:
        tools = [ChatMessage(role="tool", tool_call_id=i, content=text) for i, text in results]
        return prefix_digests([asked, *tools])[-DIGEST_SIZE:]

    expected = digest(("a", "1"), ("b", "2"))
    assert expected == digest((None, "1"), (None, "2"))
    assert expected == digest(("x", "1"), ("y", "2"))
    assert expected != digest(("b", "1"), ("a", "2"))
    assert expected != digest(("a", "2"), ("b", "1"))


def test_leading_instructions_have_a_digest_of_their_own() -> None:
    """A system message in the middle is a message like others."""
    user = ChatMessage(role="user", content="hi")
    one, two = (ChatMessage(role="system", content=text) for text in ("Be kind.", "Be brief."))

    assert prefix_digests([one, user])[-DIGEST_SIZE:] == prefix_digests([two, user])[-DIGEST_SIZE:]
    assert system_digest([one, user]) != system_digest([two, user])
    assert prefix_digests([user, one])[-DIGEST_SIZE:] != prefix_digests([user, two])[-DIGEST_SIZE:]


def test_tools_digest_ignores_the_order_of_keys() -> None:
    """The order of tools changes the prompt, so it counts."""
    left = Tool(name="f", parameters={"type": "object", "required": ["a"]})
    same = Tool(name="f", parameters={"required": ["a"], "type": "object"})
    other = Tool(name="g")

    assert tools_digest([left]) == tools_digest([same])
    assert tools_digest([left, other]) != tools_digest([other, left])
    assert tools_digest([]) != tools_digest([left])
    assert options_digest({"a": 1, "b": 2}) == options_digest({"b": 2, "a": 1})
    assert options_digest({}) != options_digest({"enable_thinking": False})
