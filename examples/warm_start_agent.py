"""A task that a random model never solves by chance: to spell two digits, "four seven" for "4 7"."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from openai import AsyncOpenAI

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def problems(num: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the first ``num`` pairs of digits: those to train on with seed 0, and those held out with any other."""
    # Every digit is in both parts, at both places.
    pairs = [(n // 10, n % 10) for n in range(100) if ((n // 10 + n % 10) % 5 == 0) == bool(seed)]
    for first, second in pairs[:num]:
        yield {"question": f"{first} {second}", "answer": f"{WORDS[first]} {WORDS[second]}"}


class SpellingAgent:
    """Takes one turn; the reward is 1 for exactly the right words, and 0 for anything else."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Send the digits, and compare the answer."""
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
        )
        completion = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": data["question"]}], max_tokens=16
        )
        return float(completion.choices[0].message.content == data["answer"])


def conversations() -> Iterator[dict[str, Any]]:
    """Yield the problems to train on with their answers, for the phase sft."""
    for problem in problems(100, seed=0):
        question = {"role": "user", "content": problem["question"]}
        yield {"messages": [question, {"role": "assistant", "content": problem["answer"]}]}


if __name__ == "__main__":
    sys.stdout.writelines(json.dumps(conversation) + "\n" for conversation in conversations())
