"""A reward function of its own module: a worker process imports nothing but this to run it."""

from __future__ import annotations

import os
from typing import Any


def twice(prompt: str, **data: Any) -> float:
    """Twice the length of the prompt, anywhere but in the process that is named."""
    return 2.0 * len(prompt) * (os.getpid() != data["pid"])
