"""Problems for the agents in this directory and for ``shell_agent.sh``: products of two numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


def problems(num: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield ``num`` products. Equal seeds give equal problems."""
    rng = random.Random(seed)
    for _ in range(num):
        a, b = rng.randint(2, 99), rng.randint(2, 99)
        yield {"question": f"What is {a} times {b}?", "answer": a * b}
