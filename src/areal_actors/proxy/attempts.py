"""Evidence in request headers that a request is a retry: an idempotency key and the number of earlier attempts.

The SDKs of OpenAI and Anthropic number their attempts, starting at 0. A request of a client that sends neither header
is always a new request.
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
    """Return the retry evidence in ``headers`` with a digest of the request, or ``None`` if there is no evidence.

    The first attempt has a digest as well (about 1 µs per KiB), because its retry must be matched to it.

    Raises:
        InvalidRequest: the idempotency key is too long to be stored.
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
