"""Your own trio app: two agents at once, each in a session of its own, so that what they say is never mixed up."""

import trio
from openai import AsyncOpenAI

from areal_actors import Inference, open_inference


async def run_agent(inference: Inference, name: str) -> None:
    """One turn; the reward is the length of the answer."""
    async with inference.session(name) as session:
        async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            answer = await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": f"I am {name}."}], max_tokens=8
            )
        await session.set_reward(len(answer.choices[0].message.content or ""))
        (row,) = (await session.export()).trajectories
        print(name, f"earns {row.reward} for the tokens", *row.input_ids[row.loss_mask == 1])


async def main() -> None:
    """Both agents are answered from one batch."""
    async with open_inference("tiny") as inference, trio.open_nursery() as nursery:
        for name in ("ada", "ben"):
            nursery.start_soon(run_agent, inference, name)


if __name__ == "__main__":
    trio.run(main)
