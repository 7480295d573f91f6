"""A plain script with requests: it blocks, and reads URL and key of the model from its environment."""

from __future__ import annotations

import os
from typing import Any

import requests


class RequestsAgent:
    """Asks two questions in one conversation. The reward is the share of digits in the last answer."""

    def __init__(self, max_tokens: int = 12) -> None:
        self.max_tokens = max_tokens

    def run(self, data: dict[str, Any], **_: Any) -> float:
        """Ask both questions, and return the reward."""
        messages: list[Any] = []
        text = ""
        with requests.Session() as session:
            session.headers["authorization"] = f"Bearer {os.environ['OPENAI_API_KEY']}"
            for question in (data["question"], "And ten times that?"):
                messages.append({"role": "user", "content": question})
                text = self.ask(session, messages)
                messages.append({"role": "assistant", "content": text})
        return sum(character.isdigit() for character in text) / max(len(text), 1)

    def ask(self, session: requests.Session, messages: list[Any]) -> str:
        """Request one turn of the model."""
        url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
        body = {"model": "policy", "messages": messages, "max_tokens": self.max_tokens}
        response = session.post(url, json=body, timeout=600)
        response.raise_for_status()
        return response.json()["choices"][0]["message"]["content"] or ""
