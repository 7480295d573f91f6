"""A generation actor whose answers to one episode are recorded, and given again to a workflow that starts over.

A workflow samples from the engine without a session, by itself or by the clients that it creates. All of them name each
request by its sample key: the episode, the prompt, and how often that was asked before. ``journal.episodes`` describes
what is answered again.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from hashlib import blake2b
from typing import Any, TypeVar, cast

from attrs import evolve

from areal_actors.domain import (
    Chunk,
    EngineRequest,
    Episode,
    FinishReason,
    Interaction,
    InteractionId,
    InteractionStatus,
    TurnEnded,
    join_chunks,
    split_completion,
)
from areal_actors.journal import Recording
from areal_actors.kernel import ActorStatistics, Address, Message, Ref, StreamMessage
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import Generate, Generation, OpenedEpisode, RecordTurn, Sessions

_log = get_logger(__name__)

R = TypeVar("R")
Item = TypeVar("Item")


class RecordedGeneration(Ref[Generation]):
    """A ref to ``generation`` for ``episode``, whose answers ``sessions`` records, after those of earlier runs."""

    __slots__ = ("_episode", "_generation", "_num_asked", "_recording", "_sessions")

    def __init__(self, generation: Ref[Generation], sessions: Ref[Sessions], *, episode: OpenedEpisode) -> None:
        self._generation = generation
        self._sessions = sessions
        self._episode = episode
        self._recording = Recording(episode.turns)
        self._num_asked = max((turn.interaction.order + 1 for turn in episode.turns), default=0)

    @property
    def address(self) -> Address:
        """The address of the generation actor."""
        return self._generation.address

    async def ask(self, message: Message[Generation, R], *, timeout: float | None = None) -> R:  # noqa: ASYNC109
        """Ask the generation actor."""
        return await self._generation.ask(message, timeout=timeout)

    async def tell(self, message: Message[Generation, Any]) -> None:
        """Tell the generation actor."""
        await self._generation.tell(message)

    def tell_nowait(self, message: Message[Generation, Any]) -> None:
        """Tell the generation actor, without waiting."""
        self._generation.tell_nowait(message)

    @asynccontextmanager
    async def stream(
        self, message: StreamMessage[Generation, Item], *, buffer_size: int = 16
    ) -> AsyncIterator[AsyncIterator[Item]]:
        """Return the chunks of a recorded answer, or sample it and record it before its last chunk is returned."""
        assert isinstance(message, Generate), "the only stream of a generation actor"
        # Of everything that the answer depends on, and of the sample key, which names it.
        request = message.request
        hashed = blake2b(request.prompt.tobytes(), digest_size=16)
        hashed.update(repr((request.key, request.sampling, request.stop_token_ids, request.grammar)).encode())
        digest = hashed.hexdigest()
        if recorded := self._recording.take(digest):
            completion = recorded[0].interaction.completion
            assert completion is not None
            chunks = split_completion(completion, num_cached_tokens=recorded[0].num_cached_tokens)
            # The reader may stop at a stop string.
            async with aclosing(_iterate(chunks)) as repeated:
                yield cast("AsyncIterator[Item]", repeated)
            return
        async with (
            self._generation.stream(message, buffer_size=buffer_size) as arriving,
            aclosing(self._record(message.request, digest, arriving)) as recording,
        ):
            yield cast("AsyncIterator[Item]", recording)

    async def _record(
        self, request: EngineRequest, digest: str, arriving: AsyncIterator[Chunk]
    ) -> AsyncGenerator[Chunk]:
        chunks: list[Chunk] = []
        order, self._num_asked = self._num_asked, self._num_asked + 1
        async for chunk in arriving:
            chunks.append(chunk)
            if chunk.finish not in (None, FinishReason.ABORT):
                turn = Interaction(
                    id=InteractionId(request.id),
                    order=order,
                    prompt_suffix=request.prompt[:0],
                    num_prompt_tokens=len(request.prompt),
                    completion=join_chunks(chunks),
                    status=InteractionStatus.COMPLETED,
                )
                ended = TurnEnded(
                    session=self._episode.name,
                    interaction=turn,
                    frame=None,
                    ended_at=time.time(),
                    num_cached_tokens=chunks[0].num_cached_tokens,
                    request=digest,
                )
                await self._sessions.ask(RecordTurn(turn=ended))
            yield chunk

    async def stop(self, *, grace: float | None = None) -> None:
        """Stop the generation actor."""
        await self._generation.stop(grace=grace)

    def statistics(self) -> ActorStatistics:
        """Return the statistics of the generation actor."""
        return self._generation.statistics()

    def describe(self, episodes: tuple[Episode, ...]) -> tuple[Episode, ...]:
        """Return the episodes of the workflow with the counts of turns that were answered again, and that were not."""
        recording = self._recording
        if not recording.num_replayed and not recording.num_left:
            return episodes
        if recording.num_left:
            detail = "The workflow has not asked for these recorded turns again; they are not trained."
            replayed, dropped = recording.num_replayed, recording.num_left
            _log.info(
                "episode_diverged",
                session=episodes[0].session,
                turns_replayed=replayed,
                turns_dropped=dropped,
                detail=detail,
            )
        is_restored = self._episode.is_remade and recording.num_replayed > 0
        # Only the first of several samples has the counts, so that they count once.
        first = evolve(episodes[0], num_replayed_turns=recording.num_replayed, num_dropped_turns=recording.num_left)
        return tuple(evolve(each, is_restored=each.is_restored or is_restored) for each in (first, *episodes[1:]))


async def _iterate(chunks: tuple[Chunk, ...]) -> AsyncGenerator[Chunk]:
    for chunk in chunks:
        yield chunk
