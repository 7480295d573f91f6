"""The smallest task for an agent with a tool: put digits into it.

`python digits.py > solved.jsonl` writes solved problems in the prompt of mini-swe-agent, as in mini_swe_agent.jsonl.
They show a random model how a call is written. Most characters in their commands are letters: there is more to learn.
"""

from __future__ import annotations

import json
import random
import string
import sys
from collections.abc import Iterator
from typing import Any

BASH = {
    "name": "bash",
    "description": "Execute a bash command",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
        "required": ["command"],
    },
}
"""The tool of mini-swe-agent, as it sends it."""


def problems(num: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield ``num`` tasks that differ by a number. Equal seeds give equal tasks."""
    rng = random.Random(seed)
    for _ in range(num):
        yield {"task": f"Print digits: {rng.randint(100, 999)}"}


def conversations(num: int) -> Iterator[dict[str, Any]]:
    """Yield ``num`` solved problems."""
    rng = random.Random(0)
    for problem in problems(num, seed=1000):
        text = "".join(rng.choice(string.ascii_lowercase + string.digits) for _ in range(6))
        function = {"name": "bash", "arguments": json.dumps({"command": f"echo {text}"})}
        calls = [{"id": "call", "type": "function", "function": function}]
        messages = [
            {"role": "system", "content": "You use bash."},
            {"role": "user", "content": problem["task"]},
            {"role": "assistant", "content": None, "tool_calls": calls},
        ]
        yield {"messages": messages, "tools": [{"type": "function", "function": BASH}]}


if __name__ == "__main__":
    sys.stdout.writelines(json.dumps(conversation) + "\n" for conversation in conversations(128))
