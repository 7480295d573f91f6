"""Rewards on trees that grew as sessions do: requests at once, several choices, re-asks, late rewards, hang-ups.

The oracle keeps a tree of its own, from what the client knows (whose answer it continued), and computes returns by the
definition, recursively. It shares no code with the session's tree, which has to find the parents from the messages.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.cache import backpropagate
from areal_actors.cache.export import STYLES, export_trajectories
from areal_actors.domain import ChatMessage, InteractionId

TEXTS = st.sampled_from(["yes", "no", "maybe"])
"""Few enough that siblings often give the same answer."""


@define
class Turn:
    """What the client knows of one choice of a request."""

    name: str
    messages: tuple[ChatMessage, ...]
    parent: Turn | None
    answer: str | None = None
    completed: int = -1
    reward: float = 0.0
    is_open: bool = True
    children: list[Turn] = field(factory=list)

    @property
    def conversation(self) -> tuple[ChatMessage, ...]:
        assert self.answer is not None
        return (*self.messages, ChatMessage(role="assistant", content=self.answer))


@define
class Client:
    """Does one thing after another with a session, and remembers what it did."""

    talk: Any
    turns: list[Turn] = field(factory=list)
    num_completed: int = 0

    @property
    def completed(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.answer is not None]

    @property
    def pending(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.is_open]

    def ask(self, parent: Turn | None, text: str, num_choices: int) -> None:
        """A request with ``num_choices`` choices, which all have the same parent."""
        before = () if parent is None else parent.conversation
        messages = (*before, ChatMessage(role="user", content=text))
        true_parent = None if parent is None else self.last_twin(parent)
        for _ in range(num_choices):
            turn = Turn(name=f"turn-{len(self.turns)}", messages=messages, parent=true_parent)
            self.turns.append(turn)
            self.talk.begin(turn.name, messages)

    def last_twin(self, turn: Turn) -> Turn:
        """Of identical answers to identical requests, the one completed last is meant."""
        twins = [other for other in self.completed if other.conversation == turn.conversation]
        return max(twins, key=lambda other: other.completed)

    def complete(self, turn: Turn, answer: str) -> None:
        turn.answer, turn.is_open, turn.completed = answer, False, self.num_completed
        self.num_completed += 1
        self.talk.finish(turn.name, ChatMessage(role="assistant", content=answer))
        if turn.parent is not None:
            turn.parent.children.append(turn)

    def cancel(self, turn: Turn) -> None:
        turn.is_open = False
        self.talk.tree.cancel(InteractionId(turn.name))

    def reward(self, turn: Turn, reward: float) -> None:
        turn.reward = reward
        self.talk.tree.set_reward(InteractionId(turn.name), reward)

    def returns(self, discount: float) -> dict[str, float]:
        """By the definition."""

        def value(turn: Turn) -> float:
            future = fmean(map(value, turn.children)) if turn.children else 0.0
            return turn.reward + discount * future

        return {turn.name: value(turn) for turn in self.completed}


def act(client: Client, data: st.DataObject) -> None:
    """One thing that may happen now."""
    choices = ["ask", "ask"]
    choices += ["complete"] * 3 + ["cancel"] if client.pending else []
    choices += ["continue"] * 3 + ["reward"] * 2 if client.completed else []
    match data.draw(st.sampled_from(choices)):
        case "ask":
            client.ask(None, data.draw(TEXTS), data.draw(st.integers(1, 3)))
        case "continue":
            client.ask(data.draw(st.sampled_from(client.completed)), data.draw(TEXTS), data.draw(st.integers(1, 3)))
        case "complete":
            client.complete(data.draw(st.sampled_from(client.pending)), data.draw(TEXTS))
        case "cancel":
            client.cancel(data.draw(st.sampled_from(client.pending)))
        case "reward":
            client.reward(data.draw(st.sampled_from(client.completed)), data.draw(st.integers(-3, 3)))


@given(st.data(), st.integers(1, 25), st.floats(0, 1))
def test_returns_follow_the_definition_in_any_order_of_events(
    new_talk: Any, data: Any, num_steps: int, discount: float
) -> None:
    """No sibling pays."""
    client = Client(new_talk())
    for _ in range(num_steps):
        act(client, data)

    record = client.talk.tree.snapshot()
    expected = client.returns(discount)
    assert expected == pytest.approx(backpropagate(record, discount), abs=1e-9)
    for style in STYLES:
        exported = export_trajectories(record, discount=discount, style=style)
        trained = _trained_returns(exported.trajectories)
        assert set(trained) == set(expected)
        for name, values in trained.items():
            assert values == pytest.approx([expected[name]] * len(values), abs=1e-5)


def _trained_returns(rows: Any) -> dict[str, list[float]]:
    """The return of each trained token, by its turn; every turn is trained in one row only."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for index, name in enumerate(row.interactions):
            values = row.returns[(row.turns == index) & (row.loss_mask == 1)].tolist()
            if values:
                assert name not in found
                found[name] = values
    return found
