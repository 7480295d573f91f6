"""The tree: lifecycles that end once, rewards that land where they were meant, tokens that add up again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from areal_actors.cache import ConversationTree, plan_prompt
from areal_actors.cache.history import full_history, full_ids, prompt_ids
from areal_actors.domain import (
    ChatMessage,
    Completion,
    CompletionRequest,
    FinishReason,
    InteractionId,
    InteractionStatus,
    SessionId,
    SessionRecord,
    as_ints,
)
from areal_actors.errors import Conflict, NotFound, RewardError


def user(text: str) -> ChatMessage:
    """A message of the user."""
    return ChatMessage(role="user", content=text)


def answer(text: str) -> ChatMessage:
    """An answer of the model."""
    return ChatMessage(role="assistant", content=text)


@given(wanted=st.lists(st.sampled_from(["abcDEF123", "abcDEF124", "call_1", ""])))
def test_call_ids_are_issued_once(wanted: list[str]) -> None:
    """The first answer keeps the id that its model wrote."""
    tree = ConversationTree(SessionId("s"))
    issued = [tree.issue_call_id(call_id) for call_id in wanted]

    assert len(set(issued)) == len(wanted)
    assert all(own.startswith(call_id) for own, call_id in zip(issued, wanted, strict=True))
    assert set(wanted) <= set(issued)


@pytest.mark.parametrize("first", ["complete", "cancel", "fail"])
@pytest.mark.parametrize("second", ["complete", "cancel", "fail"])
def test_interaction_ends_once(talk: Any, first: str, second: str) -> None:
    """The error names the first end."""

    def end(how: str) -> Any:
        if how == "complete":
            return talk.finish("1", answer("a"))
        return talk.tree.cancel("1") if how == "cancel" else talk.tree.fail("1", "engine gone")

    talk.begin("1", [user("hi")])
    ended = end(first)
    with pytest.raises(Conflict, match=f"1 is {ended.status} already"):
        end(second)

    assert ended == talk.tree.get("1")
    assert talk.tree.num_pending == 0


def test_unknown_interaction_ids_are_named(talk: Any) -> None:
    for call in (
        lambda: talk.tree.get("x"),
        lambda: talk.finish("x", answer("a")),
        lambda: talk.tree.cancel("x"),
        lambda: talk.tree.fail("x", "why"),
        lambda: talk.tree.set_reward("x", 1),
    ):
        with pytest.raises(NotFound, match="Session s has no interaction x"):
            call()


def test_last_completed_interaction_is_rewarded_by_default(talk: Any) -> None:
    talk.begin("1", [user("a")])
    talk.begin("2", [user("b")])
    talk.begin("3", [user("c")])
    talk.finish("2", answer("x"))
    talk.finish("1", answer("x"))
    talk.tree.cancel("3")

    assert talk.tree.set_reward(None, 1).id == "1"


def test_reward_without_an_id_skips_unstored_answers(talk: Any) -> None:
    talk.turn("0", [user("title?")], "t", store=False)
    assert talk.tree.set_reward(None, 1).id == "0"
    talk.turn("1", [user("a")], "x")
    talk.turn("2", [user("title?")], "t", store=False)

    assert talk.tree.set_reward(None, 1).id == "1"


def test_reward_without_a_completed_interaction_is_refused(talk: Any) -> None:
    talk.begin("1", [user("a")])

    with pytest.raises(RewardError, match="no completed interaction to reward; wait"):
        talk.tree.set_reward(None, 1)


def test_pending_interaction_keeps_its_reward(talk: Any) -> None:
    talk.begin("1", [user("a")])
    talk.tree.set_reward("1", 0.5)

    assert talk.finish("1", answer("x")).reward == 0.5


def test_reward_of_a_failed_interaction_is_refused(talk: Any) -> None:
    talk.begin("1", [user("a")])
    talk.tree.cancel("1")

    with pytest.raises(RewardError, match=r"was not completed \(cancelled\)"):
        talk.tree.set_reward("1", 1)


def test_refused_reward_changes_nothing(talk: Any) -> None:
    talk.turn("1", [user("hi")], "a")
    talk.tree.set_reward("1", 0.25)
    with pytest.raises(RewardError):
        talk.tree.set_reward("1", float("nan"))

    assert talk.tree.get("1").reward == 0.25


def test_snapshot_does_not_change() -> None:
    tree = ConversationTree(SessionId("s"), metadata={"task": 7})
    before = tree.snapshot()
    request = CompletionRequest(messages=(user("hi"),))
    tree.begin(InteractionId("1"), plan_prompt(tree, _Digits(), request))

    assert before == SessionRecord(id=SessionId("s"), metadata={"task": 7})
    assert len(tree.snapshot(is_ended=True).interactions) == 1
    assert tree.snapshot(is_ended=True).is_ended


def test_stored_arrays_are_read_only_copies(talk: Any) -> None:
    talk.begin("1", [user("hi")])
    buffer = np.arange(6, dtype=np.int32)
    logprobs = np.zeros(3, np.float32)
    completion = Completion(
        token_ids=buffer[:3],
        logprobs=logprobs,
        raw_logprobs=logprobs - 1,
        versions=buffer[3:],
        finish=FinishReason.LENGTH,
    )
    stored = talk.tree.complete("1", completion, answer("x")).completion
    buffer[:] = 99

    assert stored.token_ids.tolist() == [0, 1, 2]
    assert stored.raw_logprobs.tolist() == [-1, -1, -1]
    with pytest.raises(ValueError, match="read-only"):
        stored.token_ids[0] = 5


class _Digits:
    """A renderer with one token per message."""

    stop_token_ids = (0,)

    def render(self, messages: Any, *, tools: Any, template_kwargs: Any) -> Any:
        return as_ints([len(message.content or "") + 1 for message in messages])

    def extend(self, *, history: Any, new: Any, end: Any, tools: Any, template_kwargs: Any) -> Any:
        return self.render(new, tools=tools, template_kwargs=template_kwargs)


class TreeMachine(RuleBasedStateMachine):
    """Begin, complete, cancel, fail and reward in any order, with siblings in flight; a plain dict is the model."""

    pending = Bundle("pending")
    finished = Bundle("finished")

    def __init__(self) -> None:
        super().__init__()
        self.tree = ConversationTree(SessionId("s"))
        self.plans: dict[str, Any] = {}
        self.status: dict[str, InteractionStatus] = {}
        self.rewards: dict[str, float] = {}
        self.completed: list[str] = []
        self.early: list[tuple[SessionRecord, tuple[Any, ...]]] = []

    def _begin(self, messages: tuple[ChatMessage, ...], num_choices: int) -> Any:
        plan = plan_prompt(self.tree, _Digits(), CompletionRequest(messages=messages))
        names = [f"{len(self.plans) + i}" for i in range(num_choices)]
        for name in names:
            self.tree.begin(InteractionId(name), plan)
            self.plans[name] = plan
            self.status[name] = InteractionStatus.PENDING
        return multiple(*names)

    @rule(target=pending, text=st.sampled_from(["a", "bb"]), num_choices=st.integers(1, 3))
    def begin_root(self, text: str, num_choices: int) -> Any:
        return self._begin((user(text),), num_choices)

    @rule(target=pending, name=finished, num_choices=st.integers(1, 3))
    def continue_one(self, name: str, num_choices: int) -> Any:
        turn = self.tree.get(InteractionId(name))
        history = self.tree.history(turn)
        names = self._begin((*history, user("more")), num_choices)
        parent = self.plans[next(iter(names.values))].parent
        if turn.status is InteractionStatus.COMPLETED:
            assert parent is not None
            assert history == self.tree.history(self.tree.get(parent))
        return names

    @rule(target=finished, name=consumes(pending), ids=st.lists(st.integers(0, 9), max_size=3), text=st.text("xy"))
    def complete(self, name: str, ids: list[int], text: str) -> str:
        zeros = [0.0] * len(ids)
        completion = Completion(
            token_ids=ids, logprobs=zeros, raw_logprobs=zeros, versions=zeros, finish=FinishReason.STOP
        )
        self.tree.complete(InteractionId(name), completion, answer(text))
        self.status[name] = InteractionStatus.COMPLETED
        self.completed.append(name)
        return name

    @rule(target=finished, name=consumes(pending))
    def cancel(self, name: str) -> str:
        self.tree.cancel(InteractionId(name))
        self.status[name] = InteractionStatus.CANCELLED
        return name

    @rule(name=consumes(pending))
    def fail(self, name: str) -> None:
        self.tree.fail(InteractionId(name), "why")
        self.status[name] = InteractionStatus.FAILED

    @rule(name=finished, reward=st.floats(-1, 1))
    def reward_one(self, name: str, reward: float) -> None:
        if self.status[name] is InteractionStatus.COMPLETED:
            self.tree.set_reward(InteractionId(name), reward)
            self.rewards[name] = reward
        else:
            with pytest.raises(RewardError):
                self.tree.set_reward(InteractionId(name), reward)

    @rule(reward=st.floats(-1, 1))
    def reward_last(self, reward: float) -> None:
        if self.completed:
            assert self.tree.set_reward(None, reward).id == self.completed[-1]
            self.rewards[self.completed[-1]] = reward
        else:
            with pytest.raises(RewardError):
                self.tree.set_reward(None, reward)

    @rule()
    def look(self) -> None:
        record = self.tree.snapshot()
        self.early.append((record, record.interactions))

    @invariant()
    def agrees_with_the_model(self) -> None:
        turns = self.tree.snapshot().interactions
        assert list(self.plans) == [turn.id for turn in turns]
        assert self.status == {turn.id: turn.status for turn in turns}
        assert self.rewards == {turn.id: turn.reward for turn in turns if turn.reward is not None}
        by_completion = sorted((t for t in turns if t.completed_order is not None), key=lambda t: t.completed_order)
        assert self.completed == [turn.id for turn in by_completion]
        assert self.tree.num_pending == sum(s is InteractionStatus.PENDING for s in self.status.values())

    @invariant()
    def prompts_are_exact(self) -> None:
        for turn in self.tree.snapshot().interactions:
            ids = self.tree.prompt_tokens(turn)
            assert ids.tolist() == self.plans[turn.id].token_ids.tolist()
            assert len(ids) == turn.num_prompt_tokens

    @invariant()
    def what_is_remembered_is_what_is_stored(self) -> None:
        for turn in self.tree.snapshot().interactions:
            assert self.tree.history(turn) == full_history(turn, self.tree.get)
            assert self.tree.prompt_tokens(turn).tolist() == prompt_ids(turn, self.tree.get).tolist()
            assert self.tree.full_tokens(turn).tolist() == full_ids(turn, self.tree.get).tolist()

    @invariant()
    def early_snapshots_stand(self) -> None:
        assert all(record.interactions == turns for record, turns in self.early)


TestTree = TreeMachine.TestCase
