"""Embed the library in a trio program: two agents run at once, each in a separate session."""

import trio
from openai import AsyncOpenAI

from areal_actors import Inference, open_inference


async def run_agent(inference: Inference, name: str) -> None:
    """Take one turn, and set the length of the answer as the reward."""
    async with inference.session(name) as session:
        async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            answer = await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": f"I am {name}."}], max_tokens=8
            )
        await session.set_reward(len(answer.choices[0].message.content or ""))
        (row,) = (await session.export()).trajectories
        print(name, f"earns {row.reward} for the tokens", *row.input_ids[row.loss_mask == 1])


async def main() -> None:
    """Run both agents; the engine samples their answers in one batch."""
    async with open_inference("tiny") as inference, trio.open_nursery() as nursery:
        for name in ("ada", "ben"):
            nursery.start_soon(run_agent, inference, name)


if __name__ == "__main__":
    trio.run(main)
