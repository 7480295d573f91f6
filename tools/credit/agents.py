"""Agents of different shapes with the same task: the turns that decide the reward are to be written in digits.

``OneConversation`` is the reference: one question, one answer. The others do the same in a sub-agent, before a
compaction, in four attempts. The reward is between 0 and 1 in all of them but ``Graded``, whose rewards add up to 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["AGENTS", "problems"]

Messages = list[dict[str, str]]


def problems(num: int, seed: int) -> Iterator[dict[str, Any]]:
    """``num`` prompts that differ by a number."""
    for index in range(num):
        yield {"question": f"say {seed + index}"}


def digits(texts: Sequence[str]) -> float:
    """The share of characters other than spaces that are digits; 0 for empty texts.

    Tokens such as `` 12`` begin with a space: if that counted, a policy that says nothing else would be stuck at 2/3.
    """
    text = "".join("".join(texts).split())
    return sum(character.isdigit() for character in text) / max(len(text), 1)


class Chat:
    """One conversation with the policy."""

    def __init__(self, http_client: Any, base_url: str, messages: Messages | None = None) -> None:
        self.http_client = http_client
        self.base_url = base_url
        self.messages: Messages = list(messages or [])
        self.last_id = ""

    async def ask(self, question: str, *, max_tokens: int) -> str:
        """Ask on in this conversation, and return the answer's text."""
        self.messages.append({"role": "user", "content": question})
        body = {"model": "policy", "messages": self.messages, "max_tokens": max_tokens}
        response = await self.http_client.post(f"{self.base_url}/chat/completions", json=body)
        document = response.raise_for_status().json()
        text = document["choices"][0]["message"]["content"] or ""
        self.messages.append({"role": "assistant", "content": text})
        self.last_id = document["id"]
        return str(text)


class OneConversation:
    """One answer."""

    async def run(self, data: Mapping[str, Any], base_url: str, http_client: Any, **extra_kwargs: Any) -> float:
        """Ask once."""
        return digits([await Chat(http_client, base_url).ask(data["question"], max_tokens=8)])


class SubAgent:
    """A sub-agent writes the digits; then the main agent says a few words in a conversation without it."""

    async def run(self, data: Mapping[str, Any], base_url: str, http_client: Any, **extra_kwargs: Any) -> float:
        """Hand over, then report."""
        found = await Chat(http_client, base_url).ask(data["question"], max_tokens=8)
        await Chat(http_client, base_url).ask("report", max_tokens=4)
        return digits([found])


class FirstTurn:
    """The first of 21 answers decides."""

    async def run(self, data: Mapping[str, Any], base_url: str, http_client: Any, **extra_kwargs: Any) -> float:
        """Ask, then go on for 20 turns of one token."""
        chat = Chat(http_client, base_url)
        found = await chat.ask(data["question"], max_tokens=8)
        for _ in range(20):
            await chat.ask("on", max_tokens=1)
        return digits([found])


class Compaction:
    """Two turns decide; then their history is replaced by a summary, and one more turn follows."""

    async def run(self, data: Mapping[str, Any], base_url: str, http_client: Any, **extra_kwargs: Any) -> float:
        """Work, compact, end."""
        chat = Chat(http_client, base_url)
        found = [await chat.ask(question, max_tokens=4) for question in (data["question"], "more")]
        await Chat(http_client, base_url).ask("summary: two numbers were said. end", max_tokens=4)
        return digits(found)


class FourAttempts:
    """Four conversations that know nothing of each other; the reward is that of all of them."""

    async def run(self, data: Mapping[str, Any], base_url: str, http_client: Any, **extra_kwargs: Any) -> float:
        """Try four times."""
        return digits([await Chat(http_client, base_url).ask(data["question"], max_tokens=4) for _ in range(4)])


class Graded:
    """Four conversations, each of which has a reward; they add up to 4."""

    async def run(
        self, data: Mapping[str, Any], base_url: str, http_client: Any, **extra_kwargs: Any
    ) -> dict[str, float]:
        """Try four times, and reward each attempt."""
        rewards = {}
        for _ in range(4):
            chat = Chat(http_client, base_url)
            text = await chat.ask(data["question"], max_tokens=4)
            rewards[chat.last_id] = digits([text])
        return rewards


class SideCall:
    """A call that has nothing to do with the reward stands before the answer that decides it."""

    async def run(self, data: Mapping[str, Any], base_url: str, http_client: Any, **extra_kwargs: Any) -> float:
        """Ask for a title, then for the answer."""
        await Chat(http_client, base_url).ask("title", max_tokens=4)
        return digits([await Chat(http_client, base_url).ask(data["question"], max_tokens=8)])


AGENTS: Mapping[str, Any] = {
    "one conversation": OneConversation,
    "sub-agent": SubAgent,
    "first turn": FirstTurn,
    "compaction": Compaction,
    "four attempts": FourAttempts,
    "dense rewards": Graded,
    "side call": SideCall,
}
"""The agents by name."""
