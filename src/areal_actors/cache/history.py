"""Histories: when messages are equal, digests of whole histories, and the messages and ids of an interaction.

Clients echo answers differently: with ``content`` null, empty or absent, reserialised tool arguments, dropped
reasoning, trimmed white space, or without the text next to a tool call. A digest covers only what every client
preserves (the *meaning*), so that one lookup finds the candidates. ``is_echo`` then compares the rest, so that
differing texts are never taken for the same.

=====================  ==========================================  ==========================================
part                   in the digest                               checked by ``is_echo``
=====================  ==========================================  ==========================================
role                   exact                                       exact
text                   exact; an answer's is stripped; next to     equal (stripped); the echo may lack it next
                       tool calls it is omitted                    to tool calls whose ids were issued here
tool calls             name, arguments as JSON, in order           the same; calls that the text quotes count if
                                                                   they have the ids that were issued here
tool call ids          no; results refer to calls by position      see text
reasoning              no                                          equal (stripped); the echo may lack it
name                   exact, except for answers                   equal; either side of an answer may lack it
=====================  ==========================================  ==========================================

Some clients quote the calls in the text of an answer, instead of sending them back as calls. smolagents sends the
model's text, then ``Calling tools:`` and the calls as Python prints them, with their ids. The ids were issued only
once, which identifies such a text.

An interaction stores only the messages and token ids that are new in its turn; ``full_history`` and ``full_ids``
reassemble the rest. ``lookup`` finds interactions of one session by id and raises for unknown ones. The tree passes its
own; readers of a ``SessionRecord`` pass ``lookup_in(record)``. ``links`` decides which interaction a history continues.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import takewhile
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np
from attrs import frozen

from areal_actors.domain import ChatMessage, Interaction, InteractionId, Ints, SessionRecord, Tool, ToolCall, as_ints
from areal_actors.errors import ExportError

DIGEST_SIZE = 16
ROOT_DIGEST = bytes(DIGEST_SIZE)
"""Digest of the empty history."""

_INSTRUCTION_ROLES = frozenset({"system", "developer"})
# Beyond this, several integers share one float.
_EXACT_INTEGERS = 2.0**53
# Beyond this range, most JSON libraries read an integer as the nearest float.
_SMALLEST_INTEGER, _LARGEST_INTEGER = -(2**63), 2**64 - 1


def message_digest(message: ChatMessage) -> bytes:
    """Return 16 bytes that are equal for every faithful echo of ``message``, read on its own."""
    return extend_digest(ROOT_DIGEST, message)


def extend_digest(previous: bytes, message: ChatMessage, *, reference: int = 0) -> bytes:
    """Return the digest of a history extended by ``message``; ``reference`` is the call that a tool result answers."""
    calls = calls_of(message)
    parts = [message.role]
    # Only what every client preserves: some drop the name of an answer, or its text next to tool calls.
    if message.role != "assistant":
        parts += [message.content or "", message.name or ""]
    elif not calls:
        parts.append(_stripped(message.content))
    if message.role == "tool":
        parts.append(str(reference))
    for call in calls:
        parts += [call.name, canonical_arguments(call.arguments)]
    # Each part is prefixed with its length, so that no two lists of parts have the same text.
    text = "".join([f"{len(part)}:{part}" for part in parts])
    # JSON may carry lone surrogates, which strict UTF-8 refuses.
    return blake2b(previous + text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_SIZE).digest()


def canonical_arguments(text: str) -> str:
    """Return tool arguments as JSON with sorted keys, so that reserialising changes nothing; other text unchanged.

    ``2.0`` equals ``2`` and empty arguments equal ``{}``, because clients in other languages write them so. Integers of
    more than 64 bits equal the nearest float, because most JSON libraries read them as such.
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
    # JSON libraries of other languages write 2.0 as 2.
    if value in (float("inf"), float("-inf")):
        # Both are infinite as floats, but 1e400 and 1e500 are not the same number.
        _refuse_number(literal)
    return int(value) if value.is_integer() and abs(value) < _EXACT_INTEGERS else value


def _parse_int(literal: str) -> float | int:
    value = int(literal)
    return value if _SMALLEST_INTEGER <= value <= _LARGEST_INTEGER else _parse_float(literal)


def _refuse_number(literal: str) -> NoReturn:
    msg = f"{literal} cannot be compared as a number"
    raise ValueError(msg)


def prefix_digests(messages: Sequence[ChatMessage]) -> bytes:
    """Return the digests of all prefixes of ``messages``, 16 bytes each, concatenated.

    Leading instructions (system or developer messages) are covered by ``system_digest`` instead: up to their end the
    digest is ``ROOT_DIGEST``.
    """
    num_instructions = num_leading_instructions(messages)
    # The calls that a tool result may answer, and the number of results before it.
    calls: tuple[ToolCall, ...] = ()
    num_results = 0
    digests, digest = [ROOT_DIGEST] * num_instructions, ROOT_DIGEST
    for message in messages[num_instructions:]:
        # A result refers to its call by position: some clients drop or rename ids, and swapped results must differ.
        named = (i for i, call in enumerate(calls) if call.id == message.tool_call_id)
        reference = next(named, num_results) if message.tool_call_id else num_results
        digest = extend_digest(digest, message, reference=reference)
        if message.role == "assistant":
            calls, num_results = message.tool_calls, 0
        elif message.role == "tool":
            num_results += 1
        digests.append(digest)
    return b"".join(digests)


def num_leading_instructions(messages: Sequence[ChatMessage]) -> int:
    """Return the number of system or developer messages at the start of the history."""
    return sum(1 for _ in takewhile(lambda message: message.role in _INSTRUCTION_ROLES, messages))


def system_digest(messages: Sequence[ChatMessage]) -> bytes:
    """Return the digest of the leading instructions."""
    digest = ROOT_DIGEST
    for message in messages[: num_leading_instructions(messages)]:
        digest = extend_digest(digest, message)
    return digest


def tools_digest(tools: Sequence[Tool]) -> bytes:
    """Return the digest of the tools in their order; the order of keys within a schema does not matter."""
    return _json_digest([[tool.name, tool.description, tool.parameters] for tool in tools])


def options_digest(template_kwargs: Mapping[str, Any]) -> bytes:
    """Return the digest of the chat template's options."""
    return _json_digest(template_kwargs)


def _json_digest(value: Any) -> bytes:
    if not value:
        return ROOT_DIGEST
    text = json.dumps(value, sort_keys=True, default=lambda it: dict(it) if isinstance(it, Mapping) else repr(it))
    return blake2b(text.encode(), digest_size=DIGEST_SIZE).digest()


def is_echo(stored: ChatMessage, echoed: ChatMessage) -> bool:
    """Return whether ``echoed`` is a faithful client's version of ``stored``, given that their digests are equal."""
    if stored is echoed or stored == echoed:
        return True
    if stored.role != "assistant":
        return True  # the digest covers everything
    if stored.name and echoed.name and stored.name != echoed.name:
        return False
    if _stripped(echoed.reasoning) not in ("", _stripped(stored.reasoning)):
        return False
    left, right = _stripped(stored.content), _stripped(echoed.content)
    if left == right:
        return True
    if stored.tool_calls and not echoed.tool_calls and (quoted := read_quoted(echoed.content)):
        right = _stripped(quoted.text)
    # A missing text next to calls is an echo only with the ids issued here: other answers have the same calls.
    return bool(stored.tool_calls) and right in ("", left) and has_same_calls(stored, echoed)


def says_the_same(stored: ChatMessage, echoed: ChatMessage) -> bool:
    """Return whether ``echoed`` is a faithful client's version of ``stored``, each read on its own."""
    return stored == echoed or (message_digest(stored) == message_digest(echoed) and is_echo(stored, echoed))


def has_same_calls(stored: ChatMessage, echoed: ChatMessage) -> bool:
    """Return whether the call ids are those of ``stored``, which proves the origin: ids are never issued twice."""
    return [call.id for call in stored.tool_calls] == [call.id for call in calls_of(echoed)]


def _stripped(text: str | None) -> str:
    return (text or "").strip()


_MARK = "Calling tools:\n"
_MAX_CHARACTERS = 1 << 16


@frozen
class Quoted:
    """The text before the calls, and the calls."""

    text: str
    calls: tuple[ToolCall, ...]


def calls_of(message: ChatMessage) -> tuple[ToolCall, ...]:
    """Return the calls of an answer, whether sent as calls or quoted in its text."""
    if message.tool_calls or message.role != "assistant":
        return message.tool_calls
    quoted = read_quoted(message.content)
    return () if quoted is None else quoted.calls


def read_quoted(content: str | None) -> Quoted | None:
    """Return the calls quoted at the end of a text; ``None`` for any other text. Never raises."""
    if content is None or _MARK not in content:
        return None
    text, _, listing = content.rpartition(_MARK)
    # ``literal_eval`` of a client's text: the length limit bounds its time and memory.
    if len(listing) > _MAX_CHARACTERS:
        return None
    calls: list[ToolCall] = []
    try:
        for raw in ast.literal_eval(listing.strip()):
            function, call_id = raw["function"], raw["id"]
            name, arguments = function["name"], function["arguments"]
            if not isinstance(call_id, str) or not isinstance(name, str):
                return None
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, allow_nan=False)
            calls.append(ToolCall(id=call_id, name=name, arguments=written))
    except (ValueError, TypeError, KeyError, SyntaxError, RecursionError, MemoryError):
        return None
    return Quoted(text, tuple(calls)) if calls else None


# ------------------------------------------------------------------------------------------------------- reassembly

Lookup = Callable[[InteractionId], Interaction]
"""Finds an interaction of one session by its id."""


def lookup_in(record: SessionRecord) -> Lookup:
    """Return a lookup in ``record``, which raises ``ExportError`` for unknown ids."""
    by_id = {interaction.id: interaction for interaction in record.interactions}

    def lookup(interaction_id: InteractionId) -> Interaction:
        try:
            return by_id[interaction_id]
        except KeyError:
            raise ExportError(
                f"Session {record.id} refers to interaction {interaction_id}, which it lacks; the record is damaged."
            ) from None

    return lookup


def ancestry(
    interaction: Interaction, lookup: Lookup, parent_of: Callable[[Interaction], InteractionId | None]
) -> list[Interaction]:
    """Return the interaction and its ancestors, root first.

    Raises:
        ExportError: an ancestor was requested after its descendant.
    """
    path = [interaction]
    while (parent_id := parent_of(path[-1])) is not None:
        parent = lookup(parent_id)
        if parent.order >= path[-1].order:
            raise ExportError(f"Interaction {path[-1].id} continues one that was asked later; the record is damaged.")
        path.append(parent)
    path.reverse()
    return path


def full_history(interaction: Interaction, lookup: Lookup, *, with_answer: bool = True) -> tuple[ChatMessage, ...]:
    """Return all stored messages of an interaction, its answer last (if it has one and ``with_answer``)."""
    messages: list[ChatMessage] = []
    for turn in ancestry(interaction, lookup, attrgetter("parent")):
        go_on(messages, turn.messages, turn.num_instructions, turn.num_kept)
        if turn.output is not None and (with_answer or turn is not interaction):
            messages.append(turn.output)
    return tuple(messages)


def go_on(
    messages: list[ChatMessage], new: Sequence[ChatMessage], num_instructions: int | None, num_kept: int | None
) -> None:
    """Extend the first ``num_kept`` of ``messages`` (``None``: all) in place by ``new``.

    The first ``num_instructions`` of ``new`` replace the old instructions.
    """
    if num_kept is not None:
        del messages[num_kept:]
    if num_instructions is not None:
        messages[: num_leading_instructions(messages)] = new[:num_instructions]
    messages.extend(new[num_instructions or 0 :])


def without_instructions(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """Return the messages after the leading system or developer messages."""
    return messages[num_leading_instructions(messages) :]


def token_path(interaction: Interaction, lookup: Lookup) -> list[Interaction]:
    """Return the interaction and its token parents, root first."""
    return ancestry(interaction, lookup, attrgetter("token_parent"))


def prompt_ids(interaction: Interaction, lookup: Lookup) -> Ints:
    """Return the ids of the whole prompt, int32 [T]."""
    parts: list[Ints] = []
    for turn in token_path(interaction, lookup):
        parts.append(turn.prompt_suffix)
        if turn is not interaction and turn.completion is not None:
            parts.append(turn.completion.token_ids)
    return as_ints(np.concatenate(parts))


def full_ids(interaction: Interaction, lookup: Lookup) -> Ints:
    """Return the ids of the prompt and of the sampled output, int32 [T]."""
    prompt = prompt_ids(interaction, lookup)
    if interaction.completion is None:
        return prompt
    return as_ints(np.concatenate([prompt, interaction.completion.token_ids]))


def longest_token_ancestor(token_ids: Ints, parent: Interaction, lookup: Lookup) -> tuple[Interaction, int] | None:
    """Return the nearest conversational ancestor whose exact ids begin ``token_ids``, and their number.

    ``parent`` is tried first. Every interaction on the way is compared at most once, so the work is bounded by the ids
    that the ancestors store.
    """
    # How far the ids of an interaction agree to their end; -1 if they do not.
    lengths: dict[InteractionId, int] = {}
    ancestor: Interaction | None = parent
    while ancestor is not None:
        path: list[Interaction] = []
        turn_id: InteractionId | None = ancestor.id
        while turn_id is not None and turn_id not in lengths:
            path.append(lookup(turn_id))
            turn_id = path[-1].token_parent
        # Root first, because a turn agrees from where its token parent agreed.
        for turn in reversed(path):
            end = 0 if turn.token_parent is None else lengths[turn.token_parent]
            parts = () if turn.completion is None else (turn.prompt_suffix, turn.completion.token_ids)
            for part in parts:
                # A slice that is cut off by the end of ``token_ids`` is shorter than the part, and therefore not equal.
                start, end = end, end + len(part)
                if start < 0 or not np.array_equal(token_ids[start:end], part):
                    end = -1
            lengths[turn.id] = end if parts else -1
        if lengths[ancestor.id] >= 0:
            return ancestor, lengths[ancestor.id]
        ancestor = None if ancestor.parent is None else lookup(ancestor.parent)
    return None
