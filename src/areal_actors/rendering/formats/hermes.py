"""The tool format of Hermes and Qwen: JSON between ``<tool_call>`` and ``</tool_call>``.

A call is said when it is complete, in one piece: until its closing tag has come nobody knows whether it is one, and
what is none (broken JSON, no name, arguments that are no object) stays text, tags included. The closing tag may be
missing at the end of an answer. White space around calls belongs to the format, elsewhere to the content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from attrs import frozen

from areal_actors.domain import Exactly, Grammar, InOrder, JsonText, OneOf, Repeated, Tool, ToolCall
from areal_actors.rendering.base import Delta, TextDelta, ToolArgumentsDelta, ToolCallStarted
from areal_actors.rendering.tags import num_held_back

__all__ = ["Hermes"]

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_OTHER_FAMILIES = ("<function=", "<arg_key>")
"""Signs of formats that use the same tags around something else than JSON."""


class Hermes:
    """The family's words, kept short: small models read them too."""

    markers = (_OPEN, _CLOSE)

    def is_spoken_by(self, template: str) -> bool:
        """Whether the template writes calls between the tags, as JSON."""
        return _OPEN in template and not any(sign in template for sign in _OTHER_FAMILIES)

    def open_parser(self, call_ids: Callable[[], str], tools: Sequence[Tool]) -> _HermesParser:  # noqa: ARG002
        """A parser for one answer. JSON needs no schema to be read."""
        return _HermesParser(call_ids)

    def constrain(self, tools: Sequence[Tool], *, is_parallel: bool) -> Grammar:
        """Calls as the templates of the family write them, their arguments held to the tool's schema."""
        call = OneOf(parts=tuple(map(_grammar_of_call, tools)))
        return Repeated(part=call, at_most=None if is_parallel else 1, separator="\n")

    def format_tools(self, tools: Sequence[Tool]) -> str:
        """The tools as one JSON object a line, and how to call one."""
        lines = "\n".join(json.dumps(_signature(tool), ensure_ascii=False) for tool in tools)
        example = '{"name": <tool name>, "arguments": <JSON object>}'
        return (
            f"You may call these tools:\n<tools>\n{lines}\n</tools>\nTo call one, write:\n{_OPEN}\n{example}\n{_CLOSE}"
        )

    def format_call(self, call: ToolCall) -> str:
        """Name and arguments between the tags; the arguments are the call's own text where that is JSON."""
        arguments = call.arguments if _is_json(call.arguments) else json.dumps(call.arguments, ensure_ascii=False)
        name = json.dumps(call.name, ensure_ascii=False)
        return f'{_OPEN}\n{{"name": {name}, "arguments": {arguments}}}\n{_CLOSE}'

    def format_result(self, content: str) -> str:
        """The result between the family's tags."""
        return f"<tool_response>\n{content}\n</tool_response>"


def _signature(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}


def _grammar_of_call(tool: Tool) -> Grammar:
    before = f'{_OPEN}\n{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
    arguments = JsonText(schema={"type": "object", **tool.parameters})
    return InOrder(parts=(Exactly(text=before), arguments, Exactly(text=f"}}\n{_CLOSE}")))


def _is_json(text: str) -> bool:
    try:
        _JSON.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


class _HermesParser:
    """Text until a tag opens, a call until it closes, and again."""

    def __init__(self, call_ids: Callable[[], str]) -> None:
        self._call_ids = call_ids
        self._num_calls = 0
        self._buffer = ""
        self._searched = 0
        self._space = ""
        self._is_after_call = False
        self._deltas: list[Delta] = []
        self._state: Callable[[], bool] = self._read_text

    def feed(self, text: str) -> tuple[Delta, ...]:
        self._buffer += text
        while self._state():
            pass
        return self._take()

    def finish(self) -> tuple[Delta, ...]:
        while self._state == self._read_call:
            self._end_call(self._buffer[len(_OPEN) :], rest="")
            while self._state():
                pass
        self._say(self._buffer)
        if not self._is_after_call and self._space:
            self._deltas.append(TextDelta(text=self._space))
        return self._take()

    def _take(self) -> tuple[Delta, ...]:
        deltas, self._deltas = tuple(self._deltas), []
        return deltas

    def _read_text(self) -> bool:
        start = self._buffer.find(_OPEN)
        is_found = start >= 0
        if is_found:
            self._state, self._searched = self._read_call, len(_OPEN)
        else:
            start = len(self._buffer) - num_held_back(self._buffer, (_OPEN,))
        self._say(self._buffer[:start])
        self._buffer = self._buffer[start:]
        return is_found

    def _read_call(self) -> bool:
        end = self._buffer.find(_CLOSE, self._searched)
        if end < 0:
            self._searched = max(self._searched, len(self._buffer) - len(_CLOSE) + 1)
            return False
        body, self._searched = self._buffer[len(_OPEN) : end], end + len(_CLOSE)
        if not _ends_in_string(body):
            self._end_call(body, rest=self._buffer[self._searched :])
        return True

    def _end_call(self, body: str, *, rest: str) -> None:
        """Say the call, or take its opening tag for text and read on behind that: another call may begin there."""
        call = parse_call(body)
        if call is None:
            self._say(_OPEN)
            self._buffer = self._buffer[len(_OPEN) :]
        else:
            self._say_call(call)
            self._buffer = rest
        self._state = self._read_text

    def _say(self, text: str) -> None:
        """Content, but for the white space at its end: a call may follow, which would make that part of the format."""
        text = self._space + text
        certain = text.rstrip()
        self._space = text[len(certain) :]
        if certain:
            self._deltas.append(TextDelta(text=certain))
            self._is_after_call = False

    def _say_call(self, call: _Call) -> None:
        index = self._num_calls
        self._deltas += (
            ToolCallStarted(index=index, id=self._call_ids(), name=call.name),
            ToolArgumentsDelta(index=index, text=call.arguments),
        )
        self._num_calls += 1
        self._is_after_call = True


# ------------------------------------------------------------------------------------------ the JSON of a call


@frozen(kw_only=True)
class _Call:
    name: str
    arguments: str


def _ends_in_string(text: str) -> bool:
    """Whether JSON that begins with ``text`` has an open string at its end: a tag that follows is part of it."""
    return re.sub(r"\\.", "", text).count('"') % 2 == 1


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)


def parse_call(body: str) -> _Call | None:
    """The call that is written between two tags, arguments as the model wrote them; ``None`` if it is none.

    No arguments at all are an empty object; an object inside a string is taken out of it.
    """
    try:
        text = body.strip()
        values = _JSON.decode(text)
        if not isinstance(values, dict):
            return None
        name = values.get("name")
        arguments = _parse_arguments(values.get("arguments", {}), _slices(text).get("arguments", "{}"))
    except (ValueError, RecursionError):
        return None
    if arguments is None or not isinstance(name, str) or not name or not name.isprintable():
        return None
    return _Call(name=name, arguments=arguments)


def _parse_arguments(value: object, written: str) -> str | None:
    if isinstance(value, str):
        return value if isinstance(_JSON.decode(value), dict) else None
    return written if isinstance(value, dict) else None


def _slices(text: str) -> Mapping[str, str]:
    """The text of each value of a JSON object that is known to be valid."""
    slices: dict[str, str] = {}
    at = _skip_space(text, 1)
    while text[at] != "}":
        key, at = _JSON.raw_decode(text, at)
        start = _skip_space(text, _skip_space(text, at) + 1)
        _, end = _JSON.raw_decode(text, start)
        slices[key] = text[start:end]
        at = _skip_space(text, end)
        at = _skip_space(text, at + 1) if text[at] == "," else at
    return slices


def _skip_space(text: str, at: int) -> int:
    while text[at] in " \t\n\r":
        at += 1
    return at
