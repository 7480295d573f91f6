"""Prompts: exact tokens of the parent, rendered suffixes, forks that keep the parent that rewards flow to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.cache import backpropagate, full_history, full_ids, lookup_in, plan_prompt
from areal_actors.domain import ChatMessage, CompletionRequest, ForkReason, InteractionId, Tool
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


def test_a_turn_extends_its_parents_exact_tokens(talk: Any) -> None:
    """Prompt, sampled ids and suffix, in this order; the echo's own spelling is nowhere."""
    talk.turn("1", [user("hi")], " yo ")
    found = plan(talk, user("hi"), answer("yo"), user("more"))

    assert text(found.token_ids) == "<user>hi|<assistant> yo |<user>more|<assistant>"
    assert text(found.suffix) == "<user>more|<assistant>"
    assert (found.parent, found.token_parent, found.fork) == ("1", "1", None)
    assert found.messages == (user("more"),)


def test_an_unclosed_answer_is_closed_in_the_suffix(talk: Any) -> None:
    """An answer that ended by length has no stop id; the renderer is told."""
    talk.begin("1", [user("hi")])
    talk.finish("1", answer("yo"), is_closed=False)

    assert text(plan(talk, user("hi"), answer("yo"), user("m")).suffix) == "|<user>m|<assistant>"


def test_an_empty_answer_is_not_closed(talk: Any) -> None:
    """Nothing was sampled, not even a stop id."""
    talk.begin("1", [user("hi")])
    talk.finish("1", answer(""), is_closed=False)

    assert text(plan(talk, user("hi"), answer(""), user("m")).suffix) == "|<user>m|<assistant>"


def test_history_is_rendered_from_what_was_stored(new_talk: Callable[..., Any]) -> None:
    """A client that drops the reasoning does not change what the model reads on a fork."""
    talk = new_talk(rewrites=True)
    talk.turn("1", [user("hi")], answer("yo", reasoning="Hm."))

    found = plan(talk, user("hi"), answer("yo"), user("more"))
    assert text(found.token_ids) == "<user>hi|<assistant>(Hm.)yo|<user>more|<assistant>"


def test_a_rewritten_history_forks_the_tokens_and_keeps_the_rewards(new_talk: Callable[..., Any]) -> None:
    """With a template that drops thinking, the final reward still reaches the first turn."""
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


def test_a_full_rendering_that_happens_to_extend_is_no_fork(new_talk: Callable[..., Any]) -> None:
    """Ids decide: if the parent's exact tokens are a prefix after all, they are shared."""
    talk = new_talk(rewrites=True)
    talk.turn("1", [user("hi")], "yo")

    found = plan(talk, user("hi"), answer("yo"), user("more"))
    assert (found.token_parent, found.fork) == ("1", None)


def test_a_fork_shares_tokens_with_an_earlier_ancestor(talk: Any) -> None:
    """Tools that come and go: the turn under the old tools shares with the ancestor that had them."""
    tools = (Tool(name="look"),)
    talk.turn("1", [user("a")], "x", tools=tools)
    history = [user("a"), answer("x"), user("b")]
    talk.turn("2", history, "y")
    turn = talk.turn("3", [*history, answer("y"), user("c")], "z", tools=tools)

    assert (turn.parent, turn.token_parent, turn.fork) == ("2", "1", ForkReason.TOOLS_CHANGED)
    assert text(turn.prompt_suffix) == "<user>b|<assistant>y|<user>c|<assistant>"
    assert text(talk.tree.prompt_tokens(turn)).startswith("{look}<user>a|<assistant>x|")


def test_the_choices_of_one_request_share_one_plan(talk: Any) -> None:
    """Siblings have the same prompt and the same parents."""
    talk.turn("1", [user("hi")], "yo")
    shared = plan(talk, user("hi"), answer("yo"), user("more"))
    left, right = (talk.tree.begin(InteractionId(name), shared) for name in ("2", "3"))

    assert left.parent == right.parent == "1"
    assert talk.tree.prompt_tokens(left).tolist() == talk.tree.prompt_tokens(right).tolist()


def test_planning_changes_nothing(talk: Any) -> None:
    """A plan that is never begun leaves no trace."""
    talk.turn("1", [user("hi")], "yo")
    before = talk.tree.snapshot()
    plan(talk, user("hi"), answer("yo"), user("more"))

    assert before == talk.tree.snapshot()


def test_the_work_of_rendering_is_linear(talk: Any) -> None:
    """Each message is rendered once in a conversation, however long."""
    messages = [user("hi")]
    for number in range(50):
        talk.begin(f"{number}", messages)
        talk.finish(f"{number}", answer("yo"))
        messages += [answer("yo"), user("more")]

    assert talk.renderer.num_rendered == 2 * 50


@given(data=st.data(), rewrites=st.booleans())
def test_prompts_are_what_a_full_rendering_of_the_stored_history_gives(
    new_talk: Callable[..., Any], *, data: st.DataObject, rewrites: bool
) -> None:
    """For any conversation and any client, extended or forked, the prompt is the rendering of what was really said."""
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


def test_a_record_with_a_missing_parent_is_named(talk: Any) -> None:
    """A damaged record is an error by name, not a wrong prompt."""
    talk.turn("1", [user("hi")], "yo")
    turn = talk.turn("2", [user("hi"), answer("yo"), user("more")], "ok")
    record = talk.tree.snapshot()
    lookup = lookup_in(type(record)(id=record.id, interactions=record.interactions[1:]))

    with pytest.raises(ExportError, match="refers to interaction 1"):
        full_ids(turn, lookup)
