"""The keys of users: how they are made, recognised and remembered."""

from __future__ import annotations

import secrets
import unicodedata
from hashlib import sha256

from areal_actors.domain import KeyId
from areal_actors.errors import InvalidRequest

__all__ = ["KEY_PREFIX", "create_key", "create_key_id", "digest_of", "is_user_key", "parse_user_name"]

KEY_PREFIX = "sk-user-"
"""What the keys of users begin with, so that one is told from the key of a session without a look-up."""

_MAX_NAME = 200


def create_key() -> str:
    """A key that nobody guesses."""
    return f"{KEY_PREFIX}{secrets.token_urlsafe(32)}"


def create_key_id() -> KeyId:
    """A new name for a key, which says nothing about it."""
    return KeyId(f"key_{secrets.token_hex(8)}")


def is_user_key(key: str | None) -> bool:
    """Whether ``key`` has the form of a user's; not whether there is such a user."""
    return key is not None and key.startswith(KEY_PREFIX)


def digest_of(key: str) -> bytes:
    """What is remembered of a key. Keys are long and random, so that a plain hash is enough."""
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


def parse_user_name(text: str) -> str:
    """A user's name in one spelling, of any script. Raises ``InvalidRequest`` for what is none."""
    name = unicodedata.normalize("NFC", text).strip()
    if not name or len(name) > _MAX_NAME:
        raise InvalidRequest(f"A user's name has 1 to {_MAX_NAME} characters.", param="user")
    if any(unicodedata.category(character)[0] == "C" for character in name):
        raise InvalidRequest("A user's name has no control characters and no half characters.", param="user")
    return name
