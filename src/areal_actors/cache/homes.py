"""Routing names in session ids and keys, for several session managers behind one entry point.

Every token issued by a session manager called ``a`` begins with ``a.``. Its sessions are called ``task-7-a.<token>``
and opened by ``sk-a.<token>``, so that the entry point can read the session manager off either, without a table that
could be lost. The name is not secret and proves nothing: the session manager compares the whole key.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable

__all__ = ["HOME_NAME", "home_of", "tokens_of"]

HOME_NAME = r"[a-z0-9]{1,16}"
"""Pattern of a session manager's name."""

_NAMED = re.compile(rf"(?:.*-|)({HOME_NAME})\.[A-Za-z0-9_-]{{16,}}", re.DOTALL)


def tokens_of(home: str | None, token: Callable[[], str] = lambda: secrets.token_urlsafe(16)) -> Callable[[], str]:
    """Return a factory of unguessable tokens that begin with ``home``, or of plain ones without it."""
    return token if home is None else lambda: f"{home}.{token()}"


def home_of(text: str) -> str | None:
    """Return the session manager's name in a session's id or key; ``None`` if there is none."""
    found = _NAMED.fullmatch(text)
    return None if found is None else found[1]
