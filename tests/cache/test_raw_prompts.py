"""Raw prompts: which earlier one they go on from, and its exact tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.cache import export_trajectories, plan_prompt
from areal_actors.domain import (
    ChatMessage,
    Completion,
    CompletionRequest,
    FinishReason,
    ForkReason,
    InteractionId,
)

STOP = "\x03"
words = st.text(alphabet="ab", max_size=3)


def request(prompt: Any) -> CompletionRequest:
    """A raw prompt, as a text or as ids."""
    return CompletionRequest(
        messages=(), **({"prompt": prompt} if isinstance(prompt, str) else {"prompt_ids": tuple(prompt)})
    )


def plan(talk: Any, prompt: Any) -> Any:
    """Plan a raw prompt."""
    return plan_prompt(talk.tree, talk.renderer, request(prompt))


def turn(talk: Any, name: str, prompt: Any, sampled: str, said: str | None = None) -> Any:
    """Ask and answer; what is said is what was sampled, without its end, unless it is given."""
    found = plan(talk, prompt)
    talk.tree.begin(InteractionId(name), found)
    logprobs = np.zeros(len(sampled))
    completion = Completion(
        token_ids=list(map(ord, sampled)),
        logprobs=logprobs,
        raw_logprobs=logprobs,
        versions=[0] * len(sampled),
        finish=FinishReason.STOP,
    )
    said = sampled.removesuffix(STOP) if said is None else said
    return talk.tree.complete(InteractionId(name), completion, ChatMessage(role="assistant", content=said))


def text(ids: Any) -> str:
    """Ids as text, the mark of the beginning as a caret."""
    return "".join("^" if i == 1 else chr(i) for i in ids)


def test_raw_prompt_without_the_end_token_is_a_branch(talk: Any) -> None:
    """With it, the prompt extends the answer."""
    turn(talk, "1", "Q", "A" + STOP)
    kept, left_out = plan(talk, f"QA{STOP}Q"), plan(talk, "QAQ")

    assert (f"^QA{STOP}Q", "Q", "1") == (text(kept.token_ids), text(kept.suffix), kept.token_parent)
    assert ("^QAQ", None, "1") == (text(left_out.token_ids), left_out.token_parent, left_out.parent)
    assert ForkReason.CLIENT_EDITED_HISTORY == left_out.fork


def test_stop_string_that_the_client_repeats_is_not_doubled(talk: Any) -> None:
    """It was sampled at the end of the answer."""
    turn(talk, "1", "Q ", "act\nObservation:", said="act\n")
    found = plan(talk, "Q act\nObservation: 4")

    assert ("^Q act\nObservation: 4", " 4", "1") == (text(found.token_ids), text(found.suffix), found.token_parent)


def test_longest_then_latest_answer_is_the_parent(talk: Any) -> None:
    """Both begin the prompt."""
    turn(talk, "short", "Q", "a")
    turn(talk, "long", "Q", "ab")
    turn(talk, "again", "Q", "ab")

    assert "again" == plan(talk, "Qabc").parent
    assert "short" == plan(talk, "Qac").parent


def test_repeated_raw_prompt_is_a_sibling(talk: Any) -> None:
    """The first answer may be empty or unfinished."""
    turn(talk, "1", "Q", STOP)
    talk.tree.begin(InteractionId("2"), plan(talk, "Q"))
    talk.tree.cancel(InteractionId("2"))

    assert (None, ForkReason.ROOT) == (plan(talk, "Q").parent, plan(talk, "Q").fork)


def test_raw_prompts_and_conversations_are_separate(talk: Any) -> None:
    """Equal words are no history."""
    turn(talk, "1", "hi", "yo")
    talk.turn("2", [ChatMessage(role="user", content="hi")], "yo")
    said = tuple(
        ChatMessage(role=role, content=words) for role, words in (("user", "hi"), ("assistant", "yo"), ("user", "a"))
    )
    chat = plan_prompt(talk.tree, talk.renderer, CompletionRequest(messages=said))

    assert "2" == chat.parent
    assert "1" == plan(talk, "hiyoa").parent


@given(st.data())
def test_raw_prompt_ids_read_like_the_text(new_talk: Any, data: Any) -> None:
    """Token parents are prefixes, and every token is exported."""
    talk, texts, prompts = new_talk(), ["a"], []
    for name in map(str, range(data.draw(st.integers(1, 6)))):
        prompt = data.draw(st.sampled_from(texts)) + data.draw(words)
        if data.draw(st.booleans()) and prompt:
            prompts.append(turn(talk, name, list(map(ord, prompt)), data.draw(words.filter(bool))))
        else:
            prompts.append(
                turn(talk, name, prompt, data.draw(words.filter(bool)) + data.draw(st.sampled_from(["", STOP])))
            )
        found = talk.tree.get(name)
        assert prompt == text(talk.tree.prompt_tokens(found)).removeprefix("^")
        assert len(talk.tree.prompt_tokens(found)) == found.num_prompt_tokens
        texts += [prompt + (found.output.content or ""), text(talk.tree.full_tokens(found)).removeprefix("^")]
    exported = export_trajectories(talk.tree.snapshot(), style="concat", discount=1.0)

    assert sum(len(turn.completion.token_ids) for turn in prompts) == sum(
        int(row.loss_mask.sum()) for row in exported.trajectories
    )
