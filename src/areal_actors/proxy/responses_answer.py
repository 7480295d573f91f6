"""The ``response`` object of OpenAI's Responses API: output items, usage, and echoed request parameters.

Every key that the SDK's model requires is present, including those that only strict clients check. ``responses_stream``
has the events that lead to the object.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from attrs import frozen

from areal_actors.domain import Answer, FinishReason, InteractionId
from areal_actors.errors import Unavailable
from areal_actors.proxy.failures import Failure
from areal_actors.proxy.logprobs import Decode, format_logprobs
from areal_actors.proxy.responses_items import format_item_id
from areal_actors.proxy.responses_request import ParsedResponse

__all__ = [
    "Envelope",
    "format_call",
    "format_output",
    "format_output_logprobs",
    "format_reasoning",
    "format_text",
    "is_cut",
]

_REFUSED = range(400, 500)
_TOO_MANY = 429


@frozen(kw_only=True)
class Envelope:
    """A response without its output, from the request to its end. ``created`` is in seconds since 1970."""

    parsed: ParsedResponse
    created: int
    model: str
    decode: Decode | None = None

    def begin(self, interaction: InteractionId) -> dict[str, Any]:
        """Return the response as it is while the answer is in progress."""
        return self._format(interaction, "in_progress", [])

    def end(self, answer: Answer, output: list[dict[str, Any]], *, completed: int) -> dict[str, Any]:
        """Return the finished response; its status is ``incomplete`` if the limit of new tokens cut the answer."""
        cut = is_cut(answer)
        formatted = self._format(answer.interaction, "incomplete" if cut else "completed", output)
        formatted["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        formatted["completed_at"] = None if cut else completed
        formatted["usage"] = self._format_usage(answer)
        return formatted

    def fail(self, interaction: InteractionId, output: list[dict[str, Any]], failure: Failure) -> dict[str, Any]:
        """Return the failed response."""
        formatted = self._format(interaction, "failed", output)
        formatted["error"] = {"code": _error_code(failure), "message": failure.message}
        return formatted

    def _format(self, interaction: InteractionId, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": interaction,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": output,
            "usage": None,
            **self.parsed.echo,
        }

    def _format_usage(self, answer: Answer) -> dict[str, Any]:
        usage = answer.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": _num_reasoning_tokens(answer, self.decode)},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def is_cut(answer: Answer) -> bool:
    """Return whether the answer ended because it reached its maximum length.

    Raises:
        Unavailable: the engine aborted it.
    """
    finish = answer.completion.finish
    if finish is FinishReason.ABORT:
        raise Unavailable("The generation was aborted before it was complete; the request may be repeated.")
    return finish is FinishReason.LENGTH


def _error_code(failure: Failure) -> str:
    """Return one of the few error codes that a response object may have."""
    if failure.status == _TOO_MANY:
        return "rate_limit_exceeded"
    return "invalid_prompt" if failure.status in _REFUSED else "server_error"


def _num_reasoning_tokens(answer: Answer, decode: Decode | None) -> int:
    """Return the number of sampled tokens up to the end of the reasoning; 0 if it cannot be determined."""
    reasoning, tokens = answer.message.reasoning, answer.completion.token_ids.tolist()
    if not reasoning or decode is None or reasoning not in decode(tokens):
        return 0
    # A text that is in the decoded prefix is in every longer one too, so bisection finds the first such prefix.
    return bisect_left(range(len(tokens)), True, key=lambda count: reasoning in decode(tokens[:count]))


# ------------------------------------------------------------------------------------------------- output items


def format_output(answer: Answer, *, has_logprobs: bool, decode: Decode | None) -> list[dict[str, Any]]:
    """Return the items of a whole answer: reasoning, a message, calls. An empty answer becomes an empty message."""
    message, interaction = answer.message, answer.interaction
    items: list[dict[str, Any]] = []
    if message.reasoning:
        items.append(format_reasoning(format_item_id("rs", 0, interaction), message.reasoning))
    if message.content or not message.tool_calls:
        logprobs = format_output_logprobs(answer, decode) if has_logprobs else []
        items.append(format_text(format_item_id("msg", 0, interaction), message.content or "", logprobs))
    for index, call in enumerate(message.tool_calls):
        item_id = format_item_id("fc", index, interaction)
        items.append(format_call(item_id, call_id=call.id, name=call.name, arguments=call.arguments))
    if is_cut(answer):
        items[-1]["status"] = "incomplete"
    return items


def format_reasoning(item_id: str, text: str | None, status: str = "completed") -> dict[str, Any]:
    """Return a reasoning item; its content is empty while there is no text."""
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {
        "id": item_id,
        "type": "reasoning",
        "summary": [],
        "content": content,
        "encrypted_content": None,
        "status": status,
    }


def format_text(
    item_id: str, text: str | None, logprobs: Sequence[dict[str, Any]] = (), status: str = "completed"
) -> dict[str, Any]:
    """Return a message item; its content is empty while there is no text."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
    content = [] if text is None else [part]
    return {"id": item_id, "type": "message", "role": "assistant", "content": content, "status": status}


def format_call(item_id: str, *, call_id: str, name: str, arguments: str, status: str = "completed") -> dict[str, Any]:
    """Return an item for a function call."""
    return {
        "id": item_id,
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def format_output_logprobs(answer: Answer, decode: Decode | None) -> list[dict[str, Any]]:
    """Return one entry per sampled token."""
    entries = format_logprobs(answer.completion, decode)
    for entry in entries:
        for token in (entry, *entry["top_logprobs"]):
            # Unlike in chat completions, ``bytes`` must be a list here; it is empty for a part of a character.
            token["bytes"] = token["bytes"] or []
    return entries
