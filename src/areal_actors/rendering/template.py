"""Conversations as text: a Hugging Face chat template, and substitutes for the features that it lacks.

``PromptFormatter`` adapts the messages, converts them to the plain data that templates read, and runs the template.

*Adaptation.* If a template ignores ``tools``, the block of the model family goes into the system message (after the
default prompt that the template would have added). Calls that it drops are written in the content of their message.
Results use the role ``tool`` if the template knows that role, otherwise the role ``user``. A developer message becomes
a system message if the template does not know the role ``developer``, and without a system role the system prompt is
put before the first question. Everything that the template can do itself is left to it. ``loading`` finds out what a
template lacks.

*Templates* are Jinja programs that come with a model. They are compiled once and run in Jinja's sandbox, with the extra
tags, filters and functions that such templates expect.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import takewhile
from typing import Any, NoReturn, TypeAlias

import jinja2
from attrs import evolve, field, frozen
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from areal_actors.domain import UNPARSED_ARGUMENTS, ChatMessage, Tool
from areal_actors.errors import ModelError, RenderError
from areal_actors.rendering.formats.base import ToolFormat
from areal_actors.rendering.tokens import Vocabulary

Options: TypeAlias = Mapping[str, object]
"""Further variables of a chat template."""


@frozen(kw_only=True)
class PromptFormatter:
    """Renders conversations to text with one template."""

    template: ChatTemplate
    adaptation: Adaptation
    vocabulary: Vocabulary

    def format(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Tool] = (),
        options: Options,
        has_generation_prompt: bool = True,
    ) -> str:
        """Return the text of the conversation, in which foreign special tokens are broken.

        Raises:
            RenderError: the template refuses the conversation, it is empty, or it is nested too deeply.
        """
        if not messages:
            raise RenderError("There are no messages to render; send at least one.")
        try:
            guard, spelling = self.vocabulary.guard, self.adaptation.spelling
            adapted = self.adaptation.adapt(messages, tools)
            plain_messages = [to_plain_message(message, guard=guard, spelling=spelling) for message in adapted]
            plain_tools = [to_plain_tool(tool, guard=guard) for tool in tools] if self.adaptation.has_tools else ()
            plain_options = guard_all(options, guard)
        except RecursionError as error:
            raise RenderError("Tools, arguments or template options are nested too deeply to be rendered.") from error
        return self.template.render(
            plain_messages,
            tools=plain_tools,
            options=plain_options,
            has_generation_prompt=has_generation_prompt,
        )


_COMMON_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
Guard: TypeAlias = Callable[[str], str]


@frozen(kw_only=True)
class Spelling:
    """The variant of message data that a template expects where conventions differ."""

    empty_content: str | None = ""
    """The content of a message that has only calls."""
    has_text_arguments: bool = False
    """Pass arguments as JSON text instead of as an object."""
    thought_keys: tuple[str, ...] = ("reasoning_content",)


def to_plain_message(message: ChatMessage, *, guard: Guard, spelling: Spelling) -> PlainMessage:
    """Return the data of a message for templates, with every string guarded.

    Raises:
        RenderError: the role is not a plain word. Many templates put the role in their own markup, so it must not
            contain markup.
    """
    if message.role not in _COMMON_ROLES and not message.role.replace("_", "").replace("-", "").isalnum():
        raise RenderError(
            f"A message has the role {message.role!r}, which is not a word; use system, user, assistant or tool."
        )
    content = spelling.empty_content if not message.content and message.tool_calls else message.content or ""
    plain: PlainMessage = {"role": message.role, "content": guard(content) if content is not None else None}
    if message.tool_calls:
        calls: list[dict[str, object]] = []
        for call in message.tool_calls:
            # An object, which most templates print as JSON, or text if the arguments are not an object.
            arguments: object = call.arguments
            if not spelling.has_text_arguments:
                parsed = _parse_object(call.arguments)
                arguments = call.arguments if parsed is None else parsed
            function = {"name": call.name, "arguments": arguments}
            calls.append({"id": guard(call.id), "type": "function", "function": guard_all(function, guard)})
        plain["tool_calls"] = calls
    # Templates differ in the name of this key, so all names that the template may read are set.
    if message.reasoning is not None:
        plain |= dict.fromkeys(spelling.thought_keys, guard(message.reasoning))
    if message.tool_call_id is not None:
        plain["tool_call_id"] = guard(message.tool_call_id)
    if message.name is not None:
        plain["name"] = guard(message.name)
    return plain


def _parse_object(text: str) -> dict[str, object] | None:
    """Return the object that a template can print, or ``None`` if the arguments of a call are none."""
    # A client can send JSON that is nested deeply enough to exceed the recursion limit.
    with suppress(ValueError, RecursionError):
        value = json.loads(text, parse_float=_parse_finite)
        return value if isinstance(value, dict) else None
    return None


def _parse_finite(literal: str) -> float:
    """Return a number that a template can print. ``1e400`` would become ``Infinity``."""
    number = float(literal)
    if math.isinf(number):
        raise ValueError(literal)
    return number


def to_plain_tool(tool: Tool, *, guard: Guard) -> dict[str, object]:
    """Return a tool in the structure of OpenAI's API, which templates expect, with every string guarded."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": guard_all(function, guard)}


def guard_all(value: Any, guard: Guard) -> Any:
    """Return JSON-like ``value`` with every string guarded, including keys; other objects are converted to text."""
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, Mapping):
        return {guard(str(key)): guard_all(item, guard) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [guard_all(item, guard) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else guard(str(value))


_SYSTEM_ROLES = ("system", "developer")
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
_ISSUED_ID = re.compile("(.+)__[0-9a-f]{8}", re.DOTALL)
"""An id that a model wrote again, made unique by ``ConversationTree.issue_call_id``; templates show what it wrote."""
_ALPHABET = string.digits + string.ascii_letters


@frozen(kw_only=True)
class Adaptation:
    """The features of a template, and the substitutes for those it lacks.

    The defaults suit a template that lacks nothing.
    """

    format: ToolFormat | None = None
    """The format of the model family; ``None`` if no substitute is needed."""
    has_tools: bool = True
    has_calls: bool = True
    has_tool_role: bool = True
    has_system_role: bool = True
    has_developer_role: bool = True
    has_system_runs: bool = True
    """True if several system messages may come first."""
    has_lone_system: bool = True
    """True if a conversation may consist of system messages."""
    has_late_system: bool = True
    """True if system messages after the first question are rendered in their place."""
    has_leading_answer: bool = True
    """True if an answer, or a call, may come before the first question."""
    has_free_order: bool = True
    """True if messages of one role may follow each other; otherwise those of the user and the assistant alternate."""
    has_orphaned_results: bool = True
    """True if a result needs no call before it."""
    has_parallel_calls: bool = True
    """True if a message may have several calls."""
    has_text_with_calls: bool = True
    """True if a message with calls may have content, too."""
    has_text_with_answered_calls: bool = True
    """The same for messages before the last answer."""
    has_text_with_reasoned_calls: bool = True
    """True if a message with calls may have both content and reasoning."""
    has_malformed_arguments: bool = True
    """True if arguments may be a text that is not a JSON object."""
    has_long_ids: bool = True
    """True if call ids may be any text; otherwise they must be nine letters and digits."""
    default_system: str = ""
    spelling: Spelling = field(factory=Spelling)

    def adapt(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> Sequence[ChatMessage]:
        """Return the conversation in a form that the template can render, with the text of every message.

        If the template does not support ``tools``, their block is added.
        """
        if not self.has_developer_role and any(message.role == "developer" for message in messages):
            messages = [evolve(m, role="system") if m.role == "developer" else m for m in messages]
        leading, others = _split_system(messages)
        if not self.has_lone_system and (not others or others[0].role == "assistant"):
            leading, others = leading[:0], [*(evolve(m, role="user") for m in leading), *others]
        if not self.has_late_system:
            others = [evolve(m, role="user") if m.role in _SYSTEM_ROLES else m for m in others]
        if not self.has_system_runs and len(leading) > 1:
            leading = [evolve(leading[0], content=_join_contents(leading))]
        if not self.has_leading_answer and others and others[0].role == "assistant":
            others = [_NO_QUESTION, *others]
        leading, others = self._add_tools(leading, tools), self._adapt_calls(others)
        if leading and not self.has_system_role:
            # Joined with the question instead of sent as a separate message, because such templates require alternating
            # roles.
            asked = others[:1] if others and others[0].role == "user" else ()
            first = evolve(asked[0] if asked else _NO_QUESTION, content=_join_contents([*leading, *asked]))
            leading, others = leading[:0], [first, *others[len(asked) :]]
        return [*leading, *(others if self.has_free_order else _alternate(others))]

    def has_inserted_question(self, history: Sequence[ChatMessage], new: Sequence[ChatMessage]) -> bool:
        """Return whether an empty question is put between two answers, to which a template may move its tools.

        The history is read only if roles have to alternate around calls.
        """
        if self.has_free_order or not self.has_calls:
            return False
        return any(message is _NO_QUESTION for message in self.adapt([*history, *new], ()))

    def _add_tools(self, leading: Sequence[ChatMessage], tools: Sequence[Tool]) -> Sequence[ChatMessage]:
        """Return the system messages with the block of the tools, if the template ignores these."""
        if not tools or self.has_tools or self.format is None:
            return leading
        block = self.format.format_tools(tools)
        if leading:
            first, *rest = leading
            return [evolve(first, content=f"{first.content}\n\n{block}" if first.content else block), *rest]
        # A system message replaces the template's default prompt, so that prompt is repeated in it.
        text = f"{self.default_system}\n\n{block}" if self.default_system else block
        return [ChatMessage(role="system", content=text)]

    def _adapt_calls(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        if not any(message.tool_calls or message.role == "tool" for message in messages):
            return messages
        messages = [self._adapt_call(message) for message in _sort_results(messages)]
        if self.format is not None and not self.has_calls:
            messages = [_spell_out(self.format, message) for message in messages]
        else:
            messages = self._separate(messages)
        if not self.has_orphaned_results:
            messages = list(_adopt_orphans(messages))
        if self.has_tool_role:
            return messages
        # Results become user messages, and adjacent ones are joined, as the results of one answer.
        joined: list[ChatMessage] = []
        is_open = False
        for message in messages:
            if message.role == "tool" and is_open:
                joined[-1] = evolve(joined[-1], content=f"{joined[-1].content}\n{message.content}")
            else:
                joined.append(ChatMessage(role="user", content=message.content) if message.role == "tool" else message)
            is_open = message.role == "tool"
        return joined

    def _adapt_call(self, message: ChatMessage) -> ChatMessage:
        """Return a message whose call ids and arguments have a form that the template accepts."""
        if message.role == "tool" and (message.tool_call_id is not None or not self.has_long_ids):
            message = evolve(message, tool_call_id=self._written_id(message.tool_call_id or ""))
        if not message.tool_calls:
            return message
        calls = [
            evolve(
                call,
                id=self._written_id(call.id),
                arguments=_adapt_arguments(call.arguments, takes_any=self.has_malformed_arguments),
            )
            for call in message.tool_calls
        ]
        return evolve(message, tool_calls=tuple(calls))

    def _written_id(self, call_id: str) -> str:
        issued = _ISSUED_ID.fullmatch(call_id)
        written = issued[1] if issued else call_id
        return written if self.has_long_ids else _shorten_id(written)

    def _separate(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return the messages, with those of their parts that the template does not show together as own messages."""
        separate: list[ChatMessage] = []
        last = max((n for n, m in enumerate(messages) if m.role == "assistant" and not m.tool_calls), default=-1)
        for index, message in enumerate(messages):
            if not message.tool_calls:
                separate.append(message)
                continue
            has_text = self.has_text_with_answered_calls if index < last else self.has_text_with_calls
            if message.content and not has_text:
                separate.append(evolve(message, tool_calls=()))
                message = evolve(message, content=None, reasoning=None)  # noqa: PLW2901 - the rest of it
            elif message.content and message.reasoning and not self.has_text_with_reasoned_calls:
                # As reasoning, the text keeps its place before the calls.
                thought = f"{message.reasoning}\n\n{message.content}"
                message = evolve(message, content=None, reasoning=thought)  # noqa: PLW2901
            separate.append(message)
        return separate if self.has_parallel_calls else list(_one_by_one(separate))


def _adapt_arguments(arguments: str, *, takes_any: bool) -> str:
    """Return the arguments of a call. Clients write in several ways that there are none."""
    if arguments.strip() in ("", "null"):
        return "{}"
    if takes_any or _parse_object(arguments) is not None:
        return arguments
    return json.dumps({UNPARSED_ARGUMENTS: arguments}, ensure_ascii=False)


def _results_of(messages: Sequence[ChatMessage], index: int) -> Sequence[ChatMessage]:
    """Return the results that follow the message at ``index``, sorted by the calls that they name if all name one.

    Those that name none are those of the calls in their order.
    """
    calls = messages[index].tool_calls
    results = [
        evolve(result, tool_call_id=calls[place].id) if not result.tool_call_id and place < len(calls) else result
        for place, result in enumerate(takewhile(lambda message: message.role == "tool", messages[index + 1 :]))
    ]
    places = {call.id: place for place, call in enumerate(calls)}
    if len(places) < len(calls) or any(result.tool_call_id not in places for result in results):
        return results
    return sorted(results, key=lambda result: places[result.tool_call_id or ""])


def _sort_results(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """Yield the messages, with results in the order of their calls: most templates show no ids."""
    skipped = 0
    for index, message in enumerate(messages):
        if skipped:
            skipped -= 1
            continue
        yield message
        if message.tool_calls:
            results = _results_of(messages, index)
            skipped = len(results)
            yield from results


def _one_by_one(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """Yield the messages, with each of several calls as an own message before its result."""
    skipped = 0
    for index, message in enumerate(messages):
        if skipped:
            skipped -= 1
            continue
        if len(message.tool_calls) < 2:  # noqa: PLR2004 - several
            yield message
            continue
        results = list(takewhile(lambda m: m.role == "tool", messages[index + 1 :]))
        skipped, named = len(results), {result.tool_call_id for result in results}
        for place, call in enumerate(message.tool_calls):
            yield (
                evolve(message, tool_calls=(call,)) if not place else ChatMessage(role="assistant", tool_calls=(call,))
            )
            is_last = place == len(message.tool_calls) - 1
            # Results without a known id are told apart by their place.
            own = [r for r in results if r.tool_call_id == call.id] if call.id in named else results[:1]
            own = results if is_last else own
            yield from own
            results = [result for result in results if not any(result is other for other in own)]


def _adopt_orphans(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """Yield the messages, with results before which nothing was called as the user's."""
    is_called = False
    for message in messages:
        if message.role == "assistant":
            is_called = bool(message.tool_calls)
        is_orphan = message.role == "tool" and not is_called
        yield ChatMessage(role="user", content=message.content) if is_orphan else message


_NO_QUESTION = ChatMessage(role="user", content="")
_NO_ANSWER = ChatMessage(role="assistant", content="")


def _alternate(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """Yield the messages with alternating roles: adjacent ones of a role are joined, others get an empty one between.

    Calls and results that the template itself renders do not count, as in Mistral's templates.
    """
    last: ChatMessage | None = None
    role = "assistant"
    for message in messages:
        if message.role == "tool" or message.tool_calls:
            if last is not None:
                yield last
                last = None
            yield message
            continue
        if message.role == role and last is not None:
            thoughts = [m.reasoning for m in (last, message) if m.reasoning]
            last = evolve(last, content=_join_contents([last, message]), reasoning="\n\n".join(thoughts) or None)
            continue
        if last is not None:
            yield last
        if message.role == role:
            yield _NO_ANSWER if role == "user" else _NO_QUESTION
        last, role = message, message.role
    if last is not None:
        yield last


def _spell_out(form: ToolFormat, message: ChatMessage) -> ChatMessage:
    if message.role == "tool":
        content = form.format_result(message.content or "")
        return ChatMessage(role="tool", content=content, tool_call_id=message.tool_call_id, name=message.name)
    if not message.tool_calls:
        return message
    # The calls move to the content, because the template would drop ``tool_calls``.
    parts = [message.content] if message.content else []
    parts += [form.format_call(call) for call in message.tool_calls]
    return ChatMessage(role=message.role, content="\n".join(parts), name=message.name, reasoning=message.reasoning)


# -------------------------------------------------------------------------------------------- system messages


def _split_system(messages: Sequence[ChatMessage]) -> tuple[Sequence[ChatMessage], Sequence[ChatMessage]]:
    """Return the system messages at the beginning, and all other messages."""
    count = next((n for n, message in enumerate(messages) if message.role not in _SYSTEM_ROLES), len(messages))
    return messages[:count], messages[count:]


def _join_contents(messages: Iterable[ChatMessage]) -> str:
    return "\n\n".join(message.content for message in messages if message.content)


# -------------------------------------------------------------------------------------------------------- calls


def _shorten_id(call_id: str) -> str:
    """Return nine letters and digits that depend only on the id; an id of this form is returned unchanged."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    # A hash, so that a call and its result get the same short id without any state.
    number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "replace")).digest()[:8])
    return "".join(_ALPHABET[number // len(_ALPHABET) ** place % len(_ALPHABET)] for place in range(9))


PlainMessage = dict[str, Any]
"""A message as templates read it: ``role``, ``content``, ``tool_calls``, …"""

_MAX_SHOWN = 8
"""Number of roles that an error repeats."""
_RESERVED = frozenset({"messages", "tools", "xml_tools", "documents", "add_generation_prompt"})


class _GenerationTag(Extension):
    """Support for ``{% generation %}``, which marks the assistant's text for loss masks. Only its body is rendered.

    Loss masks here come from sampling, so that the mark is not needed.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _create_environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    # Jinja's own filter escapes HTML, which would put ``\u003c`` into prompts.
    def to_json(
        value: object,
        *,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    # The options with which transformers renders chat templates; a template depends on them for its white space.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _compile(environment: ImmutableSandboxedEnvironment, source: str) -> jinja2.Template:
    template = environment.from_string(source)
    # Jinja copies the globals at every rendering, which is slow for its chain of dicts.
    template.globals = dict(template.globals)
    return template


@frozen(kw_only=True)
class ChatTemplate:
    """A compiled template, or two if a model has a separate one for conversations with tools."""

    source: str
    """The text of the template (of both, joined), by which families are recognised."""
    plain: jinja2.Template
    with_tools: jinja2.Template
    variables: Mapping[str, str]
    """The tokenizer's named special tokens (``bos_token``, ``eos_token``, …), which templates refer to."""

    @staticmethod
    def create(
        source: str | Mapping[str, str],
        *,
        variables: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> ChatTemplate:
        """Compile ``source``: a template, or several by name, of which ``default`` and ``tool_use`` are used.

        ``now`` is the clock for templates that print the date.

        Raises:
            ModelError: a template is not valid Jinja, or there is no default template.
        """
        named = {"default": source} if isinstance(source, str) else dict(source)
        if "default" not in named:
            raise ModelError(
                f"The model has chat templates {sorted(named)} and none called default; name one in the configuration."
            )
        environment = _create_environment(now)
        try:
            plain = _compile(environment, named["default"])
            with_tools = _compile(environment, named["tool_use"]) if "tool_use" in named else plain
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"The chat template is not valid Jinja (line {error.lineno}): {error.message}") from error
        text = "\n".join(named[name] for name in ("default", "tool_use") if name in named)
        return ChatTemplate(source=text, plain=plain, with_tools=with_tools, variables=variables)

    def render(
        self,
        messages: Sequence[PlainMessage],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        options: Options,
        has_generation_prompt: bool = True,
    ) -> str:
        """Return the text of the conversation. ``options`` are further variables of the template.

        Raises:
            RenderError: the template refuses the conversation; the message contains the template's own.
        """
        if clash := _RESERVED & options.keys():
            raise RenderError(
                f"Template options may not be called {', '.join(sorted(clash))}: the renderer sets these itself."
            )
        template = self.with_tools if tools else self.plain
        try:
            return template.render(
                {
                    **self.variables,
                    **options,
                    "messages": messages,
                    # Templates commonly test for ``none``, so that an empty list would count as tools.
                    "tools": list(tools) or None,
                    # The name that SmolLM3's template has for tools that are called as its model was trained to.
                    "xml_tools": list(tools) or None,
                    "documents": None,
                    "add_generation_prompt": has_generation_prompt,
                }
            )
        except Exception as error:  # a template is a third party's program: any error means that it refuses
            roles = ", ".join(str(message["role"]) for message in messages[:_MAX_SHOWN])
            roles += ", …" if len(messages) > _MAX_SHOWN else ""
            raise RenderError(
                f"The model's chat template refuses these {len(messages)} messages (roles {roles}): {error}. "
                "Change their roles or order."
            ) from error
