"""The tiny job with Anthropic's SDK: two turns, the second with the answer of the first in its history."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anthropic import AsyncAnthropic


def problems(num: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield ``num`` prompts that differ by a number."""
    for index in range(num):
        yield {"question": f"say {seed + index}"}


class AnthropicAgent:
    """Asks twice; the reward is the share of characters of both answers that are digits."""

    def __init__(self, max_tokens: int = 12) -> None:
        self.max_tokens = max_tokens

    async def run(self, data: dict[str, Any], base_url: str, api_key: str, **extra_kwargs: Any) -> float:
        """Play the episode, and return its reward."""
        client = AsyncAnthropic(
            base_url=base_url.removesuffix("/v1"),  # the SDK adds /v1/messages, where OpenAI's adds /chat/completions
            api_key=api_key,
            http_client=extra_kwargs["http_client"],
        )
        messages: list[Any] = []
        text = ""
        for question in (data["question"], "again"):
            messages.append({"role": "user", "content": question})
            answer = await client.messages.create(
                model="policy", system="Write digits.", messages=messages, max_tokens=self.max_tokens
            )
            messages.append({"role": "assistant", "content": answer.content})
            text += "".join(block.text for block in answer.content if block.type == "text")
        return sum(character.isdigit() for character in text) / max(len(text), 1)
