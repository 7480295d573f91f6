"""Parents: every follow-up that continues an answer of ours finds it, and nothing else does."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.cache import Match
from areal_actors.domain import (
    ChatMessage,
    CompletionRequest,
    ForkReason,
    Interaction,
    InteractionId,
    InteractionStatus,
    Tool,
    ToolCall,
)
from areal_actors.testing.strategies import chat_messages, echo_styles

System = ChatMessage(role="system", content="Be kind.")


def user(text: str) -> ChatMessage:
    """A message of the user."""
    return ChatMessage(role="user", content=text)


def answer(text: str | None, *calls: ToolCall, reasoning: str | None = None) -> ChatMessage:
    """An answer of the model."""
    return ChatMessage(role="assistant", content=text, tool_calls=calls, reasoning=reasoning)


def match(talk: Any, messages: list[ChatMessage], **request: Any) -> Match:
    """Look for the parent."""
    return talk.tree.match(CompletionRequest(messages=tuple(messages), **request))


def parent_of(found: Match) -> InteractionId | None:
    """The parent's id, if there is one."""
    return None if found.parent is None else found.parent.id


# ------------------------------------------------------------------- against an independent, slow, obvious oracle


def _text(message: ChatMessage) -> str:
    return (message.content or "").strip() if message.role == "assistant" else message.content or ""


def _calls(message: ChatMessage) -> list[Any]:
    def value(text: str) -> Any:
        try:
            return json.loads(text or "{}", parse_constant=lambda _: json.loads("!"))
        except (ValueError, RecursionError):
            return [text]  # arguments are never a list otherwise

    return [(call.name, value(call.arguments)) for call in message.tool_calls]


def says_the_same(stored: ChatMessage, echoed: ChatMessage) -> bool:
    """The definition, one clause after the other."""
    if stored.role != echoed.role or _calls(stored) != _calls(echoed):
        return False
    if stored.role != "assistant":
        return _text(stored) == _text(echoed) and stored.tool_call_id == echoed.tool_call_id
    thoughts = [(m.reasoning or "").strip() for m in (stored, echoed)]
    if thoughts[1] and thoughts[0] != thoughts[1]:
        return False
    is_lost = bool(stored.tool_calls) and not _text(echoed)
    has_ids = [c.id for c in stored.tool_calls] == [c.id for c in echoed.tool_calls]
    return _text(stored) == _text(echoed) or (is_lost and has_ids)


def candidates(talk: Any, messages: tuple[ChatMessage, ...]) -> list[Interaction]:
    """All completed interactions whose messages and answer are the longest prefix of ``messages``."""
    best: list[Interaction] = []
    longest = 0
    turns = talk.tree.snapshot().interactions
    issuers = {call.id: turn.id for turn in turns if turn.output is not None for call in turn.output.tool_calls}
    for turn in turns:
        if turn.status is not InteractionStatus.COMPLETED:
            continue
        stored = talk.tree.history(turn)
        if len(stored) > len(messages) or not all(map(says_the_same, stored, messages)):
            continue
        if {issuers.get(call.id, turn.id) for call in messages[len(stored) - 1].tool_calls} - {turn.id}:
            continue  # the same words, but another answer's call ids
        if len(stored) > longest:
            best, longest = [], len(stored)
        if len(stored) == longest:
            best.append(turn)
    return best


def is_justified(talk: Any, found: Match, messages: tuple[ChatMessage, ...]) -> bool:
    """Whether an edited parent issued a call of the request, or was asked all the questions before an answer in it.

    Instead of the parent, an ancestor may have issued the call, if the request says all that came after it. Otherwise
    the request has the parent's answer behind its last question.
    """
    stored = talk.tree.history(found.parent)
    ends = [at for at, message in enumerate(messages) if message.role == "assistant"]
    called = {call.id for message in messages for call in message.tool_calls}
    for at in (at for at, message in enumerate(stored) if called & {call.id for call in message.tool_calls}):
        after = stored[at + 1 :]
        tails = (messages[end + 1 - len(after) : end + 1] for end in ends if end + 1 >= len(after))
        if any(all(map(says_the_same, after, tail)) for tail in tails):
            return True
    if any(_questions(stored[:-1]) == _questions(messages[:at]) for at in ends):
        return True
    asked = [message for message in stored[:-1] if message.role != "assistant"][-1]
    repeated = [messages[at - 1] for at in ends if at and says_the_same(stored[-1], messages[at])]
    return any(asked.role == question.role and _text(asked).startswith(_text(question)) for question in repeated)


def _questions(messages: Sequence[ChatMessage]) -> list[str | None]:
    return [None if message.role == "assistant" else _text(message) for message in messages]


ROOTS = st.sampled_from([(user("hi"),), (System, user("hi")), (user("hi"), user("there"))])
ANSWERS = st.sampled_from([answer("yes"), answer(" yes"), answer("no", reasoning="Hm."), answer("no", reasoning="Ha.")])
FIRST_ARGUMENTS = st.sampled_from(['{"a": 1.0}', '{"a":  "é"}', "", "{"])


@st.composite
def answers(draw: st.DrawFn, number: int) -> ChatMessage:
    """Answers from a small set, so that siblings often coincide; call ids are given out once."""
    calls = [
        ToolCall(id=f"call_{number}_{i}", name="look", arguments=draw(FIRST_ARGUMENTS))
        for i in range(draw(st.sampled_from([0, 0, 1, 2])))
    ]
    return evolve(draw(ANSWERS), tool_calls=tuple(calls))


def replies(output: ChatMessage) -> list[ChatMessage]:
    """What a client says next: the results of the calls, or a message."""
    return [ChatMessage(role="tool", content="42", tool_call_id=call.id) for call in output.tool_calls] or [
        user("go on")
    ]


@given(st.data())
def test_parents_agree_with_a_slow_search(new_talk: Callable[..., Any], data: st.DataObject) -> None:
    """Random sessions have echoes in all styles, siblings, edits and unfinished turns."""
    talk = new_talk()
    prompts: dict[str, tuple[ChatMessage, ...]] = {}
    for number in range(data.draw(st.integers(1, 10), "turns")):
        completed = [t for t in talk.tree.snapshot().interactions if t.output is not None]
        if completed and data.draw(st.booleans(), "continues"):
            before = data.draw(st.sampled_from(completed), "parent")
            echo = data.draw(echo_styles(), "echo")
            messages = (*prompts[before.id], echo(before.output), *replies(before.output))
        elif prompts and data.draw(st.booleans(), "asks again"):
            messages = data.draw(st.sampled_from(sorted(prompts.values(), key=len)), "prompt")
        else:
            messages = data.draw(ROOTS, "root")
        if data.draw(st.integers(0, 7), "edits") == 0:
            first = 1 if messages[0].role == "system" else 0  # instructions follow rules of their own, tested below
            position = data.draw(st.integers(first, len(messages) - 1), "where")
            edited = evolve(messages[position], content=(messages[position].content or "") + "!")
            messages = (*messages[:position], edited, *messages[position + 1 :])

        expected = candidates(talk, messages)
        found = match(talk, list(messages))

        if found.num_kept is not None:
            assert any((message.content or "").endswith("!") for message in messages)
            assert found.fork_hint is not None
            assert is_justified(talk, found, messages)
        else:
            assert (parent_of(found) in {turn.id for turn in expected}) if expected else found.parent is None
        if found.num_kept is None and len({(turn.output, turn.parent) for turn in expected}) == 1:
            assert max(expected, key=lambda turn: turn.completed_order).id == parent_of(found)
        prompts[f"{number}"] = messages
        talk.begin(f"{number}", messages)
        output = data.draw(answers(number), "answer")
        if data.draw(st.integers(0, 5), "cancelled") == 0:
            talk.tree.cancel(InteractionId(f"{number}"), talk.completion(output), output)
        else:
            talk.finish(f"{number}", output)


# -------------------------------------------------------------------------------------------------- single rules


def test_last_completed_of_equal_siblings_is_the_parent(talk: Any) -> None:
    """The order of requests does not decide."""
    talk.begin("1", [user("hi")])
    talk.begin("2", [user("hi")])
    talk.finish("2", answer("same"))
    talk.finish("1", answer("same"))

    assert parent_of(match(talk, [user("hi"), answer("same"), user("go on")])) == "1"


def test_call_ids_and_reasoning_distinguish_equal_siblings(talk: Any) -> None:
    """They name the sibling that is continued."""
    for name in ("1", "2", "3"):
        call = ToolCall(id=f"call_{name}", name="look", arguments="{}")
        talk.turn(name, [user("hi")], answer(None, call, reasoning=f"thought {name}"))

    by_ids = answer(None, ToolCall(id="call_1", name="look", arguments="{}"))
    by_reasoning = answer(None, ToolCall(id="renamed", name="look", arguments="{}"), reasoning="thought 2")
    by_nothing = answer(None, ToolCall(id="renamed", name="look", arguments="{}"))

    assert parent_of(match(talk, [user("hi"), by_ids, user("x")])) == "1"
    assert parent_of(match(talk, [user("hi"), by_reasoning, user("x")])) == "2"
    assert parent_of(match(talk, [user("hi"), by_nothing, user("x")])) == "3"


def test_edited_answer_is_found_by_its_prompt(talk: Any) -> None:
    """The prompt was answered once."""
    talk.turn("1", [user("hi")], "a")

    found = match(talk, [user("hi"), answer("A"), user("more")])

    assert (parent_of(found), found.base) == ("1", None)
    assert found.fork_hint is ForkReason.CLIENT_EDITED_HISTORY
    assert (found.num_kept, found.new_messages) == (1, (answer("A"), user("more")))


def test_edited_answer_to_a_prompt_with_two_answers_is_a_root(talk: Any) -> None:
    """The fork has a reason."""
    talk.turn("1", [user("hi")], "a")
    talk.turn("2", [user("hi")], "b")

    found = match(talk, [user("hi"), answer("A"), user("more")])

    assert (found.parent, found.fork_hint) == (None, ForkReason.CLIENT_EDITED_HISTORY)


def test_tokens_extend_the_last_faithful_answer_before_an_edit(talk: Any) -> None:
    """The edited answer carries the reward."""
    talk.turn("1", [user("hi")], "a")
    talk.turn("2", [user("hi"), answer("a"), user("more")], "b")

    history = [user("hi"), answer("a"), user("more"), answer("B"), user("and?")]
    turn = talk.turn("3", history, "c")
    later = talk.turn("4", [*history, answer("c"), user("bye")], "d")

    assert (turn.parent, turn.token_parent, turn.fork) == ("2", "1", ForkReason.CLIENT_EDITED_HISTORY)
    assert talk.tree.history(turn) == (*history, answer("c"))
    assert (later.parent, later.token_parent, later.fork) == ("3", "3", None)


def test_edited_reasoning_in_the_history_is_an_edit(talk: Any) -> None:
    """Digests omit reasoning, so the path is compared message by message."""
    first = answer("a", reasoning="thought")
    talk.turn("1", [user("hi")], first)
    talk.turn("2", [user("hi"), first, user("more")], "b")
    edited = evolve(first, reasoning="another thought")

    found = match(talk, [user("hi"), edited, user("more"), answer("b"), user("x")])
    assert (parent_of(found), found.base, found.num_kept) == ("2", None, 1)
    assert found.fork_hint is ForkReason.CLIENT_EDITED_HISTORY
    assert parent_of(match(talk, [user("hi"), answer("a"), user("more"), answer("b"), user("x")])) == "2"


def test_call_ids_outrank_arguments(talk: Any) -> None:
    """An edit may turn the call of one sibling into that of another."""
    calls = [
        ToolCall(id=f"call_{at}", name="edit", arguments=a) for at, a in enumerate(['{"a": 1}', '{"a": 1, "b": 0}'])
    ]
    for call in calls:
        talk.turn(call.id, [user("hi")], answer(None, call))
    echo = answer(None, evolve(calls[0], arguments=calls[1].arguments))

    found = match(talk, [user("hi"), echo, user("x")])

    assert parent_of(found) == "call_0"
    assert found.fork_hint is ForkReason.CLIENT_EDITED_HISTORY


def test_call_ids_find_the_parent_of_a_shortened_history(talk: Any) -> None:
    """The window begins with a call."""
    call = ToolCall(id="call_1", name="look", arguments="{}")
    result = ChatMessage(role="tool", content="ok", tool_call_id="call_1")
    talk.turn("1", [user("hi")], answer("a"))
    talk.turn("2", [user("hi"), answer("a"), user("more")], answer(None, call))

    window = [user("summary"), answer(None, call), result]
    turn = talk.turn("3", window, "b")

    assert (turn.parent, turn.token_parent, turn.fork) == ("2", None, ForkReason.HISTORY_TRUNCATED)
    assert talk.tree.history(turn) == (*window, answer("b"))


def test_inserted_answer_has_a_fork_reason(talk: Any) -> None:
    """The client put an own answer into the conversation."""
    talk.turn("1", [user("hi")], "a")

    turn = talk.turn("2", [user("hi"), answer("a"), user("x"), answer("made up"), user("y")], "b")

    assert (turn.parent, turn.token_parent, turn.fork) == ("1", "1", ForkReason.CLIENT_EDITED_HISTORY)


def test_prefilled_answer_is_not_an_echo(talk: Any) -> None:
    """It ends the request."""
    talk.turn("1", [user("hi")], "a")
    talk.turn("2", [user("hi"), answer("a"), user("x")], "b")

    turn = talk.turn("3", [user("hi"), answer("a"), user("y"), answer("{")], "c")
    again = match(talk, [user("hi"), answer("a"), user("x"), answer("{")])

    assert (turn.parent, turn.token_parent, turn.fork) == ("1", "1", None)
    assert (parent_of(again), again.num_kept) == ("1", None)


def test_shortened_history_is_truncated_not_edited(talk: Any) -> None:
    """Its last answer is continued for rewards."""
    talk.turn("1", [user("hi")], "first")
    talk.turn("2", [user("hi"), answer("first"), user("more")], "second")

    window = match(talk, [user("more"), answer("second"), user("and?")])
    edited = match(talk, [user("ho"), answer("first"), user("more")])
    other = match(talk, [user("ho"), answer("second"), user("more")])

    assert (parent_of(window), window.base, window.fork_hint) == ("2", None, ForkReason.HISTORY_TRUNCATED)
    assert (edited.parent, edited.fork_hint) == (None, ForkReason.CLIENT_EDITED_HISTORY)
    assert (other.parent, other.fork_hint) == (None, ForkReason.HISTORY_TRUNCATED)


def test_answers_are_found_when_the_prompt_around_them_changes(talk: Any) -> None:
    """Aider moves its files before the last question."""
    files, ok, reminder = user("a.txt: one"), answer("Ok."), "\n\nAnswer briefly."
    talk.turn("1", [files, ok, user("upper case?" + reminder)], "ONE")

    turn = talk.turn(
        "2", [user("upper case?  \n"), answer("ONE"), user("a.txt: ONE"), ok, user("more?" + reminder)], "ONE, and TWO"
    )

    assert (turn.parent, turn.token_parent, turn.fork) == ("1", None, ForkReason.HISTORY_TRUNCATED)
    assert [message.content for message in talk.tree.history(turn)][:2] == ["upper case?  \n", "ONE"]


def test_repeated_or_quoted_answer_names_no_turn(talk: Any) -> None:
    """It may be an example that the client wrote."""
    shots = [user("1+1"), answer("2")]
    talk.turn("1", [*shots, user("0+2")], "2")
    talk.turn("2", [user("a?")], "b")
    talk.turn("3", [user("a?")], "b")

    example = match(talk, [user("hi"), answer("ho"), *shots, user("3+3")])
    twice = match(talk, [user("hi"), answer("ho"), user("a?"), answer("b"), user("more")])
    alone = match(talk, [answer("2"), user("more")])

    assert (example.parent, twice.parent, alone.parent) == (None, None, None)


def test_edited_history_does_not_match_other_words(talk: Any) -> None:
    """The text is the same, but calls or the question differ."""
    call = ToolCall(id="call_1", name="look", arguments="{}")
    seen = ChatMessage(role="tool", content="42", tool_call_id="call_1")
    called = evolve(answer("yes"), tool_calls=(call,))
    talk.begin("1", [user("hi")])
    talk.finish("1", called)
    talk.turn("2", [user("hi"), called, seen], "yes")
    other = evolve(answer("yes"), tool_calls=(evolve(call, id="call_9"),))

    calls = match(talk, [user("ho"), called, seen, other, evolve(seen, tool_call_id="call_9")])
    asks = match(talk, [user("ho"), called, evolve(seen, content="43"), answer("yes"), user("more")])
    same = match(talk, [user("ho"), called, seen, answer("yes"), user("more")])

    assert ("1", "1", "2") == (parent_of(calls), parent_of(asks), parent_of(same))


def test_root_that_is_asked_again_is_a_sibling(talk: Any) -> None:
    """The first one may still be pending."""
    assert talk.begin("1", [user("hi")]).fork is ForkReason.ROOT
    assert talk.begin("2", [user("hi")]).fork is ForkReason.SIBLING
    assert talk.begin("3", [user("ho")]).fork is ForkReason.ROOT


def test_few_shot_examples_are_a_root(talk: Any) -> None:
    """The session never gave these answers."""
    shots = [user("1+1"), answer("2"), user("2+2")]

    assert match(talk, shots).fork_hint is ForkReason.ROOT
    talk.turn("1", shots, "4")
    assert match(talk, [*shots[:2], user("3+3")]).fork_hint is ForkReason.ROOT


def test_changed_tools_keep_the_parent_and_fork_the_tokens(talk: Any) -> None:
    """The fork has a reason."""
    talk.turn("1", [user("hi")], "a", tools=(Tool(name="look"),))
    messages = [user("hi"), answer("a"), user("more")]

    without = match(talk, messages)
    same = match(talk, messages, tools=(Tool(name="look"),))
    options = match(talk, messages, tools=(Tool(name="look"),), template_kwargs={"enable_thinking": False})

    assert (parent_of(without), without.fork_hint) == ("1", ForkReason.TOOLS_CHANGED)
    assert (parent_of(same), same.fork_hint) == ("1", None)
    assert (parent_of(options), options.fork_hint) == ("1", ForkReason.TEMPLATE_OPTIONS_CHANGED)


def test_new_instructions_are_a_new_branch(talk: Any) -> None:
    """Equal words of two personas are not confused."""
    talk.turn("1", [System, user("hi")], "a")
    other = evolve(System, content="Be brief.")

    for messages in ([other, user("hi"), answer("a"), user("x")], [user("hi"), answer("a"), user("x")]):
        found = match(talk, messages)

        assert found.parent is None
        assert found.fork_hint is ForkReason.NEW_SYSTEM_PROMPT


def test_call_ids_link_a_handoff_under_other_instructions(talk: Any) -> None:
    call = ToolCall(id="call_7f3a", name="transfer", arguments="{}")
    result = ChatMessage(role="tool", content="ok", tool_call_id="call_7f3a")
    talk.turn("1", [System, user("hi")], answer(None, call))
    talk.turn("2", [System, user("hi"), answer(None, call), result], "passing on")
    other = evolve(System, content="You are the expert.")

    history = [other, user("hi"), answer(None, call), result, answer("passing on"), user("go")]
    turn = talk.turn("3", history, "done")
    later = talk.turn("4", [*history, answer("done"), user("thanks")], "bye")

    assert (turn.parent, turn.token_parent, turn.fork) == ("2", None, ForkReason.NEW_SYSTEM_PROMPT)
    assert talk.tree.history(turn) == (*history, answer("done"))
    assert (later.parent, later.token_parent) == ("3", "3")
    assert talk.tree.history(later)[0] == other


def test_cancelled_answer_is_not_a_parent(talk: Any) -> None:
    """The continuation is a branch with a reason, or follows a completed turn."""
    talk.begin("1", [user("hi")])
    talk.tree.cancel(InteractionId("1"), talk.completion(answer("par")), answer("par"))

    found = match(talk, [user("hi"), answer("par"), user("go on")])

    assert found.parent is None
    assert found.fork_hint is ForkReason.PARENT_UNFINISHED


def test_removed_answer_makes_a_sibling(talk: Any) -> None:
    """Clients drop a malformed answer and ask again."""
    talk.turn("1", [user("hi")], "a")
    talk.turn("2", [user("hi"), answer("a"), user("more")], "malformed")

    again = match(talk, [user("hi"), answer("a"), user("more"), user("Answer in JSON.")])
    assert parent_of(again) == "1"
    assert again.new_messages == (user("more"), user("Answer in JSON."))


@given(st.lists(chat_messages(), max_size=4))
def test_any_list_of_messages_is_a_root_of_an_empty_session(
    new_talk: Callable[..., Any], messages: list[ChatMessage]
) -> None:
    """Role orders may be strange, and there may be no message."""
    found = match(new_talk(), messages)

    assert found.parent is None
