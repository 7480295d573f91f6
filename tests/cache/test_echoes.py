"""Every measured manner of echo finds its parent, through the parsers of every protocol; other words never do."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from tests.cache.wires import WIRES, Style, Wire

from areal_actors.domain import Answer, ChatMessage, ForkReason, InteractionId, ToolCall, Usage
from areal_actors.testing.strategies import chat_messages

ALL_STYLES = [(protocol, style) for protocol, wire in WIRES.items() for style in wire.styles]
QUESTIONS = st.sampled_from(["hi", "", " a\n", "é漢🙂", "go on"])


def answers(number: int) -> st.SearchStrategy[ChatMessage]:
    """What the model says in one turn; call ids are given out once."""

    def name_calls(message: ChatMessage) -> ChatMessage:
        calls = [evolve(call, id=f"call_{number}_{at}") for at, call in enumerate(message.tool_calls)]
        return evolve(message, tool_calls=tuple(calls))

    return chat_messages("assistant").map(name_calls)


def to_answer(talk: Any, name: str, message: ChatMessage) -> Answer:
    """The answer as the proxy formats it."""
    completion = talk.completion(message)
    usage = Usage(prompt_tokens=1, completion_tokens=len(completion.token_ids))
    return Answer(interaction=InteractionId(name), message=message, completion=completion, usage=usage)


class Conversation:
    """One client's conversation through one wire, in one manner of echo."""

    def __init__(self, talk: Any, wire: Wire, *, name: str = "") -> None:
        self.talk = talk
        self.wire = wire
        self.name = name
        self.history: list[Any] = []
        self.turns: list[Any] = []

    def turn(self, output: ChatMessage, styles: Sequence[Style], *, question: str) -> Any:
        """Ask, answer, and remember the answer as the client does."""
        calls = self.turns[-1].output.tool_calls if self.turns else ()
        self.history += [self.wire.answer_call(call.id, question) for call in calls] or [self.wire.ask(question)]
        name = f"{self.name}{len(self.turns)}"
        self.turns.append(self.talk.turn(name, self.wire.read(self.history), output))
        pieces = self.wire.receive(to_answer(self.talk, name, output))
        for style in styles:
            pieces = style.echo(pieces)
        self.history += pieces
        return self.turns[-1]


ODD = '{"city":  "Z\\u00fcrich", "days": 2.0}'
SAMPLES = (
    ChatMessage(
        role="assistant", content="\n\nLet me check. ", tool_calls=(ToolCall(id="a", name="look", arguments=ODD),)
    ),
    ChatMessage(
        role="assistant",
        content="Both.",
        reasoning="Hm.\n",
        tool_calls=(ToolCall(id="b", name="look", arguments=ODD), ToolCall(id="c", name="add", arguments="{}")),
    ),
    ChatMessage(role="assistant", tool_calls=(ToolCall(id="d", name="look", arguments="{"),)),
    ChatMessage(role="assistant", content=" It is\n\n21. é漢🙂 ", reasoning="Ha."),
    ChatMessage(role="assistant", content=""),
    ChatMessage(role="assistant", content="Bye."),
)


@pytest.mark.parametrize("protocol", sorted(WIRES))
@given(data=st.data())
def test_turns_echoed_in_mixed_styles_are_one_chain(
    new_talk: Callable[..., Any], protocol: str, data: st.DataObject
) -> None:
    """Each answer may be echoed in several styles."""
    wire = WIRES[protocol]
    mixed = st.lists(st.sampled_from(sorted(wire.styles)), max_size=4, unique=True)
    talk = Conversation(new_talk(), wire)
    for number in range(3):
        names = data.draw(mixed, "styles")
        styles = sorted((wire.styles[name] for name in names), key=lambda style: style.degree)
        turn = talk.turn(data.draw(answers(number), "answer"), styles, question=data.draw(QUESTIONS))

        assert (f"{number - 1}" if number else None) == turn.parent


@pytest.mark.parametrize("protocol", sorted(WIRES))
@given(data=st.data())
def test_parallel_conversations_are_two_chains(
    new_talk: Callable[..., Any], protocol: str, data: st.DataObject
) -> None:
    """They differ in one word, and their answers may be equal."""
    wire = WIRES[protocol]
    tree = new_talk()
    pair = [Conversation(tree, wire, name=name) for name in "ab"]
    for number in range(3):
        output = data.draw(answers(number), "answer")
        for talk in data.draw(st.permutations(pair)):
            style = wire.styles[data.draw(st.sampled_from(sorted(wire.styles)))]
            question = data.draw(QUESTIONS) + talk.name
            calls = tuple(evolve(call, id=f"{talk.name}{call.id}") for call in output.tool_calls)
            turn = talk.turn(evolve(output, tool_calls=calls), [style], question=question)

            assert (f"{talk.name}{number - 1}" if number else None) == turn.parent


EDITS: dict[str, Callable[[ChatMessage], ChatMessage]] = {
    "a word more": lambda m: evolve(m, content=(m.content or "") + " not"),
    "a call more": lambda m: evolve(m, tool_calls=(*m.tool_calls, ToolCall(id="call_x", name="look", arguments="{}"))),
    "other thoughts": lambda m: evolve(m, reasoning=(m.reasoning or "") + " or not"),
    "a call fewer": lambda m: evolve(m, tool_calls=m.tool_calls[1:], content=m.content or "none"),
    "calls renamed": lambda m: evolve(m, tool_calls=tuple(evolve(c, name=c.name + "x") for c in m.tool_calls)),
    "other arguments": lambda m: evolve(m, tool_calls=tuple(map(_with_another_argument, m.tool_calls))),
}
"""What makes another answer of an answer."""


def _with_another_argument(call: ToolCall) -> ToolCall:
    try:
        arguments = json.loads(call.arguments or "{}", parse_constant=lambda _: json.loads("!"))
    except (ValueError, RecursionError):
        return evolve(call, arguments='{"other": 0}')
    return evolve(call, arguments=json.dumps(arguments | {"other": 0}))


@pytest.mark.parametrize("protocol", sorted(WIRES))
@given(data=st.data())
def test_edited_answer_is_parent_for_rewards_only(
    new_talk: Callable[..., Any], protocol: str, data: st.DataObject
) -> None:
    """The fork has a reason, and the sampled tokens are not extended."""
    wire = WIRES[protocol]
    tree = new_talk()
    output = data.draw(answers(0), "answer")
    edited = EDITS[data.draw(st.sampled_from(sorted(EDITS)), "edit")](output)
    tree.turn("0", wire.read([wire.ask("hi")]), output)
    style = wire.styles[data.draw(st.sampled_from([name for name, s in wire.styles.items() if s.degree < 5]))]
    pieces = style.echo(wire.receive(to_answer(tree, "0", edited)))
    follow_up = tree.turn("1", wire.read([wire.ask("hi"), *pieces, wire.ask("go on")]), "b")

    is_edited = edited != output
    assert follow_up.parent == "0"
    assert follow_up.token_parent == (None if is_edited else "0")
    assert follow_up.fork is (ForkReason.CLIENT_EDITED_HISTORY if is_edited else None)
