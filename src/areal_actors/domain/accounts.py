"""Users of the service: their names, their quotas, and the keys issued to them."""

from __future__ import annotations

from typing import NewType

from attrs import field, frozen
from attrs.validators import ge, optional

__all__ = ["IssuedKey", "KeyId", "Quotas", "User", "UserKey"]

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
