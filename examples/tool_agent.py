"""An agent that must use a tool: it calls ``multiply`` with JSON arguments, reads the result and reports it.

Ordinary code against the OpenAI SDK: it knows nothing of training. ``areal-actors train examples/tool_agent.yaml``
gives it a base URL, a key and an HTTP client, and trains the model behind them on the rewards that ``run`` returns.
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
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]

DEMONSTRATED = "A shelf holds {a} books. How many books are on {b} shelves?"
QUESTIONS = (
    "A box holds {a} pens. How many pens are in {b} boxes?",
    "A field has {a} rows of {b} plants. How many plants are there?",
    "One ticket costs {a} dollars. What do {b} tickets cost?",
    "A train makes {a} trips with {b} passengers each. How many passengers travel?",
)

ATTEMPTED, CALLED, ANSWERED, SOLVED = 0.1, 0.3, 0.5, 1.0
"""Rewards: a call was attempted; it was right; the answer holds the result; it is the sentence that was shown."""


def problems(num: int, seed: int) -> Iterator[dict[str, Any]]:
    """``num`` word problems with factors of three digits. Equal seeds give equal problems."""
    rng = random.Random(seed)
    for _ in range(num):
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        yield {"question": rng.choice(QUESTIONS).format(a=a, b=b), "a": a, "b": b}


class ToolAgent:
    """Two turns: a tool call, then the answer. ``num_demonstrations`` solved examples stand before the question."""

    def __init__(self, num_demonstrations: int = 2, temperature: float = 1.0) -> None:
        self.temperature = temperature
        pairs = [(123, 456), (728, 391), (505, 217)][:num_demonstrations]
        self.demonstrations = [message for a, b in pairs for message in demonstration(a, b)]

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Work on one problem; returns its reward."""
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
        )
        messages = [*self.demonstrations, {"role": "user", "content": data["question"]}]
        first = await self.ask(client, messages, max_tokens=48)
        arguments = parse_arguments(first)
        if arguments is None:
            return ATTEMPTED if "<tool_call>" in (first.content or "") or first.tool_calls else 0.0
        if sorted(arguments) != sorted((data["a"], data["b"])):
            return ATTEMPTED
        product = data["a"] * data["b"]
        assert first.tool_calls
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": str(product)}
        second = await self.ask(client, [*messages, first.model_dump(exclude_none=True), result], max_tokens=24)
        return grade(second.content or "", product)

    async def ask(self, client: AsyncOpenAI, messages: list[Any], *, max_tokens: int) -> ChatCompletionMessage:
        """One turn of the model."""
        completion = await client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS, temperature=self.temperature, max_tokens=max_tokens
        )
        return completion.choices[0].message


def demonstration(a: int, b: int) -> list[dict[str, Any]]:
    """A question, the call, its result and the answer."""
    call = {"name": "multiply", "arguments": json.dumps({"a": a, "b": b})}
    return [
        {"role": "user", "content": DEMONSTRATED.format(a=a, b=b)},
        {"role": "assistant", "tool_calls": [{"id": f"call_{a}", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": f"call_{a}", "content": str(a * b)},
        {"role": "assistant", "content": f"The answer is {a * b}."},
    ]


def parse_arguments(message: ChatCompletionMessage) -> tuple[int, int] | None:
    """The two factors of the first call, or ``None`` if it is no valid call of ``multiply``."""
    if not message.tool_calls or message.tool_calls[0].type != "function":
        return None
    function = message.tool_calls[0].function
    try:
        arguments = json.loads(function.arguments)
        return (int(arguments["a"]), int(arguments["b"])) if function.name == "multiply" else None
    except (ValueError, TypeError, KeyError):
        return None


def grade(answer: str, product: int) -> float:
    """How good the final answer is."""
    if re.fullmatch(rf"The answer is {product}\.", answer.strip()):
        return SOLVED
    return ANSWERED if str(product) in answer else CALLED
