"""An agent that must use a tool: it calls ``multiply`` with JSON arguments, reads the result and reports it.

Ordinary code against the OpenAI SDK; it knows nothing of training. ``areal-actors train examples/tool_agent.yaml``
gives it a base URL, a key and an HTTP client, and trains the model behind them on the rewards that ``run`` returns.
Without these it talks to the server of ``OPENAI_BASE_URL``.

The prompt shows one call and no answer: a small pretrained model then calls the tool now and then, seldom says what it
returned, and has both to learn.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessage

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two integers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]

DEMONSTRATION: list[Any] = [
    {"role": "system", "content": "Call multiply, then reply with its result."},
    {"role": "user", "content": "What is 123 times 456?"},
    {
        "role": "assistant",
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "multiply", "arguments": json.dumps({"a": 123, "b": 456})},
            }
        ],
    },
]

QUESTIONS = ("What is {a} times {b}?", "Multiply {a} by {b}.", "{a} * {b} = ?", "Compute the product of {a} and {b}.")

ATTEMPTED, CALLED, ANSWERED, SOLVED = 0.1, 0.3, 0.5, 1.0
"""Rewards: a call was attempted; it was the right one; the answer mentions the result; the answer is the result."""


def problems(num: int, seed: int) -> Iterator[dict[str, Any]]:
    """``num`` products of numbers of three digits. Equal seeds give equal problems."""
    rng = random.Random(seed)
    for _ in range(num):
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        yield {"question": rng.choice(QUESTIONS).format(a=a, b=b), "a": a, "b": b}


class ToolAgent:
    """Two turns: a tool call, then the answer. The bounds on new tokens leave little room around what is asked for."""

    def __init__(self, temperature: float = 1.0, max_call_tokens: int = 40, max_answer_tokens: int = 16) -> None:
        self.temperature = temperature
        self.max_call_tokens = max_call_tokens
        self.max_answer_tokens = max_answer_tokens

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Work on one problem; returns its reward."""
        client = AsyncOpenAI(**{k: extra_kwargs.get(k) for k in ("base_url", "api_key", "http_client")})
        messages = [*DEMONSTRATION, {"role": "user", "content": data["question"]}]
        called = await self.ask(client, messages, max_tokens=self.max_call_tokens)
        if not is_right_call(called, a=data["a"], b=data["b"]):
            return ATTEMPTED if called.tool_calls or "<tool_call>" in (called.content or "") else 0.0
        assert called.tool_calls
        product = data["a"] * data["b"]
        messages += [
            called.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": str(product)},
        ]
        answered = await self.ask(client, messages, max_tokens=self.max_answer_tokens)
        return grade(answered.content or "", product)

    async def ask(self, client: AsyncOpenAI, messages: list[Any], *, max_tokens: int) -> ChatCompletionMessage:
        """One turn of the model."""
        completion = await client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS, temperature=self.temperature, max_tokens=max_tokens
        )
        return completion.choices[0].message


def is_right_call(message: ChatCompletionMessage, *, a: int, b: int) -> bool:
    """Whether the message calls ``multiply`` once, with the two factors in either order."""
    calls = message.tool_calls or []
    if len(calls) != 1 or calls[0].type != "function" or calls[0].function.name != "multiply":
        return False
    try:
        arguments = json.loads(calls[0].function.arguments)
    except ValueError:
        return False
    return arguments in ({"a": a, "b": b}, {"a": b, "b": a})


def grade(answer: str, product: int) -> float:
    """How good the final answer is."""
    if answer.strip() == str(product):
        return SOLVED
    return ANSWERED if re.search(rf"\b{product}\b", answer) else CALLED
