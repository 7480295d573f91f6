"""One request's way: the keys of its random numbers, the room for its answer, and an end that comes once."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from tests.stacks.inference_stack import encode, renderer, say

from areal_actors.cache import ConversationTree, plan_prompt
from areal_actors.domain import (
    Chunk,
    CompletionRequest,
    FinishReason,
    InteractionId,
    InteractionStatus,
    SampleKey,
    Sampling,
    SessionId,
    Tool,
    ToolCallStarted,
    as_ints,
    digest_tokens,
)
from areal_actors.sessions.request import Choice, SampleKeys
from areal_actors.testing.engines import echo_logprob
from areal_actors_testing.families import FAMILIES

BASE = SampleKey(seed=1, path=("train", 7, 0))
REQUEST = CompletionRequest(messages=say("what?"), sampling=Sampling(max_new_tokens=10))


prompts = st.lists(st.integers(0, 99), min_size=1, max_size=3).map(tuple)


@given(program=st.lists(st.tuples(prompts, st.integers(1, 3)), max_size=8), random=st.randoms())
def test_sample_keys_do_not_depend_on_the_order_of_prompts(program: list, random):
    """Parallel requests race."""

    def keys_in(order) -> dict:
        source, found = SampleKeys(BASE), {}
        for prompt, num_choices in order:
            keys = source.keys(evolve(REQUEST, num_choices=num_choices), digest_tokens(as_ints(prompt)))
            found.setdefault(prompt, []).extend((key, num_choices) for key in keys)
        return found

    one_size = [(prompt, 2) for prompt, _ in program]
    shuffled = one_size.copy()
    random.shuffle(shuffled)

    assert keys_in(one_size) == keys_in(shuffled)
    found = [key for keys in keys_in(program).values() for key, _ in keys]
    assert len(found) == len(set(found)) == sum(num for _, num in program)


def test_repeated_prompts_and_choices_have_different_keys():
    keys = SampleKeys(BASE)
    found = [key for _ in range(3) for key in keys.keys(evolve(REQUEST, num_choices=2), digest_tokens(as_ints([1, 2])))]

    assert 6 == len(set(found))
    assert {BASE.path} == {key.path[:3] for key in found}


def test_seeded_requests_have_equal_keys():
    """This holds in any session."""
    seeded = evolve(REQUEST, seed=5, num_choices=2)
    first, other = SampleKeys(BASE), SampleKeys(SampleKey(seed=2))
    expected = first.keys(seeded, digest_tokens(as_ints([1, 2])))
    first.keys(REQUEST, digest_tokens(as_ints([1, 2])))

    assert (
        expected
        == first.keys(seeded, digest_tokens(as_ints([1, 2])))
        == other.keys(seeded, digest_tokens(as_ints([1, 2])))
    )
    assert expected[0] != expected[1]
    assert expected != first.keys(evolve(seeded, seed=6), digest_tokens(as_ints([1, 2])))
    assert expected != first.keys(seeded, digest_tokens(as_ints([2, 1])))


def open_choice(tree: ConversationTree, *, stop: tuple[str, ...] = (), is_streaming: bool = False) -> Choice:
    request = evolve(REQUEST, sampling=Sampling(max_new_tokens=10, stop=stop))
    plan = plan_prompt(tree, renderer(), request)
    tree.begin(InteractionId("turn"), plan)
    return Choice(
        interaction=InteractionId("turn"),
        index=0,
        plan=plan,
        tree=tree,
        renderer=renderer(),
        is_streaming=is_streaming,
    )


def make_chunk(ids, *, version: int = 0, finish: FinishReason | None = None, num_cached: int = 0) -> Chunk:
    logprobs = [echo_logprob(i) for i in ids]
    return Chunk(
        token_ids=ids,
        logprobs=logprobs,
        raw_logprobs=logprobs,
        version=version,
        finish=finish,
        num_cached_tokens=num_cached,
    )


def test_chunks_of_several_versions_become_one_completion():
    tree = ConversationTree(SessionId("s"))
    choice = open_choice(tree)
    ids = encode("4 2")
    choice.feed(make_chunk(ids[:1], version=3, num_cached=5))
    choice.feed(make_chunk(ids[1:], version=4))
    assert choice.was_aborted
    choice.feed(make_chunk([], version=4, finish=FinishReason.STOP))
    answer = choice.complete()

    assert not choice.was_aborted
    assert ids == answer.completion.token_ids.tolist()
    assert [3, *[4] * (len(ids) - 1)] == answer.completion.versions.tolist()
    assert ("4 2", 5, len(ids)) == (
        answer.message.content,
        answer.usage.cached_tokens,
        answer.usage.completion_tokens,
    )


@pytest.mark.parametrize("first", ["complete", "cancel", "fail"])
def test_choice_ends_once(first: str):
    """Later calls change nothing."""
    tree = ConversationTree(SessionId("s"))
    choice = open_choice(tree)
    choice.feed(make_chunk(encode("4"), finish=FinishReason.STOP))
    {"complete": choice.complete, "cancel": choice.cancel, "fail": lambda: choice.fail("broken")}[first]()
    choice.cancel()
    choice.fail("too late")
    turn = tree.get(InteractionId("turn"))
    expected = {
        "complete": InteractionStatus.COMPLETED,
        "cancel": InteractionStatus.CANCELLED,
        "fail": InteractionStatus.FAILED,
    }

    assert expected[first] == turn.status
    assert turn.failure == ("broken" if first == "fail" else None)


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize(("stop", "expected"), [((), None), (("x",), None), (("2", "4"), "4")])
def test_answer_names_its_stop_string(stop, expected, is_streaming):
    """All sampled ids are kept."""
    choice = open_choice(ConversationTree(SessionId("s")), stop=stop, is_streaming=is_streaming)
    choice.feed(make_chunk(encode("4 2"), finish=FinishReason.STOP))
    choice.flush()
    answer = choice.complete()

    assert expected == answer.stop_sequence
    assert encode("4 2") == answer.completion.token_ids.tolist()


@pytest.mark.parametrize("is_parallel", [True, False])
def test_streamed_calls_keep_their_ids(is_parallel):
    """The model wrote some of them itself."""
    family = FAMILIES["mistral-v3"].create_renderer()
    tools = (Tool(name="f", parameters={}), Tool(name="g", parameters={}))
    request = evolve(REQUEST, tools=tools, parallel_tool_calls=is_parallel)
    tree = ConversationTree(SessionId("s"))
    plan = plan_prompt(tree, family, request)
    tree.begin(InteractionId("turn"), plan)
    choice = Choice(
        interaction=InteractionId("turn"),
        index=0,
        plan=plan,
        tree=tree,
        renderer=family,
        is_streaming=True,
    )
    calls = '[{"name": "f", "arguments": {}, "id": "abcdef012"}, {"name": "g", "arguments": {}}]'
    ids = family.encode(f"[TOOL_CALLS]{calls}", is_start=False)
    told = [*choice.feed(make_chunk(ids, finish=FinishReason.STOP)), *choice.flush()]
    message = choice.complete().message

    names = [call.id for call in message.tool_calls]
    assert names == [delta.id for delta in told if isinstance(delta, ToolCallStarted)]
    assert ("abcdef012", 2 if is_parallel else 1) == (names[0], len(set(names)))


def test_choice_without_chunks_is_cancelled_without_tokens():
    tree = ConversationTree(SessionId("s"))
    choice = open_choice(tree, is_streaming=True)
    assert choice.was_aborted
    choice.cancel()

    assert tree.get(InteractionId("turn")).completion is None
