"""Synthetic news of a run: sessions of two turns, their episodes, steps and evaluations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from areal_actors.cache import export_trajectories
from areal_actors.domain import (
    ChatMessage,
    Completion,
    Episode,
    FinishReason,
    ForkReason,
    Interaction,
    InteractionId,
    InteractionStatus,
    Problem,
    SessionId,
    SessionRecord,
    ToolCall,
)
from areal_actors.messages import EpisodeFinished, SessionArchived, StepFinished


def completion(ids: list[int], version: int) -> Completion:
    logprobs = [-0.1 * index for index in range(len(ids))]
    return Completion(
        token_ids=ids,
        logprobs=logprobs,
        raw_logprobs=logprobs,
        versions=[version] * len(ids),
        finish=FinishReason.STOP,
    )


def make_record(position: int, *, version: int, text: str, reward: float) -> SessionRecord:
    """A question, a tool call, and an answer on a branch of its own."""
    call = ToolCall(id="c1", name="add", arguments='{"a": 1}')
    first = Interaction(
        id=InteractionId("turn-1"),
        order=0,
        fork=ForkReason.ROOT,
        messages=(ChatMessage(role="user", content=text),),
        prompt_suffix=[1, 2, 3],
        num_prompt_tokens=3,
        completion=completion([10, 11], version),
        output=ChatMessage(role="assistant", tool_calls=(call,)),
        status=InteractionStatus.COMPLETED,
        completed_order=0,
    )
    second = Interaction(
        id=InteractionId("turn-2"),
        order=1,
        parent=first.id,
        fork=ForkReason.TEMPLATE_REWROTE_HISTORY,
        messages=(ChatMessage(role="tool", content="3"),),
        prompt_suffix=[1, 2, 4, 5],
        num_prompt_tokens=4,
        completion=completion([12, 13, 14], version),
        output=ChatMessage(role="assistant", content=f"The answer to {text} is 3."),
        status=InteractionStatus.COMPLETED,
        completed_order=1,
        reward=reward,
    )
    third = Interaction(
        id=InteractionId("turn-3"),
        order=2,
        messages=(ChatMessage(role="user", content="never mind"),),
        prompt_suffix=[1],
        num_prompt_tokens=1,
        completion=completion([15], version),
        status=InteractionStatus.CANCELLED,
    )
    session = SessionId(f"train-{position}-0-AbCdEfGhIjKlMnOpQrStUv")
    return SessionRecord(id=session, interactions=(first, second, third), is_ended=True)


def make_episode(record: SessionRecord, *, member: int = 0, failure: str | None = None) -> Episode:
    exported = export_trajectories(record, style="individual", discount=0.5)
    return Episode(
        session=record.id,
        member=member,
        reward=0.0 if failure else 1.0,
        trajectories=() if failure else exported.trajectories,
        untrained=exported.untrained,
        num_turns=3,
        seconds=0.5,
        failure=failure,
    )


class News:
    """Makes the news of a run."""

    def session(
        self, position: int = 0, *, version: int = 0, text: str = "1 + 2", is_eval: bool = False, failure: Any = None
    ) -> SessionArchived:
        record = make_record(position, version=version, text=text, reward=1.0)
        problem = Problem(position=position, data={})
        return SessionArchived(
            record=record, episode=make_episode(record, failure=failure), problem=problem, is_eval=is_eval
        )

    def episode(
        self,
        position: int = 0,
        *,
        version: int = 0,
        member: int = 0,
        is_eval: bool = False,
        failure: Any = None,
        is_repeated: bool = False,
    ) -> EpisodeFinished:
        record = make_record(position, version=version, text="1 + 2", reward=1.0)
        return EpisodeFinished(
            episode=make_episode(record, member=member, failure=failure),
            problem=Problem(position=position, data={}),
            version=version,
            is_eval=is_eval,
            is_repeated=is_repeated,
        )

    def step(self, step: int, reward: float = 0.5, **metrics: Any) -> StepFinished:
        return StepFinished(step=step, metrics={"step": step, "version": step, "reward": reward, **metrics})


@pytest.fixture
def news() -> News:
    return News()


@pytest.fixture
def decode() -> Callable[[Any], str]:
    """Tokens as numbers between blanks."""
    return lambda ids: "".join(f" {token}" for token in ids)
