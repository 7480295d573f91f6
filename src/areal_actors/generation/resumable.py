"""Generations that continue at another engine after the one that sampled them has failed.

* The tokens sampled so far become the end of the prompt, and each keeps the version that sampled it. A generation never
  continues with weights older than those.
* A generation fails after ``max_attempts`` attempts in a row without a new token. Failures after progress do not add
  up, because an answer of an hour may well outlive several servers.
* The random numbers after a move have another key. With the same one, those of the beginning would be drawn again.
* A generation under a grammar cannot move once a token was sampled, because engines start a grammar at its beginning.
  It is refused with 503, which SDKs repeat.
* An engine may also interrupt a generation on purpose, as a server does whose adapter changes. It continues at the same
  replica.

``replicas`` chooses the replica of each attempt.
"""

from __future__ import annotations

import numpy as np
from attrs import evolve

from areal_actors.domain import Chunk, EngineRequest, FinishReason, Ints
from areal_actors.errors import EngineError, Unavailable
from areal_actors.generation.base import find_stop_ids


class ResumableGeneration:
    """The state of one generation: the tokens sampled so far, and the failures of the replicas that sampled them."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.version = 0
        """The newest version that sampled; the generation does not continue with an older one."""
        self.num_sampled = 0
        self.num_attempts = 0
        self.num_failures = 0
        """Attempts that failed since the last new token."""
        self.failed_at: set[str] = set()
        """Names of replicas that failed it; they are used again only if there is no other."""
        self.is_over = False
        self._sampled: list[Ints] = []
        self._max_new_tokens = request.sampling.max_new_tokens

    def fit(self, context_length: int) -> None:
        """Limit the generation to the context of its replicas.

        Without this limit, a generation whose replica is lost at the end of its context would be sent to another one,
        which would refuse it.
        """
        room = context_length - len(self.request.prompt)
        self._max_new_tokens = min(self.request.sampling.max_new_tokens, max(room, 1))

    def next_request(self) -> EngineRequest:
        """Return the request for the remaining tokens.

        Each attempt has a new id, because the former one may still be running somewhere.
        """
        request, self.num_attempts = self.request, self.num_attempts + 1
        sampling, left = request.sampling, self._max_new_tokens - self.num_sampled
        if left != sampling.max_new_tokens:
            sampling = evolve(sampling, max_new_tokens=left)
        if not self.num_sampled:
            if self.num_attempts == 1 and sampling is request.sampling:
                return request
            name = request.id if self.num_attempts == 1 else f"{request.id}.{self.num_attempts}"
            return evolve(request, id=name, sampling=sampling)
        return evolve(
            request,
            id=f"{request.id}.{self.num_attempts}",
            prompt=np.concatenate([request.prompt, *self._sampled]),
            sampling=sampling,
            key=evolve(request.key, num_drawn=request.key.num_drawn + self.num_sampled),
        )

    def add(self, chunk: Chunk) -> Chunk:
        """Store a chunk; return it in the form that the client receives."""
        is_first = not self._sampled
        if len(chunk.token_ids):
            self._sampled.append(chunk.token_ids)
            self.num_sampled += len(chunk.token_ids)
            self.num_failures = 0
        self.version = chunk.version
        self.is_over = chunk.finish is not None
        # After a move the prompt contains sampled tokens; whether those are cached is not a fact about the client's
        # prompt.
        return chunk if is_first or not chunk.num_cached_tokens else evolve(chunk, num_cached_tokens=0)

    def find_finish(self) -> FinishReason | None:
        """Return the finish if all tokens are known although no replica reported it, else ``None``."""
        if not self._sampled:
            return None
        if int(self._sampled[-1][-1]) in find_stop_ids(self.request):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_sampled >= self._max_new_tokens else None

    def end_attempt(
        self, replica: str, failure: BaseException | None, reason: str, *, is_failure: bool, max_failures: int
    ) -> Chunk | None:
        """Decide what follows an attempt that ``replica`` has left unfinished for ``reason``.

        Returns the last chunk if all tokens are known, and ``None`` if another attempt continues the generation.
        ``is_failure`` says whether the attempt counts as failed: one that was moved on purpose does not.

        Raises:
            Unavailable: the generation is under a grammar, and has begun.
            EngineError: it failed ``max_failures`` times in a row.
        """
        if is_failure:
            self.num_failures += 1
            self.failed_at.add(replica)
        # A replica may be lost after the last token and before it reports the finish.
        if (finish := self.find_finish()) is not None:
            return self.add(Chunk(token_ids=(), logprobs=(), raw_logprobs=(), version=self.version, finish=finish))
        if self.request.grammar is not None and self.num_sampled:
            raise Unavailable(
                f"Replica {replica} left ({reason}) in the middle of an answer with a prescribed form, which another "
                "engine cannot continue; the request may be repeated."
            ) from failure
        if self.num_failures >= max_failures:
            raise EngineError(
                f"Generation {self.request.id} failed {self.num_failures} times in a row, after {self.num_sampled} "
                f"tokens, at {', '.join(sorted(self.failed_at))}; the last reason: {reason}. See their logs."
            ) from failure
        return None
