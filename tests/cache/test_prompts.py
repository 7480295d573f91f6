"""Prompts: exact tokens of the parent, rendered suffixes, forks that keep the parent that rewards flow to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.cache import backpropagate, full_history, full_ids, lookup_in, plan_prompt
from areal_actors.domain import ChatMessage, CompletionRequest, ForkReason, Tool
from areal_actors.errors import ExportError
from areal_actors.testing.strategies import conversations, echo_styles


def user(text: str) -> ChatMessage:
    """A message of the user."""
    return ChatMessage(role="user", content=text)


def answer(text: str, *, reasoning: str | None = None) -> ChatMessage:
    """An answer of the model."""
    return ChatMessage(role="assistant", content=text, reasoning=reasoning)


def plan(talk: Any, *messages: ChatMessage, **request: Any) -> Any:
    """Plan the prompt of these messages."""
    return plan_prompt(talk.tree, talk.renderer, CompletionRequest(messages=messages, **request))


def text(ids: Any) -> str:
    """Ids as text, stop ids as bars."""
    return "".join("|" if i == 3 else chr(i) for i in ids)


def test_answer_without_a_stop_id_is_closed_in_the_suffix(talk: Any) -> None:
    """It ended by length."""
    talk.begin("1", [user("hi")])
    talk.finish("1", answer("yo"), is_closed=False)

    assert text(plan(talk, user("hi"), answer("yo"), user("m")).suffix) == "|<user>m|<assistant>"


def test_empty_answer_is_closed_in_the_suffix(talk: Any) -> None:
    """Not even a stop id was sampled."""
    talk.begin("1", [user("hi")])
    talk.finish("1", answer(""), is_closed=False)

    assert text(plan(talk, user("hi"), answer(""), user("m")).suffix) == "|<user>m|<assistant>"


def test_fork_is_rendered_from_the_stored_history(new_talk: Callable[..., Any]) -> None:
    """The client has dropped the reasoning."""
    talk = new_talk(rewrites=True)
    talk.turn("1", [user("hi")], answer("yo", reasoning="Hm."))

    found = plan(talk, user("hi"), answer("yo"), user("more"))
    assert text(found.token_ids) == "<user>hi|<assistant>(Hm.)yo|<user>more|<assistant>"


def test_rewritten_history_forks_tokens_and_keeps_rewards(new_talk: Callable[..., Any]) -> None:
    """The template drops thinking."""
    talk = new_talk(rewrites=True, keeps_reasoning=False)
    talk.renderer.keeps_reasoning = True
    talk.turn("1", [user("hi")], answer("yo", reasoning="Hm."))
    talk.renderer.keeps_reasoning = False
    turn = talk.turn("2", [user("hi"), answer("yo"), user("more")], "done")
    talk.tree.set_reward(None, 1.0)

    assert (turn.parent, turn.token_parent) == ("1", None)
    assert turn.fork is ForkReason.TEMPLATE_REWROTE_HISTORY
    assert text(talk.tree.prompt_tokens(turn)) == "<user>hi|<assistant>yo|<user>more|<assistant>"
    assert backpropagate(talk.tree.snapshot(), 0.9) == {"1": 0.9, "2": 1.0}


def test_full_rendering_that_extends_the_parent_is_no_fork(new_talk: Callable[..., Any]) -> None:
    """Ids decide."""
    talk = new_talk(rewrites=True)
    talk.turn("1", [user("hi")], "yo")

    found = plan(talk, user("hi"), answer("yo"), user("more"))
    assert (found.token_parent, found.fork) == ("1", None)


def test_fork_shares_tokens_with_an_earlier_ancestor(talk: Any) -> None:
    """Tools come and go."""
    tools = (Tool(name="look"),)
    talk.turn("1", [user("a")], "x", tools=tools)
    history = [user("a"), answer("x"), user("b")]
    talk.turn("2", history, "y")
    turn = talk.turn("3", [*history, answer("y"), user("c")], "z", tools=tools)

    assert (turn.parent, turn.token_parent, turn.fork) == ("2", "1", ForkReason.TOOLS_CHANGED)
    assert text(turn.prompt_suffix) == "<user>b|<assistant>y|<user>c|<assistant>"
    assert text(talk.tree.prompt_tokens(turn)).startswith("{look}<user>a|<assistant>x|")


def test_each_message_is_rendered_once(talk: Any) -> None:
    """The work of a conversation is linear."""
    messages = [user("hi")]
    for number in range(50):
        talk.begin(f"{number}", messages)
        talk.finish(f"{number}", answer("yo"))
        messages += [answer("yo"), user("more")]

    assert talk.renderer.num_rendered == 2 * 50


@given(data=st.data(), rewrites=st.booleans())
def test_prompts_equal_a_full_rendering_of_the_stored_history(
    new_talk: Callable[..., Any], *, data: st.DataObject, rewrites: bool
) -> None:
    """Any conversation of any client, extended or forked."""
    talk = new_talk(rewrites=rewrites)
    script = data.draw(conversations(max_turns=4))
    echo = data.draw(echo_styles())
    heard: list[ChatMessage] = []
    true: list[ChatMessage] = []
    number = 0
    for message in script:
        if message.role == "assistant":
            asked = talk.begin(f"{number}", heard)
            expected = talk.renderer.render(true, tools=(), template_kwargs={})

            assert expected.tolist() == talk.tree.prompt_tokens(asked).tolist()
            assert (f"{number - 1}" if number else None) == asked.parent
            talk.finish(f"{number}", message)
            number += 1
        heard.append(echo(message) if message.role == "assistant" else message)
        true.append(message)

    record = talk.tree.snapshot()
    lookup = lookup_in(record)
    for turn in record.interactions:
        assert talk.tree.full_tokens(turn).tolist() == full_ids(turn, lookup).tolist()
        assert talk.tree.history(turn) == full_history(turn, lookup)


def test_record_with_a_missing_parent_is_refused(talk: Any) -> None:
    """The error names it."""
    talk.turn("1", [user("hi")], "yo")
    turn = talk.turn("2", [user("hi"), answer("yo"), user("more")], "ok")
    record = talk.tree.snapshot()
    lookup = lookup_in(type(record)(id=record.id, interactions=record.interactions[1:]))

    with pytest.raises(ExportError, match="refers to interaction 1"):
        full_ids(turn, lookup)
