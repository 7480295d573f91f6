"""Placeholder keys for agents that pass none, because some SDKs refuse to be created without a key.

An inline agent gets a base URL that authorises its session by itself, so any key or none is accepted there. OpenAI's
SDK still requires one and looks for it in the environment. A key that is set there is not changed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from threading import Lock

__all__ = ["PLACEHOLDER", "placeholder_keys"]

PLACEHOLDER = "not-needed-on-the-url-of-a-session"
"""A key without any rights: other services reject a request with it."""

_NAMES = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")

_users: Counter[str] = Counter()
_lock = Lock()


@contextmanager
def placeholder_keys(environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Set a placeholder in each variable that is not set, until the last such block of the process is left."""
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
