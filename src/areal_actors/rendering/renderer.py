"""``Renderer`` converts messages to token ids and back, for any Hugging Face chat template.

Its parts are ``template`` (messages to text), ``tokens`` (text to ids and back), ``extension`` (the next messages
alone) and ``parsers`` (answers). ``loading`` assembles them. ``cache`` decides which turn extends which, and ``proxy``
formats responses for clients.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from attrs import field, frozen
from tokenizers import Tokenizer

from areal_actors.domain import ChatMessage, ForkReason, Grammar, InOrder, Ints, OneOf, Tool, ToolChoice, as_ints
from areal_actors.errors import RenderError, UnsupportedParameter
from areal_actors.rendering.extension import (
    Shape,
    SuffixRenderer,
    Verdict,
    canonical_json,
    find_left_out,
    find_thought,
    shape_of,
)
from areal_actors.rendering.formats.base import AnswerParser, ReasoningFormat, ToolFormat
from areal_actors.rendering.formats.reading import CallParser
from areal_actors.rendering.parsers import (
    AnswerStream,
    PlainText,
    join_deltas,
)
from areal_actors.rendering.template import Options, PromptFormatter
from areal_actors.rendering.tokens import Vocabulary

_NO_OPTIONS: Options = {}
_MAX_KEPT = 4096
"""Number of cached verdicts, bounded because a client may send any number of shapes."""
_MIN_TELLING = 16
_MAX_SHOWN = 40
"""Number of characters of a rendering that an error repeats."""
_MARK = "end 5b1f8d03"
_QUESTION = ChatMessage(role="user", content="question")


@frozen(kw_only=True, eq=False)
class Renderer:
    """Conversion of messages to ids and back, for one model. Made by ``load_renderer`` or ``create_renderer``.

    Independent of any conversation, and fast enough to call in an event loop.

    ``stop_token_ids`` end an answer: the template's end of turn first, then the model's other end tokens.
    """

    vocabulary: Vocabulary
    formatter: PromptFormatter
    stop_token_ids: tuple[int, ...]
    tool_format: ToolFormat | None
    reasoning_format: ReasoningFormat | None
    suffixes: SuffixRenderer
    _verdicts: dict[Shape, Verdict] = field(factory=dict, init=False)
    _openings: dict[str, bool] = field(factory=dict, init=False)
    _hidden: AbstractSet[int] = field(init=False)
    _hidden_with_tools: AbstractSet[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Find the ids that clients do not see: end tokens, and special tokens that no parser needs."""
        reasoning = self.reasoning_format.markers if self.reasoning_format else ()
        tools = self.tool_format.markers if self.tool_format else ()
        # The class is frozen, so computed fields are set this way.
        object.__setattr__(self, "_hidden", self._without(reasoning))
        object.__setattr__(self, "_hidden_with_tools", self._without((*reasoning, *tools)))

    def _without(self, markers: Sequence[str]) -> AbstractSet[int]:
        special = {token_id for token_id, text in self.vocabulary.special.items() if text not in markers}
        return frozenset(special | {*self.stop_token_ids})

    @property
    def vocab_size(self) -> int:
        """The largest id of the tokenizer plus one."""
        return self.vocabulary.size

    @property
    def has_reasoning(self) -> bool:
        """Whether answers may contain thinking, in which stop strings do not count."""
        return self.reasoning_format is not None

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Tool] = (),
        template_kwargs: Options | None = None,
    ) -> Ints:
        """Return the ids of the whole conversation and of the header that asks for an answer, int32 [T].

        Raises:
            RenderError: the template refuses the conversation, or leaves a message out.
        """
        options = template_kwargs or _NO_OPTIONS
        text = self.formatter.format(messages, tools=tools, options=options)
        self._check_shown(text, messages, has_tools=bool(tools), options=options)
        return as_ints(self.vocabulary.encode(text))

    def _check_shown(self, text: str, messages: Sequence[ChatMessage], *, has_tools: bool, options: Options) -> None:
        """Raise ``RenderError`` if the template has left a message out of ``text``."""
        contents = [(message.content or "").strip() for message in messages]
        # Short texts may occur in the prompt by chance.
        if all(len(content) >= _MIN_TELLING and content in text for content in contents):
            return
        index = find_left_out(self.formatter, messages, has_tools=has_tools, options=options)
        if index is not None:
            raise RenderError(
                f"The model's chat template leaves out message {index} (of role {messages[index].role}) of "
                f"{len(messages)}. Send it in another place, or as the user's."
            )

    def render_answer(
        self,
        messages: Sequence[ChatMessage],
        answer: ChatMessage,
        *,
        tools: Sequence[Tool] = (),
        template_kwargs: Options | None = None,
    ) -> Ints:
        """Return the ids that a model would sample to give ``answer`` after the prompt of ``messages``, int32 [n].

        They end with the end of the turn. The answer is tokenised apart from its prompt, as sampling separates them.

        Raises:
            RenderError: the template refuses the conversation, does not write the answer after its own prompt, or
                writes it as several turns.
        """
        options = template_kwargs or _NO_OPTIONS
        prompt = self.formatter.format(messages, tools=tools, options=options)
        whole = self.formatter.format([*messages, answer], tools=tools, options=options, has_generation_prompt=False)
        text = self._find_answer(prompt, whole, answer)
        ids = self._until_end(text)
        rest = self.vocabulary.encode(text)[len(ids) :] if ids is not None else []
        if self.vocabulary.decode([each for each in rest if each not in self.vocabulary.special]).strip():
            raise RenderError(
                "The chat template writes this answer as several turns; leave out its text, or all calls but one."
            )
        if ids is None:
            # Some families end a turn with the role of the next one, which only another message shows.
            calls = answer.tool_calls
            replies = [ChatMessage(role="tool", content="", tool_call_id=call.id) for call in calls] or [_QUESTION]
            followed = self.formatter.format([*messages, answer, *replies], tools=tools, options=options)
            ids = self._until_end(followed[len(prompt) :]) if followed.startswith(whole) else None
        # A template without an end of turn leaves it to the model's end token.
        return as_ints(ids or [*self.vocabulary.encode(text), *self.stop_token_ids[:1]])

    def begin_answer(
        self,
        messages: Sequence[ChatMessage],
        begun: ChatMessage,
        *,
        tools: Sequence[Tool] = (),
        template_kwargs: Options | None = None,
    ) -> Ints:
        """Return the ids of the beginning of an answer, which the model continues, after the prompt of ``messages``.

        Only requests whose client begins the answer need it.

        Returns:
            int32 [n], up to the end of the text of ``begun``.

        Raises:
            RenderError: the template does not write the text of ``begun``, unchanged, after its own prompt.
        """
        options = template_kwargs or _NO_OPTIONS
        prompt = self.formatter.format(messages, tools=tools, options=options)
        form, thought = self.reasoning_format, begun.reasoning
        if thought is None and form is not None and form.is_opened_by(prompt):
            thought = ""  # it is over where the text begins
        content = begun.content or ""
        # The mark keeps white space that a template would strip at the end.
        answer = ChatMessage(role="assistant", content=content + _MARK, reasoning=thought)
        whole = self.formatter.format([*messages, answer], tools=tools, options=options, has_generation_prompt=False)
        try:
            text, found, _ = self._find_answer(prompt, whole, answer).partition(_MARK)
        except RenderError as error:
            # Such as one that joins the answer with the one before it, or that shows it in another turn.
            raise RenderError(
                f"The chat template does not let an answer begin after the {messages[-1].role} message before it; "
                "leave the begun answer out."
            ) from error
        if not found or not text.endswith(self.vocabulary.guard(content)):
            raise RenderError(
                "The chat template changes the text of a begun answer; send it without white space around."
            )
        return as_ints(self.vocabulary.encode(text))

    def _find_answer(self, prompt: str, whole: str, answer: ChatMessage) -> str:
        """Return the part of ``whole`` after ``prompt``. Raises ``RenderError`` if it does not begin with that."""
        if whole.startswith(prompt):
            return whole[len(prompt) :]
        form = self.reasoning_format
        if form is not None and answer.reasoning is not None and form.is_opened_by(prompt):
            # Some templates open the reasoning in the prompt, and drop it from every answer that they write.
            opened, closed, *_ = form.markers
            before = prompt[: prompt.rindex(opened)]
            if whole.startswith(before):
                thought = self.vocabulary.guard(answer.reasoning)
                return f"{thought}\n{closed}\n\n{whole[len(before) :]}"
        num_equal = next(n for n, (a, b) in enumerate(zip(whole + "\0", prompt + "\1", strict=False)) if a != b)
        raise RenderError(
            f"The chat template ends a prompt with {prompt[num_equal:][-_MAX_SHOWN:]!r}, and writes this answer as "
            f"{whole[num_equal:][:_MAX_SHOWN]!r}; where a prompt opens the reasoning, answers need reasoning_content."
        )

    def _until_end(self, text: str) -> list[int] | None:
        """Return the ids of ``text`` up to the first one that ends a turn; ``None`` if none does."""
        ids = self.vocabulary.encode(text)
        end = next((index + 1 for index, token_id in enumerate(ids) if token_id in self.stop_token_ids), None)
        return None if end is None else ids[:end]

    def extend(
        self,
        *,
        history: Sequence[ChatMessage],
        new: Sequence[ChatMessage],
        end: int | None,
        tools: Sequence[Tool] = (),
        template_kwargs: Options | None = None,
    ) -> Ints | ForkReason:
        """Return the ids that follow the parent's exact ids (prompt and sampled answer) to ask for an answer.

        Only ``new`` is rendered and tokenised. If the result would differ from the template's rendering of the whole
        conversation, a ``ForkReason`` is returned instead: call ``render`` then (which also shows why, if the template
        refuses the conversation).

        Args:
            history: the parent's messages, followed by its answer.
            new: the messages after the answer.
            end: the last sampled id if it is one of ``stop_token_ids``; ``None`` after an answer that was cut, whose
                turn the returned ids close.
            tools: the tools that are offered.
            template_kwargs: further variables of the template.

        Raises:
            ValueError: ``history`` does not end with an answer of the assistant.
        """
        if not history or history[-1].role != "assistant":
            raise ValueError("history must end with the assistant's answer that the new messages follow")
        options = template_kwargs or _NO_OPTIONS
        shape = shape_of(history, new, tools=tools, options=options)
        verdict = self._verdicts.get(shape)
        if verdict is None:
            # A verdict costs only milliseconds, so the whole cache is cleared.
            if len(self._verdicts) >= _MAX_KEPT:
                self._verdicts.clear()
            verdict = self._verdicts[shape] = self.suffixes.judge(shape, options)
        if not verdict.faithful or (verdict.depends_on_history and find_thought(history) not in verdict.faithful):
            return ForkReason.TEMPLATE_REWROTE_HISTORY
        if self.formatter.adaptation.has_inserted_question(history, new):
            return ForkReason.TEMPLATE_REWROTE_HISTORY
        try:
            needed = tools if verdict.needs_tools else ()
            tail = self.suffixes.render(history[-1], new, tools=needed, options=options)
        except RenderError:
            return ForkReason.TEMPLATE_REWROTE_HISTORY
        closing, *ids = self.vocabulary.encode(tail)
        if end is None:
            return as_ints([closing, *ids])
        # An end of turn may be sampled in another spelling (<|eom_id|> for <|eot_id|>). A token that opens the next
        # turn may not: <|user|> announces a question, <|observation|> a tool's result.
        if closing not in {end, self.suffixes.end_of_turn}:
            return ForkReason.TEMPLATE_REWROTE_HISTORY
        return as_ints(ids)

    def parse(
        self,
        token_ids: Ints | Sequence[int],
        *,
        tools: Sequence[Tool] = (),
        stop: Sequence[str] = (),
        template_kwargs: Options | None = None,
        call_ids: Callable[[], str] | None = None,
        is_plain: bool = False,
    ) -> ChatMessage:
        """Return the assistant's message that these sampled ids represent. Never raises: malformed text stays content.

        Args:
            token_ids: the sampled ids.
            tools: the tools that were offered; without any, the answer is not searched for tool calls.
            stop: stop strings; the text ends before the first of them that is outside of the thinking.
            template_kwargs: those of the prompt.
            call_ids: creates the ids of tool calls; random ones by default.
            is_plain: everything is content, including reasoning and calls, as after a raw prompt.
        """
        stream = self.open_stream(
            tools=tools, stop=stop, template_kwargs=template_kwargs, call_ids=call_ids, is_plain=is_plain
        )
        return join_deltas((*stream.feed(token_ids), *stream.finish()))

    def open_stream(
        self,
        *,
        tools: Sequence[Tool] = (),
        stop: Sequence[str] = (),
        template_kwargs: Options | None = None,
        call_ids: Callable[[], str] | None = None,
        is_plain: bool = False,
        is_eager: bool = False,
    ) -> AnswerStream:
        """Return a parser for one answer as it arrives; its deltas join to the message that ``parse`` returns.

        With ``is_eager``, calls are emitted while they are read. A call that turns out to be malformed after its
        arguments have begun is then a call with incomplete arguments, where ``parse`` returns its text as content.
        """
        call_ids = call_ids or (lambda: f"call_{secrets.token_hex(12)}")
        tool_format = self.tool_format if tools and not is_plain else None
        reasoning: AnswerParser = PlainText()
        if self.reasoning_format is not None and not is_plain:
            is_open = self._is_open(self.reasoning_format, template_kwargs or _NO_OPTIONS)
            reasoning = self.reasoning_format.open_parser(is_open=is_open)
        parser: AnswerParser = tool_format.open_parser(call_ids, tools) if tool_format else PlainText()
        if isinstance(parser, CallParser):
            parser.is_eager = is_eager
        return AnswerStream(
            detokenizer=self.vocabulary.open_detokenizer(),
            # A plain answer shows the special tokens of calls, because its text is not searched for calls.
            hidden=self._hidden_with_tools if tool_format or is_plain else self._hidden,
            stop=stop,
            reasoning=reasoning,
            tools=parser,
        )

    def constrain(
        self,
        *,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice | str = ToolChoice.AUTO,
        parallel_tool_calls: bool = True,
        response_format: Grammar | None = None,
        template_kwargs: Options | None = None,
    ) -> Grammar | None:
        """Return the grammar that an answer must match, including its reasoning.

        It enforces calls as ``tool_choice`` demands, or ``response_format``. With a ``response_format`` and ``tools``
        that may be called, the answer is either. Returns ``None`` if nothing is required.

        Raises:
            UnsupportedParameter: the model's tool format has no grammar.
        """
        has_calls = tool_choice not in (ToolChoice.AUTO, ToolChoice.NONE)
        # A response format alone would forbid the calls that ``auto`` permits.
        may_call = tool_choice == ToolChoice.AUTO and bool(tools) and response_format is not None
        forms: list[Grammar] = []
        if has_calls or may_call:
            wanted = ToolChoice.REQUIRED if may_call else tool_choice
            called = tools if wanted == ToolChoice.REQUIRED else [tool for tool in tools if tool.name == wanted]
            form = self.tool_format if called else None
            calls = form.constrain(called, is_parallel=parallel_tool_calls) if form else None
            if calls is None:
                raise UnsupportedParameter(
                    "Calls cannot be enforced: the way in which this model writes them has no grammar. "
                    "Use tool_choice auto, without response_format.",
                    param="tool_choice",
                )
            forms.append(self._behind_thinking(calls, template_kwargs, has_calls=True))
        if response_format is not None and not has_calls:
            forms.append(self._behind_thinking(response_format, template_kwargs, has_calls=False))
        return OneOf(parts=tuple(forms)) if len(forms) > 1 else next(iter(forms), None)

    def _behind_thinking(self, answer: Grammar, template_kwargs: Options | None, *, has_calls: bool) -> Grammar:
        if self.reasoning_format is None:
            return answer
        is_open = self._is_open(self.reasoning_format, template_kwargs or _NO_OPTIONS)
        return InOrder(parts=(self.reasoning_format.constrain(is_open=is_open, has_calls=has_calls), answer))

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that defines the ids."""
        return self.vocabulary.backend

    def encode(self, text: str, *, is_start: bool) -> Ints:
        """Return the ids of a raw text, int32 [T]; special tokens that it spells out are recognised.

        With ``is_start``, the tokens that the tokenizer puts at the beginning of every text come first, once.
        """
        return as_ints(self.vocabulary.encode_raw(text, is_start=is_start))

    def decode(self, token_ids: Ints | Sequence[int]) -> str:
        """Return the plain text of ids, special tokens included.

        Never raises; ids outside the vocabulary are skipped.
        """
        return self.vocabulary.decode(token_ids)

    def token_bytes(self, token_ids: Ints | Sequence[int], *, is_start: bool = True) -> list[bytes]:
        """Return the bytes that each of these sampled tokens adds to the text of an answer.

        A token may begin or end within a character, and joined bytes are UTF-8. Special tokens are spelled out; ids
        outside the vocabulary have no bytes. With ``is_start``, the first token begins the answer, which matters to
        tokenizers that drop the white space there.
        """
        return self.vocabulary.token_bytes(token_ids, is_start=is_start)

    def _is_open(self, form: ReasoningFormat, options: Options) -> bool:
        """Return whether prompts with these options end inside the reasoning; cached."""
        key = canonical_json(options)
        if key not in self._openings:
            if len(self._openings) >= _MAX_KEPT:
                self._openings.clear()
            try:
                self._openings[key] = form.is_opened_by(self.formatter.format([_QUESTION], options=options))
            except RenderError:
                self._openings[key] = False
        return self._openings[key]
