"""What a client says about the sending of a request: its own name for it, and how often it was sent before.

The SDKs of OpenAI and Anthropic number their sendings, from 0. What comes from a client that says nothing is always a
new request.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

from areal_actors.domain import Attempt
from areal_actors.errors import InvalidRequest

__all__ = ["read_attempt"]

_RETRY_COUNT = b"x-stainless-retry-count"
_IDEMPOTENCY_KEY = b"idempotency-key"
_MAX_KEY = 255
_MAX_DIGITS = 4


def read_attempt(headers: Mapping[bytes, bytes], operation: str, body: bytes) -> Attempt | None:
    """The evidence in ``headers``, with a digest of what is asked; ``None`` if there is no evidence.

    The first sending has a digest as well (about 1 µs per KiB), because its retry must find it.

    Raises:
        InvalidRequest: the idempotency key is too long to be remembered.
    """
    number, key = headers.get(_RETRY_COUNT, b""), headers.get(_IDEMPOTENCY_KEY, b"").strip()
    if not number and not key:
        return None
    if len(key) > _MAX_KEY:
        raise InvalidRequest(f"The Idempotency-Key has more than {_MAX_KEY} characters; shorten it.")
    digest = blake2b(operation.encode() + b"\0", digest_size=16)
    digest.update(body)
    return Attempt(
        fingerprint=digest.hexdigest(),
        number=int(number) if number.isdigit() and len(number) <= _MAX_DIGITS else 0,
        idempotency_key=key.decode("latin-1") or None,
    )
