"""Authentication: keys from headers, sessions from URLs, and the admin key.

Only the session manager knows which key opens which session and for what; this module only turns a request into a
``Credential``. The URL of a session is a capability: every client that knows it may query the model in that session,
with any key or none, so the URL is never logged in full. To reward or end a session, a client needs the session's own
key, the key of its user, or the admin key.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping

from attrs import field, frozen

from areal_actors.domain import Credential, SessionId
from areal_actors.errors import Unauthorized

__all__ = ["Gatekeeper", "create_admin_key", "read_key"]


def create_admin_key() -> str:
    """Return a random admin key with 256 bits of entropy."""
    return f"sk-admin-{secrets.token_urlsafe(32)}"


def read_key(headers: Mapping[bytes, bytes]) -> str | None:
    """Return the key of a request: ``Authorization: Bearer`` as OpenAI's clients send it, else ``x-api-key``."""
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    key = bearer.strip() if scheme.lower() == b"bearer" else b""
    key = key or headers.get(b"x-api-key", b"").strip()
    return key.decode("latin-1") or None


@frozen(kw_only=True)
class Gatekeeper:
    """Turns keys and session names into credentials. ``session_urls`` says whether a session's URL alone opens it."""

    admin_key: str = field(repr=False)
    session_urls: bool = True

    def is_admin(self, key: str | None) -> bool:
        """Return whether ``key`` is the admin key. The comparison takes constant time."""
        return key is not None and hmac.compare_digest(key.encode(), self.admin_key.encode())

    def require_admin(self, key: str | None) -> None:
        """Raise ``Unauthorized`` unless ``key`` is the admin key."""
        if not self.is_admin(key):
            raise Unauthorized("This needs the proxy's admin key, as 'Authorization: Bearer <key>'.")

    def credential(self, *, key: str | None, in_path: str | None, in_request: str | None) -> Credential:
        """Return the credential of a request.

        Args:
            key: the key that was sent with it.
            in_path: the session that its URL names.
            in_request: the session that its query or body names; it also needs the key that owns the session.

        Raises:
            Unauthorized: there is neither a key nor the URL of a session.
        """
        session = in_path or in_request
        if session is not None and self.is_admin(key):
            return Credential(session=SessionId(session), is_capability=True, has_control=True)
        if in_path is not None and self.session_urls:
            return Credential(session=SessionId(in_path), key=key, is_capability=True)
        if key is None:
            raise Unauthorized(
                "No key came with this request; send the session's key as 'Authorization: Bearer <key>' or 'x-api-key'."
            )
        return Credential(session=None if session is None else SessionId(session), key=key, is_capability=False)
