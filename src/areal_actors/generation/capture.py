"""The self-test of an engine: sample a few tokens, and check that what it reports about them is consistent.

It runs for every engine before the first agent starts, so that a faulty engine is detected at startup. Faults that
appear later are detected by the trainer's capture gate.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from itertools import count
from typing import Protocol

import numpy as np

from areal_actors.domain import (
    LOGPROB_SLACK,
    CaptureFault,
    Chunk,
    Completion,
    EngineInfo,
    EngineRequest,
    FinishReason,
    Ints,
    SampleKey,
    Sampling,
    join_chunks,
)
from areal_actors.errors import CaptureViolation

SELF_TEST_TOKENS = 8
"""Number of tokens to sample: enough to check that each token is predicted from the ones before it."""

Compare = Callable[[Ints, Completion], Awaitable[str | None]]
"""A function of a prompt [T] and what was sampled after it that returns a description of the fault, or ``None``."""

_ids = count()


class CanSample(Protocol):
    """The part of an engine that the self-test needs: an engine itself, or a proxy for one in another process."""

    @property
    def info(self) -> EngineInfo:
        """See ``Engine.info``."""
        ...

    def generate(self, request: EngineRequest) -> AbstractAsyncContextManager[AsyncIterator[Chunk]]:
        """See ``Engine.generate``."""
        ...


async def check_capture(engine: CanSample, *, prompt: Ints, version: int, compare: Compare | None = None) -> None:
    """Sample after ``prompt``, and check ids, log-probabilities and versions.

    Args:
        engine: open, and not paused.
        prompt: at least one id.
        version: the version of the weights that were published last.
        compare: compares the log-probabilities with those of the same weights elsewhere. Without it, only internal
            consistency is checked.

    Raises:
        CaptureViolation: a check failed; ``kind`` and the message say which.
        EngineError: the engine failed.
    """
    request = EngineRequest(
        id=f"self-test-{next(_ids)}",
        prompt=prompt,
        sampling=Sampling(max_new_tokens=SELF_TEST_TOKENS),
        key=SampleKey(seed=0, path=("self-test",)),
    )
    async with engine.generate(request) as chunks:
        received = [chunk async for chunk in chunks]
    num = sum(len(chunk.token_ids) for chunk in received)
    if not num:
        raise _violation(engine, CaptureFault.EMPTY_CAPTURE, "it gave no token")
    sampled = join_chunks(received)
    ids = sampled.token_ids
    if {num} != {len(sampled.logprobs), len(sampled.raw_logprobs)}:
        what = f"it gave {num} ids and {len(sampled.logprobs)} log-probabilities"
        raise _violation(engine, CaptureFault.MISSING_TOKENS, what)
    # Fewer tokens are fine after a stop token; with LENGTH, all of them were promised.
    if num > SELF_TEST_TOKENS or (sampled.finish is FinishReason.LENGTH and num < SELF_TEST_TOKENS):
        what = f"it was asked for {SELF_TEST_TOKENS} tokens and gave {num}"
        raise _violation(engine, CaptureFault.MISSING_TOKENS, what)
    if ids.min() < 0 or ids.max() >= engine.info.vocab_size:
        what = f"it gave {ids.tolist()}, and its ids are below {engine.info.vocab_size}"
        raise _violation(engine, CaptureFault.UNKNOWN_IDS, what)
    for values in (sampled.logprobs, sampled.raw_logprobs):
        if not np.isfinite(values).all() or (values > LOGPROB_SLACK).any():
            what = f"it gave the log-probabilities {values.tolist()}"
            raise _violation(engine, CaptureFault.IMPOSSIBLE_LOGPROBS, what)
    if (sampled.versions != version).any():
        what = f"it gave tokens of version {sampled.versions[0]}, and {version} is served"
        raise _violation(engine, CaptureFault.WRONG_VERSION, what)
    wrong = None if compare is None else await compare(prompt, sampled)
    if wrong is not None:
        raise _violation(engine, CaptureFault.UNEXPLAINED_LOGPROBS, wrong)


def _violation(engine: CanSample, kind: CaptureFault, what: str) -> CaptureViolation:
    return CaptureViolation(
        f"The self-test of engine {engine.info.name} failed: {what}. Nothing was started; its answers could not be "
        "trained on.",
        kind=kind,
    )
