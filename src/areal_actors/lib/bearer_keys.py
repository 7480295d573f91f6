"""Keys in the header ``Authorization``."""

from __future__ import annotations


def read_bearer(authorization: str) -> str:
    """Return the key of ``Bearer <key>``, or an empty text for another scheme. The scheme has no case."""
    scheme, *rest = authorization.split(None, 1) or ("",)
    return "".join(rest).strip() if scheme.lower() == "bearer" else ""
