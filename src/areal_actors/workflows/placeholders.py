"""Keys for agents that pass none, where an SDK refuses to be made without one.

An inline agent is given a base URL that opens its session by itself, so that any key or none will do there. OpenAI's
SDK wants one all the same and looks for it in the environment. A key that is set there is left as it is.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from threading import Lock

__all__ = ["PLACEHOLDER", "placeholder_keys"]

PLACEHOLDER = "not-needed-on-the-url-of-a-session"
"""It opens nothing: a request that goes elsewhere with it is refused there."""

_NAMES = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")

_users: Counter[str] = Counter()
_lock = Lock()


@contextmanager
def placeholder_keys(environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Have a placeholder in each variable that is not set, until the last such block of the process is left."""
    with _lock:
        ours = [name for name in _NAMES if environment.get(name, PLACEHOLDER) == PLACEHOLDER]
        for name in ours:
            environment[name] = PLACEHOLDER
        _users.update(ours)
    try:
        yield
    finally:
        with _lock:
            _users.subtract(ours)
            for name in ours:
                if not _users[name] and environment.get(name) == PLACEHOLDER:
                    del environment[name]
