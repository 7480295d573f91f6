"""When two messages are the same: canonical forms, digests of them, and rolling digests of whole histories.

Clients echo our answers in their own manner: ``content`` null, empty or absent, tool arguments serialised anew,
reasoning dropped, white space trimmed, the text beside a tool call lost. A digest here covers only what every client
preserves (the *meaning*), so that one look-up finds the candidates; ``is_echo`` then compares what digests leave out,
so that text that differs is never taken for the same.

=====================  ==========================================  ==========================================
part                   in the digest                               checked by ``is_echo``
=====================  ==========================================  ==========================================
role                   exact                                       exact
text                   exact; an answer's is stripped; beside      equal (stripped); the echo may lack it beside
                       tool calls it is left out                   tool calls whose ids are those we gave out
tool calls             name, arguments as JSON, in order           the same; calls that the text quotes count if
                                                                   they have the ids that we gave out
tool call ids          no; results refer to calls by position      see text
reasoning              no                                          equal (stripped); the echo may lack it
name                   exact, but for answers                      equal; either side of an answer may lack it
=====================  ==========================================  ==========================================

Which interaction a history belongs to is decided in ``links``; nothing here knows interactions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any, NoReturn

from areal_actors.cache.quoted import calls_of, read_quoted
from areal_actors.domain import ChatMessage, Tool, ToolCall

__all__ = [
    "DIGEST_SIZE",
    "ROOT_DIGEST",
    "canonical_arguments",
    "extend_digest",
    "has_same_calls",
    "is_echo",
    "message_digest",
    "num_leading_instructions",
    "options_digest",
    "prefix_digests",
    "system_digest",
    "tools_digest",
]

DIGEST_SIZE = 16
ROOT_DIGEST = bytes(DIGEST_SIZE)
"""The digest of the empty history."""

_INSTRUCTION_ROLES = frozenset({"system", "developer"})
_EXACT_INTEGERS = 2.0**53  # beyond it a float no longer names one integer
_SMALLEST_INTEGER, _LARGEST_INTEGER = -(2**63), 2**64 - 1  # what JSON libraries read exactly


def message_digest(message: ChatMessage) -> bytes:
    """16 bytes that equal those of any faithful echo of ``message``, read on its own."""
    return extend_digest(ROOT_DIGEST, message)


def extend_digest(previous: bytes, message: ChatMessage, *, reference: int = 0) -> bytes:
    """The digest of a history that goes on with ``message``; ``reference`` is the call that a tool result answers."""
    text = "".join(f"{len(part)}:{part}" for part in _canonical_parts(message, reference))
    return blake2b(previous + text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_SIZE).digest()


def _canonical_parts(message: ChatMessage, reference: int) -> Iterable[str]:
    """What every client preserves. Lengths are written before the parts, so that no two lists of parts read alike."""
    yield message.role
    calls = calls_of(message)
    if message.role == "assistant":
        if not calls:
            yield _stripped(message.content)
    else:
        yield message.content or ""
        yield message.name or ""
    if message.role == "tool":
        yield str(reference)
    for call in calls:
        yield call.name
        yield canonical_arguments(call.arguments)


def canonical_arguments(text: str) -> str:
    """Tool arguments as JSON with sorted keys, so that serialising anew changes nothing; other text as it is.

    ``2.0`` equals ``2`` and no arguments at all equal ``{}``, because clients in other languages write them so.
    Integers of more than 64 bits equal the nearest float, because that is what most JSON libraries make of them.
    """
    try:
        value = json.loads(
            text.strip() or "{}", parse_float=_parse_float, parse_int=_parse_int, parse_constant=_refuse_number
        )
        return "json:" + json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return "text:" + text


def _parse_float(literal: str) -> float | int:
    value = float(literal)
    if value in (float("inf"), float("-inf")):
        _refuse_number(literal)  # 1e400 and 1e500 are not the same number
    return int(value) if value.is_integer() and abs(value) < _EXACT_INTEGERS else value


def _parse_int(literal: str) -> float | int:
    value = int(literal)
    return value if _SMALLEST_INTEGER <= value <= _LARGEST_INTEGER else _parse_float(literal)


def _refuse_number(literal: str) -> NoReturn:
    msg = f"{literal} cannot be compared as a number"
    raise ValueError(msg)


def prefix_digests(messages: Sequence[ChatMessage], *, known: bytes = b"") -> bytes:
    """The digest of every prefix of ``messages``, 16 bytes each, one after another.

    ``known`` holds those of the first prefixes, where they have been computed before. Leading instructions (system or
    developer messages) stand apart, in ``system_digest``: up to them the digest is ``ROOT_DIGEST``.
    """
    start, num_instructions = len(known) // DIGEST_SIZE, num_leading_instructions(messages)
    calls, num_results = _tool_context(messages, start)
    digests, digest = [known], known[-DIGEST_SIZE:] or ROOT_DIGEST
    for position in range(start, len(messages)):
        message = messages[position]
        if position >= num_instructions:
            digest = extend_digest(digest, message, reference=_reference(message, calls, num_results))
        if message.role == "assistant":
            calls, num_results = message.tool_calls, 0
        elif message.role == "tool":
            num_results += 1
        digests.append(digest)
    return b"".join(digests)


def _tool_context(messages: Sequence[ChatMessage], end: int) -> tuple[tuple[ToolCall, ...], int]:
    """The calls that a tool result at position ``end`` may answer, and how many results came before it."""
    num_results = 0
    for message in reversed(messages[:end]):
        if message.role == "assistant":
            return message.tool_calls, num_results
        num_results += message.role == "tool"
    return (), num_results


def _reference(message: ChatMessage, calls: tuple[ToolCall, ...], num_results: int) -> int:
    """Which call a result answers, by position: some clients drop or rename ids, but results that swap calls differ."""
    if message.tool_call_id:
        for position, call in enumerate(calls):
            if call.id == message.tool_call_id:
                return position
    return num_results


def num_leading_instructions(messages: Sequence[ChatMessage]) -> int:
    """How many system or developer messages the history begins with."""
    return sum(1 for _ in takewhile(lambda message: message.role in _INSTRUCTION_ROLES, messages))


def system_digest(messages: Sequence[ChatMessage]) -> bytes:
    """The digest of the leading instructions alone."""
    digest = ROOT_DIGEST
    for message in messages[: num_leading_instructions(messages)]:
        digest = extend_digest(digest, message)
    return digest


def tools_digest(tools: Sequence[Tool]) -> bytes:
    """The digest of the tools in their order; the order of keys within a schema does not matter."""
    return _json_digest([[tool.name, tool.description, tool.parameters] for tool in tools])


def options_digest(template_kwargs: Mapping[str, Any]) -> bytes:
    """The digest of the options of the chat template."""
    return _json_digest(template_kwargs)


def _json_digest(value: Any) -> bytes:
    if not value:
        return ROOT_DIGEST
    text = json.dumps(value, sort_keys=True, default=_plain)
    return blake2b(text.encode(), digest_size=DIGEST_SIZE).digest()


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else repr(value)


def is_echo(stored: ChatMessage, echoed: ChatMessage) -> bool:
    """Whether ``echoed`` is what a faithful client makes of ``stored``, given that their digests are equal."""
    if stored is echoed or stored == echoed:
        return True
    if stored.role != "assistant":
        return True  # all of it is in the digest
    return (
        (not stored.name or not echoed.name or stored.name == echoed.name)
        and _stripped(echoed.reasoning) in ("", _stripped(stored.reasoning))
        and _is_same_text(stored, echoed)
    )


def has_same_calls(stored: ChatMessage, echoed: ChatMessage) -> bool:
    """Whether the call ids are those of ``stored``: proof of origin, since ids are never given out twice."""
    return [call.id for call in stored.tool_calls] == [call.id for call in calls_of(echoed)]


def _is_same_text(stored: ChatMessage, echoed: ChatMessage) -> bool:
    left, right = _stripped(stored.content), _stripped(echoed.content)
    if left == right:
        return True
    if stored.tool_calls and not echoed.tool_calls and (quoted := read_quoted(echoed.content)):
        right = _stripped(quoted.text)
    return bool(stored.tool_calls) and right in ("", left) and has_same_calls(stored, echoed)


def _stripped(text: str | None) -> str:
    return (text or "").strip()
