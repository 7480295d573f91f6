"""Messages to the account keeper: users' keys and usage."""

from __future__ import annotations

from attrs import field, frozen

from areal_actors.domain import IssuedKey, KeyId, Quotas
from areal_actors.kernel import Message


class Accounts:
    """Address of the account keeper: users, their keys, their quotas and their usage."""


@frozen(kw_only=True)
class CreateKey(Message[Accounts, IssuedKey]):
    """Issue a key. The reply is sent once the key is on disk, and is the only place where its secret appears.

    An unknown ``user`` is created; for a known one, the given values replace the stored ones.
    """

    user: str
    experiment: str | None = None
    trial: str | None = None
    quotas: Quotas = field(factory=Quotas)
    expires_at: float | None = None


@frozen(kw_only=True)
class ListKeys(Message[Accounts, tuple[IssuedKey, ...]]):
    """List every key that was issued, including revoked ones."""


@frozen(kw_only=True)
class RevokeKey(Message[Accounts, IssuedKey]):
    """Revoke a key. The reply is sent once the revocation is on disk.

    Revoking twice is harmless. Raises ``NotFound``.
    """

    key: KeyId


@frozen(kw_only=True)
class IdentifyUser(Message[Accounts, IssuedKey]):
    """Return the key that a secret belongs to. Raises ``Unauthorized`` unless it is valid."""

    secret: str = field(repr=False)


@frozen(kw_only=True)
class AdmitUser(Message[Accounts, IssuedKey]):
    """Admit a completion request by the owner of a key, and count it.

    Raises ``Unauthorized`` unless the key is valid, ``QuotaExceeded`` if the user's quota is exhausted. Without
    ``is_counted``, only the key's validity is checked.
    """

    key: KeyId
    is_counted: bool = True


@frozen(kw_only=True)
class TokensSampled(Message[Accounts, None]):
    """News: tokens were sampled for a user."""

    user: str
    num_tokens: int
