"""One generation over servers: its tokens, however many servers they came from, and what is still asked for.

Nothing here waits. Who is asked when is ``engine``.
"""

from __future__ import annotations

from uuid import uuid4

import numpy as np
from attrs import define, evolve, field

from areal_actors.domain import Chunk, EngineRequest, FinishReason
from areal_actors.engines.requests import find_stop_ids
from areal_actors.errors import EngineError

__all__ = ["Run", "empty_chunk"]


@define(eq=False)
class Run:
    """The state of one generation. ``num_failures`` counts attempts since the last new token."""

    request: EngineRequest
    max_new_tokens: int
    """As many as fit into the context."""
    stop_ids: frozenset[int]
    token_ids: list[int] = field(factory=list)
    num_failures: int = 0
    num_attempts: int = 0
    attempt_id: str | None = None
    """What the attempt that runs now is called at its server."""
    is_aborted: bool = False
    """Whether somebody asked for it to end."""
    is_over: bool = False
    was_interrupted: bool = False
    """Whether an attempt that has sampled something ends because the engine is paused to abort it."""

    @classmethod
    def create(cls, request: EngineRequest, *, context_length: int) -> Run:
        """A generation that has not begun. ``request`` has been validated."""
        room = context_length - len(request.prompt)
        return cls(request, min(request.sampling.max_new_tokens, room), find_stop_ids(request))

    @property
    def routing_key(self) -> str:
        """What keeps the requests of a session together."""
        return self.request.routing_key or self.request.id

    def begin_attempt(self) -> EngineRequest:
        """What is asked of the next server: to go on after what is known.

        Raises ``EngineError`` if that cannot be said: a grammar begins at the beginning.
        """
        if self.token_ids and self.request.grammar is not None:
            raise EngineError(
                f"Generation {self.request.id} lost its server after {len(self.token_ids)} tokens, and its grammar "
                "cannot be taken up in the middle. Ask again."
            )
        # Servers know requests by prefixes of their names, too; so no name may be the beginning of another.
        self.attempt_id = f"{uuid4().hex}-{self.request.id}"
        self.num_attempts += 1
        sampling = evolve(self.request.sampling, max_new_tokens=self.max_new_tokens - len(self.token_ids))
        prompt = np.concatenate([self.request.prompt, np.asarray(self.token_ids, dtype=np.int32)])
        return evolve(self.request, id=self.attempt_id, prompt=prompt, sampling=sampling)

    def take(self, chunk: Chunk) -> Chunk:
        """Keep a chunk; returns it as the consumer sees it: with a finish if the whole generation is over with it."""
        self.token_ids.extend(chunk.token_ids.tolist())
        if len(chunk.token_ids):
            self.num_failures = 0
        finish = self._judge(chunk.finish)
        self.is_over = finish is not None
        return evolve(chunk, finish=finish, num_cached_tokens=chunk.num_cached_tokens if self.num_attempts == 1 else 0)

    def _judge(self, finish: FinishReason | None) -> FinishReason | None:
        """What an attempt's end means for the generation: nothing, if nobody here asked for it."""
        if finish is None:
            return None
        if finish is FinishReason.ABORT:
            has_ended_by_us = self.is_aborted or (self.was_interrupted and bool(self.token_ids))
            return FinishReason.ABORT if has_ended_by_us else self.find_end()
        if finish is FinishReason.STOP and not self._was_asked_for:
            return self.find_end()
        return finish

    @property
    def _was_asked_for(self) -> bool:
        """Whether a stop may be one of ours; servers also stop at the end token of their model."""
        request = self.request
        return bool(
            request.sampling.stop
            or request.grammar is not None
            or (self.token_ids and self.token_ids[-1] in self.stop_ids)
        )

    def find_end(self) -> FinishReason | None:
        """Whether what is known is the whole, though no server said so."""
        if self.token_ids and self.token_ids[-1] in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.max_new_tokens else None

    def fail(self, error: EngineError, *, max_failures: int) -> None:
        """Note that an attempt failed. Raises ``EngineError`` if it was one too many."""
        self.num_failures += 1
        if self.num_failures >= max_failures:
            raise EngineError(
                f"Generation {self.request.id} failed {self.num_failures} times in a row, after {len(self.token_ids)} "
                f"tokens: {error}"
            ) from error


def empty_chunk(finish: FinishReason, *, version: int) -> Chunk:
    """The end, and nothing else."""
    return Chunk(token_ids=(), logprobs=(), raw_logprobs=(), version=version, finish=finish)
