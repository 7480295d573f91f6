"""Raw prompts: which earlier one they go on from, and its exact tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.cache import export_trajectories, plan_prompt
from areal_actors.cache.tree import PrefixIndex
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


def test_a_first_prompt_is_a_root(talk: Any) -> None:
    """Its ids are the text's, as the tokenizer begins texts, or the very ids."""
    by_text, by_ids = plan(talk, "ab"), plan(talk, [97, 98])

    assert ("^ab", "ab") == (text(by_text.token_ids), text(by_ids.token_ids))
    assert [ForkReason.ROOT] * 2 == [by_text.fork, by_ids.fork]
    assert by_text.messages == by_ids.messages == (ChatMessage(role="prompt", content="ab"),)


def test_a_prompt_goes_on_from_prompt_and_answer(talk: Any) -> None:
    """Its ids are the parent's, those that were sampled, and those of the rest; turn after turn."""
    turn(talk, "1", "Once", " upon")
    turn(talk, "2", "Once upon a", " time")
    found = plan(talk, "Once upon a time, ")

    assert "^Once upon a time, " == text(found.token_ids)
    assert (", ", "2", "2", None) == (text(found.suffix), found.parent, found.token_parent, found.fork)
    assert [m.content for m in talk.tree.history(talk.tree.get("2"))] == ["Once", " upon", " a", " time"]


def test_an_unseen_end_must_stand_in_the_prompt(talk: Any) -> None:
    """A client that writes turns itself repeats the end token; one that leaves it out goes on from other tokens."""
    turn(talk, "1", "Q", "A" + STOP)
    kept, left_out = plan(talk, f"QA{STOP}Q"), plan(talk, "QAQ")

    assert (f"^QA{STOP}Q", "Q", "1") == (text(kept.token_ids), text(kept.suffix), kept.token_parent)
    assert ("^QAQ", None, "1") == (text(left_out.token_ids), left_out.token_parent, left_out.parent)
    assert ForkReason.CLIENT_EDITED_HISTORY == left_out.fork


def test_a_stop_string_that_the_client_writes_itself_is_not_doubled(talk: Any) -> None:
    """The answer ended before ``Observation:``, which was sampled; the client adds it and goes on behind it."""
    turn(talk, "1", "Q ", "act\nObservation:", said="act\n")
    found = plan(talk, "Q act\nObservation: 4")

    assert ("^Q act\nObservation: 4", " 4", "1") == (text(found.token_ids), text(found.suffix), found.token_parent)


def test_ids_go_on_from_exact_ids(talk: Any) -> None:
    """What was read and sampled, end included, begins the new prompt."""
    turn(talk, "1", [97, 98], "c" + STOP)
    found, other = plan(talk, [97, 98, 99, 3, 100]), plan(talk, [97, 98, 99, 100])

    assert ([100], "1", "1", None) == (found.suffix.tolist(), found.parent, found.token_parent, found.fork)
    assert (None, ForkReason.ROOT) == (other.parent, other.fork)


def test_the_longest_and_then_the_latest_is_the_parent(talk: Any) -> None:
    """Of two answers that both begin the prompt, the longer one; of equal ones, the one that was said last."""
    turn(talk, "short", "Q", "a")
    turn(talk, "long", "Q", "ab")
    turn(talk, "again", "Q", "ab")

    assert "again" == plan(talk, "Qabc").parent
    assert "short" == plan(talk, "Qac").parent


def test_the_same_prompt_again_is_a_sibling(talk: Any) -> None:
    """Also after an answer without text, and after one that was never finished."""
    turn(talk, "1", "Q", STOP)
    talk.tree.begin(InteractionId("2"), plan(talk, "Q"))
    talk.tree.cancel(InteractionId("2"))

    assert (None, ForkReason.ROOT) == (plan(talk, "Q").parent, plan(talk, "Q").fork)


def test_conversations_and_raw_prompts_never_mix(talk: Any) -> None:
    """Equal words of a chat and of a raw prompt are not a history of one another."""
    turn(talk, "1", "hi", "yo")
    talk.turn("2", [ChatMessage(role="user", content="hi")], "yo")
    said = tuple(
        ChatMessage(role=role, content=words) for role, words in (("user", "hi"), ("assistant", "yo"), ("user", "a"))
    )
    chat = plan_prompt(talk.tree, talk.renderer, CompletionRequest(messages=said))

    assert "2" == chat.parent
    assert "1" == plan(talk, "hiyoa").parent


@given(st.data())
def test_ids_are_those_of_the_prompt_whatever_was_said_before(new_talk: Any, data: Any) -> None:
    """For any program, a prompt's ids read like its text, token parents are prefixes, and every token is exported."""
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


@given(st.lists(st.binary(max_size=4)), st.binary(max_size=8))
def test_the_index_finds_the_longest_prefix(known: list, data: bytes) -> None:
    """As looking at all of them would."""
    index = PrefixIndex()
    for number, prefix in enumerate(known):
        index.add(prefix, InteractionId(str(number)))
    expected = max(((len(p), n) for n, p in enumerate(known) if data.startswith(p)), default=None)

    assert index.find(data) == (None if expected is None else (str(expected[1]), expected[0]))
