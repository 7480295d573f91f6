"""The smallest job, which the tests train: random weights learn to write digits, in seconds on any CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openai import AsyncOpenAI


def problems(num: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield ``num`` prompts that differ by a number."""
    for index in range(num):
        yield {"question": f"say {seed + index}"}


class TinyAgent:
    """Takes one turn; the reward is the share of characters that are digits."""

    def __init__(self, max_tokens: int = 12) -> None:
        self.max_tokens = max_tokens

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Send one request, and return the share of digits in the answer."""
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
        )
        completion = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": data["question"]}], max_tokens=self.max_tokens
        )
        text = completion.choices[0].message.content or ""
        return sum(character.isdigit() for character in text) / max(len(text), 1)
