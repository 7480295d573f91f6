"""Pure parts of the replica set: the rest of a cut generation, the choice of a replica, sums of counters."""

from __future__ import annotations

import pytest
from anyio import CancelScope
from hypothesis import given
from hypothesis import strategies as st
from tests.stacks.replica_stack import START, count, request

from areal_actors.domain import Chunk, EngineInfo, EngineStatistics, Exactly, FinishReason
from areal_actors.errors import EngineError, Unavailable
from areal_actors.generation.replicas import Attempt, Counters, Replica, ReplicaState, choose
from areal_actors.generation.resumable import ResumableGeneration

INFO = EngineInfo(
    name="e", model="m", vocab_size=99, context_length=99, dtype="float32", device="cpu", max_concurrent=4
)


def chunk(ids, *, version: int = 0, finish: FinishReason | None = None, num_cached: int = 0) -> Chunk:
    logprobs = [-1.0] * len(ids)
    return Chunk(
        token_ids=ids,
        logprobs=logprobs,
        raw_logprobs=logprobs,
        version=version,
        finish=finish,
        num_cached_tokens=num_cached,
    )


class Anywhere:
    """A ref that is never asked."""


def replica(name: str, *, version: int = 0, state: ReplicaState = ReplicaState.SERVING, running: int = 0) -> Replica:
    """A replica where ``running`` generations never end."""
    made = Replica(name=name, ref=Anywhere(), state=state, version=version, info=INFO)
    for _ in range(running):
        made.attempts.add(Attempt(CancelScope))
    return made


@given(pieces=st.lists(st.lists(st.integers(1, 3), max_size=4), min_size=1, max_size=5), left=st.integers(1, 5))
def test_resumed_generation_asks_for_the_rest(pieces: list[list[int]], left: int):
    """However often a generation is cut: each next request asks for what is left, after all that was sampled."""
    num_tokens = sum(map(sum, pieces)) + left
    generation = ResumableGeneration(request(num_tokens))
    names, keys = set(), set()
    for piece in pieces:
        asked = generation.next_request()
        names.add(asked.id)
        keys.add((generation.num_sampled, asked.key))

        assert num_tokens == len(asked.prompt) - 2 + asked.sampling.max_new_tokens
        assert [1, *range(START, START + len(asked.prompt) - 1)] == asked.prompt.tolist()
        told = iter(count(asked.prompt))
        for length in piece:
            generation.add(chunk([next(told) for _ in range(length)]))

    assert len(pieces) == len(names)
    assert len({num for num, _ in keys}) == len({key for _, key in keys})
    assert generation.find_finish() is None


def test_generation_fails_after_failures_in_a_row():
    """A token in between starts the count again."""
    generation = ResumableGeneration(request())
    for _ in range(2):
        for _ in range(2):
            assert generation.end_attempt("a", None, "no memory", is_failure=True, max_failures=3) is None
        generation.add(chunk([11]))
    for _ in range(2):
        generation.end_attempt("a", None, "no memory", is_failure=True, max_failures=3)
    with pytest.raises(EngineError, match=r"failed 3 times in a row, after 2 tokens, at a.*no memory"):
        generation.end_attempt("a", None, "no memory", is_failure=True, max_failures=3)


@pytest.mark.parametrize("is_failure", [True, False])
def test_unfinished_attempt_continues_unless_all_tokens_are_known(*, is_failure: bool):
    """A move on purpose is not a failure; a replica that is lost after the last token does not cost the answer."""
    generation = ResumableGeneration(request(2))
    generation.add(chunk([11], version=3))
    assert generation.end_attempt("a", None, "gone", is_failure=is_failure, max_failures=2) is None
    assert generation.failed_at == ({"a"} if is_failure else set())

    generation.add(chunk([12], version=4))
    end = generation.end_attempt("b", None, "gone", is_failure=is_failure, max_failures=1)
    assert end is not None
    assert (end.finish, end.version, len(end.token_ids)) == (FinishReason.LENGTH, 4, 0)
    assert generation.is_over


def test_generation_is_limited_to_the_context():
    """Its replica was lost when the context was full: another one would refuse the whole of it as a prompt."""
    generation = ResumableGeneration(request())
    generation.fit(5)
    asked = generation.next_request()
    generation.add(chunk([11, 12, 13]))

    assert 3 == asked.sampling.max_new_tokens
    assert FinishReason.LENGTH is generation.find_finish()


def test_constrained_generation_moves_only_before_its_first_token():
    """Engines start a grammar at its beginning; the client is asked to repeat the request."""
    generation = ResumableGeneration(request(grammar=Exactly(text="yes")))
    assert generation.end_attempt("a", None, "gone", is_failure=True, max_failures=3) is None
    generation.add(chunk([11]))
    with pytest.raises(Unavailable, match="may be repeated"):
        generation.end_attempt("a", None, "gone", is_failure=True, max_failures=3)


def test_cached_tokens_are_reported_for_the_first_attempt_only():
    """After a move, the prompt contains sampled tokens."""
    generation = ResumableGeneration(request())

    assert 2 == generation.add(chunk([11], num_cached=2)).num_cached_tokens
    assert 0 == generation.add(chunk([12], num_cached=3)).num_cached_tokens


SHAPES = st.tuples(st.integers(0, 3), st.sampled_from(ReplicaState), st.integers(0, 5))


@given(shapes=st.lists(SHAPES, max_size=6), version=st.integers(0, 3), data=st.data())
def test_chosen_replica_may_serve_and_is_least_loaded(shapes: list[tuple[int, ReplicaState, int]], version: int, data):
    """It serves, with new enough weights; the pinned one if it may, else no other is loaded less."""
    herd = [
        replica(str(number), version=own, state=state, running=running)
        for number, (own, state, running) in enumerate(shapes)
    ]
    pinned = data.draw(st.none() | st.sampled_from(herd)) if herd else None
    failed_at = set(data.draw(st.lists(st.sampled_from([one.name for one in herd])))) if herd else set()
    name = None if pinned is None else pinned.name
    by_name = {one.name: one for one in herd}
    chosen = choose(by_name, pinned=name, version=version, failed_at=failed_at)
    able = [one for one in herd if one.can_serve(version)]

    if chosen is None:
        assert not able
        return
    assert chosen.can_serve(version)
    if pinned in able and pinned.name not in failed_at:
        assert chosen is pinned
        return
    fresh = [one for one in able if one.name not in failed_at] or able
    assert chosen in fresh
    assert chosen.load == min(one.load for one in fresh)


LIVES = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 9), st.booleans()), max_size=20)


@given(lives=LIVES)
def test_counters_sum_all_incarnations(lives: list[tuple[str, int, bool]]):
    """What replicas sampled in all, in whichever lives; it never falls."""
    totals, now, sampled, last = Counters(), {"a": 0, "b": 0}, 0, 0
    for name, num_tokens, is_born_again in lives:
        if is_born_again:
            now[name] = 0
            totals.add(name, EngineStatistics())
        now[name] += num_tokens
        sampled += num_tokens
        totals.add(name, EngineStatistics(sampled_tokens=now[name], running=3))
        total = totals.total({"a"})

        assert sampled == total.sampled_tokens >= last
        assert total.running in (0, 3)
        last = total.sampled_tokens


def test_replica_with_unknown_capacity_counts_as_full():
    """One running generation is a load of 1."""
    known, strange = replica("a", running=2), replica("b", running=2)
    strange.info = None

    assert (2 / INFO.max_concurrent, 2.0) == (known.load, strange.load)
