"""Harmony, the format of GPT-OSS: an answer consists of several messages, each on a channel.

::

    <|channel|>analysis<|message|>thinking<|end|>
    <|start|>assistant<|channel|>commentary<|message|>what the user may see before a call<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

(without the line breaks). ``analysis`` is reasoning, ``commentary`` and ``final`` are content; consecutive messages of
one kind are separated by an empty line. A message to a function is a call; ``HarmonyChannels`` normalises it to one
spelling, and ``HARMONY_CALLS`` reads it. Everything else (other recipients, other channels, broken headers) stays
content.

The parsers read text, as all parsers here do, so that they work with any tokenizer. The vendor's library reads the ids
of one vocabulary, which it downloads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

from areal_actors.domain import (
    Delta,
    Exactly,
    FreeText,
    Grammar,
    InOrder,
    OneOf,
    ReasoningDelta,
    TextDelta,
    Tool,
)
from areal_actors.rendering.formats.base import ReasoningFormat, StateParser
from areal_actors.rendering.formats.json_calls import decode_object, read_object
from areal_actors.rendering.formats.json_families import JsonFormat
from areal_actors.rendering.formats.reading import (
    Call,
    CallSyntax,
    NoCall,
    Reading,
    Source,
    check_name,
    num_held_back,
)

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_CONSTRAIN = "<|constrain|>"
_MESSAGE = "<|message|>"
_END = "<|end|>"
_CALL = "<|call|>"
_RETURN = "<|return|>"
_ASSISTANT = f"{_START}assistant"
_MAX_HEADER = 200
"""Limit in characters; longer text is not a header."""


_SIGNS = (_CHANNEL, _MESSAGE)
"""Texts in every template of the family."""

_WORD = re.compile(r"\w*")
_NAME = re.compile(r"[^\s<]*")


def _read_call(source: Source) -> Reading[tuple[Call, ...]]:
    """Read ``<|channel|>… to=functions.name …<|message|>{…}<|call|>``; the last tag may be missing at the end."""
    yield from source.require(_CHANNEL)
    yield from source.match(_WORD)
    yield from source.require("to=functions.")
    name = check_name((yield from source.match(_NAME)))
    yield from source.expect(_CONSTRAIN)
    yield from source.match(_WORD)
    yield from source.require(_MESSAGE)
    source.begin_call(name)
    arguments = yield from read_object(source)
    decode_object(arguments)
    if not (yield from source.expect(_CALL)) and not source.is_at_end:
        raise NoCall
    return (Call(name=name, arguments=arguments),)


def _describe(tools: Sequence[Tool]) -> str:
    return "\n".join(
        f"// {tool.description}\ntype {tool.name} = (_: {dict(tool.parameters)}) => any;" for tool in tools
    )


HARMONY_CALLS = JsonFormat(
    markers=(_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _CALL),
    signs=_SIGNS,
    result_tags=("", ""),
    syntax=CallSyntax(anywhere={_CHANNEL: _read_call}),
    before=f"{_CHANNEL}commentary to=functions.NAME {_CONSTRAIN}json{_MESSAGE}",
    last=_CALL,
    # A call ends the turn.
    has_parallel_calls=False,
    instructions="# Tools\n\n## functions\n\nnamespace functions {\nTOOLS\n}",
    describe=_describe,
)
"""Calls in the output of ``HarmonyChannels``."""


# ------------------------------------------------------------------------------------------------------- channels


class HarmonyChannels(ReasoningFormat):
    """Reasoning, content and calls, distinguished by their channels."""

    markers = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END)
    stops = (_RETURN, _CALL)
    signs = _SIGNS

    def is_opened_by(self, prompt: str) -> bool:  # noqa: ARG002 - the answer names its channel itself
        """Return ``False``: the model itself writes the header of its reasoning."""
        return False

    def constrain(self, *, is_open: bool, has_calls: bool) -> Grammar:  # noqa: ARG002 - it is never open
        """Return the grammar of an optional analysis, and of the final message's header unless calls follow."""
        opening, closing = f"{_CHANNEL}analysis{_MESSAGE}", f"{_END}{_ASSISTANT}"
        parts = (Exactly(text=opening), FreeText(excluding=(_END,)), Exactly(text=closing))
        thought = OneOf(parts=(Exactly(text=""), InOrder(parts=parts)))
        return thought if has_calls else InOrder(parts=(thought, Exactly(text=f"{_CHANNEL}final{_MESSAGE}")))

    def open_parser(self, *, is_open: bool) -> _ChannelParser:  # noqa: ARG002 - it is never open
        """Return a parser for one answer."""
        return _ChannelParser()


_HEADER = re.compile(
    r"(?P<start><\|start\|>assistant)?(?:\s?to=(?P<before>[^\s<]+))?\s*"
    r"(?:<\|channel\|>(?P<channel>\w+)(?:\s+to=(?P<behind>[^\s<]+))?)?(?P<type>\s*(?:<\|constrain\|>)?\w*)"
)
_HEADER_STARTS = (_ASSISTANT, _CHANNEL, "to=", " to=")
_CLOSINGS = (_END, _CALL, _RETURN)
_BODY_ENDS = (*_CLOSINGS, _START, _CHANNEL)
_BODY_END = re.compile("|".join(map(re.escape, _BODY_ENDS)))
_FUNCTIONS = "functions."


class _ChannelParser(StateParser):
    """Alternates between headers and bodies."""

    def __init__(self) -> None:
        super().__init__()
        self._say_content = partial(self._say_as, TextDelta)
        self._say_thought = partial(self._say_as, ReasoningDelta)
        self._say: Callable[[str], None] = self._say_content
        self._spoken: dict[type[Delta], str] = {}
        self._state = self._read_header

    def _end(self) -> None:
        if self._state == self._read_header:
            self._say_content(self._buffer)
        else:
            self._say(self._buffer)

    def _read_header(self) -> bool:
        """Determine the kind of the next message; text without a header is content."""
        # The text so far may be the beginning of a header or of a closing tag.
        text = self._buffer
        is_tag = any(tag.startswith(text) and tag != text for tag in _CLOSINGS)
        if is_tag or any(start.startswith(text) for start in _HEADER_STARTS):
            return False
        header, found, _ = self._buffer[: _MAX_HEADER + len(_MESSAGE)].partition(_MESSAGE)
        if self._buffer.startswith(_HEADER_STARTS) and "\n" not in header:
            if found:
                self._begin_message(header)
                return True
            if len(self._buffer) < _MAX_HEADER + len(_MESSAGE):
                return False
        self._say, self._state = self._say_content, self._skip_start
        return True

    def _skip_start(self) -> bool:
        """Treat a tag that begins no header as content; a header may follow it."""
        found = _BODY_END.match(self._buffer)
        if found:
            self._say_content(found.group())
            self._buffer = self._buffer[found.end() :]
        self._state = self._read_body
        return True

    def _begin_message(self, header: str) -> None:
        found = _HEADER.fullmatch(header)
        recipient = (found["before"] or found["behind"]) if found else None
        channel = found["channel"] if found else None
        if found and recipient and recipient.startswith(_FUNCTIONS) and channel:
            self._begin_body(self._say_raw)
            self._say_raw(f"{_CHANNEL}{channel} to={recipient}{found['type']}{_MESSAGE}")
        elif found and recipient is None and channel in {"analysis", "commentary", "final", None}:
            self._begin_body(self._say_thought if channel == "analysis" else self._say_content)
        else:
            self._say, self._state = self._say_content, self._skip_start
            return
        self._buffer = self._buffer[len(header) + len(_MESSAGE) :]

    def _begin_body(self, say: Callable[[str], None]) -> None:
        self._say, self._state = say, self._read_body
        # Two messages of one kind are separated by an empty line, which is emitted only if the second one has text.
        for kind in self._spoken:
            self._spoken[kind] = "\n\n"

    def _read_body(self) -> bool:
        found = _BODY_END.search(self._buffer)
        end = found.start() if found else len(self._buffer) - num_held_back(self._buffer, _BODY_ENDS)
        self._say(self._buffer[:end])
        self._buffer = self._buffer[end:]
        if not found:
            return False
        if self._say == self._say_raw:
            # The body may have ended with another tag, or with none.
            self._say_raw(_CALL)
        if found.group() in _CLOSINGS:
            self._buffer = self._buffer[len(found.group()) :]
        self._state = self._read_header
        return True

    def _say_as(self, kind: type[TextDelta | ReasoningDelta], text: str) -> None:
        if text:
            self._deltas.append(kind(text=self._spoken.get(kind, "") + text))
            self._spoken[kind] = ""

    def _say_raw(self, text: str) -> None:
        if text:
            self._deltas.append(TextDelta(text=text))
