"""The parts of an Anthropic message that finished answers and streams share: blocks, stop reason, usage."""

from __future__ import annotations

from typing import Any

from areal_actors.domain import Answer, ChatMessage, FinishReason, ToolCall
from areal_actors.errors import Unavailable
from areal_actors.proxy.anthropic_messages import format_input, sign_thought

__all__ = ["format_blocks", "format_end", "format_usage"]


def format_blocks(message: ChatMessage) -> list[dict[str, Any]]:
    """Return thinking, text and tool call blocks, in this order. There is always at least one block."""
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": sign_thought(message.reasoning)})
    # Many agents read the first block without checking that there is one.
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content or "", "citations": None})
    return blocks + [_format_call(call) for call in message.tool_calls]


def _format_call(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": format_input(call.arguments)}


def format_end(answer: Answer) -> dict[str, Any]:
    """Return the stop reason of an answer in Anthropic's terms.

    Raises:
        Unavailable: the engine aborted it.
    """
    finish = answer.completion.finish
    if finish is FinishReason.ABORT:
        raise Unavailable("The generation was aborted before it was complete; the request may be repeated.")
    # Agents run tools on ``tool_use`` only; calls of an answer that was cut by its length may be incomplete.
    if answer.message.tool_calls and finish is FinishReason.STOP:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if answer.stop_sequence is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_sequence}
    is_cut = finish is FinishReason.LENGTH
    return {"stop_reason": "max_tokens" if is_cut else "end_turn", "stop_sequence": None}


def format_usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return token counts. ``input_tokens`` is the whole prompt, as ``count_tokens`` counts it."""
    return {
        "input_tokens": prompt_tokens,
        # Clients add the three counts of the prompt. Tokens from the engine's prefix cache are part of
        # ``input_tokens``, because they have no separate price here.
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": completion_tokens,
    }
