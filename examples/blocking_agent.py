"""The tiny job with a blocking agent, which uses the standard library only and runs in child processes."""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.request import Request, urlopen


class BlockingAgent:
    """Takes one turn; the reward is the share of digits. URL and key of the model are in the environment."""

    def __init__(self, max_tokens: int = 12) -> None:
        self.max_tokens = max_tokens

    def run(self, data: dict[str, Any], **_: Any) -> float:
        """Send one request, and return the share of digits in the answer."""
        messages = [{"role": "user", "content": data["question"]}]
        body = {"model": "policy", "messages": messages, "max_tokens": self.max_tokens}
        request = Request(
            f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
            data=json.dumps(body).encode(),
            headers={"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"},
        )
        with urlopen(request) as response:
            text = json.load(response)["choices"][0]["message"]["content"] or ""
        return sum(character.isdigit() for character in text) / max(len(text), 1)
