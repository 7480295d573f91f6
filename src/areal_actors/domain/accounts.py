"""Users of the service: their names, their quotas, and the keys issued to them."""

from __future__ import annotations

from hashlib import sha256
from typing import NewType

from attrs import field, frozen
from attrs.validators import ge, optional

KeyId = NewType("KeyId", str)
"""Identifies a key without granting access; it may be displayed and logged."""


@frozen(kw_only=True)
class Quotas:
    """Limits of one user over all keys together; ``None`` is unlimited."""

    max_sessions: int | None = field(default=None, validator=optional(ge(0)))
    """Sessions that may be live at once."""
    max_requests_per_minute: int | None = field(default=None, validator=optional(ge(0)))
    """Completion requests in any 60 seconds."""
    max_tokens_per_day: int | None = field(default=None, validator=optional(ge(0)))
    """Sampled tokens from one midnight (UTC) to the next."""


@frozen(kw_only=True)
class User:
    """A user by name. ``experiment`` and ``trial`` are those that the user's sessions belong to."""

    name: str
    experiment: str | None = None
    trial: str | None = None
    quotas: Quotas = field(factory=Quotas)


@frozen(kw_only=True)
class UserKey:
    """An issued key without its secret. Times are seconds since 1970."""

    id: KeyId
    user: str
    digest: bytes = field(repr=False)
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None

    def is_valid(self, now: float) -> bool:
        """Return whether the key is neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


@frozen(kw_only=True)
class IssuedKey:
    """A key with its owner. ``secret`` is set only when the key is created; it cannot be read again afterwards."""

    key: UserKey
    user: User
    secret: str | None = field(default=None, repr=False)
    num_tokens_today: int = 0
    """Tokens sampled with all of the user's keys since midnight (UTC)."""


KEY_PREFIX = "sk-user-"
"""Prefix of users' keys, which distinguishes them from keys of sessions without a look-up."""


def is_user_key(key: str | None) -> bool:
    """Return whether ``key`` has the form of a user's key; it may not exist."""
    return key is not None and key.startswith(KEY_PREFIX)


def digest_of(key: str) -> bytes:
    """Return the SHA-256 digest of a key, which is stored instead of the key."""
    # Keys are long and random, so a plain hash is enough.
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
