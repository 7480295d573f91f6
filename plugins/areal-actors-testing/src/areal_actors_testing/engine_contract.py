"""The contract of every ``Engine``, as checks that you can run against your own.

Each check is a coroutine function that takes a ``Subject`` and raises ``AssertionError`` if the engine breaks the
contract. They need no clock: after ``pause`` has returned, everything that was sampled has been reported. An engine is
used by one check at a time, and each check leaves it ready for the next::

    @pytest.mark.anyio
    @pytest.mark.parametrize("check", ENGINE_CHECKS)
    async def test_my_engine_keeps_the_contract(check):
        async with open_my_engine() as engine:
            await check(Subject(engine=engine, create_snapshot=..., prompt=(1, 2, 3)))
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from itertools import count

import anyio
import numpy as np
from attrs import field, frozen

from areal_actors.domain import (
    Chunk,
    EngineRequest,
    Exactly,
    FinishReason,
    Floats,
    Grammar,
    InOrder,
    Ints,
    JsonText,
    MatchingRegex,
    PauseMode,
    SampleKey,
    Sampling,
    Snapshot,
    as_ints,
)
from areal_actors.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from areal_actors.generation.base import Engine

_ids = count()


@frozen(kw_only=True)
class Subject:
    """An engine under test.

    ``create_snapshot(version)`` returns weights that it can load. ``prompt`` must not lead to an end within
    ``num_tokens`` tokens: scripted engines need a long enough script. ``recompute(prompt, output)``, if given, returns
    the log-probabilities float32 [len(output)] at temperature 1 that the engine should report, within ``tolerance``. An
    engine with grammars needs ``decode``, from ids to text without special tokens, and ``stop_token_ids`` of its
    tokenizer.
    """

    engine: Engine
    create_snapshot: Callable[[int], Snapshot]
    prompt: Ints = field(converter=as_ints, eq=False)
    num_tokens: int = 24
    recompute: Callable[[Ints, Ints], Floats] | None = None
    tolerance: float = 1e-4
    decode: Callable[[Sequence[int]], str] | None = None
    stop_token_ids: tuple[int, ...] = ()


def create_request(
    subject: Subject,
    *,
    prompt: Ints | None = None,
    path: tuple[int | str, ...] = (),
    grammar: Grammar | None = None,
    **sampling: object,
) -> EngineRequest:
    """Return a request of the subject's prompt with a unique id; ``sampling`` overrides fields of ``Sampling``.

    With a ``grammar``, the subject's stop tokens may end it.
    """
    settings = {"max_new_tokens": subject.num_tokens} | sampling
    return EngineRequest(
        id=f"contract-{next(_ids)}",
        prompt=subject.prompt if prompt is None else prompt,
        sampling=Sampling(**settings),  # type: ignore[arg-type]  # the caller names the fields
        key=SampleKey(seed=7, path=path),
        stop_token_ids=subject.stop_token_ids if grammar is not None else (),
        grammar=grammar,
    )


async def collect(engine: Engine, request: EngineRequest) -> list[Chunk]:
    """Return all chunks of one generation."""
    async with engine.generate(request) as chunks:
        return [chunk async for chunk in chunks]


def join_ids(chunks: Sequence[Chunk]) -> list[int]:
    """Return all token ids."""
    return [int(token_id) for chunk in chunks for token_id in chunk.token_ids]


Check = Callable[[Subject], Awaitable[None]]


async def check_chunks_are_well_formed(subject: Subject) -> None:
    """Arrays of a chunk agree in length, log-probabilities are at most 0, only the last has a finish or is empty.

    A plain log-probability may be unknown, and is NaN then.
    """
    chunks = await collect(subject.engine, create_request(subject))

    assert all(len(c.token_ids) == len(c.logprobs) == len(c.raw_logprobs) for c in chunks)
    assert all((c.logprobs <= 0).all() and not (c.raw_logprobs > 0).any() for c in chunks)
    assert all(c.finish is None and len(c.token_ids) for c in chunks[:-1])
    assert chunks[-1].finish is not None
    assert all(0 <= i < subject.engine.info.vocab_size for i in join_ids(chunks))


async def check_ends_at_max_new_tokens(subject: Subject) -> None:
    """A generation ends with LENGTH after exactly ``max_new_tokens``."""
    chunks = await collect(subject.engine, create_request(subject, max_new_tokens=3))

    assert len(join_ids(chunks)) == 3  # noqa: PLR2004
    assert chunks[-1].finish is FinishReason.LENGTH


async def check_stop_token_is_delivered(subject: Subject) -> None:
    """A stop token ends a generation with STOP and is the last token delivered."""
    # An engine whose samples do not follow keys repeats an answer only at temperature 0.
    temperature = 1.0 if subject.engine.info.samples_follow_keys else 0.0
    free = join_ids(await collect(subject.engine, create_request(subject, temperature=temperature)))
    stopping = create_request(subject, stop_token_ids=(free[2],), temperature=temperature)
    chunks = await collect(subject.engine, stopping)

    assert free[: free.index(free[2]) + 1] == join_ids(chunks)
    assert chunks[-1].finish is FinishReason.STOP


async def check_samples_follow_the_key(subject: Subject) -> None:
    """Equal keys, prompts and weights give equal tokens, whatever runs concurrently, if the engine promises it."""
    if not subject.engine.info.samples_follow_keys:
        return
    alone = join_ids(await collect(subject.engine, create_request(subject, path=(1,))))
    results: dict[int, list[int]] = {}

    async def run(number: int) -> None:
        results[number] = join_ids(await collect(subject.engine, create_request(subject, path=(number,))))

    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(run, number)

    assert alone == results[1]


async def check_concurrent_requests_all_end(subject: Subject) -> None:
    """More requests than run at once are all served."""
    # Three of them have to wait for a place, unless the engine runs more than 16 at once.
    number = min(subject.engine.info.max_concurrent, 16) + 3
    ended: list[FinishReason | None] = []

    async def run(path: int) -> None:
        chunks = await collect(subject.engine, create_request(subject, path=(path,), max_new_tokens=5))
        ended.append(chunks[-1].finish)

    async with anyio.create_task_group() as tasks:
        for path in range(number):
            tasks.start_soon(run, path)

    assert [FinishReason.LENGTH] * number == ended


async def check_overlong_prompt_is_refused(subject: Subject) -> None:
    """A prompt that leaves no room for one token raises ``ContextLengthExceeded``."""
    prompt = as_ints(np.resize(subject.prompt, subject.engine.info.context_length))
    await _expect(ContextLengthExceeded, subject, create_request(subject, prompt=prompt))


async def check_ids_outside_the_vocabulary_are_refused(subject: Subject) -> None:
    """Ids below 0 or beyond the vocabulary, and no ids at all, raise ``InvalidRequest``; the engine keeps working."""
    for prompt in ([subject.engine.info.vocab_size], [-1], []):
        await _expect(InvalidRequest, subject, create_request(subject, prompt=as_ints(prompt)))

    assert await collect(subject.engine, create_request(subject))


async def _expect(error: type[Exception], subject: Subject, request: EngineRequest) -> None:
    try:
        await collect(subject.engine, request)
    except error:
        return
    raise AssertionError(f"{request} was accepted, and {error.__name__} was expected")


_MAX_ATTEMPTS = 10
"""Number of attempts: an engine may finish a generation before it is notified of the interruption."""


async def check_abort_ends_a_generation(subject: Subject) -> None:
    """``abort`` ends a generation with ABORT, after what was sampled before; unknown ids are ignored."""
    await subject.engine.abort("nobody")
    seen: list[Chunk] = []
    for _ in range(_MAX_ATTEMPTS):
        request = create_request(subject)
        async with subject.engine.generate(request) as chunks:
            seen = [await anext(aiter(chunks))]
            await subject.engine.abort(request.id)
            seen += [chunk async for chunk in chunks]
        if len(join_ids(seen)) < subject.num_tokens:
            break

    assert seen[-1].finish is FinishReason.ABORT
    assert len(join_ids(seen)) < subject.num_tokens


async def check_leaving_aborts(subject: Subject) -> None:
    """A consumer that leaves its block, or is cancelled in it, ends the generation in the engine."""
    async with subject.engine.generate(create_request(subject)) as chunks:
        await anext(aiter(chunks))
    with anyio.CancelScope() as scope:
        async with subject.engine.generate(create_request(subject)) as chunks:
            async for _ in chunks:
                scope.cancel()
    # Everything that was sampled has been reported when it returns.
    await subject.engine.pause()
    statistics = subject.engine.statistics()
    await subject.engine.resume()

    assert statistics.running == statistics.waiting == 0


async def check_pause_keeps(subject: Subject) -> None:
    """After ``pause`` nothing is sampled, new requests wait, and everything continues after ``resume``."""
    engine = subject.engine
    seen: list[Chunk] = []
    late: list[Chunk] = []
    before, after = 0, -1

    async def arrive_late() -> None:
        late.extend(await collect(engine, create_request(subject)))

    async with anyio.create_task_group() as tasks, engine.generate(create_request(subject)) as chunks:
        seen.append(await anext(aiter(chunks)))
        await engine.pause()
        before = engine.statistics().sampled_tokens
        tasks.start_soon(arrive_late)
        await engine.pause()
        after = engine.statistics().sampled_tokens
        await engine.resume()
        seen += [chunk async for chunk in chunks]

    assert before == after
    assert len(join_ids(seen)) == len(join_ids(late)) == subject.num_tokens


async def check_pause_waits(subject: Subject) -> None:
    """``pause(WAIT)`` returns after the running generations have ended normally."""
    engine = subject.engine
    seen: list[Chunk] = []

    async with anyio.create_task_group() as tasks, engine.generate(create_request(subject)) as chunks:
        seen.append(await anext(aiter(chunks)))
        tasks.start_soon(engine.pause, PauseMode.WAIT)
        seen += [chunk async for chunk in chunks]
    await engine.resume()

    assert len(join_ids(seen)) == subject.num_tokens


async def check_pause_aborts(subject: Subject) -> None:
    """``pause(ABORT)`` ends the running generations with ABORT."""
    engine = subject.engine
    seen: list[Chunk] = []
    for _ in range(_MAX_ATTEMPTS):
        async with engine.generate(create_request(subject)) as chunks:
            seen = [await anext(aiter(chunks))]
            await engine.pause(PauseMode.ABORT)
            seen += [chunk async for chunk in chunks]
        await engine.resume()
        if len(join_ids(seen)) < subject.num_tokens:
            break

    assert seen[-1].finish is FinishReason.ABORT


async def check_load_stamps_versions(subject: Subject) -> None:
    """After ``load`` the version is the snapshot's; a running generation continues and stamps it from there.

    A fast engine may have ended a generation before its first token is read. So increasing numbers of generations run
    concurrently, until one of them is interrupted.
    """
    for number in (1, 2, 4, 8, 16, 32, 64):
        if any(len(set(versions)) > 1 for versions in await _load_within(subject, number)):
            return
    raise AssertionError("Weights were loaded while 64 generations ran, and none went on with them.")


async def _load_within(subject: Subject, number: int) -> list[list[int]]:
    """Return the version of each token of ``number`` generations, with a load after the first token of the first."""
    engine, old = subject.engine, subject.engine.version
    first, *others = (create_request(subject, path=("load", number, index)) for index in range(number))
    found: list[list[Chunk]] = []
    seen: list[Chunk] = []

    async def run(request: EngineRequest) -> None:
        found.append(await collect(engine, request))

    async with anyio.create_task_group() as tasks, engine.generate(first) as chunks:
        for request in others:
            tasks.start_soon(run, request)
        seen = [await anext(aiter(chunks))]
        await engine.pause()
        await engine.load(subject.create_snapshot(old + 1))
        await engine.resume()
        found.append(seen + [chunk async for chunk in chunks])
    spans = [[chunk.version for chunk in chunks for _ in chunk.token_ids] for chunks in found]

    assert (old, old + 1) == (seen[0].version, engine.version)
    assert all(len(versions) == subject.num_tokens and versions == sorted(versions) for versions in spans)
    assert all(set(versions) <= {old, old + 1} for versions in spans)
    return spans


async def check_logprobs_are_recomputable(subject: Subject) -> None:
    """Reported log-probabilities are those of the model given each token's whole prefix."""
    if subject.recompute is None:
        return
    chunks = await collect(subject.engine, create_request(subject, path=("recompute",)))
    expected = subject.recompute(subject.prompt, as_ints(join_ids(chunks)))

    for reported in ([c.logprobs for c in chunks], [c.raw_logprobs for c in chunks]):
        np.testing.assert_allclose(np.concatenate(reported), expected, atol=subject.tolerance, rtol=0)


_ANSWER = InOrder(parts=(Exactly(text="Is it? "), JsonText(schema={"enum": ["yes", "no", 3]})))


async def check_plain_logprobs_are_right_or_unknown(subject: Subject) -> None:
    """At another temperature, plain log-probabilities are still those of the model, or NaN if the engine says so."""
    chunks = await collect(subject.engine, create_request(subject, path=("plain",), temperature=0.6))
    found = np.concatenate([c.raw_logprobs for c in chunks])

    assert not np.isnan(found).any() or not subject.engine.info.knows_raw_logprobs
    if subject.recompute is not None:
        expected = subject.recompute(subject.prompt, as_ints(join_ids(chunks)))
        known = ~np.isnan(found)
        np.testing.assert_allclose(found[known], expected[known], atol=subject.tolerance, rtol=0)


async def check_grammars_are_matched(subject: Subject) -> None:
    """Samples under a grammar match it and end with a stop token; without grammars the request is rejected."""
    if not subject.engine.info.has_grammars:
        await _expect(UnsupportedParameter, subject, create_request(subject, grammar=_ANSWER))
        return
    assert subject.decode is not None, "an engine with grammars is checked with its tokenizer"
    for number in range(4):
        chunks = await collect(subject.engine, create_request(subject, grammar=_ANSWER, path=(number,)))
        *ids, last = join_ids(chunks)
        text = subject.decode(ids)

        assert last in subject.stop_token_ids
        assert chunks[-1].finish is FinishReason.STOP
        assert text.startswith("Is it? ")
        assert json.loads(text.removeprefix("Is it? ")) in ("yes", "no", 3)


async def check_grammars_are_cut_by_length(subject: Subject) -> None:
    """A grammar that needs more tokens than allowed ends with LENGTH in its middle."""
    if not subject.engine.info.has_grammars:
        return
    chunks = await collect(subject.engine, create_request(subject, grammar=_ANSWER, max_new_tokens=1))

    assert len(join_ids(chunks)) == 1
    assert chunks[-1].finish is FinishReason.LENGTH


async def check_broken_grammars_are_refused(subject: Subject) -> None:
    """An invalid grammar is rejected when it is requested, and the engine continues."""
    if not subject.engine.info.has_grammars:
        return
    for broken in (MatchingRegex(pattern="("), JsonText(schema={"type": "nothing"})):
        await _expect(InvalidRequest, subject, create_request(subject, grammar=broken))

    assert len(join_ids(await collect(subject.engine, create_request(subject)))) == subject.num_tokens


ENGINE_CHECKS: tuple[Check, ...] = (
    check_chunks_are_well_formed,
    check_ends_at_max_new_tokens,
    check_stop_token_is_delivered,
    check_samples_follow_the_key,
    check_concurrent_requests_all_end,
    check_overlong_prompt_is_refused,
    check_ids_outside_the_vocabulary_are_refused,
    check_abort_ends_a_generation,
    check_leaving_aborts,
    check_pause_keeps,
    check_pause_waits,
    check_pause_aborts,
    check_load_stamps_versions,
    check_logprobs_are_recomputable,
    check_plain_logprobs_are_right_or_unknown,
    check_grammars_are_matched,
    check_grammars_are_cut_by_length,
    check_broken_grammars_are_refused,
)
"""All checks."""
