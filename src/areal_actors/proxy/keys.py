"""Routes for user keys: the administrator issues, lists and revokes them. ``access`` decides what a key may do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from attrs import frozen

from areal_actors.domain import IssuedKey, KeyId, Quotas, is_model_identifier
from areal_actors.errors import InvalidRequest, NotFound
from areal_actors.kernel import Ref
from areal_actors.messages import Accounts, CreateKey, ListKeys, RevokeKey
from areal_actors.proxy.access import Authenticator, read_key
from areal_actors.proxy.config import ProxyConfig
from areal_actors.proxy.dialects.fields import TEXT, Schema, integer, read, wrong
from areal_actors.proxy.exchange import Exchange

_LIMITS = ("max_sessions", "max_requests_per_minute", "max_tokens_per_day")
_LIMIT = integer(0, 2**53)
KEY_ARGUMENTS: Mapping[str, Schema] = {
    "user": {"type": "string", "minLength": 1, "maxLength": 200},
    "experiment": TEXT.schema,
    "trial": TEXT.schema,
    **dict.fromkeys(_LIMITS, _LIMIT.schema),
    "expires_at": {"type": ["string", "number", "null"]},
}
"""The fields of a key's request, as JSON schemas."""


@frozen(kw_only=True)
class KeysEndpoint:
    """The handlers, one method per route. Without ``accounts`` these routes answer 404."""

    accounts: Ref[Accounts] | None
    authenticator: Authenticator
    config: ProxyConfig

    async def create_or_list(self, exchange: Exchange) -> None:
        """Create a key and show its secret once (``POST``), or list all keys without their secrets (``GET``)."""
        accounts = self._admitted(exchange)
        if exchange.method == "GET":
            listed = await accounts.ask(ListKeys())
            await exchange.send_json(200, {"object": "list", "data": [format_key(issued) for issued in listed]})
            return
        limits = self.config
        body = await exchange.read_json(max_bytes=limits.max_body_bytes, timeout_seconds=limits.body_timeout_seconds)
        issued = await accounts.ask(parse_key_request(body))
        await exchange.send_json(200, {**format_key(issued), "key": issued.secret})

    async def revoke(self, exchange: Exchange) -> None:
        """Revoke a key (``DELETE``). It no longer opens anything, but stays in the list."""
        accounts = self._admitted(exchange)
        await exchange.send_json(200, format_key(await accounts.ask(RevokeKey(key=KeyId(exchange.item)))))

    def _admitted(self, exchange: Exchange) -> Ref[Accounts]:
        self.authenticator.require_admin(read_key(exchange.headers))
        if self.accounts is None:
            raise NotFound("This service keeps no users; that takes a plug-in: pip install areal-actors-service.")
        return self.accounts


def parse_key_request(body: Mapping[str, Any]) -> CreateKey:
    """Parse the body of ``POST /keys``.

    Raises ``InvalidRequest`` naming the invalid field; unknown fields are invalid.
    """
    unknown = sorted(set(body) - set(KEY_ARGUMENTS))
    if unknown:
        raise InvalidRequest(f"{unknown[0]} is not a field of a key; see docs/guides/users.md.", param=unknown[0])
    user = read(body, "user", TEXT)
    if user is None:
        raise InvalidRequest("user is missing; name whose key this is.", param="user")
    return CreateKey(
        user=user,
        experiment=_read_directory(body, "experiment"),
        trial=_read_directory(body, "trial"),
        quotas=Quotas(**{name: read(body, name, _LIMIT) for name in _LIMITS}),
        expires_at=_read_time(body, "expires_at"),
    )


def _read_directory(body: Mapping[str, Any], name: str) -> str | None:
    """Return half of a model's name. Refused here, a bad one is the operator's mistake and not the user's."""
    value = read(body, name, TEXT)
    if value is not None and not is_model_identifier(f"{value}/{value}"):
        raise wrong(name, "letters, digits, dots, dashes and underscores, and begin with a letter or digit", value)
    return value


def _read_time(body: Mapping[str, Any], name: str) -> float | None:
    """Return a time in seconds since 1970, read from a number or from an ISO 8601 text (UTC if it names no zone)."""
    value = body.get(name)
    if value is None:
        return None
    try:
        if isinstance(value, str):
            read = datetime.fromisoformat(value)
            return (read if read.tzinfo is not None else read.replace(tzinfo=UTC)).timestamp()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise wrong(name, "a time, as ISO 8601 or in seconds since 1970", value)


def format_key(issued: IssuedKey) -> dict[str, Any]:
    """Return the public JSON form of a key, without its secret."""
    key, user = issued.key, issued.user
    return {
        "id": key.id,
        "object": "key",
        "user": user.name,
        "experiment": user.experiment,
        "trial": user.trial,
        **{name: getattr(user.quotas, name) for name in _LIMITS},
        "tokens_today": issued.num_tokens_today,
        "created_at": int(key.created_at),
        "expires_at": None if key.expires_at is None else int(key.expires_at),
        "revoked_at": None if key.revoked_at is None else int(key.revoked_at),
    }
