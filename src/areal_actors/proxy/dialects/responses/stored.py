"""Stored answers in the form of Responses: the ``response`` object, the items of its input, and references to items.

A reference (``item_reference``) is an item that the client names by its id instead of sending it. It is replaced in the
body before that is parsed, so that a history of references and one of items are the same history.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_actors.domain import Answer, CompletionRequest, Interaction, InteractionId, Usage
from areal_actors.errors import InvalidRequest, NotFound
from areal_actors.proxy.dialects.base import Parsed, TokenBytes
from areal_actors.proxy.dialects.responses.answer import ResponsesDialect
from areal_actors.proxy.dialects.responses.request import ECHO, ITEM_ID, RESPONSE_PREFIX, is_reference


def find_references(body: Mapping[str, Any]) -> frozenset[InteractionId]:
    """Return the interactions whose items the input refers to. An id of another form is left to the parser."""
    items = body.get("input")
    ids = (raw.get("id") for raw in items if is_reference(raw)) if isinstance(items, list) else ()
    matches = (ITEM_ID.fullmatch(name) for name in ids if isinstance(name, str))
    return frozenset(InteractionId(f"{RESPONSE_PREFIX}{match[1]}") for match in matches if match is not None)


def replace_references(body: Mapping[str, Any], answers: Mapping[InteractionId, Interaction]) -> Mapping[str, Any]:
    """Return ``body`` with items in the place of references to them.

    Raises:
        InvalidRequest: an id that is not that of an item of ``answers``.
    """
    items = {item["id"]: item for each in answers.values() for item in format_stored_response(each)["output"]}
    replaced: list[Any] = []
    for index, raw in enumerate(body["input"]):
        if not is_reference(raw):
            replaced.append(raw)
            continue
        name = raw.get("id")
        if name in items:
            replaced.append(items[name])
            continue
        # A stream may have split a text in several items. The first of them has all of the text when it is stored, so
        # a reference to a later one adds nothing.
        match = ITEM_ID.fullmatch(name) if isinstance(name, str) else None
        kind = str(name).partition("_")[0]
        if match is None or kind not in {"msg", "rs"} or f"{kind}_0_{match[1]}" not in items:
            raise InvalidRequest(
                f"input[{index}] refers to item {name!r}, which no answer of this session has; send the item.",
                param=f"input[{index}]",
            )
    return {**body, "input": replaced}


_SAMPLING = ("temperature", "top_p")


def format_stored_response(
    turn: Interaction, *, model: str = "policy", token_bytes: TokenBytes | None = None
) -> dict[str, Any]:
    """Return the ``response`` object. What is not stored has its default: the time is 0, and there are no tools."""
    sampling = {} if turn.sampling is None else {name: getattr(turn.sampling, name) for name in _SAMPLING}
    echo = {**ECHO, "previous_response_id": turn.parent, "store": turn.is_stored, **sampling}
    dialect = ResponsesDialect(model=model, token_bytes=token_bytes, clock=lambda: 0.0)
    parsed = Parsed(request=CompletionRequest(messages=()), echo=echo)
    return dialect.format_answers(parsed, [_answer(turn)]) | {"completed_at": None}


def _answer(turn: Interaction) -> Answer:
    if turn.output is None or turn.completion is None:
        raise NotFound(f"Response {turn.id} has no answer.")
    usage = Usage(prompt_tokens=turn.num_prompt_tokens, completion_tokens=len(turn.completion.token_ids))
    return Answer(interaction=turn.id, message=turn.output, completion=turn.completion, usage=usage)
