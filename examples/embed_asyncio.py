"""Embed the library in an asyncio program: an agent talks to the model, and its session becomes a training row."""

import asyncio
from typing import Any

from openai import AsyncOpenAI

from areal_actors import open_inference


async def main() -> None:
    """Run two turns, set one reward at the end, and print the row."""
    async with open_inference("tiny") as inference, inference.session("dialogue") as session:
        client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
        messages: list[Any] = []
        for question in ("Name a number.", "Now its double."):
            messages.append({"role": "user", "content": question})
            answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
            messages.append(answer.choices[0].message)
        await client.close()
        await session.set_reward(1.0)  # for the last answer; the first one receives its discounted share
        row = (await session.export(discount=0.9, style="concat")).trajectories[0]
        for name in ("input_ids", "loss_mask", "logprobs", "versions", "returns"):
            print(f"{name:9}", *getattr(row, name).round(2))


if __name__ == "__main__":
    asyncio.run(main())
