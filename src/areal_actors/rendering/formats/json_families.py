"""Formats that write the arguments of a call as one JSON object, which only differ in the texts around it.

::

    <tool_call>                                                  Hermes, Qwen
    {"name": "f", "arguments": {"a": 1}}
    </tool_call>

    {"name": "f", "parameters": {"a": 1}}                        Llama 3

    [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]           Mistral, older models
    [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}             Mistral, newer models

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
    ```json
    {"a": 1}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>                   DeepSeek V3, R1; V3.1 has no fences

    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0
    <|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>
    <|tool_calls_section_end|>                                   Kimi K2

    <|tool_call|>[{"name": "f", "arguments": {"a": 1}}]          Granite 3; others with their own tags

Models write the form that their template shows, but all forms of a vendor are read. Outer and last closing tags may be
missing at the end of an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial

from attrs import evolve, frozen

from areal_actors.domain import Exactly, Grammar, InOrder, Tool, ToolCall
from areal_actors.lib.json_prefix import MAX_DEPTH
from areal_actors.rendering.formats.base import ToolFormat, format_signatures, grammar_of_calls
from areal_actors.rendering.formats.json_calls import (
    decode_object,
    grammar_of_arguments,
    is_json,
    parse_call,
    read_object,
)
from areal_actors.rendering.formats.reading import (
    Call,
    CallSyntax,
    NoCall,
    Reading,
    Source,
    check_name,
    drop,
    read_items,
)


@frozen(kw_only=True, eq=False)
class JsonFormat(ToolFormat):
    """Calls that are a JSON object of arguments, with fixed texts and the name around it.

    ``before`` and ``after`` surround the arguments, with NAME in the place of the name, which is a JSON string if
    ``has_quoted_name``. ``opening`` and ``closing`` surround all calls of an answer, and ``separator`` is between two.
    ``last`` is a token that ends an answer after its call, so that it is not in the grammar. Models without
    ``has_parallel_calls`` write one call, but several are read. ``instructions`` offer the tools: TOOLS stands for what
    ``describe`` writes of them, and EXAMPLE for a call. Signs may be replaced by ``pattern``.
    """

    markers: tuple[str, ...]
    signs: tuple[str, ...]
    foreign_signs: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    result_tags: tuple[str, str] | None = ToolFormat.result_tags
    syntax: CallSyntax
    before: str
    after: str = ""
    has_quoted_name: bool = False
    opening: str = ""
    closing: str = ""
    separator: str = "\n"
    last: str = ""
    has_parallel_calls: bool = True
    instructions: str
    describe: Callable[[Sequence[Tool]], str] = format_signatures

    def matches_template(self, template: str) -> bool:
        """See ``ToolFormat.matches_template``."""
        has_pattern = self.pattern is None or self.pattern.search(template) is not None
        return has_pattern and ToolFormat.matches_template(self, template)

    def syntax_for(self, tools: Sequence[Tool]) -> CallSyntax:  # noqa: ARG002 - JSON needs no schema to be read
        """See ``ToolFormat.syntax_for``."""
        return self.syntax

    def constrain(self, tools: Sequence[Tool], *, is_parallel: bool) -> Grammar:
        """Return the grammar of calls as the family's templates write them; arguments match the tool's schema."""
        after = (Exactly(text=self.after),) if self.after else ()
        calls = grammar_of_calls(
            (InOrder(parts=(Exactly(text=self._before(t.name)), grammar_of_arguments(t), *after)) for t in tools),
            is_parallel=is_parallel and self.has_parallel_calls,
            separator=self.separator,
        )
        if not self.opening:
            return calls
        return InOrder(parts=(Exactly(text=self.opening), calls, Exactly(text=self.closing)))

    def format_tools(self, tools: Sequence[Tool]) -> str:
        """Return the tools, and instructions for calling one."""
        example = self._write(self.before.replace("NAME", "<tool name>"), "<JSON object>")
        return self.instructions.replace("EXAMPLE", example).replace("TOOLS", self.describe(tools))

    def format_call(self, call: ToolCall) -> str:
        """Return one call; arguments that are valid JSON keep their text."""
        arguments = call.arguments if is_json(call.arguments) else json.dumps(call.arguments, ensure_ascii=False)
        return self._write(self._before(call.name), arguments)

    def _before(self, name: str) -> str:
        written = json.dumps(name, ensure_ascii=False) if self.has_quoted_name else name
        return self.before.replace("NAME", written)

    def _write(self, before: str, arguments: str) -> str:
        return f"{self.opening}{before}{arguments}{self.after}{self.closing}{self.last}"


_NAME = re.compile(r"[\w.:/-]*")


# ------------------------------------------------------------------------------------------------ Hermes and Qwen


def _read_hermes(source: Source) -> Reading[tuple[Call, ...]]:
    yield from source.require("<tool_call>")
    source.begin_object()
    call = parse_call((yield from read_object(source)))
    if not (yield from source.expect("</tool_call>")) and not source.is_at_end:
        raise NoCall
    return (call,)


HERMES = JsonFormat(
    markers=("<tool_call>", "</tool_call>"),
    signs=("<tool_call>",),
    # Other families use the same tags around something else.
    foreign_signs=("<function=", "<arg_key>", "<tool_calls>", "<invoke name="),
    syntax=CallSyntax(anywhere={"<tool_call>": _read_hermes}),
    before='<tool_call>\n{"name": NAME, "arguments": ',
    after="}\n</tool_call>",
    has_quoted_name=True,
    # Short, because small models read them too.
    instructions="You may call these tools:\n<tools>\nTOOLS\n</tools>\nTo call one, write:\nEXAMPLE",
)


# -------------------------------------------------------------------------------------------------------- Llama 3

_TAG, _START, _END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"


def _read_llama(source: Source, *, opening: str = "") -> Reading[tuple[Call, ...]]:
    if opening:
        yield from source.require(opening)
    if opening == ";":
        yield from source.expect(_TAG)
    source.begin_object()
    text = yield from read_object(source)
    return (parse_call(text, is_bare_allowed=False),)


LLAMA_JSON = JsonFormat(
    markers=(_TAG, _START, _END),
    signs=(),
    foreign_signs=("<tool_call>", "(params_name1="),
    # A call in a template's source, with any expression for its name. A tool is excluded by its description.
    pattern=re.compile(r'\{\s*\\?"name\\?":(?:(?!description).){0,120}?\\?"parameters\\?":', re.DOTALL),
    result_tags=None,
    # An object is a call at the beginning of an answer, anywhere after a tag, and after another call, with or without a
    # semicolon between them. The end tag closes the calls of Llama 4; further calls may follow it.
    syntax=CallSyntax(
        anywhere={tag: partial(_read_llama, opening=tag) for tag in (_TAG, _START, _END)},
        at_start={"{": _read_llama},
        after_call={"{": _read_llama, ";": partial(_read_llama, opening=";"), _END: drop(_END)},
    ),
    before='{"name": NAME, "parameters": ',
    after="}",
    has_quoted_name=True,
    has_parallel_calls=False,
    instructions="You may call these tools:\nTOOLS\nTo call one, answer with nothing but EXAMPLE",
)


# -------------------------------------------------------------------------------------------------------- Mistral

_CALLS, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID = re.compile("[a-zA-Z0-9]{9}")


def _read_mistral(source: Source) -> Reading[tuple[Call, ...]]:
    """Read one call after its name, or a list of calls."""
    yield from source.require(_CALLS)
    if (yield from source.sees(_ARGS, _CALL_ID)):
        raise NoCall
    if not (yield from source.expect("[")):
        name = check_name((yield from source.match(_NAME)))
        call_id = (yield from source.match(_NAME)) if (yield from source.expect(_CALL_ID)) else ""
        yield from source.require(_ARGS)
        source.begin_call(name, call_id=call_id if _ID.fullmatch(call_id) else None)
        arguments = yield from read_object(source)
        decode_object(arguments)
        return (_identify(Call(name=name, arguments=arguments), call_id),)
    texts = yield from read_items(source, "]", read_object)
    if not texts:
        raise NoCall
    return tuple(_identify(parse_call(t), decode_object(t, max_depth=MAX_DEPTH + 1).get("id")) for t in texts)


def _identify(call: Call, call_id: object) -> Call:
    """Return the call with the id that the model wrote, if it has the vendor's form: the result has to quote it."""
    return evolve(call, id=call_id) if isinstance(call_id, str) and _ID.fullmatch(call_id) else call


MISTRAL = JsonFormat(
    markers=(_CALLS, _CALL_ID, _ARGS),
    signs=(_CALLS,),
    foreign_signs=(_ARGS,),
    result_tags=("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    syntax=CallSyntax(anywhere={_CALLS: _read_mistral}),
    opening=f"{_CALLS}[",
    before='{"name": NAME, "arguments": ',
    after="}",
    has_quoted_name=True,
    separator=", ",
    closing="]",
    instructions="[AVAILABLE_TOOLS]\nTOOLS\n[/AVAILABLE_TOOLS]\nTo call one, write:\nEXAMPLE",
)
MISTRAL_ARGS = evolve(
    MISTRAL,
    signs=(_CALLS, _ARGS),
    foreign_signs=(),
    opening="",
    before=f"{_CALLS}NAME{_ARGS}",
    after="",
    has_quoted_name=False,
    separator="",
    closing="",
)


# ------------------------------------------------------------------------------------------------------- DeepSeek

_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def _read_deepseek(source: Source, *, is_first: bool = False) -> Reading[tuple[Call, ...]]:
    if is_first:
        yield from source.require(_CALLS_BEGIN)
    yield from source.require(_CALL_BEGIN)
    name = yield from source.match(_NAME)
    yield from source.require(_SEPARATOR)
    # With fences, ``function`` stands before the separator and the name after it.
    is_bare = yield from source.sees("{")
    if not is_bare:
        name = yield from source.match(_NAME)
        yield from source.require("```json")
    source.begin_call(check_name(name))
    arguments = yield from read_object(source)
    # Checks the arguments; their text is kept as the model wrote it.
    decode_object(arguments)
    if not is_bare:
        yield from source.require("```")
    if not (yield from source.expect(_CALL_END)) and not source.is_at_end:
        raise NoCall
    return (Call(name=check_name(name), arguments=arguments),)


def _describe_in_paragraphs(tools: Sequence[Tool]) -> str:
    return "\n\n".join(
        f"### {t.name}\n{t.description}\nParameters: {json.dumps(t.parameters, ensure_ascii=False)}" for t in tools
    )


DEEPSEEK_V3 = JsonFormat(
    markers=(_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _SEPARATOR),
    signs=(_CALLS_BEGIN, "```json"),
    result_tags=("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    syntax=CallSyntax(
        anywhere={_CALLS_BEGIN: partial(_read_deepseek, is_first=True), _CALL_BEGIN: _read_deepseek},
        after_call={_CALLS_END: drop(_CALLS_END)},
    ),
    opening=_CALLS_BEGIN,
    before=f"{_CALL_BEGIN}function{_SEPARATOR}NAME\n```json\n",
    after=f"\n```{_CALL_END}",
    closing=_CALLS_END,
    instructions="## Tools\n\nTOOLS\n\nTo call tools, write:\nEXAMPLE",
    describe=_describe_in_paragraphs,
)
DEEPSEEK_V3_1 = evolve(
    DEEPSEEK_V3,
    signs=(_CALLS_BEGIN,),
    foreign_signs=("```json",),
    before=f"{_CALL_BEGIN}NAME{_SEPARATOR}",
    after=_CALL_END,
    separator="",
)


# -------------------------------------------------------------------------------------------------------- Kimi K2

_SECTION_BEGIN, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_BEGIN, _KIMI_ARGUMENTS, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>.+):\d+")


def _read_kimi(source: Source, *, is_first: bool = False) -> Reading[tuple[Call, ...]]:
    if is_first:
        yield from source.require(_SECTION_BEGIN)
    yield from source.require(_KIMI_BEGIN)
    call_id = yield from source.match(_NAME)
    yield from source.require(_KIMI_ARGUMENTS)
    # The model numbers its calls, and reads a result under the number that it gave.
    numbered = _KIMI_ID.fullmatch(call_id)
    name = check_name(numbered["name"] if numbered else call_id)
    own_id = call_id if numbered else None
    source.begin_call(name, call_id=own_id)
    arguments = yield from read_object(source)
    decode_object(arguments)
    if not (yield from source.expect(_KIMI_END)) and not source.is_at_end:
        raise NoCall
    return (Call(name=name, arguments=arguments, id=own_id),)


KIMI_K2 = JsonFormat(
    markers=(_SECTION_BEGIN, _SECTION_END, _KIMI_BEGIN, _KIMI_ARGUMENTS, _KIMI_END),
    signs=(_KIMI_BEGIN, _KIMI_ARGUMENTS),
    syntax=CallSyntax(
        anywhere={_SECTION_BEGIN: partial(_read_kimi, is_first=True), _KIMI_BEGIN: _read_kimi},
        after_call={_SECTION_END: drop(_SECTION_END)},
    ),
    opening=_SECTION_BEGIN,
    before=f"{_KIMI_BEGIN}functions.NAME:0{_KIMI_ARGUMENTS}",
    after=_KIMI_END,
    separator="",
    closing=_SECTION_END,
    instructions="# Tools\nTOOLS\nTo call tools, write:\nEXAMPLE",
)

# --------------------------------------------------------------------------------------------- lists between tags


def _read_between(source: Source, *, opening: str, closing: str) -> Reading[tuple[Call, ...]]:
    """Read a list of calls, or one call after the other; the closing tag may be missing at the end of an answer."""
    yield from source.require(opening)
    is_list = yield from source.expect("[")
    source.begin_object()
    if is_list:
        texts = yield from read_items(source, "]", read_object)
    else:
        texts = [(yield from read_object(source))]
        while (yield from source.sees("{")):
            texts.append((yield from read_object(source)))
    is_closed = not closing or (yield from source.expect(closing)) or source.is_at_end
    if not texts or not is_closed:
        raise NoCall
    return tuple(map(parse_call, texts))


def _create_list(opening: str, closing: str = "", *, name: str = "name", arguments: str = "arguments") -> JsonFormat:
    """Return the format of a JSON list of calls between two tags, with these keys in each call."""
    return JsonFormat(
        markers=(opening, closing) if closing else (opening,),
        signs=(opening,),
        syntax=CallSyntax(anywhere={opening: partial(_read_between, opening=opening, closing=closing)}),
        opening=f"{opening}[",
        before=f'{{"{name}": NAME, "{arguments}": ',
        after="}",
        has_quoted_name=True,
        separator=", ",
        closing=f"]{closing}",
        instructions="You may call these tools:\nTOOLS\nTo call one, write:\nEXAMPLE",
    )


GRANITE = _create_list("<|tool_call|>")
NEMOTRON_2 = _create_list("<TOOLCALL>", "</TOOLCALL>")
APRIEL = _create_list("<tool_calls>", "</tool_calls>")
COMMAND = _create_list("<|START_ACTION|>", "<|END_ACTION|>", name="tool_name", arguments="parameters")
