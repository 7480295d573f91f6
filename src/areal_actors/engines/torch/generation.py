"""One generation as it stands: its tokens, its place, its random numbers, and when it is over.

Owned by the engine's thread; nothing here waits or touches tensors. Who runs when is ``scheduler.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from attrs import define, field, frozen

from areal_actors.domain import FinishReason, Ints, SampleKey, Sampling, TopLogprob
from areal_actors.engines.base import EngineRequest
from areal_actors.engines.requests import find_stop_ids

if TYPE_CHECKING:
    from areal_actors.engines.torch.constraint import Constraint
    from areal_actors.engines.torch.scheduler import Slot

__all__ = ["Decode", "Generation", "Sampled", "StopScanner", "create_uniforms"]

Decode = Callable[[Sequence[int]], str]
"""From token ids to text, as a tokenizer's ``decode``."""


@frozen
class Sampled:
    """One sampled token, as it travels from the engine's thread to the consumer."""

    token_id: int
    logprob: float
    raw_logprob: float
    version: int
    top: tuple[TopLogprob, ...] = ()


def create_uniforms(key: SampleKey) -> Callable[[], float]:
    """The stream of uniform numbers in [0, 1) that belongs to ``key``: the n-th call gives the n-th token's number.

    Counter-based, so that it depends on the key alone, in every process and on every machine.
    """
    text = repr((int(key.seed), tuple(key.path))).encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=seed)).random


class StopScanner:
    """Finds the first token that completes one of the ``stop`` strings, decoding only a window of the last tokens.

    A stop string of L characters is looked for in the text of the last 4 L + 16 tokens at least: a token may be a third
    of a character.
    """

    def __init__(self, stop: tuple[str, ...], decode: Decode) -> None:
        self._stop = stop
        self._decode = decode
        self._window: list[int] = []
        self._keep = 4 * max(map(len, stop)) + 16

    def is_complete(self, token_id: int) -> bool:
        """Whether a stop string is in the text now that ``token_id`` has been sampled."""
        self._window.append(token_id)
        if len(self._window) > 2 * self._keep:
            del self._window[: -self._keep]
        text = self._decode(self._window)
        return any(stop in text for stop in self._stop)


@define(eq=False, kw_only=True)
class Generation:
    """The state of one generation. ``tokens`` int32 has room for prompt and output; the first ``length`` are known.

    ``base`` tokens have their keys and values in the slot's main part, or will once prefill reached them; those sampled
    after that live in its tail row. ``target`` is where the present prefill ends.
    """

    request: EngineRequest
    tokens: Ints
    length: int
    limit: int
    stop_ids: frozenset[int]
    uniform: Callable[[], float]
    scanner: StopScanner | None
    constraint: Constraint | None = None
    slot: Slot | None = None
    tail_row: int = -1
    base: int = 0
    num_cached: int | None = None
    finish: FinishReason | None = None
    outbox: list[Sampled] = field(factory=list)

    @classmethod
    def create(
        cls,
        request: EngineRequest,
        *,
        context_length: int,
        decode: Decode | None,
        constraint: Constraint | None = None,
    ) -> Generation:
        """A generation that has not begun. ``request`` has been validated, and its grammar is ``constraint``."""
        num_prompt = len(request.prompt)
        limit = min(num_prompt + request.sampling.max_new_tokens, context_length)
        tokens = np.empty(limit, dtype=np.int32)
        tokens[:num_prompt] = request.prompt
        stop = request.sampling.stop
        return cls(
            request=request,
            tokens=tokens,
            length=num_prompt,
            limit=limit,
            stop_ids=find_stop_ids(request),
            uniform=create_uniforms(request.key),
            scanner=StopScanner(stop, decode) if stop and decode is not None else None,
            constraint=constraint,
        )

    @property
    def sampling(self) -> Sampling:
        """How to sample."""
        return self.request.sampling

    @property
    def num_prompt(self) -> int:
        """Tokens of the request's prompt."""
        return len(self.request.prompt)

    @property
    def context(self) -> Ints:
        """All tokens known: the prompt and what was sampled."""
        return self.tokens[: self.length]

    @property
    def allowed(self) -> npt.NDArray[np.bool_] | None:
        """The tokens that the grammar allows next, bool [V]; ``None`` where there is no grammar."""
        return None if self.constraint is None else self.constraint.allowed()

    @property
    def output(self) -> Ints:
        """What was sampled."""
        return self.tokens[self.num_prompt : self.length]

    def append(self, sampled: Sampled) -> None:
        """Take a token in, and set ``finish`` if the generation is over with it."""
        self.tokens[self.length] = sampled.token_id
        self.length += 1
        self.outbox.append(sampled)
        if sampled.token_id in self.stop_ids or (
            self.scanner is not None and self.scanner.is_complete(sampled.token_id)
        ):
            self.finish = FinishReason.STOP
            return
        if self.constraint is not None:
            self.constraint.append(sampled.token_id)
        if self._is_complete:
            self.finish = FinishReason.STOP
        elif self.length >= self.limit:
            self.finish = FinishReason.LENGTH

    @property
    def _is_complete(self) -> bool:
        """Whether nothing can follow but a stop token, and there is none, or no room for it."""
        constraint = self.constraint
        return constraint is not None and constraint.is_over and (self.length >= self.limit or not constraint.has_stop)
