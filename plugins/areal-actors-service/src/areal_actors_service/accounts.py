"""Users, keys and quotas: the account book in memory, and the file in which users and keys are stored.

The methods of ``AccountBook`` change only its own state and never wait. Wall-clock times (expiry, days) and monotonic
times (rates) are parameters.

The file is a small SQLite database that several processes may open at once. The command line writes to it while a
service runs; the service calls ``has_changed`` and reads it again. It is in WAL mode with full synchronisation: when a
method returns, its changes survive a killed process and a power failure. The file must be on a local disk, is readable
only by its owner, and is created with the first write.

::

    users(name, experiment, trial, max_sessions, max_requests_per_minute, max_tokens_per_day)
    keys(id, user, digest, created_at, expires_at, revoked_at)       digest: SHA-256; the key itself is nowhere
    usage(user, day, tokens)                                         day: days since 1970, UTC

``AccountStore`` blocks; run it on a worker thread.
"""

from __future__ import annotations

import hmac
import math
import os
import secrets
import sqlite3
import unicodedata
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from attrs import asdict, evolve, field, frozen

from areal_actors.domain import IssuedKey, KeyId, Quotas, User, UserKey
from areal_actors.domain.accounts import KEY_PREFIX, digest_of
from areal_actors.errors import ConfigError, InvalidRequest, NotFound, QuotaExceeded, Unauthorized, Unavailable

_DAY_SECONDS = 86_400
_MAX_NAME = 200


class RateWindow:
    """A limit on the number of events in any period of ``seconds`` (a sliding window).

    Times may come from any monotonic clock.
    """

    def __init__(self, *, seconds: float = 60.0) -> None:
        self._seconds = seconds
        # The times of the events that still count. A counter that is reset each minute would let twice as many through
        # around the reset.
        self._times: deque[float] = deque()

    def try_enter(self, now: float, limit: int) -> float:
        """Count an event if there is room for it.

        Returns 0 if there was room, and otherwise the seconds after which there will be, if no other event comes first.
        With a ``limit`` of 0 there never is room, and the length of the window is returned.
        """
        while self._times and self._times[0] + self._seconds <= now:
            self._times.popleft()
        if len(self._times) < limit:
            self._times.append(now)
            return 0.0
        if limit <= 0:
            return self._seconds
        freeing = self._times[len(self._times) - limit] + self._seconds
        # Never 0, even if the difference rounds to it: 0 means that the event was counted.
        return max(freeing - now, math.ulp(now))


def day_of(now: float) -> int:
    """Return the UTC day at ``now``, in days since 1970."""
    return math.floor(now / _DAY_SECONDS)


def seconds_to_midnight(now: float) -> float:
    """Return the seconds until the end of the UTC day."""
    return (day_of(now) + 1) * _DAY_SECONDS - now


_VERSION = 1
_BUSY_SECONDS = 10.0
"""How long a writer waits for another process that writes."""
_KEPT_DAYS = 31
"""Number of days of usage that are kept, for inspection."""

_SCHEMA = """
CREATE TABLE users (
    name TEXT PRIMARY KEY, experiment TEXT, trial TEXT,
    max_sessions INTEGER, max_requests_per_minute INTEGER, max_tokens_per_day INTEGER
) STRICT;
CREATE TABLE keys (
    id TEXT PRIMARY KEY, user TEXT NOT NULL REFERENCES users, digest BLOB NOT NULL UNIQUE,
    created_at REAL NOT NULL, expires_at REAL, revoked_at REAL
) STRICT;
CREATE TABLE usage (
    user TEXT NOT NULL REFERENCES users, day INTEGER NOT NULL, tokens INTEGER NOT NULL, PRIMARY KEY (user, day)
) STRICT;
"""
_PUT_USER = "INSERT OR REPLACE INTO users VALUES (?, ?, ?, ?, ?, ?)"
_PUT_KEY = "INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?)"
_ADD_USAGE = """
INSERT INTO usage VALUES (?, ?, ?) ON CONFLICT (user, day) DO UPDATE SET tokens = tokens + excluded.tokens
"""


@frozen(kw_only=True)
class Contents:
    """The contents of the file. ``usage`` is the number of sampled tokens by user and day."""

    users: tuple[User, ...] = ()
    keys: tuple[UserKey, ...] = ()
    usage: Mapping[tuple[str, int], int] = field(factory=dict)


class AccountStore:
    """An open file, or one that does not exist yet. Must be used from one thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = None
        self._seen: tuple[int, int] | None = None

    def close(self) -> None:
        """Close the file; the store opens it again when it is used again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def read(self) -> Contents:
        """Return everything in the file. Raises ``ConfigError`` for a file that is not a database of keys."""
        with self._explaining():
            connection = self._open(create=False)
            if connection is None:
                return Contents()
            with _transaction(connection, "BEGIN"):
                # In one transaction with the read, so that a later write by another process changes the stamp.
                self._seen = self._stamp(connection)
                rows = connection.execute("SELECT * FROM users ORDER BY rowid").fetchall()
                keys = connection.execute("SELECT * FROM keys ORDER BY created_at, rowid").fetchall()
                usage = connection.execute("SELECT user, day, tokens FROM usage").fetchall()
            return Contents(
                users=tuple(
                    User(
                        name=name,
                        experiment=experiment,
                        trial=trial,
                        quotas=Quotas(
                            max_sessions=sessions, max_requests_per_minute=requests, max_tokens_per_day=tokens
                        ),
                    )
                    for name, experiment, trial, sessions, requests, tokens in rows
                ),
                keys=tuple(
                    UserKey(
                        id=key, user=user, digest=digest, created_at=created, expires_at=expires, revoked_at=revoked
                    )
                    for key, user, digest, created, expires, revoked in keys
                ),
                usage={(user, day): tokens for user, day, tokens in usage},
            )

    def has_changed(self) -> bool:
        """Return whether another process has written since the last ``read``. Takes microseconds."""
        with self._explaining():
            connection = self._open(create=False)
            return connection is not None and self._stamp(connection) != self._seen

    def put_key(self, user: User, key: UserKey) -> None:
        """Save a new key, and the current properties of its user."""
        quotas = user.quotas
        row = (user.name, user.experiment, user.trial)
        limits = (quotas.max_sessions, quotas.max_requests_per_minute, quotas.max_tokens_per_day)
        with self._writing() as connection:
            connection.execute(_PUT_USER, (*row, *limits))
            times = (key.created_at, key.expires_at, key.revoked_at)
            connection.execute(_PUT_KEY, (key.id, key.user, key.digest, *times))

    def revoke(self, key: KeyId, at: float) -> None:
        """Save that a key is revoked. If it was revoked before, the first time is kept."""
        with self._writing() as connection:
            connection.execute("UPDATE keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL", (at, key))

    def add_usage(self, tokens: Mapping[tuple[str, int], int]) -> None:
        """Add to the numbers of tokens that users have sampled on a day, and delete usage older than 31 days."""
        with self._writing() as connection:
            connection.executemany(_ADD_USAGE, [(user, day, number) for (user, day), number in tokens.items()])
            newest = max(day for _, day in tokens)
            connection.execute("DELETE FROM usage WHERE day < ?", (newest - _KEPT_DAYS,))

    # ------------------------------------------------------------------------------------------------ opening

    def _open(self, *, create: bool) -> sqlite3.Connection | None:
        if self._connection is None and (create or self.path.exists()):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Created first, because SQLite would let all users read it.
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
            connection = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None)
            try:
                connection.execute("PRAGMA synchronous = FULL")
                # Replacing a user's row would count as deleting it.
                connection.execute("PRAGMA foreign_keys = OFF")
                with _transaction(connection, "BEGIN IMMEDIATE"):
                    _prepare(connection)
                # After _prepare, which rejects foreign files: this changes the file.
                connection.execute("PRAGMA journal_mode = WAL")
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _stamp(self, connection: sqlite3.Connection) -> tuple[int, int]:
        """Return a value that changes whenever another connection writes."""
        # ``data_version`` can be compared only within one connection, so the connection is part of the stamp.
        return int(connection.execute("PRAGMA data_version").fetchone()[0]), id(connection)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._explaining():
            connection = self._open(create=True)
            assert connection is not None
            with _transaction(connection, "BEGIN IMMEDIATE"):
                yield connection

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Convert errors of SQLite to errors with clear messages."""
        try:
            yield
        except (sqlite3.OperationalError, OSError) as error:
            self.close()
            raise Unavailable(f"The keys in {self.path} cannot be reached: {error}.") from error
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:
            self.close()
            raise ConfigError(
                f"users.path: {self.path} is not a file of keys ({error}); restore it, or name another path"
            ) from error


def _prepare(connection: sqlite3.Connection) -> None:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > _VERSION:
        raise sqlite3.DatabaseError(f"it was written by a newer version of this library, in form {version}")
    if version == _VERSION:
        return
    if connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
        raise sqlite3.DatabaseError("it is the database of something else")
    for statement in _SCHEMA.split(";"):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {_VERSION}")


@contextmanager
def _transaction(connection: sqlite3.Connection, begin: str) -> Iterator[None]:
    connection.execute(begin)
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


_INVALID = "This key is not valid (any more); ask the operator of this service for another."
"""One message for unknown, revoked and expired keys, so that it reveals nothing to strangers."""


@frozen(kw_only=True)
class Claim:
    """The requested properties of a new key. For a user who exists already, ``None`` leaves a property unchanged."""

    user: str
    experiment: str | None = None
    trial: str | None = None
    quotas: Quotas = field(factory=Quotas)
    expires_at: float | None = None


class AccountBook:
    """The single owner of accounts within a process."""

    def __init__(self) -> None:
        self._users: dict[str, User] = {}
        self._keys: dict[KeyId, UserKey] = {}
        self._by_digest: dict[bytes, UserKey] = {}
        self._windows: dict[str, RateWindow] = {}
        self._saved: Counter[tuple[str, int]] = Counter()
        self._unsaved: Counter[tuple[str, int]] = Counter()

    def load(self, contents: Contents) -> None:
        """Replace users, keys and saved usage by the contents of the file.

        Usage that is not saved yet stays counted.
        """
        self._users = {user.name: user for user in contents.users}
        self._keys = {}
        self._by_digest = {}
        for key in contents.keys:
            self.put(key)
        self._saved = Counter(contents.usage)

    def put(self, key: UserKey, user: User | None = None) -> None:
        """Add a key, and its user if given."""
        self._keys[key.id] = self._by_digest[key.digest] = key
        if user is not None:
            self._users[user.name] = user

    # ---------------------------------------------------------------------------------------------------- keys

    def issue(self, claim: Claim, now: float) -> IssuedKey:
        """Create a key. It is not stored until ``put`` is called. Raises ``InvalidRequest`` for an invalid claim."""
        name = _parse_user_name(claim.user)
        if claim.expires_at is not None and claim.expires_at <= now:
            raise InvalidRequest("The key would have expired already; name a time to come.", param="expires_at")
        user = self._users.get(name) or User(name=name)
        given = {name: value for name, value in asdict(claim.quotas).items() if value is not None}
        user = evolve(
            user,
            experiment=claim.experiment if claim.experiment is not None else user.experiment,
            trial=claim.trial if claim.trial is not None else user.trial,
            quotas=evolve(user.quotas, **given),
        )
        secret = _create_key()
        key = UserKey(
            id=_create_key_id(), user=name, digest=digest_of(secret), created_at=now, expires_at=claim.expires_at
        )
        return IssuedKey(key=key, user=user, secret=secret, num_tokens_today=self.tokens_on(name, day_of(now)))

    def describe(self, key: KeyId, now: float) -> IssuedKey:
        """Return a key and its owner, without its secret. Raises ``NotFound``."""
        known = self._keys.get(key)
        if known is None:
            raise NotFound(f"There is no key {key}; 'areal-actors keys list' or GET /keys shows those that there are.")
        return self._describe(now, known)

    def describe_all(self, now: float) -> tuple[IssuedKey, ...]:
        """Return every key, oldest first."""
        return tuple(map(partial(self._describe, now), self._keys.values()))

    def _describe(self, now: float, key: UserKey) -> IssuedKey:
        tokens = self.tokens_on(key.user, day_of(now))
        return IssuedKey(key=key, user=self._users.get(key.user) or User(name=key.user), num_tokens_today=tokens)

    # --------------------------------------------------------------------------------------------------- using

    def knows(self, secret: str) -> bool:
        """Return whether a key with this secret was ever issued."""
        return digest_of(secret) in self._by_digest

    def authenticate(self, secret: str, now: float) -> IssuedKey:
        """Return the key with this secret. Raises ``Unauthorized`` unless it is valid now."""
        digest = digest_of(secret)
        key = self._by_digest.get(digest)
        # Only digests are compared, so timing reveals nothing about keys.
        is_same = key is not None and hmac.compare_digest(key.digest, digest)
        if key is None or not is_same or not key.is_valid(now):
            raise Unauthorized(_INVALID)
        return self._describe(now, key)

    def check(self, key: KeyId, now: float) -> IssuedKey:
        """Return the key with this id. Raises ``Unauthorized`` unless it is valid now."""
        known = self._keys.get(key)
        if known is None or not known.is_valid(now):
            raise Unauthorized(_INVALID)
        return self._describe(now, known)

    def admit(self, user: User, *, now: float, monotonic: float) -> None:
        """Count a request. Raises ``QuotaExceeded`` if it exceeds the user's quotas; it is not counted then."""
        # Tokens before requests, because ``try_enter`` counts the request and a refused one must not count.
        limit = user.quotas.max_tokens_per_day
        if limit is not None and self.tokens_on(user.name, day_of(now)) >= limit:
            raise QuotaExceeded(
                f"The {limit} sampled tokens of this day (UTC) are used up; a new day begins at midnight.",
                retry_after_seconds=seconds_to_midnight(now),
            )
        limit = user.quotas.max_requests_per_minute
        if limit is None:
            return
        wait = self._windows.setdefault(user.name, RateWindow()).try_enter(monotonic, limit)
        if wait > 0:
            raise QuotaExceeded(
                f"There may be {limit} requests a minute; the next one in {wait:.1f} s.", retry_after_seconds=wait
            )

    # --------------------------------------------------------------------------------------------------- usage

    def tokens_on(self, user: str, day: int) -> int:
        """Return the number of tokens that a user has sampled on a day."""
        return self._saved[user, day] + self._unsaved[user, day]

    def note_sampled(self, user: str, num_tokens: int, now: float) -> None:
        """Count sampled tokens."""
        self._unsaved[user, day_of(now)] += num_tokens

    @property
    def unsaved(self) -> Mapping[tuple[str, int], int]:
        """A copy of the usage that is counted but not in the file yet."""
        return {place: number for place, number in self._unsaved.items() if number}

    def note_saved(self, tokens: Mapping[tuple[str, int], int]) -> None:
        """Record that this usage is in the file now."""
        self._saved.update(tokens)
        self._unsaved.subtract(tokens)
        # Unary plus drops the entries that are zero, so that the counter does not grow with users and days.
        self._unsaved = +self._unsaved


def _create_key() -> str:
    """Return a new random key with 256 bits of entropy."""
    return f"{KEY_PREFIX}{secrets.token_urlsafe(32)}"


def _create_key_id() -> KeyId:
    """Return a new random id for a key, which reveals nothing about the key."""
    return KeyId(f"key_{secrets.token_hex(8)}")


def _parse_user_name(text: str) -> str:
    """Return a user's name in normalized spelling; all scripts are allowed.

    Raises ``InvalidRequest`` for an invalid name.
    """
    name = unicodedata.normalize("NFC", text).strip()
    if not name or len(name) > _MAX_NAME:
        raise InvalidRequest(f"A user's name has 1 to {_MAX_NAME} characters.", param="user")
    if any(unicodedata.category(character)[0] == "C" for character in name):
        raise InvalidRequest("A user's name has no control characters and no half characters.", param="user")
    return name
