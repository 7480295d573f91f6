"""An agent over a dataset whose episodes take different times, as with tools, and of which some always fail."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import anyio
from openai import AsyncOpenAI

FAILING = 7
"""Every so many problems, the agent raises."""


def problems(num: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield ``num`` prompts that differ by a number."""
    for index in range(num):
        yield {"question": f"say {seed + index}", "number": seed + index}


class ToolAgent:
    """Takes one to four turns with pauses between them; the reward is the share of characters that are digits."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Ask, wait for a tool, and ask again."""
        if data["number"] % FAILING == FAILING - 1:
            raise ValueError("the tool of this problem is broken")
        plan = random.Random(data["number"])
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
        )
        messages: list[Any] = [{"role": "user", "content": data["question"]}]
        text = ""
        for _ in range(plan.randint(1, 4)):
            completion = await client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
            text = completion.choices[0].message.content or ""
            await anyio.sleep(plan.choice((0.0, 0.02, 0.2)))
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and the next"}]
        return sum(character.isdigit() for character in text) / max(len(text), 1)
