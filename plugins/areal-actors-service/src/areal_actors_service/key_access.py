"""Issue, list and revoke the keys of users from the command line.

Keys can be reached in two ways: through the file, even while a service on this machine uses it, and through the HTTP
API of a running service on any machine. Both block.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import httpx
from attrs import evolve, field, frozen

from areal_actors.client.http import error_of
from areal_actors.domain import KeyId
from areal_actors.errors import ConfigError, Unavailable
from areal_actors.proxy.keys import format_key, parse_key_request
from areal_actors_service.accounts import AccountBook, AccountStore, Claim

Shown = Mapping[str, Any]
"""A key as ``GET /keys`` returns it."""

_COLUMNS = ("id", "user", "experiment", "trial", "max_sessions", "max_requests_per_minute", "max_tokens_per_day")
_SECONDS = 30.0


class KeyClient(Protocol):
    """An interface to the keys of a service."""

    def create(self, fields: Mapping[str, Any]) -> Shown:
        """Issue a key as ``POST /keys`` does; ``key`` of the result is its secret."""
        ...

    def list(self) -> Sequence[Shown]:
        """Return all keys, oldest first."""
        ...

    def revoke(self, key: str) -> Shown:
        """Revoke the key with this id."""
        ...


def open_keys(*, store: Path, url: str | None, admin_key: str | None) -> KeyClient:
    """Return the keys of the service at ``url``, else those in the file ``store``.

    Raises ``ConfigError`` for a service without an admin key.
    """
    if url is None:
        return FileKeys(path=store)
    if not admin_key:
        raise ConfigError("--url needs the admin key of the service; set AREAL_ADMIN_KEY.")
    return ServiceKeys(url=url.rstrip("/").removesuffix("/v1"), admin_key=admin_key)


@frozen(kw_only=True)
class FileKeys:
    """The keys in a file. A running service sees a new key at once, and other changes within ``users.save_seconds``."""

    path: Path

    def create(self, fields: Mapping[str, Any]) -> Shown:
        """Issue a key."""
        message = parse_key_request(fields)
        with closing(AccountStore(self.path)) as store:
            claim = Claim(
                user=message.user,
                experiment=message.experiment,
                trial=message.trial,
                quotas=message.quotas,
                expires_at=message.expires_at,
            )
            issued = _book_of(store).issue(claim, time.time())
            store.put_key(issued.user, issued.key)
        return {**format_key(issued), "key": issued.secret}

    def list(self) -> Sequence[Shown]:
        """Return all keys."""
        with closing(AccountStore(self.path)) as store:
            return [format_key(issued) for issued in _book_of(store).describe_all(time.time())]

    def revoke(self, key: str) -> Shown:
        """Revoke a key. Revoking it again keeps the first time."""
        with closing(AccountStore(self.path)) as store:
            now = time.time()
            issued = _book_of(store).describe(KeyId(key), now)
            if issued.key.revoked_at is None:
                store.revoke(issued.key.id, now)
                issued = evolve(issued, key=evolve(issued.key, revoked_at=now))
        return format_key(issued)


def _book_of(store: AccountStore) -> AccountBook:
    book = AccountBook()
    book.load(store.read())
    return book


@frozen(kw_only=True)
class ServiceKeys:
    """The keys of a running service, reached over HTTP."""

    url: str
    admin_key: str = field(repr=False)

    def create(self, fields: Mapping[str, Any]) -> Shown:
        """Issue a key."""
        return self._send("POST", "/keys", fields)

    def list(self) -> Sequence[Shown]:
        """Return all keys."""
        listed: Sequence[Shown] = self._send("GET", "/keys")["data"]
        return listed

    def revoke(self, key: str) -> Shown:
        """Revoke a key."""
        return self._send("DELETE", f"/keys/{quote(key, safe='')}")

    def _send(self, method: str, path: str, fields: Mapping[str, Any] | None = None) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self.admin_key}"}
        body = None if fields is None else {name: value for name, value in fields.items() if value is not None}
        try:
            # A proxy of the environment would not find a service on this machine.
            with httpx.Client(timeout=_SECONDS, trust_env=False) as http:
                answer = http.request(method, self.url + path, json=body, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unavailable(f"{self.url} does not answer: {error}.") from error
        if not answer.is_success:
            raise error_of(answer)
        found: dict[str, Any] = answer.json()
        return found


def format_keys(keys: Sequence[Shown]) -> str:
    """Format the keys as a table."""
    head: tuple[str, ...] = (
        "KEY",
        "USER",
        "EXPERIMENT",
        "TRIAL",
        "SESSIONS",
        "REQ/MIN",
        "TOKENS/DAY",
        "TODAY",
        "STATE",
    )
    rows: list[tuple[str, ...]] = [head]
    for key in keys:
        cells = ("-" if key[name] is None else str(key[name]) for name in _COLUMNS)
        if key["revoked_at"] is not None:
            state = f"revoked {_day(key['revoked_at'])}"
        elif key["expires_at"] is None:
            state = "valid"
        else:
            state = f"{'valid until' if key['expires_at'] > time.time() else 'expired'} {_day(key['expires_at'])}"
        rows.append((*cells, str(key["tokens_today"]), state))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M")
