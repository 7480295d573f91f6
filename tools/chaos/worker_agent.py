"""An agent that the service runs itself, in a process that may be killed as well."""

from __future__ import annotations

from typing import Any

from openai import OpenAI


class HeldOutAgent:
    """One turn with the SDK that waits; the reward is the share of characters that are digits."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Ask once, and count."""
        with OpenAI(base_url=extra_kwargs["base_url"], api_key=extra_kwargs["api_key"]) as client:
            completion = client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": data["question"]}], max_tokens=12
            )
        text = completion.choices[0].message.content or ""
        return sum(character.isdigit() for character in text) / max(len(text), 1)
