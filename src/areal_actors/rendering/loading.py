"""Creation of a renderer from a model's tokenizer files: settings, template, special tokens.

Which features a chat template lacks is found out once, by rendering synthetic conversations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen
from tokenizers import Tokenizer

from areal_actors.domain import ChatMessage, Tool, ToolCall
from areal_actors.errors import ModelError, RenderError
from areal_actors.lib.telemetry import get_logger
from areal_actors.rendering.extension import SuffixRenderer, find_end_of_turn
from areal_actors.rendering.formats.base import ToolFormat
from areal_actors.rendering.parsers import REASONING_FORMATS, TOOL_FORMATS, choose_format
from areal_actors.rendering.renderer import Renderer
from areal_actors.rendering.template import (
    Adaptation,
    ChatTemplate,
    PromptFormatter,
    Spelling,
    to_plain_message,
    to_plain_tool,
)
from areal_actors.rendering.tokens import Vocabulary

_log = get_logger(__name__)

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast


@frozen(kw_only=True)
class RendererConfig:
    """Settings of the conversion between messages and tokens.

    ``tool_format`` and ``reasoning_format`` are names of formats, ``auto`` (recognised by the chat template) or
    ``none``. ``chat_template`` is Jinja text that replaces the model's own.
    """

    tool_format: str = "auto"
    reasoning_format: str = "auto"
    chat_template: str | None = None


def load_renderer(model_path: Path | str, *, config: RendererConfig | None = None) -> Renderer:
    """Create a renderer for the model in the directory ``model_path``.

    Reads the tokenizer files, and further end tokens from ``generation_config.json`` if it exists.

    Raises:
        ModelError: there is no fast tokenizer or no usable chat template.
        ConfigError: the configuration names an unknown format.
    """
    tokenizer: PlainTokenizer | PreTrainedTokenizerFast | None = _read_plain_tokenizer(Path(model_path))
    if tokenizer is None:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        try:
            chosen = AutoTokenizer.from_pretrained(str(model_path))
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ModelError(f"No tokenizer can be loaded from {model_path}: {error}") from error
        if not isinstance(chosen, PreTrainedTokenizerFast):
            raise ModelError(f"{model_path} has no fast tokenizer; save the model with its tokenizer.json.")
        tokenizer = chosen
    path, more_stops = Path(model_path) / "generation_config.json", []
    if path.is_file():
        try:
            more_stops = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
    # One id, several, or none.
    ids = more_stops if isinstance(more_stops, list) else [more_stops]
    stop_token_ids = [token_id for token_id in ids if isinstance(token_id, int)]
    return create_renderer(tokenizer, config=config, stop_token_ids=stop_token_ids)


@frozen
class PlainTokenizer:
    """A tokenizer as its files have it, with the attributes of a ``PreTrainedTokenizerFast`` that renderers need."""

    backend_tokenizer: Tokenizer
    chat_template: str
    special_tokens_map: Mapping[str, str]

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """Return the tokens that were added to the vocabulary, by their ids."""
        found: Mapping[int, AddedToken] = self.backend_tokenizer.get_added_tokens_decoder()
        return found

    @property
    def eos_token_id(self) -> int | None:
        """Return the id of the token that ends a text."""
        name = self.special_tokens_map.get("eos_token")
        found: int | None = None if name is None else self.backend_tokenizer.token_to_id(name)
        return found


def _read_plain_tokenizer(directory: Path) -> PlainTokenizer | None:
    """Return a tokenizer that transformers would load from ``directory`` without changing it; ``None`` for all others.

    Those of the built-in models are such. transformers takes 0.5 s of CPU time to import, and 2 s with torch, which a
    proxy or a worker without a model does not need.
    """
    try:
        model = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        settings = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = (directory / "chat_template.jinja").read_text(encoding="utf-8")
        # For some other types of models transformers replaces the class that the tokenizer was saved with.
        if (model["model_type"], settings["tokenizer_class"]) != ("llama", "TokenizersBackend"):
            return None
        named = {name: settings[name] for name in _NAMED_TOKENS if name in settings}
        tokenizer = PlainTokenizer(Tokenizer.from_file(str(directory / "tokenizer.json")), template, named)
    except Exception:  # noqa: BLE001 - tokenizers raises nothing more exact; transformers explains what is wrong
        return None
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    # Other settings change the tokenizer, and so does a special token that it does not have yet.
    is_plain = settings.keys() <= _NAMED_TOKENS | _HARMLESS_SETTINGS and special.issuperset(named.values())
    return tokenizer if is_plain else None


_NAMED_TOKENS = frozenset({"bos_token", "eos_token", "pad_token", "unk_token"})
_HARMLESS_SETTINGS = frozenset({"backend", "is_local", "local_files_only", "model_max_length", "tokenizer_class"})


def create_renderer(
    tokenizer: PreTrainedTokenizerFast | PlainTokenizer,
    *,
    config: RendererConfig | None = None,
    stop_token_ids: Sequence[int] = (),
    now: Callable[[], datetime] = datetime.now,
) -> Renderer:
    """Create a renderer for ``tokenizer``, whose backend is modified: truncation and padding are switched off.

    ``stop_token_ids`` are end tokens that neither the tokenizer nor the template defines. ``now`` is the clock for
    templates that print the date. Raises the errors of ``load_renderer``.
    """
    config = config or RendererConfig()
    special = {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    vocabulary = Vocabulary.create(tokenizer.backend_tokenizer, special=special)
    source = config.chat_template or tokenizer.chat_template
    if not source:
        raise ModelError(
            "The model has no chat template; give one as chat_template, or use an instruction-tuned model."
        )
    variables = {key: text for key, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    template = ChatTemplate.create(source, variables=variables, now=now)
    tool_format = choose_format(config.tool_format, TOOL_FORMATS, template=template.source, path="tool_format")
    stand_in = tool_format or next(iter(TOOL_FORMATS.values()))
    adaptation = probe_adaptation(template, stand_in)
    # With ``auto``, an unrecognised template that does not support tools gets the first known format.
    if config.tool_format == "auto" and not adaptation.has_tools:
        tool_format = stand_in
    elif config.tool_format == "auto" and tool_format is None:
        _log.warning("tool_format_unknown", hint="Calls of this model stay text; name a format as tool_format.")
    formatter = PromptFormatter(template=template, adaptation=adaptation, vocabulary=vocabulary)
    known_ends = {each for each in (tokenizer.eos_token_id, *stop_token_ids) if isinstance(each, int)}
    end_of_turn = find_end_of_turn(formatter, vocabulary, ends=known_ends)
    reasoning_format = choose_format(
        config.reasoning_format, REASONING_FORMATS, template=template.source, path="reasoning_format"
    )
    # Some families end an answer with tokens that the template does not show, for example after a call.
    texts = reasoning_format.stops if reasoning_format else ()
    more_ends = [token_id for token_id, text in vocabulary.special.items() if text in texts]
    # The end of turn comes first, as ``Renderer.stop_token_ids`` promises. Each of the first two may be ``None``.
    ends = (end_of_turn, tokenizer.eos_token_id, *more_ends, *stop_token_ids)
    stops = tuple(dict.fromkeys(token_id for token_id in ends if isinstance(token_id, int)))
    return Renderer(
        vocabulary=vocabulary,
        formatter=formatter,
        stop_token_ids=stops,
        tool_format=tool_format,
        reasoning_format=reasoning_format,
        suffixes=SuffixRenderer(
            formatter=formatter, vocabulary=vocabulary, stop_token_ids=stops, end_of_turn=end_of_turn
        ),
    )


_ARGUMENT = "probe argument"
# Nine letters and digits, because Mistral's templates refuse other ids.
_CALL = ToolCall(id="probe0000", name="probe_name", arguments=json.dumps({"probe": _ARGUMENT}))
_PYTHON_OBJECT = "{'probe'"
"""The beginning of an object that a template printed as text, in Python syntax."""
_TOOL = Tool(name="probe_tool", description="A probe.", parameters={"type": "object", "properties": {}})
_USER = ChatMessage(role="user", content="probe question")
_ANSWER = ChatMessage(role="assistant", content="probe answer")
_SYSTEM_TEXT = "probe system"
_MORE_TEXT = "probe more of it"
_SYSTEM = ChatMessage(role="system", content=_SYSTEM_TEXT)
_RESULT_TEXT = "probe result"


def probe_adaptation(template: ChatTemplate, form: ToolFormat) -> Adaptation:
    """Return the adaptation for ``template``, with ``form`` as the substitute for features that it lacks."""
    # Templates of one family read ``thinking``; all others ``reasoning_content``, or no reasoning.
    is_common = "reasoning_content" in template.source or "thinking" not in template.source
    keys = ("reasoning_content",) if is_common else ("reasoning_content", "thinking")
    probe = _Probe(template=template, spelling=Spelling(thought_keys=keys))
    has_tools, spelling = probe.has_tools(), probe.find_spelling()
    probe = evolve(probe, spelling=spelling or probe.spelling)
    default_system = probe.find_default_system()
    adaptation = Adaptation(
        format=None if has_tools and spelling else form,
        has_tools=has_tools,
        has_calls=spelling is not None,
        has_tool_role=spelling is not None or probe.shows_result(),
        has_system_role=default_system is not None,
        has_developer_role=probe.has_developer_role(),
        has_long_ids=spelling is None or probe.has_long_ids(),
        default_system=default_system or "",
        spelling=probe.spelling,
    )
    for ability, talks in _ABILITIES.items():
        num_shown = probe.count_shown(talks, adaptation)
        if num_shown < len(talks):
            lacking: dict[str, Any] = {ability: False}
            with_substitute = evolve(adaptation, **lacking)
            # Some templates cannot be helped, and then refuse what they would refuse anyway.
            if probe.count_shown(talks, with_substitute) > num_shown:
                adaptation = with_substitute
    return adaptation


_ABILITIES: Mapping[str, Sequence[str]] = {
    "has_system_role": ("su", "sucr", "suau"),
    "has_system_runs": ("ssu",),
    "has_free_order": ("uu", "uaau", "suau"),
    "has_late_system": ("us", "usau", "uasu", "sus", "suasau"),
    "has_lone_system": ("s", "ss"),
    "has_leading_answer": ("au", "cru", "sau"),
    "has_malformed_arguments": ("umr", "umrau"),
    "has_parallel_calls": ("udrr", "udrrau"),
    "has_text_with_calls": ("utr", "utrutr"),
    "has_text_with_answered_calls": ("utrau", "utraua"),
    "has_text_with_reasoned_calls": ("uhr",),
    "has_orphaned_results": ("ur", "uar", "rau", "uarau"),
}
"""Conversations that a template with an ability renders with all of their text.

They are spelled as in ``create_talk``. An ability is judged with the substitutes for those before it.
"""


def create_talk(letters: str) -> list[ChatMessage]:
    """Return a conversation with an own text in each message, of which none begins as another one.

    A letter is a message: ``s`` of the system, ``u`` of the user, ``a`` an answer, ``r`` a result; and answers with a
    call: ``c`` alone, ``m`` with malformed arguments, ``d`` with another call, ``t`` with text, ``h`` with text and
    thoughts.
    """
    messages: list[ChatMessage] = []
    open_ids: list[str] = []
    for number, letter in enumerate(letters):
        text = f"probe {number:02}"
        if letter in _ROLE_OF:
            messages.append(ChatMessage(role=_ROLE_OF[letter], content=text))
        elif letter == "r":
            call_id = open_ids.pop(0) if open_ids else _CALL.id
            messages.append(ChatMessage(role="tool", content=text, tool_call_id=call_id, name=_CALL.name))
        else:
            open_ids = [f"probe{number:03}{n}" for n in range(1 + (letter == "d"))]
            written = (f"{text} call {n}" for n in range(len(open_ids)))
            arguments = [text if letter == "m" else json.dumps({"probe": text}) for text in written]
            messages.append(
                ChatMessage(
                    role="assistant",
                    content=f"{text} text" if letter in "th" else None,
                    reasoning="thought" if letter == "h" else None,
                    tool_calls=tuple(map(_create_call, open_ids, arguments)),
                )
            )
    return messages


_ROLE_OF = {"s": "system", "u": "user", "a": "assistant"}


def _argument_of(call: ToolCall) -> str:
    return call.arguments.removeprefix('{"probe": "').removesuffix('"}')


def _create_call(call_id: str, arguments: str) -> ToolCall:
    return ToolCall(id=call_id, name=_CALL.name, arguments=arguments)


@frozen(kw_only=True)
class _Probe:
    template: ChatTemplate
    spelling: Spelling

    def render(self, *messages: ChatMessage, tools: Sequence[Tool] = ()) -> str:
        """Return the rendered probe; empty if the template refuses it."""
        plain = [to_plain_message(message, guard=str, spelling=self.spelling) for message in messages]
        try:
            return self.template.render(plain, tools=[to_plain_tool(tool, guard=str) for tool in tools], options={})
        except RenderError:
            return ""

    def shows(self, messages: Sequence[ChatMessage], adaptation: Adaptation) -> bool:
        """Return whether all arguments are rendered, and all contents in their order, with tools and without."""
        contents = [message.content for message in messages if message.content]
        arguments = [_argument_of(call) for message in messages for call in message.tool_calls]
        for tools in ((), (_TOOL,)):
            rendered = self.render(*adaptation.adapt(messages, tools), tools=tools if adaptation.has_tools else ())
            places = [rendered.find(text) for text in contents]
            if -1 in places or places != sorted(places) or not all(text in rendered for text in arguments):
                return False
        return True

    def count_shown(self, talks: Sequence[str], adaptation: Adaptation) -> int:
        """Return how many conversations are rendered with all of their texts; see ``create_talk``."""
        return sum(self.shows(create_talk(talk), adaptation) for talk in talks)

    def has_tools(self) -> bool:
        return any(_TOOL.name in self.render(*messages, tools=[_TOOL]) for messages in ((_USER,), (_SYSTEM, _USER)))

    def find_spelling(self) -> Spelling | None:
        """Return the first variant in which calls are rendered, preferably as JSON; ``None`` if they never are."""
        shown = []
        for has_text_arguments, empty_content in product((False, True), ("", None)):
            spelling = evolve(self.spelling, empty_content=empty_content, has_text_arguments=has_text_arguments)
            text = evolve(self, spelling=spelling).render_call()
            if _ARGUMENT in text:
                shown.append((_PYTHON_OBJECT in text, spelling))
        # ``min`` is stable: the first variant that is rendered as JSON, otherwise the first one.
        return min(shown, key=lambda pair: pair[0])[1] if shown else None

    def render_call(self, call: ToolCall = _CALL, content: str | None = None, reasoning: str | None = None) -> str:
        """Render a call, alone and then with its result, because some templates require one and some the other."""
        answer = ChatMessage(role="assistant", content=content, reasoning=reasoning, tool_calls=(call,))
        result = ChatMessage(role="tool", content=_RESULT_TEXT, tool_call_id=call.id, name=call.name)
        texts = (self.render(_USER, answer), self.render(_USER, answer, result))
        return next((text for text in texts if _ARGUMENT in text), "")

    def has_long_ids(self) -> bool:
        return (
            self.render_call(ToolCall(id="call_0f1e2d3c4b5a69788796a5b4", name=_CALL.name, arguments=_CALL.arguments))
            != ""
        )

    def shows_result(self) -> bool:
        return _RESULT_TEXT in self.render(_USER, _ANSWER, ChatMessage(role="tool", content=_RESULT_TEXT))

    def has_developer_role(self) -> bool:
        """Return whether the template knows the role.

        A template that prints any role must also mention it in its source.
        """
        developer = ChatMessage(role="developer", content=_SYSTEM_TEXT)
        return "developer" in self.template.source and _SYSTEM_TEXT in self.render(developer, _USER)

    def find_default_system(self) -> str | None:
        """Return the system prompt that the template adds if there is none; ``None`` if it has no system role."""
        given = self.render(_SYSTEM, _USER)
        before, found, after = given.partition(_SYSTEM_TEXT)
        if not found:
            return None
        absent = self.render(_USER)
        # The default prompt is the difference between both renderings, provided that they agree around it.
        is_added = absent.startswith(before) and absent.endswith(after) and len(absent) >= len(before) + len(after)
        return absent[len(before) : len(absent) - len(after)] if is_added else ""
