"""Answering one request: the engine's streams, their end, and whoever waits for them.

A turn is answered by the handler of the request that began it. Others join it with the same request, sent again; should
the first caller leave then, the turn is *adopted* by a task of the actor, which goes on with the same streams, token by
token. Generation is aborted when the last caller has left::

    first caller ── samples ──┬── answers ──▶ everybody who waits
                              └── leaves ──▶ somebody joined? ── yes ──▶ adopted ── last one leaves ──▶ aborted
                                                             └── no ───▶ aborted

Which request is another one again is decided in ``attempts``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import anyio
from attrs import define, field

from areal_actors.actors.attempts import Attempts, Sending
from areal_actors.actors.durable import Ledger
from areal_actors.actors.turns import Choice, asked_of
from areal_actors.cache import PromptPlan, Session
from areal_actors.core import BackgroundTasks, Ref
from areal_actors.domain import (
    Answer,
    AnswerStarted,
    Attempt,
    Chunk,
    Delta,
    EngineRequest,
    Interaction,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallStarted,
    TurnEnded,
)
from areal_actors.errors import ActorStopped, SessionEnded, Unavailable
from areal_actors.messages import Generate, Generation
from areal_actors.telemetry import get_logger

__all__ = ["Answering", "Turn", "check_complete", "replay"]

_log = get_logger(__name__)

Streams = list[AsyncIterator[Chunk]]


@define(eq=False, kw_only=True)
class Turn:
    """A request that has begun: one choice and one engine request per answer.

    ``sending`` is there if it may return, ``ledger`` if its session is durable.
    """

    session: Session
    plan: PromptPlan
    choices: tuple[Choice, ...]
    requests: tuple[EngineRequest, ...]
    is_streaming: bool = False
    sending: Sending[Turn] | None = None
    ledger: Ledger | None = None
    _num_joined: int = field(default=0, init=False)
    _ended: anyio.Event | None = field(default=None, init=False)
    _adopted: anyio.CancelScope | None = field(default=None, init=False)

    def begin_in(self, attempts: Attempts[Turn], attempt: Attempt | None) -> None:
        """Be remembered for retries; and what it continues has been read, so that it needs none."""
        if self.plan.parent is not None:
            attempts.note_read(self.plan.parent)
        if attempt is not None:
            interactions = tuple(choice.interaction for choice in self.choices)
            self.sending = attempts.begin(attempt, interactions, self, anyio.current_time())

    @property
    def is_movable(self) -> bool:
        """Whether another task could go on with it."""
        has_key = self.sending is not None and self.sending.key is not None
        return self.is_streaming or has_key or len(self.requests) > 1

    @property
    def is_awaited(self) -> bool:
        """Whether somebody joined it and still waits."""
        return self._num_joined > 0

    async def wait(self) -> None:
        """Join it: wait for its end, whatever that is. Who leaves an adopted turn as the last one aborts it."""
        self._ended = self._ended or anyio.Event()
        self._num_joined += 1
        try:
            await self._ended.wait()
        finally:
            self._num_joined -= 1
            if not self._num_joined and self._adopted is not None:
                self._adopted.cancel()

    def adopt(self) -> anyio.CancelScope:
        """The first caller has left; returns the scope in which to go on."""
        self._adopted = anyio.CancelScope()
        return self._adopted

    async def complete(self, *choices: Choice) -> tuple[Answer, ...]:
        """Record these answers, which are complete; those of a durable session are written first, all or none.

        Raises:
            Unavailable: they could not be written, and are not recorded.
            SessionEnded: the session was ended while they waited to be written.
        """
        ledger = self.ledger
        if ledger is None or not choices:
            return tuple(choice.complete() for choice in choices)
        async with ledger.lock:
            for choice in choices:
                check_complete(self, choice)
            now = ledger.clock()
            await ledger.write(*[self._fact(*choice.prepare(), now) for choice in choices])
            return tuple(choice.complete() for choice in choices)

    def _fact(self, interaction: Interaction, answer: Answer | None, now: float) -> TurnEnded:
        history, sending = self.plan.match.history, self.sending
        attempt = None
        if sending is not None:
            attempt = Attempt(fingerprint=sending.fingerprint, number=sending.number, idempotency_key=sending.key)
        return TurnEnded(
            session=self.session.id,
            interaction=interaction,
            frame=(history.frame.system, history.frame.tools, history.frame.options),
            prompt_digest=history.digest(len(history.messages)),
            ended_at=now,
            attempt=attempt,
            siblings=() if attempt is None else tuple(choice.interaction for choice in self.choices),
            asked=asked_of(self.plan.request, self.requests[0].key),
            num_cached_tokens=0 if answer is None else answer.usage.cached_tokens,
            stop_sequence=None if answer is None else answer.stop_sequence,
        )

    def _note_unanswered(self, ledger: Ledger) -> None:
        unanswered = [choice.interaction for choice in self.choices if choice.answer is None]
        if unanswered:
            now, tree = ledger.clock(), self.session.tree
            ledger.note(*[self._fact(tree.get(interaction), None, now) for interaction in unanswered])

    def end(self) -> None:
        """Cancel the choices that have not ended, and wake whoever joined."""
        for choice in self.choices:
            choice.cancel()
        if self.ledger is not None:
            self._note_unanswered(self.ledger)
        now = self.session.last_used_at = anyio.current_time()  # a long answer is no idleness
        if self.sending is not None:
            answers = tuple(choice.answer for choice in self.choices if choice.answer is not None)
            self.sending.end(answers if len(answers) == len(self.choices) else None, now)
        if self._ended is not None:
            self._ended.set()

    def fail(self, reason: str) -> None:
        """Record why no answer came."""
        for choice in self.choices:
            choice.fail(reason)


class Answering:
    """Samples turns with ``generation``.

    ``tasks`` go on with those whose first caller has left. Without any, such a turn is aborted, and who joined it
    samples anew.
    """

    def __init__(self, generation: Ref[Generation]) -> None:
        self.tasks: BackgroundTasks | None = None
        self._generation = generation

    async def answer(self, turn: Turn) -> tuple[Answer, ...]:
        """Answer in one piece: all choices are recorded, or none is."""
        async with self.sampling(turn) as streams:
            await _read(turn, streams)
            return await turn.complete(*turn.choices)

    @asynccontextmanager
    async def sampling(self, turn: Turn) -> AsyncIterator[Streams]:
        """The engine's streams, one per choice, all running; ends the turn, however the block is left.

        Unless somebody else waits for it: then the turn goes on without the block.
        """
        async with AsyncExitStack() as stack:
            stack.enter_context(_ending(turn))
            streams = [
                await stack.enter_async_context(
                    self._generation.stream(Generate(request=request), buffer_size=_buffer_size(request, turn))
                )
                for request in turn.requests
            ]
            try:
                yield streams
            except anyio.get_cancelled_exc_class():
                if turn.is_awaited and turn.is_movable and self.tasks is not None:
                    self.tasks.start_soon(_go_on, turn, streams, turn.adopt(), stack.pop_all(), name="adopted")
                raise


async def _go_on(turn: Turn, streams: Streams, scope: anyio.CancelScope, stack: AsyncExitStack) -> None:
    """Finish an adopted turn. Its failure is no news to the actor: whoever joined samples anew, and meets it there."""
    with scope:
        try:
            async with stack:
                await _read(turn, streams)
                await turn.complete(*[choice for choice in turn.choices if not choice.is_ended])
        except Exception as error:  # noqa: BLE001 - whatever it is, the interactions have it as their reason
            _log.info("adopted_turn_failed", error=repr(error))


async def _read(turn: Turn, streams: Streams) -> None:
    """Read the streams to their ends, from wherever they stand."""
    choices = [(choice, chunks) for choice, chunks in zip(turn.choices, streams, strict=True) if not choice.is_ended]
    for choice, chunks in choices:
        async for chunk in chunks:
            choice.feed(chunk)
        choice.flush()
    for choice, _ in choices:
        check_complete(turn, choice)


@contextmanager
def _ending(turn: Turn) -> Iterator[None]:
    """Ends the turn after the block, with a reason if it failed."""
    try:
        yield
    except ActorStopped as error:
        turn.fail("the generation actor stopped")
        raise Unavailable("The engine is gone; the request may be repeated when it is back.") from error
    except Exception as error:
        turn.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        turn.end()


def check_complete(turn: Turn, choice: Choice) -> None:
    """Raise if the answer came to no proper end, or comes too late for its session."""
    if choice.was_aborted:
        raise Unavailable("The generation was aborted before it was complete; the request may be repeated.")
    if turn.session.is_ended:
        raise SessionEnded(f"Session {turn.session.id} ended while this request was answered; start a new one.")


def replay(answers: tuple[Answer, ...]) -> Iterator[AnswerStarted | Delta | Answer]:
    """Finished answers as a stream says them: the deltas join to the same messages."""
    for choice, answer in enumerate(answers):
        message = answer.message
        yield AnswerStarted(interaction=answer.interaction, num_prompt_tokens=answer.usage.prompt_tokens, choice=choice)
        if message.reasoning is not None:
            yield ReasoningDelta(text=message.reasoning, choice=choice)
        if message.content:
            yield TextDelta(text=message.content, choice=choice)
        for index, call in enumerate(message.tool_calls):
            yield ToolCallStarted(index=index, id=call.id, name=call.name, choice=choice)
            yield ToolArgumentsDelta(index=index, text=call.arguments, choice=choice)
        yield answer


def _buffer_size(request: EngineRequest, turn: Turn) -> int:
    """Choices that are told later must not hold their generation up; a single one may: that is back-pressure.

    An answer in one piece waits for nothing but its chunks and needs no buffer. Without one, a stream ends with the
    task that reads it and cannot be adopted; only who names a request with a key of its own can count on that.
    """
    if len(turn.requests) > 1:
        return request.sampling.max_new_tokens + 1
    return 16 if turn.is_movable else 0
