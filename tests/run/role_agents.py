"""An agent, a user simulator and a judge that ask the same model in one episode."""

from __future__ import annotations

from openai import AsyncOpenAI

from areal_actors.client import role_base_url


class Simulated:
    """Two turns of the agent with a simulated user between them, and a judge that continues its last answer."""

    def __init__(self, agent: str | None = None) -> None:
        self.agent = agent

    async def run(self, data, **extra_kwargs):
        """Return a reward that differs between members."""
        url, key = extra_kwargs["base_url"], extra_kwargs["api_key"]
        own = url if self.agent is None else role_base_url(url, self.agent)
        async with (
            AsyncOpenAI(base_url=own, api_key=key) as agent,
            AsyncOpenAI(base_url=role_base_url(url, "user"), api_key=key) as user,
            AsyncOpenAI(base_url=url, api_key=key, default_headers={"x-areal-agent": "judge"}) as judge,
        ):
            messages = [{"role": "user", "content": data["question"]}]
            first = await ask(agent, messages)
            follow_up = await ask(user, [{"role": "user", "content": "Ask for more digits."}])
            messages += [{"role": "assistant", "content": first}, {"role": "user", "content": follow_up}]
            second = await ask(agent, messages)
            messages += [{"role": "assistant", "content": second}, {"role": "user", "content": "Is it good?"}]
            verdict = await ask(judge, messages)
        return float(len(first + second + verdict) % 7)


async def ask(client, messages):
    """Return the text of one answer."""
    answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
    return answer.choices[0].message.content or ""
