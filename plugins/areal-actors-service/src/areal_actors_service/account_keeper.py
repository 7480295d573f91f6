"""The account keeper: the account book of users and keys, and its file.

A new key or a revocation is on disk before it is acknowledged. Token usage is written every ``save_seconds``: a killed
process loses at most the usage since the last write, and that amount is granted a second time. Rate counters are kept
in memory only. Changes that another process makes to the file (the command line, another service) are noticed within
``save_seconds`` as well; an unknown key makes the keeper read the file at once.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
from attrs import evolve

from areal_actors.config import RunConfig
from areal_actors.domain import IssuedKey
from areal_actors.errors import ConfigError, Unavailable
from areal_actors.kernel import Actor, Context, OwnThread
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import (
    Accounts,
    AdmitUser,
    CreateKey,
    IdentifyUser,
    ListKeys,
    RevokeKey,
    TokensSampled,
)
from areal_actors_service.accounts import AccountBook, AccountStore, Claim
from areal_actors_service.config import UsersConfig, users_of

_log = get_logger(__name__)


class AccountKeeper(Actor[Accounts]):
    """The actor that owns the accounts. ``clock`` returns seconds since 1970.

    Raises:
        ConfigError: when the actor is spawned, if the file is not an account file.
    """

    def __init__(
        self, path: Path, *, config: UsersConfig | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = AccountStore(path)
        self._config = config or UsersConfig()
        self._clock = clock
        self._book = AccountBook()
        self._thread: OwnThread
        self._using: anyio.Lock

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:
        """Load the file, keep it in sync while the actor runs, and save token usage at the end."""
        self._using = anyio.Lock()
        async with OwnThread.open() as self._thread:
            try:
                self._book.load(await self._thread.run(self._store.read))
                context.tasks.start_soon(self._keep_up)
                yield
            finally:
                with anyio.CancelScope(shield=True):
                    await self._save()
                    await self._thread.run(self._store.close)

    # ---------------------------------------------------------------------------------------------------- keys

    @CreateKey.handler
    async def create(self, message: CreateKey) -> IssuedKey:
        """Issue a key and write it to disk before replying."""
        await self._look()
        claim = Claim(
            user=message.user,
            experiment=message.experiment,
            trial=message.trial,
            quotas=message.quotas,
            expires_at=message.expires_at,
        )
        issued = self._book.issue(claim, self._clock())
        async with self._at_file():
            await self._thread.run(partial(self._store.put_key, issued.user, issued.key))
            # Only after the write succeeded: a key that is not on disk must not work.
            self._book.put(issued.key, issued.user)
        _log.info("key_created", key=issued.key.id, user=issued.user.name)
        return issued

    @ListKeys.handler
    async def list(self, message: ListKeys) -> tuple[IssuedKey, ...]:  # noqa: ARG002 - the message says it all
        """Return every key, including revoked ones."""
        await self._look()
        return self._book.describe_all(self._clock())

    @RevokeKey.handler
    async def revoke(self, message: RevokeKey) -> IssuedKey:
        """Revoke a key. A key that is already revoked keeps its first revocation time."""
        await self._look()
        now = self._clock()
        issued = self._book.describe(message.key, now)
        if issued.key.revoked_at is None:
            async with self._at_file():
                await self._thread.run(partial(self._store.revoke, message.key, now))
                self._book.put(evolve(issued.key, revoked_at=now))
            _log.info("key_revoked", key=issued.key.id, user=issued.user.name)
        return self._book.describe(message.key, now)

    # --------------------------------------------------------------------------------------------------- using

    @IdentifyUser.handler
    async def identify(self, message: IdentifyUser) -> IssuedKey:
        """Return the key that belongs to a secret, reading the file again if the secret is unknown."""
        # An unknown key may have been issued by the command line just now.
        if not self._book.knows(message.secret):
            await self._look()
        return self._book.authenticate(message.secret, self._clock())

    @AdmitUser.handler
    async def admit(self, message: AdmitUser) -> IssuedKey:
        """Check the key's validity and quotas, and count the request if the message says so."""
        now = self._clock()
        issued = self._book.check(message.key, now)
        if message.is_counted:
            self._book.admit(issued.user, now=now, monotonic=anyio.current_time())
        return issued

    @TokensSampled.handler
    async def note_sampled(self, message: TokensSampled) -> None:
        """Add sampled tokens to the user's usage."""
        self._book.note_sampled(message.user, message.num_tokens, self._clock())

    # ------------------------------------------------------------------------------------------------ the file

    @asynccontextmanager
    async def _at_file(self) -> AsyncIterator[None]:
        """Hold the file lock, shielded from cancellation."""
        async with self._using:
            # A cancellation between writing the file and updating the book would leave the two inconsistent.
            with anyio.CancelScope(shield=True):
                yield

    async def _keep_up(self) -> None:
        while True:
            await anyio.sleep(self._config.save_seconds)
            await self._save()
            try:
                await self._look()
            except (ConfigError, Unavailable) as error:
                _log.warning("keys_unreadable", error=str(error))

    async def _look(self) -> None:
        """Reload the file if another process has written it."""
        async with self._at_file():
            if await self._thread.run(self._store.has_changed):
                self._book.load(await self._thread.run(self._store.read))

    async def _save(self) -> None:
        """Write the unsaved token usage; if that fails, the next call tries again."""
        async with self._at_file():
            tokens = self._book.unsaved
            if not tokens:
                return
            try:
                await self._thread.run(partial(self._store.add_usage, tokens))
            except (ConfigError, Unavailable) as error:
                _log.warning("token_use_unsaved", error=str(error))
            else:
                self._book.note_saved(tokens)


def create_account_keeper(config: RunConfig) -> AccountKeeper:
    """Return the keeper of the users of a run."""
    users = users_of(config)
    assert users.path is not None, "users_of fills it in"
    return AccountKeeper(users.path, config=users)
