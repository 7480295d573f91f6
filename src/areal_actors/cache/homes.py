"""Where a session lives, when several session managers share one entry point: its id and its key say so.

Every token that a session manager called ``a`` gives out begins with ``a.``; so its sessions are called
``task-7-a.<token>`` and opened by ``sk-a.<token>``, and whoever forwards a request reads its home off either, without a
table that could be lost. The name is no secret and proves nothing: at home, the whole key is compared.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable

__all__ = ["HOME_NAME", "home_of", "tokens_of"]

HOME_NAME = r"[a-z0-9]{1,16}"
"""What a session manager may be called."""

_NAMED = re.compile(rf"(?:.*-|)({HOME_NAME})\.[A-Za-z0-9_-]{{16,}}", re.DOTALL)


def tokens_of(home: str | None, token: Callable[[], str] = lambda: secrets.token_urlsafe(16)) -> Callable[[], str]:
    """A factory of unguessable tokens that name their ``home``; of plain ones without it."""
    return token if home is None else lambda: f"{home}.{token()}"


def home_of(text: str) -> str | None:
    """The name in a session's id or key; ``None`` if there is none."""
    found = _NAMED.fullmatch(text)
    return None if found is None else found[1]
