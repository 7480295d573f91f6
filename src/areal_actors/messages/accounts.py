"""Messages to the keeper of accounts: the keys of users, and what their owners use."""

from __future__ import annotations

from attrs import field, frozen

from areal_actors.core import Message
from areal_actors.domain import IssuedKey, KeyId, Quotas

__all__ = [
    "Accounts",
    "AdmitUser",
    "CreateKey",
    "HasKeys",
    "IdentifyUser",
    "ListKeys",
    "RevokeKey",
    "TokensSampled",
]


class Accounts:
    """Address of the keeper of accounts: users, their keys, what they may use and have used."""


@frozen(kw_only=True)
class CreateKey(Message[Accounts, IssuedKey]):
    """Issue a key; it is on disk when the reply comes, which alone carries its secret.

    A new ``user`` is made; of a known one, what is given here replaces what was.
    """

    user: str
    experiment: str | None = None
    trial: str | None = None
    quotas: Quotas = field(factory=Quotas)
    expires_at: float | None = None


@frozen(kw_only=True)
class ListKeys(Message[Accounts, tuple[IssuedKey, ...]]):
    """Every key that was issued, revoked ones too."""


@frozen(kw_only=True)
class RevokeKey(Message[Accounts, IssuedKey]):
    """Let a key open nothing any more; on disk when the reply comes. Twice is harmless; raises ``NotFound``."""

    key: KeyId


@frozen(kw_only=True)
class IdentifyUser(Message[Accounts, IssuedKey]):
    """Whose key this is. Raises ``Unauthorized`` unless it is valid."""

    secret: str = field(repr=False)


@frozen(kw_only=True)
class AdmitUser(Message[Accounts, IssuedKey]):
    """Let the owner of a key ask for a completion, and count it.

    Raises ``Unauthorized`` unless the key is valid, ``QuotaExceeded`` if the user has used up what was granted. Without
    ``is_counted``, validity alone is looked at.
    """

    key: KeyId
    is_counted: bool = True


@frozen(kw_only=True)
class TokensSampled(Message[Accounts, None]):
    """News: so many tokens were sampled for a user."""

    user: str
    num_tokens: int


@frozen(kw_only=True)
class HasKeys(Message[Accounts, bool]):
    """Whether any key was ever issued."""
