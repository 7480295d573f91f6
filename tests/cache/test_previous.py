"""Requests that name the answer they follow: the same tree, the same tokens, as if the history had been repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.cache import plan_prompt
from areal_actors.domain import ChatMessage, CompletionRequest, ForkReason, InteractionId, ToolCall
from areal_actors.errors import InvalidRequest, PreviousNotFound

TEXTS = st.sampled_from(["", "a", "hi there"])
ROLES = st.sampled_from(["system", "developer", "user", "tool"])
MESSAGES = st.lists(st.builds(ChatMessage, role=ROLES, content=TEXTS), min_size=1, max_size=3).map(tuple)
INSTRUCTIONS = st.sampled_from([(), (ChatMessage(role="system", content="Be kind."),)])
CALL = ToolCall(id="call_1", name="look", arguments="{}")
ANSWERS = st.builds(ChatMessage, role=st.just("assistant"), content=TEXTS, tool_calls=st.sampled_from([(), (CALL,)]))


def user(text: str) -> ChatMessage:
    """A message of the user."""
    return ChatMessage(role="user", content=text)


def instructions(text: str) -> ChatMessage:
    """What is meant for one request alone."""
    return ChatMessage(role="system", content=text)


@given(
    turns=st.lists(st.tuples(INSTRUCTIONS, MESSAGES, ANSWERS, st.integers(0, 3)), min_size=1, max_size=5),
)
def test_previous_id_gives_the_same_prompt_as_the_history(new_talk: Callable[..., Any], turns: list[Any]) -> None:
    talk = new_talk()
    histories: list[tuple[ChatMessage, ...]] = []
    for number, (own, new, output, back) in enumerate(turns):
        previous = number - 1 - back % number if number else None
        said = () if previous is None else histories[previous]
        name = None if previous is None else InteractionId(str(previous))
        turn = talk.turn(str(number), own + new, output, previous=name, has_instructions=bool(own))
        histories.append((*said, *new, output))

        assert talk.tree.history(turn) == (*own, *histories[-1])
        assert turn.parent == name
        whole = talk.renderer.render((*own, *said, *new), tools=(), template_kwargs={})
        assert talk.tree.prompt_tokens(turn).tolist() == whole.tolist()
        if turn.fork is None and name is not None:
            assert turn.token_parent == name


def test_previous_id_extends_the_exact_tokens(new_talk: Callable[..., Any]) -> None:
    """The instructions are the same."""
    talk = new_talk()
    kind = instructions("Be kind.")
    first = talk.turn("1", [kind, user("a")], "b", has_instructions=True)
    second = talk.turn("2", [kind, user("c")], "d", has_instructions=True, previous=InteractionId("1"))

    start = talk.tree.full_tokens(first).tolist()
    assert (second.parent, second.token_parent, second.fork) == ("1", "1", None)
    assert second.messages == (user("c"),)
    assert talk.tree.prompt_tokens(second).tolist()[: len(start)] == start


def test_instructions_apply_to_their_request_only(new_talk: Callable[..., Any]) -> None:
    """They are not mixed with system messages of the conversation."""
    talk = new_talk()
    house, now = ChatMessage(role="system", content="A house."), ChatMessage(role="developer", content="It is noon.")
    talk.turn("1", [instructions("Be kind."), house, user("a")], "b", has_instructions=True)
    brief = instructions("Be brief.")
    second = talk.turn("2", [brief, now, user("c")], "d", has_instructions=True, previous=InteractionId("1"))
    third = talk.turn("3", [now], "e", previous=InteractionId("2"))

    said = (house, user("a"), ChatMessage(role="assistant", content="b"), now, user("c"))
    assert second.fork is third.fork is ForkReason.NEW_SYSTEM_PROMPT
    assert talk.tree.history(second)[:-1] == (brief, *said)
    assert talk.tree.history(third)[:-1] == (*said, ChatMessage(role="assistant", content="d"), now)


def test_previous_id_selects_one_of_equal_answers(new_talk: Callable[..., Any]) -> None:
    """A history would leave it open."""
    talk = new_talk()
    talk.turn("1", [user("a")], "b")
    talk.turn("2", [user("a")], "b")

    assert talk.turn("3", [user("c")], "d", previous=InteractionId("1")).parent == "1"


def test_echoes_and_previous_ids_can_be_mixed(new_talk: Callable[..., Any]) -> None:
    """Either may follow the other."""
    talk = new_talk()
    said = [user("a"), ChatMessage(role="assistant", content="b"), user("c")]
    talk.turn("1", said[:1], "b")
    talk.turn("2", said, "d")
    third = talk.turn("3", [user("e")], "f", previous=InteractionId("2"))
    fourth = talk.turn("4", [*talk.tree.history(third), user("g")], "h")

    assert [third.parent, third.token_parent] == ["2", "2"]
    assert [fourth.parent, fourth.token_parent] == ["3", "3"]


def test_previous_id_follows_an_echo_with_other_call_ids(new_talk: Callable[..., Any]) -> None:
    """Its results are read by position."""
    talk = new_talk()
    calls = tuple(ToolCall(id=f"call_{n}", name="look", arguments="{}") for n in (1, 2))
    renamed = tuple(evolve(call, id=f"mine_{n}") for n, call in enumerate(calls))
    results = [ChatMessage(role="tool", content=name, tool_call_id=name) for name in ("mine_1", "mine_0")]
    talk.turn("1", [user("a")], ChatMessage(role="assistant", tool_calls=calls))
    talk.turn("2", [user("a"), ChatMessage(role="assistant", tool_calls=renamed), *results], "b")
    third = talk.turn("3", [user("c")], "d", previous=InteractionId("2"))

    assert (third.parent, third.token_parent, third.fork) == ("2", "2", None)
    assert third.messages == (user("c"),)


def test_previous_id_without_a_completed_answer_is_refused(new_talk: Callable[..., Any]) -> None:
    """It is unknown, pending, cancelled or failed."""
    talk = new_talk()
    for name in ("pending", "cancelled", "failed"):
        talk.begin(name, [user(name)])
    partial = talk.completion(ChatMessage(role="assistant", content="b"))
    talk.tree.cancel(InteractionId("cancelled"), partial)
    talk.tree.fail(InteractionId("failed"), "no engine")
    asked = CompletionRequest(messages=(user("x"),), previous=InteractionId("unknown"))

    with pytest.raises(PreviousNotFound, match="unknown") as caught:
        plan_prompt(talk.tree, talk.renderer, asked)
    assert (caught.value.status, caught.value.code, caught.value.param) == (
        400,
        "previous_response_not_found",
        "previous_response_id",
    )
    for name in ("pending", "cancelled", "failed"):
        with pytest.raises(InvalidRequest, match=f"{name} was not completed"):
            plan_prompt(talk.tree, talk.renderer, evolve(asked, previous=InteractionId(name)))
