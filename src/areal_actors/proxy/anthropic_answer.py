"""The parts of an Anthropic message that a finished answer and a stream share: blocks, end, usage."""

from __future__ import annotations

from typing import Any

from areal_actors.domain import Answer, ChatMessage, FinishReason, ToolCall
from areal_actors.errors import Unavailable
from areal_actors.proxy.anthropic_messages import format_input, sign_thought

__all__ = ["format_blocks", "format_end", "format_usage"]


def format_blocks(message: ChatMessage) -> list[dict[str, Any]]:
    """Thinking, text and calls, in this order. There is always a block: many agents read the first one unasked."""
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": sign_thought(message.reasoning)})
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content or "", "citations": None})
    return blocks + [_format_call(call) for call in message.tool_calls]


def _format_call(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": format_input(call.arguments)}


def format_end(answer: Answer) -> dict[str, Any]:
    """Why the answer ended, in Anthropic's words. Agents run a tool on ``tool_use`` alone.

    Raises:
        Unavailable: the engine aborted it.
    """
    finish = answer.completion.finish
    if finish is FinishReason.ABORT:
        raise Unavailable("The generation was aborted before it was complete; the request may be repeated.")
    if answer.message.tool_calls and finish is FinishReason.STOP:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if answer.stop_sequence is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_sequence}
    is_cut = finish is FinishReason.LENGTH
    return {"stop_reason": "max_tokens" if is_cut else "end_turn", "stop_sequence": None}


def format_usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Token counts. ``input_tokens`` is the whole prompt, as ``count_tokens`` counts it.

    What the engine took from its prefix cache is no part of it that would have a price of its own; clients add the
    three counts of the prompt up.
    """
    return {
        "input_tokens": prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": completion_tokens,
    }
