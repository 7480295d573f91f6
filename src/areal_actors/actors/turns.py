"""One request on its way to its answers: from a planned prompt to engine requests, from chunks to a completion.

Plain objects that the session manager drives; they wait for nothing and know no actor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen

from areal_actors.cache import ConversationTree, PromptPlan
from areal_actors.domain import (
    Answer,
    ChatMessage,
    Chunk,
    Completion,
    CompletionRequest,
    Delta,
    EngineRequest,
    FinishReason,
    Grammar,
    Interaction,
    InteractionId,
    Ints,
    SampleKey,
    Tool,
    ToolArgumentsDelta,
    ToolCallStarted,
    ToolChoice,
    Usage,
)
from areal_actors.errors import ContextLengthExceeded, UnsupportedParameter
from areal_actors.rendering import Renderer, StreamParser

__all__ = ["Choice", "SampleKeys", "asked_of", "engine_request", "find_grammar"]

ScalarT = TypeVar("ScalarT", bound=np.generic)


class SampleKeys:
    """Keys for the random numbers of one session's requests.

    A request that names its own seed is repeatable. Any other is keyed by the session, by what it asks, and by how
    often the session has asked that before: the order in which parallel requests arrive changes nothing.
    """

    def __init__(self, base: SampleKey) -> None:
        self.base = base
        self._asked: dict[str, int] = {}

    def note_asked(self, digest: str, occurrence: int) -> None:
        """The prompt of this digest was asked for the ``occurrence``-th time (from 0) by an earlier process."""
        self._asked[digest] = max(self._asked.get(digest, 0), occurrence + 1)

    def keys(self, request: CompletionRequest, prompt: Ints) -> list[SampleKey]:
        """One key per choice."""
        digest = blake2b(prompt.tobytes(), digest_size=8).hexdigest()
        choices = range(request.num_choices)
        if request.seed is not None:
            return [SampleKey(seed=request.seed, path=("request", digest, choice)) for choice in choices]
        occurrence = self._asked.get(digest, 0)
        self._asked[digest] = occurrence + 1
        seed, path = self.base.seed, self.base.path
        return [SampleKey(seed=seed, path=(*path, digest, occurrence, choice)) for choice in choices]


def asked_of(request: CompletionRequest, key: SampleKey) -> tuple[str, int] | None:
    """What ``SampleKeys`` counted for a request with ``key``; ``None`` for one with a seed of its own."""
    if request.seed is not None:
        return None
    digest, occurrence, _ = key.path[-3:]
    return str(digest), int(occurrence)


def find_grammar(renderer: Renderer, request: CompletionRequest, *, has_grammars: bool) -> Grammar | None:
    """What the answer must match, by the model's own way of writing calls and thoughts; ``None`` if it is free.

    Raises ``UnsupportedParameter`` if something is demanded that the engine, or the model's format, has no means for.
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


def engine_request(
    *,
    request_id: str,
    plan: PromptPlan,
    key: SampleKey,
    stop_token_ids: tuple[int, ...],
    context_length: int,
    grammar: Grammar | None = None,
    routing_key: str = "",
) -> EngineRequest:
    """What the engine is asked for one choice, bounded by the room that the prompt leaves.

    Raises ``ContextLengthExceeded`` if there is no room for a token.
    """
    room = context_length - len(plan.token_ids)
    sampling = plan.request.sampling
    if room < 1:
        wanted = len(plan.token_ids) + sampling.max_new_tokens
        raise ContextLengthExceeded(num_tokens=wanted, max_tokens=context_length)
    if sampling.max_new_tokens > room:
        sampling = evolve(sampling, max_new_tokens=room)
    return EngineRequest(
        id=request_id,
        prompt=plan.token_ids,
        sampling=sampling,
        key=key,
        stop_token_ids=stop_token_ids,
        grammar=grammar,
        routing_key=routing_key,
    )


@frozen(kw_only=True)
class _Sampled:
    """What the chunks so far say, joined."""

    completion: Completion
    num_cached_tokens: int


class Choice:
    """One answer in the making: collects chunks, parses them as they come, and ends its interaction exactly once."""

    def __init__(
        self,
        *,
        interaction: InteractionId,
        index: int,
        plan: PromptPlan,
        tree: ConversationTree,
        renderer: Renderer,
        call_ids: Callable[[], str],
        is_streaming: bool,
    ) -> None:
        self.interaction = interaction
        self.index = index
        self._plan = plan
        self._tree = tree
        self._renderer = renderer
        self._call_ids = call_ids
        self._streamed_ids: list[str] = []
        """The ids that were made for the calls of the stream; those that the model wrote itself are not among them."""
        self._parser: StreamParser | None = self._open_parser(self._make_call_id) if is_streaming else None
        self._chunks: list[Chunk] = []
        self._is_flushed = False
        self._prepared: tuple[Interaction, Answer] | None = None
        self.is_ended = False
        self.answer: Answer | None = None
        """What it came to, once complete."""

    def _make_call_id(self) -> str:
        self._streamed_ids.append(self._call_ids())
        return self._streamed_ids[-1]

    def _open_parser(self, call_ids: Callable[[], str]) -> StreamParser:
        request = self._plan.request
        return self._renderer.open_stream(
            tools=_callable_tools(request),
            stop=request.sampling.stop,
            template_kwargs=request.template_kwargs,
            call_ids=call_ids,
            is_plain=request.is_raw,
        )

    def feed(self, chunk: Chunk) -> Sequence[Delta]:
        """Keep a chunk; returns what the client may read of it."""
        self._chunks.append(chunk)
        if self._parser is None or len(chunk.token_ids) == 0:
            return ()
        return self._note(self._parser.feed(chunk.token_ids))

    def flush(self) -> Sequence[Delta]:
        """What the parser had held back, once nothing follows; said once."""
        if self._parser is None or self._is_flushed:
            return ()
        self._is_flushed = True
        return self._note(self._parser.finish())

    def _note(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        if not self._plan.request.parallel_tool_calls:
            deltas = [delta for delta in deltas if not _is_of_further_call(delta)]
        if self.index:
            deltas = [evolve(delta, choice=self.index) for delta in deltas]
        return deltas

    @property
    def was_aborted(self) -> bool:
        """Whether the engine ended it on somebody's request."""
        return not self._chunks or self._chunks[-1].finish in (None, FinishReason.ABORT)

    def complete(self) -> Answer:
        """Record the answer in the tree."""
        interaction, answer = self._prepared or self.prepare()
        self.is_ended = True
        self._tree.record(interaction)
        self.answer = answer
        return answer

    def prepare(self) -> tuple[Interaction, Answer]:
        """What ``complete`` will record and return; until then the interaction is pending."""
        sampled = self._sampled()
        message = self._message(sampled.completion)
        interaction = self._tree.prepare(self.interaction, sampled.completion, message)
        completion = interaction.completion
        assert completion is not None
        usage = Usage(
            prompt_tokens=len(self._plan.token_ids),
            completion_tokens=len(sampled.completion.token_ids),
            cached_tokens=sampled.num_cached_tokens,
        )
        # With the tree's own arrays, so that an answer that is kept for its retry costs next to nothing.
        answer = Answer(
            interaction=self.interaction,
            message=message,
            completion=completion,
            usage=usage,
            stop_sequence=self._stop_sequence(completion),
        )
        self._prepared = interaction, answer
        return self._prepared

    def cancel(self) -> None:
        """Record that nobody waits any more; what was sampled is kept. Does nothing once ended."""
        if not self.is_ended:
            self.is_ended = True
            self._tree.cancel(self.interaction, self._sampled().completion if self._chunks else None)

    def fail(self, reason: str) -> None:
        """Record why no answer came; what was sampled is kept. Does nothing once ended."""
        if not self.is_ended:
            self.is_ended = True
            self._tree.fail(self.interaction, reason, self._sampled().completion if self._chunks else None)

    def _message(self, completion: Completion) -> ChatMessage:
        """The message, with the ids of tool calls that were streamed already."""
        streamed = iter(self._streamed_ids)
        request = self._plan.request
        message = self._renderer.parse(
            completion.token_ids,
            tools=_callable_tools(request),
            stop=request.sampling.stop,
            template_kwargs=request.template_kwargs,
            call_ids=lambda: next(streamed, None) or self._call_ids(),
            is_plain=request.is_raw,
        )
        return message if request.parallel_tool_calls else evolve(message, tool_calls=message.tool_calls[:1])

    def _stop_sequence(self, completion: Completion) -> str | None:
        """The stop string that ended the text; without a stream, the text is read again to find it."""
        if not self._plan.request.sampling.stop:
            return None
        parser = self._parser
        if parser is None:
            parser = self._open_parser(self._call_ids)
            parser.feed(completion.token_ids)
            parser.finish()
        return parser.stop_sequence

    def _sampled(self) -> _Sampled:
        chunks = self._chunks
        versions = np.array([chunk.version for chunk in chunks], dtype=np.int32)
        completion = Completion(
            token_ids=_join([chunk.token_ids for chunk in chunks]),
            logprobs=_join([chunk.logprobs for chunk in chunks]),
            raw_logprobs=_join([chunk.raw_logprobs for chunk in chunks]),
            versions=versions.repeat([len(chunk.token_ids) for chunk in chunks]),
            finish=chunks[-1].finish or FinishReason.ABORT,
            top_logprobs=tuple(top for chunk in chunks for top in chunk.top_logprobs),
        )
        return _Sampled(completion=completion, num_cached_tokens=chunks[0].num_cached_tokens)


def _join(parts: Sequence[npt.NDArray[ScalarT]]) -> npt.NDArray[ScalarT]:
    """The parts one after another; a single one as it is, because the tree copies what it keeps."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _callable_tools(request: CompletionRequest) -> tuple[Tool, ...]:
    """The tools whose calls are looked for. The prompt shows all of them, so that the turn extends the last one."""
    return () if request.tool_choice is ToolChoice.NONE else request.tools


def _is_of_further_call(delta: Delta) -> bool:
    return isinstance(delta, ToolCallStarted | ToolArgumentsDelta) and delta.index > 0
