"""An external agent that ``areal-actors serve`` trains; it needs only httpx.

In each episode it starts a session, asks, rewards the answer and finalizes. ``python serve_agent.py 50`` runs 50
episodes instead of 500. Set ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` to the values that the service prints.
"""

from __future__ import annotations

import asyncio
import os
import sys

import httpx


def share_of_digits(text: str) -> float:
    """Return the reward of an answer: the share of its characters that are digits."""
    return sum(character.isdigit() for character in text) / max(len(text), 1)


async def start_session(client: httpx.AsyncClient, number: int) -> dict[str, str]:
    """Start a session; while the service has no capacity, wait as long as ``Retry-After`` says."""
    response = await client.post("/rl/v1/start_session", json={"task_id": f"say-{number}"})
    if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
        await asyncio.sleep(float(response.headers["retry-after"]))
        return await start_session(client, number)
    return dict(response.raise_for_status().json())


async def run_episode(client: httpx.AsyncClient, number: int) -> float:
    """Run one episode in a new session, and return its reward."""
    session = await start_session(client, number)
    own = {"authorization": f"Bearer {session['api_key']}"}
    question = {"model": "policy", "max_tokens": 12, "messages": [{"role": "user", "content": f"say {number}"}]}
    answered = await client.post("/v1/chat/completions", json=question, headers=own)
    completion = answered.raise_for_status().json()
    reward = share_of_digits(completion["choices"][0]["message"]["content"] or "")
    rewarding = {"completion_id": completion["id"], "reward": reward}
    (await client.post("/rl/v1/set_reward", json=rewarding, headers=own)).raise_for_status()
    (await client.post("/rl/v1/finalize", json={"final_reward": reward}, headers=own)).raise_for_status()
    return reward


async def main(num_episodes: int, num_at_once: int = 32) -> None:
    """Run episodes until all are done, or until the service has finished training."""
    url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
    admin = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    numbers = iter(range(num_episodes))

    async def work(client: httpx.AsyncClient) -> None:
        for number in numbers:
            print(f"{number}: {await run_episode(client, number):.2f}")

    async with httpx.AsyncClient(base_url=url, headers=admin, timeout=60) as client:
        try:
            await asyncio.gather(*(work(client) for _ in range(num_at_once)))
        except (httpx.TransportError, httpx.HTTPStatusError) as error:
            print(f"The service has gone: {error!r}")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 500))
