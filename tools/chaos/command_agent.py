"""An agent that is a command: it starts quickly, and speaks HTTP by the standard library."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any
from urllib.request import Request, urlopen


def main() -> None:
    """Ask a few times, with pauses; print the share of characters that are digits."""
    problem = json.load(sys.stdin)
    plan = random.Random(problem["number"])
    messages: list[Any] = [{"role": "user", "content": problem["question"]}]
    text = ""
    for turn in range(plan.randint(1, 6)):
        body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 4}).encode()
        headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
        with urlopen(Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)) as answer:
            text = json.load(answer)["choices"][0]["message"]["content"] or ""
        time.sleep(plan.choice((0.0, 0.05, 0.3)))
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": str(turn)}]
    sys.stdout.write(f"{sum(character.isdigit() for character in text) / max(len(text), 1)}\n")


main()
