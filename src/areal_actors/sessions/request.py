"""One completion request: its exact prompt, the engine's streams, its answers, and the callers that wait for it.

``RequestPlanner`` plans the prompt, keys the samples and adds the choices to the tree; ``sampling`` opens the engine's
streams; ``Choice`` collects the chunks of one answer and parses them.

A turn is answered by the handler of the request that began it, and a retry of the same request waits for it. If the
first caller leaves, the turn is aborted; a retry that waits then takes its place, with the same random numbers.

``retries`` decides which request is a retry of which.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
from attrs import define, evolve, field

from areal_actors.cache import ConversationTree, PromptPlan, Session, plan_prompt
from areal_actors.domain import (
    Answer,
    AnswerStarted,
    Attempt,
    Chunk,
    CompletionRequest,
    Delta,
    EngineInfo,
    EngineRequest,
    FinishReason,
    Grammar,
    Interaction,
    InteractionId,
    ReasoningDelta,
    SampledTokens,
    SampleKey,
    Sampling,
    StreamItem,
    TextDelta,
    Tool,
    ToolArgumentsDelta,
    ToolCallStarted,
    ToolChoice,
    TurnEnded,
    Usage,
    digest_tokens,
    join_chunks,
    split_completion,
)
from areal_actors.errors import ActorStopped, ContextLengthExceeded, SessionEnded, Unavailable, UnsupportedParameter
from areal_actors.kernel import Ref
from areal_actors.lib.tracing import set_error
from areal_actors.messages import Generate, Generation
from areal_actors.rendering import Renderer, join_deltas
from areal_actors.sessions.journal import SessionJournal
from areal_actors.sessions.retries import CachedRequest, RetryCache

if TYPE_CHECKING:
    from opentelemetry.trace import Span

Streams = list[AsyncIterator[Chunk]]


@define(eq=False, kw_only=True)
class PendingRequest:
    """A request in progress, with one choice and one engine request per answer.

    ``cached`` is set if the request may be retried, ``journal`` if its session is durable.
    """

    session: Session
    plan: PromptPlan
    choices: tuple[Choice, ...]
    requests: tuple[EngineRequest, ...]
    is_streaming: bool = False
    cached: CachedRequest[PendingRequest] | None = None
    journal: SessionJournal | None = None
    span: Span | None = None
    _ended: anyio.Event | None = field(default=None, init=False)

    def begin_in(self, attempts: RetryCache[PendingRequest], attempt: Attempt | None) -> None:
        """Register the request for retries.

        It also marks the interaction that it continues as read: a client that builds on an answer has received it, so
        that answer needs no retry.
        """
        if self.plan.parent is not None:
            attempts.note_read(self.plan.parent)
        if attempt is not None:
            interactions = tuple(choice.interaction for choice in self.choices)
            self.cached = attempts.begin(attempt, interactions, self, anyio.current_time())
            self.cached.asked = asked_of(self.plan.request, self.requests[0].key)

    def trace(self, span: Span | None) -> None:
        """Have the request, whose prompt has been rendered, described by ``span``."""
        self.span = span
        if span is not None:
            span.add_event("rendered")
            for choice in self.choices:
                choice.span = span

    async def wait(self) -> None:
        """Wait until the turn ends, in whatever way."""
        self._ended = self._ended or anyio.Event()
        await self._ended.wait()

    async def complete(self, *choices: Choice) -> tuple[Answer, ...]:
        """Record these finished answers. For a durable session they are written to the journal first, all or none.

        Raises:
            Unavailable: the answers could not be written, and are not recorded.
            SessionEnded: the session ended while the answers waited to be written.
        """
        if self.journal is None or not choices:
            return tuple(choice.complete() for choice in choices)
        # Held from the decision to the change, so that the journal and the tree agree on one order.
        async with self.journal.lock:
            for choice in choices:
                # The session may have ended while this turn waited for the lock.
                check_complete(self, choice)
            now = self.journal.clock()
            await self.journal.write(*[self._event(*choice.prepare(), now) for choice in choices])
            return tuple([choice.complete() for choice in choices])

    def _event(self, interaction: Interaction, answer: Answer | None, now: float) -> TurnEnded:
        match, cached = self.plan.match, self.cached
        attempt = None
        if cached is not None:
            attempt = Attempt(fingerprint=cached.fingerprint, number=cached.number, idempotency_key=cached.key)
        assert self.journal is not None
        return TurnEnded(
            session=self.journal.session,
            interaction=interaction,
            frame=(match.frame.system, match.frame.tools, match.frame.options),
            prompt_digest=match.digest(len(match.messages)),
            ended_at=now,
            attempt=attempt,
            siblings=tuple(choice.interaction for choice in self.choices) if attempt is not None else (),
            asked=asked_of(self.plan.request, self.requests[0].key),
            num_cached_tokens=0 if answer is None else answer.usage.cached_tokens,
            stop_sequence=None if answer is None else answer.stop_sequence,
        )

    def end(self) -> None:
        """Cancel the choices that have not ended, and wake all callers that joined."""
        for choice in self.choices:
            choice.cancel()
        unanswered = [choice.interaction for choice in self.choices if choice.answer is None]
        if self.journal is not None and unanswered:
            # No caller waits for these events, so they are handed over without waiting for the disk.
            wall_now, tree = self.journal.clock(), self.session.tree
            self.journal.note(*[self._event(tree.get(interaction), None, wall_now) for interaction in unanswered])
        # Time spent on a long answer does not count as idle.
        now = self.session.last_used_at = anyio.current_time()
        if self.cached is not None:
            answers = tuple(choice.answer for choice in self.choices if choice.answer is not None)
            self.cached.end(answers if len(answers) == len(self.choices) else None, now)
        if self._ended is not None:
            self._ended.set()
        if self.span is not None:
            self._describe(self.span)

    def _describe(self, span: Span) -> None:
        """End the span with what was sampled, for how long a prompt and with which weights."""
        chunks = [chunk for choice in self.choices for chunk in choice.chunks]
        span.set_attributes(
            {
                "areal.interactions": [choice.interaction for choice in self.choices],
                "areal.cached_tokens": max((chunk.num_cached_tokens for chunk in chunks), default=0),
                "areal.weights.versions": sorted({chunk.version for chunk in chunks if len(chunk.token_ids)}),
                "gen_ai.usage.input_tokens": len(self.plan.token_ids),
                "gen_ai.usage.output_tokens": sum(len(chunk.token_ids) for chunk in chunks),
                "gen_ai.response.finish_reasons": [chunk.finish.value for chunk in chunks if chunk.finish is not None],
            }
        )
        unanswered = [choice.interaction for choice in self.choices if choice.answer is None]
        if unanswered:
            recorded = self.session.tree.get(unanswered[0])
            set_error(span, recorded.failure or recorded.status.value)
        span.end()

    def fail(self, reason: str) -> None:
        """Record why no answer was produced."""
        for choice in self.choices:
            choice.fail(reason)


@asynccontextmanager
async def sampling(turn: PendingRequest, generation: Ref[Generation]) -> AsyncIterator[Streams]:
    """Open the engine's streams, one per choice, all running, and end the turn when the block is left.

    Raises:
        Unavailable: the generation actor has stopped.
    """
    try:
        async with AsyncExitStack() as stack:
            streams: Streams = []
            for request in turn.requests:
                # Choices are delivered one after another, so each gets a buffer for its whole answer: it must not block
                # while it waits for its turn. A single choice gets a small buffer, which gives back-pressure.
                size = 16 if len(turn.requests) == 1 else request.sampling.max_new_tokens + 1
                streams.append(
                    await stack.enter_async_context(generation.stream(Generate(request=request), buffer_size=size))
                )
            yield streams
    except ActorStopped as error:
        turn.fail("the generation actor stopped")
        raise Unavailable("The engine is gone; the request may be repeated when it is back.") from error
    except Exception as error:
        turn.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        turn.end()


async def answer(turn: PendingRequest, generation: Ref[Generation]) -> tuple[Answer, ...]:
    """Answer without streaming: record all choices, or none. Raises as ``sampling`` and ``PendingRequest.complete``."""
    async with sampling(turn, generation) as streams:
        for choice, chunks in zip(turn.choices, streams, strict=True):
            async for chunk in chunks:
                choice.feed(chunk)
                if choice.has_stopped:
                    break
        for choice in turn.choices:
            check_complete(turn, choice)
        return await turn.complete(*turn.choices)


def check_complete(turn: PendingRequest, choice: Choice) -> None:
    """Check that an answer ended properly and that its session is still open.

    Raises:
        Unavailable: the generation was aborted before it was complete.
        SessionEnded: the session ended while the request was answered.
    """
    if choice.was_aborted:
        raise Unavailable("The generation was aborted before it was complete; the request may be repeated.")
    if turn.session.is_ended:
        raise SessionEnded(f"Session {turn.session.id} ended while this request was answered; start a new one.")


def replay(answers: tuple[Answer, ...], *, with_tokens: bool = False) -> Iterator[StreamItem]:
    """Yield finished answers as a stream would have; the deltas join to the same messages."""
    for choice, answer in enumerate(answers):
        message = answer.message
        yield AnswerStarted(
            interaction=answer.interaction,
            num_prompt_tokens=answer.usage.prompt_tokens,
            choice=choice,
            temperature=answer.temperature,
        )
        if with_tokens:
            for chunk in split_completion(answer.completion, num_cached_tokens=answer.usage.cached_tokens):
                yield SampledTokens(chunk=chunk, choice=choice)
        if message.reasoning is not None:
            yield ReasoningDelta(text=message.reasoning, choice=choice)
        if message.content:
            yield TextDelta(text=message.content, choice=choice)
        for index, call in enumerate(message.tool_calls):
            yield ToolCallStarted(index=index, id=call.id, name=call.name, choice=choice)
            yield ToolArgumentsDelta(index=index, text=call.arguments, choice=choice)
        yield answer


class RequestPlanner:
    """Begins turns with the model's renderer, within the engine's limits."""

    def __init__(self, renderer: Renderer, *, token_factory: Callable[[], str]) -> None:
        """Create the factory of turns. ``token_factory`` makes the ids of interactions."""
        self._renderer = renderer
        self._token = token_factory
        self._context_length = 0
        self._has_grammars = False
        self._logprobs_follow_truncation = True

    def learn(self, engine: EngineInfo) -> None:
        """Store the engine's limits. This is required before the first turn."""
        self._context_length = engine.context_length
        self._has_grammars = engine.has_grammars
        self._logprobs_follow_truncation = engine.logprobs_follow_truncation

    def plan(self, session: Session, request: CompletionRequest) -> PromptPlan:
        """Return the prompt of ``request``, without beginning a turn."""
        return plan_prompt(session.tree, self._renderer, request)

    def begin(
        self,
        session: Session,
        plan: PromptPlan,
        *,
        sample_keys: SampleKeys,
        journal: SessionJournal | None,
        is_streaming: bool,
        asked: tuple[str, int] | None = None,
        tag: str | None = None,
    ) -> PendingRequest:
        """Create the turn of ``plan`` and add its interactions to the tree.

        ``asked`` identifies a request that it replaces, and ``tag`` is its role, by default the one that the request
        names. Raises the ``RequestError`` that the client should see; the tree is unchanged in that case.
        """
        request = plan.request
        grammar = find_grammar(self._renderer, request, has_grammars=self._has_grammars)
        if grammar is not None and request.begun is not None:
            raise UnsupportedParameter(
                "An answer that the client begins cannot be constrained by response_format or tool_choice. "
                "Send one of the two.",
                param="messages",
            )
        prompt_digest = digest_tokens(plan.token_ids)
        keys = sample_keys.keys(request, prompt_digest, asked)
        # The id that the client sees.
        first = f"{request.id_prefix}{self._token()}"
        names = [first, *(f"{first}-{index}" for index in range(1, request.num_choices))]
        wanted, is_streamed = self._fit(plan), is_streaming
        if wanted.stop and self._renderer.has_reasoning and not is_raw(request):
            # The engine would find stop strings in the thinking. ``Choice`` finds them instead, and sampling ends with
            # the token that completes one. Tokens that are delivered late would be sampled in vain.
            wanted, is_streamed = evolve(wanted, stop=()), True
        requests = tuple(
            EngineRequest(
                id=name,
                prompt=plan.token_ids,
                sampling=wanted,
                key=key,
                stop_token_ids=self._renderer.stop_token_ids,
                grammar=grammar,
                routing_key=session.id,
                is_streamed=is_streamed,
            )
            for name, key in zip(names, keys, strict=True)
        )
        sampling = request.sampling.distribution(
            has_grammar=grammar is not None, logprobs_follow_truncation=self._logprobs_follow_truncation
        )
        choices: list[Choice] = []
        for index, name in enumerate(names):
            session.tree.begin(InteractionId(name), plan, sampling=sampling, tag=tag)
            choice = Choice(
                interaction=InteractionId(name),
                index=index,
                plan=plan,
                tree=session.tree,
                renderer=self._renderer,
                is_streaming=is_streaming,
            )
            choices.append(choice)
        return PendingRequest(
            session=session,
            plan=plan,
            choices=tuple(choices),
            requests=requests,
            is_streaming=is_streaming,
            journal=journal,
        )

    def _fit(self, plan: PromptPlan) -> Sampling:
        """Return the sampling settings of a request, limited to the room that its prompt leaves.

        Raises:
            ContextLengthExceeded: there is no room for a single token.
        """
        room, sampling = self._context_length - len(plan.token_ids), plan.request.sampling
        if room < 1:
            num_tokens = len(plan.token_ids) + sampling.max_new_tokens
            raise ContextLengthExceeded(num_tokens=num_tokens, max_tokens=self._context_length)
        return sampling if sampling.max_new_tokens <= room else evolve(sampling, max_new_tokens=room)


_NUM_KEY_DIGITS = 16
"""Hexadecimal digits of a prompt's hash in the keys of its random numbers."""


class SampleKeys:
    """Keys for the random numbers of one session's requests.

    A request with a seed is repeatable. Any other request is keyed by the session, its prompt, and how often the
    session has asked for that prompt before, so that the order in which parallel requests arrive makes no difference.
    """

    def __init__(self, base: SampleKey) -> None:
        self.base = base
        self._asked: dict[str, int] = {}

    @classmethod
    def restore(cls, base: SampleKey, turns: Iterable[TurnEnded]) -> SampleKeys:
        """Return keys that continue where an earlier process stopped, so that no random numbers are used twice."""
        keys = cls(base)
        for turn in turns:
            if turn.asked is not None:
                digest, occurrence = turn.asked
                keys._asked[digest] = max(keys._asked.get(digest, 0), occurrence + 1)
        return keys

    def keys(
        self, request: CompletionRequest, prompt_digest: str, asked: tuple[str, int] | None = None
    ) -> list[SampleKey]:
        """Return one key per choice. ``asked`` is of the request that this one replaces, and counts for its prompt."""
        digest = prompt_digest[:_NUM_KEY_DIGITS]
        choices = range(request.num_choices)
        if request.seed is not None:
            return [SampleKey(seed=request.seed, path=("request", digest, choice)) for choice in choices]
        if asked is not None and asked[0] == digest:
            occurrence = asked[1]
        else:
            occurrence = self._asked.get(digest, 0)
            self._asked[digest] = occurrence + 1
        seed, path = self.base.seed, self.base.path
        return [SampleKey(seed=seed, path=(*path, digest, occurrence, choice)) for choice in choices]


def asked_of(request: CompletionRequest, key: SampleKey) -> tuple[str, int] | None:
    """Return what ``SampleKeys`` counted for a request with ``key``; ``None`` for a request with a seed."""
    if request.seed is not None:
        return None
    digest, occurrence, _ = key.path[-3:]
    return str(digest), int(occurrence)


def find_grammar(renderer: Renderer, request: CompletionRequest, *, has_grammars: bool) -> Grammar | None:
    """Return the grammar of the answer, in the model's format of calls and reasoning; ``None`` if it is unconstrained.

    Raises:
        UnsupportedParameter: the request demands something that the engine or the model's format cannot enforce.
    """
    is_call_demanded = request.tool_choice not in (ToolChoice.AUTO, ToolChoice.NONE)
    if not has_grammars and (is_call_demanded or request.response_format is not None):
        param = "tool_choice" if is_call_demanded else "response_format"
        raise UnsupportedParameter(
            f"{param} cannot be enforced: the engine does not constrain what it samples. Say in the prompt what the "
            "answer has to look like.",
            param=param,
        )
    return renderer.constrain(
        tools=request.tools,
        tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=request.response_format,
        template_kwargs=request.template_kwargs,
    )


class Choice:
    """One answer in progress: collects chunks, parses them as they come, and ends its interaction exactly once."""

    def __init__(
        self,
        *,
        interaction: InteractionId,
        index: int,
        plan: PromptPlan,
        tree: ConversationTree,
        renderer: Renderer,
        is_streaming: bool,
    ) -> None:
        request = plan.request
        self.interaction = interaction
        self.index = index
        self._plan = plan
        self._tree = tree
        options: dict[str, Any] = {
            "tools": _callable_tools(request),
            "template_kwargs": request.template_kwargs,
            "is_plain": is_raw(request),
        }
        self._parser = renderer.open_stream(**options, stop=request.sampling.stop, is_eager=is_streaming)
        self._is_parsed_at_once = not is_streaming and not request.sampling.stop
        """Whether nothing is read of the answer before it is complete."""
        self._begun = None if request.begun is None else renderer.parse(plan.beginning, **options)
        self._said: list[Delta] = [*self._parser.begin(plan.beginning)]
        """The deltas so far, with the beginning that the client wrote; of a stream, those that the client has."""
        said = sum(len(delta.text) for delta in self._said if isinstance(delta, TextDelta))
        self._num_unsent = 0 if self._begun is None else len(self._begun.content or "") - said
        """Characters of that beginning that the client does not receive."""
        self.chunks: list[Chunk] = []
        self._is_flushed = False
        self._prepared: tuple[Interaction, Answer] | None = None
        self.is_ended = False
        self.span: Span | None = None
        self.answer: Answer | None = None
        """The answer, once complete."""

    def feed(self, chunk: Chunk) -> Sequence[Delta]:
        """Store a chunk; return the deltas that the client may see.

        If it completes a stop string, it is the last chunk. Tokens that were sampled after the stop string and arrived
        with it are kept, as all sampled tokens are.
        """
        deltas: Sequence[Delta] = ()
        if not self._is_parsed_at_once and len(chunk.token_ids):
            deltas = self._parser.feed(chunk.token_ids)
        if self.has_stopped:
            chunk = evolve(chunk, finish=FinishReason.STOP)
        self.chunks.append(chunk)
        if self.span is not None and len(self.chunks) == 1:
            self.span.add_event("first token", {"areal.interaction": self.interaction})
        return self._note(deltas)

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string has ended the answer, so that no chunk follows."""
        return self._parser.stop_sequence is not None

    def flush(self) -> Sequence[Delta]:
        """Return the deltas that the parser held back, once no chunk follows. A second call returns nothing."""
        if self._is_flushed:
            return ()
        self._is_flushed = True
        deltas: list[Delta] = []
        if self._is_parsed_at_once and self.chunks:
            deltas += self._parser.feed(np.concatenate([chunk.token_ids for chunk in self.chunks]))
        return self._note([*deltas, *self._parser.finish()])

    def _note(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        # Further calls may be sampled, but are hidden from a client that wants one call at a time.
        if not self._plan.request.parallel_tool_calls:
            deltas = [
                delta
                for delta in deltas
                if not (isinstance(delta, ToolCallStarted | ToolArgumentsDelta) and delta.index > 0)
            ]
        deltas = [
            evolve(delta, id=self._tree.issue_call_id(delta.id)) if isinstance(delta, ToolCallStarted) else delta
            for delta in deltas
        ]
        self._said += deltas
        if self._num_unsent > 0:
            deltas = list(self._skip(deltas))
        if self.index:
            deltas = [evolve(delta, choice=self.index) for delta in deltas]
        return deltas

    def _skip(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        """Yield the deltas without the text of the beginning that the parser has held back."""
        for delta in deltas:
            if not isinstance(delta, TextDelta) or self._num_unsent <= 0:
                yield delta
                continue
            text = delta.text[self._num_unsent :]
            self._num_unsent -= len(delta.text)
            if text:
                yield evolve(delta, text=text)

    @property
    def was_aborted(self) -> bool:
        """Whether the engine aborted it on request."""
        return not self.chunks or self.chunks[-1].finish in (None, FinishReason.ABORT)

    def complete(self) -> Answer:
        """Record the answer in the tree, and return it."""
        interaction, answer = self._prepared or self.prepare()
        self.is_ended = True
        self._tree.record(interaction)
        self.answer = answer
        return answer

    def prepare(self) -> tuple[Interaction, Answer]:
        """Return what ``complete`` will record and return. The interaction stays pending until then.

        The message is the one that the client of a stream has received, so that its echo is recognised.
        """
        self.flush()
        sampled, message = join_chunks(self.chunks), join_deltas(self._said)
        interaction = self._tree.prepare(self.interaction, sampled, message)
        completion = interaction.completion
        assert completion is not None
        if self._begun is not None:
            # What the client has not written itself: clients put both together.
            message = evolve(
                message,
                content=(message.content or "").removeprefix(self._begun.content or "") or None,
                reasoning=None if message.reasoning == self._begun.reasoning else message.reasoning,
            )
        usage = Usage(
            prompt_tokens=len(self._plan.token_ids),
            completion_tokens=len(sampled.token_ids),
            cached_tokens=self.chunks[0].num_cached_tokens,
        )
        # Shares the tree's arrays, so that keeping an answer for its retry costs almost no memory.
        answer = Answer(
            interaction=self.interaction,
            message=message,
            completion=completion,
            usage=usage,
            stop_sequence=self._parser.stop_sequence,
            temperature=self._plan.request.sampling.temperature,
        )
        self._prepared = interaction, answer
        return self._prepared

    def cancel(self) -> None:
        """Record that the answer is no longer wanted, and keep the sampled tokens. Does nothing once ended."""
        if not self.is_ended:
            self.is_ended = True
            self._tree.cancel(self.interaction, join_chunks(self.chunks) if self.chunks else None)

    def fail(self, reason: str) -> None:
        """Record why there is no answer, and keep the sampled tokens. Does nothing once ended."""
        if not self.is_ended:
            self.is_ended = True
            self._tree.fail(self.interaction, reason, join_chunks(self.chunks) if self.chunks else None)


def is_raw(request: CompletionRequest) -> bool:
    """Return whether the request continues a text or ids, so that all of its answer is text."""
    return request.prompt is not None or bool(request.prompt_ids)


def _callable_tools(request: CompletionRequest) -> tuple[Tool, ...]:
    """Return the tools whose calls are parsed."""
    # The prompt shows all tools in any case, so that it extends the prompt of the previous turn.
    return () if request.tool_choice is ToolChoice.NONE else request.tools
