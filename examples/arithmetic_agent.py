"""A one-turn agent that adds and subtracts. ``areal-actors train examples/arithmetic.yaml`` trains its model.

Three worked sums precede the question; without them, a small model answers in sentences, and no answer is correct.
The sums are split into a training and a held-out part. The agent answers the ``question`` of any problem whose
``answer`` is a text to match, such as those of many reasoning-gym generators.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from openai import AsyncOpenAI

WORKED = (("4 + 3 =", "7"), ("9 - 5 =", "4"), ("6 + 8 =", "14"))


def problems(num: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the first ``num`` of the 357 sums of 1 to 20 and 1 to 9, shuffled by ``seed``, each once."""
    sums = [(a, sign, b) for a in range(1, 21) for b in range(1, 10) for sign in "+-"]
    random.Random(seed).shuffle(sums)
    rows = [{"question": f"{a} {sign} {b} =", "answer": str(a + b if sign == "+" else a - b)} for a, sign, b in sums]
    shown = {question for question, _ in WORKED}
    yield from [row for row in rows if row["question"] not in shown][:num]


class ArithmeticAgent:
    """Asks one question; the reward is 1 if the answer is the correct number."""

    def __init__(self, temperature: float = 1.0, max_tokens: int = 8) -> None:
        self.temperature = temperature
        self.max_tokens = max_tokens

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Work on one problem, and return its reward."""
        injected: dict[str, Any] = {name: extra_kwargs.get(name) for name in ("base_url", "api_key", "http_client")}
        client = AsyncOpenAI(**injected)
        completion = await client.chat.completions.create(
            model="policy",
            messages=create_messages(data["question"]),
            temperature=self.temperature,
            max_tokens=self.max_tokens,
        )
        answer = (completion.choices[0].message.content or "").strip()
        return float(answer == data["answer"])


def create_messages(question: str) -> list[Any]:
    """Return the prompt: the instruction, the worked sums, the question."""
    messages = [{"role": "system", "content": "Reply with the number."}]
    for asked, answered in WORKED:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return [*messages, {"role": "user", "content": question}]
