"""Clients that edit what the model said: every turn keeps its true parent, and a rewarded episode forgets no turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_actors.cache import RewardTree, backpropagate, export_trajectories
from areal_actors.cache.history import message_digest
from areal_actors.domain import ChatMessage, ForkReason, Interaction, InteractionId, ToolCall

Edit = Callable[[ChatMessage], ChatMessage]


def say(text: str | None, role: str = "user", **rest: Any) -> ChatMessage:
    """A message."""
    return ChatMessage(role=role, content=text, **rest)


def with_default(message: ChatMessage) -> ChatMessage:
    """As Claude Code and the AI SDK: an argument that the model left out has its default in the echo."""
    calls = [evolve(c, arguments=json.dumps(json.loads(c.arguments) | {"all": False})) for c in message.tool_calls]
    return evolve(message, tool_calls=tuple(calls))


def as_code(message: ChatMessage) -> ChatMessage:
    """As smolagents' CodeAgent: the stop string is put back, and the code is repeated as a call of its own naming."""
    call = {"id": "call_1", "type": "function", "function": {"name": "python", "arguments": message.content or ""}}
    return say(f"{message.content}</code>Calling tools:\n{[call]}", "assistant")


EDITS: dict[str, Edit] = {
    "nothing": lambda m: m,
    "a default argument": with_default,
    "code": as_code,
    "a word more": lambda m: evolve(m, content=f"{m.content} not"),
    "no calls": lambda m: evolve(m, tool_calls=()),
    "calls reversed": lambda m: evolve(m, tool_calls=m.tool_calls[::-1]),
    "other thoughts": lambda m: evolve(m, reasoning="other"),
    "emptied": lambda m: evolve(m, content=None, tool_calls=(), reasoning=None),
}


class Client:
    """One conversation, whose client remembers answers as its edits left them, or edits them on every request."""

    def __init__(self, talk: Any, name: str, *, question: str = "hi", instructions: str = "") -> None:
        self.talk = talk
        self.name = name
        self.asked: list[ChatMessage] = [say(instructions, "system"), say(question)]
        self.answers: list[tuple[int, ChatMessage]] = []
        self.turns: list[str] = []

    def messages(self, edits: Sequence[Edit]) -> list[ChatMessage]:
        """The next request, with each answer edited."""
        messages = list(self.asked)
        for edit, (position, output) in zip(edits, self.answers, strict=True):
            messages.insert(position, edit(output))
        return messages

    def ask(self, edits: Sequence[Edit]) -> Interaction:
        """Send the next request."""
        self.turns.append(f"{self.name}{len(self.turns)}")
        return self.talk.begin(self.turns[-1], self.messages(edits))

    def hear(self, output: ChatMessage, reply: str) -> None:
        """Receive the answer, and think of the next question."""
        self.talk.finish(self.turns[-1], output)
        self.answers.append((len(self.asked) + len(self.answers), output))
        self.asked += [say(reply, "tool", tool_call_id=call.id) for call in output.tool_calls] or [say(reply)]


@st.composite
def outputs(draw: st.DrawFn, name: str) -> ChatMessage:
    """Answers from a small set, so that parallel conversations often hear the same; call ids are given out once."""
    calls = [
        ToolCall(
            id=f"{name}_{at}", name="edit", arguments=draw(st.sampled_from(['{"a": 1}', '{"a": 1, "all": false}']))
        )
        for at in range(draw(st.sampled_from([0, 0, 1, 2])))
    ]
    return say(draw(st.sampled_from(["yes", "no"])), "assistant", tool_calls=tuple(calls))


EDITING = st.sampled_from(sorted(EDITS))
REPLIES = st.sampled_from(["go on", "ok"])


@given(data=st.data())
def test_edited_linear_episode_is_one_chain(new_talk: Callable[..., Any], data: st.DataObject) -> None:
    """The reward reaches every turn, and edited ones have a reason."""
    talk = new_talk()
    client = Client(talk, "t")
    is_stable = data.draw(st.booleans(), "edits once")
    edits: list[Edit] = []
    for number in range(data.draw(st.integers(1, 6), "turns")):
        if not is_stable:
            edits = [EDITS[data.draw(EDITING, "edit")] for _ in client.answers]
        turn = client.ask(edits)

        assert turn.parent == (client.turns[-2] if number else None)
        assert turn.token_parent == turn.parent or turn.fork is not None
        sent, stored = client.messages(edits), talk.tree.history(turn)
        assert [message_digest(m) for m in sent] == [message_digest(m) for m in stored]
        client.hear(data.draw(outputs(f"{number}"), "answer"), data.draw(REPLIES, "reply"))
        edits = [*edits, EDITS[data.draw(EDITING, "edit")]]
    talk.tree.set_reward(InteractionId(client.turns[-1]), 1.0)

    assert set(backpropagate(talk.tree.snapshot(), 1.0).values()) == {1.0}


@given(data=st.data())
@settings(max_examples=150)
def test_edited_parallel_conversations_have_true_parents(new_talk: Callable[..., Any], data: st.DataObject) -> None:
    """Otherwise the fork has a reason."""
    talk = new_talk()
    clients = [
        Client(talk, name, question=data.draw(st.sampled_from("xy")), instructions=data.draw(st.sampled_from("pq")))
        for name in "abc"[: data.draw(st.integers(2, 3), "clients")]
    ]
    waiting: list[Client] = []
    for number in range(data.draw(st.integers(2, 9), "moves")):
        client = data.draw(st.sampled_from(clients), "client")
        if client in waiting:
            waiting.remove(client)
            client.hear(data.draw(outputs(f"{client.name}{number}"), "answer"), data.draw(REPLIES, "reply"))
            continue
        edits = [EDITS[data.draw(EDITING, "edit")] for _ in client.answers]
        turn = client.ask(edits)
        waiting.append(client)
        before = client.turns[-2] if len(client.turns) > 1 else None
        if turn.parent is not None and turn.parent != before:
            said = talk.tree.history(talk.tree.get(turn.parent))
            is_twin = _is_said(said, client.messages(edits))
            assert turn.fork is not None or is_twin
            # A client that takes back an edit may repeat the prompt of another one, and edit the answer to that.
            assert turn.parent in client.turns or is_twin or _is_said(said[:-1], client.messages(edits))
        elif turn.parent is None:
            assert before is None or turn.fork is not None


def _is_said(history: Sequence[ChatMessage], messages: Sequence[ChatMessage]) -> bool:
    """Whether a request repeats a conversation word for word, so that the two cannot be told apart."""
    return all(_plain(m) == _plain(n) for m, n in zip(history, messages, strict=False))


def _plain(message: ChatMessage) -> ChatMessage:
    calls = tuple(evolve(call, id="") for call in message.tool_calls)
    return evolve(message, tool_calls=calls, tool_call_id=None)


@pytest.mark.parametrize("edit", [with_default, EDITS["a word more"], as_code])
def test_coding_session_with_edited_calls_returns_the_reward_to_each_turn(talk: Any, edit: Edit) -> None:
    """Eight turns return 1.0, and edited ones say so."""
    client = Client(talk, "t")
    for number, name in enumerate(["Write", "Read", *["Edit"] * 5]):
        turn = client.ask([edit if at > 1 else EDITS["nothing"] for at in range(number)])
        assert turn.fork is (
            ForkReason.ROOT if number == 0 else ForkReason.CLIENT_EDITED_HISTORY if number > 2 else None
        )
        client.hear(say("", "assistant", tool_calls=(ToolCall(id=f"c{number}", name=name, arguments="{}"),)), "ok")
    client.ask([edit if at > 1 else EDITS["nothing"] for at in range(7)])
    client.hear(say("All done.", "assistant"), "")
    talk.tree.set_reward(None, 1.0)
    record = talk.tree.snapshot()

    assert list(backpropagate(record, 1.0).values()) == [1.0] * 8
    sampled = {turn.id: turn.completion.token_ids.tolist() for turn in record.interactions}
    for row in export_trajectories(record, style="individual", discount=1.0).trajectories:
        assert sampled[row.interactions[-1]] == row.input_ids[row.loss_mask == 1].tolist()
    assert RewardTree.of(record).depths() == list(range(8))


# -------------------------------------------------------------------------------- answers after one that was proven


def compress(talk: Any, *, others: int = 0) -> Interaction:
    """Qwen Code's compression: a question of an earlier turn loses a reminder, and the last answer has no calls."""
    call = say("Counting.", "assistant", tool_calls=(ToolCall(id="call_7", name="wc", arguments="{}"),))
    asked = [say("count"), say("It is noon.\ngo on")]
    result, done = say("3", "tool", tool_call_id="call_7"), say("All done.", "assistant")
    talk.begin("a", asked)
    talk.finish("a", call)
    for index in range(1 + others):
        talk.begin(f"b{index}", [*asked, call, result])
        talk.finish(f"b{index}", done)
    return talk.begin("c", [asked[0], say("go on"), call, result, done, say("Summarise.")])


def test_faithful_answer_after_an_edited_one_is_the_parent(talk):
    """It follows the answer whose call id is known."""
    turn = compress(talk)

    assert (turn.parent, turn.token_parent, turn.fork) == ("b0", None, ForkReason.CLIENT_EDITED_HISTORY)


def test_two_equal_continuations_of_an_edited_answer_are_ambiguous(talk):
    """The parent is the edited answer."""
    turn = compress(talk, others=1)

    assert (turn.parent, turn.fork) == ("a", ForkReason.CLIENT_EDITED_HISTORY)
