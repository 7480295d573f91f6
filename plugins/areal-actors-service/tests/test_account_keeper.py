"""The keeper of accounts: what it promises of its file."""

from __future__ import annotations

import sqlite3
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest

from areal_actors.domain import Quotas
from areal_actors.errors import ConfigError, QuotaExceeded, Unauthorized, Unavailable
from areal_actors.kernel import ActorSystem, root_cause
from areal_actors.messages import AdmitUser, CreateKey, IdentifyUser, ListKeys, RevokeKey, TokensSampled
from areal_actors.testing import virtual_backend
from areal_actors_service.account_keeper import AccountKeeper
from areal_actors_service.accounts import AccountStore
from areal_actors_service.config import UsersConfig

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend(anyio_backend: str) -> tuple[str, dict[str, Any]]:
    """Virtual time: nothing here opens a socket."""
    return virtual_backend(anyio_backend)


DAY = 86_400.0


@asynccontextmanager
async def kept(path, clock=lambda: 1000.0):
    async with ActorSystem.open() as system:
        yield await system.spawn(AccountKeeper(path, config=UsersConfig(save_seconds=3600), clock=clock))


async def test_keeper_saves_usage_when_it_stops(tmp_path):
    """Nothing of an orderly end is lost, and the next process goes on from there."""
    path = tmp_path / "keys.sqlite"
    async with kept(path) as keeper:
        issued = await keeper.ask(CreateKey(user="ada", quotas=Quotas(max_tokens_per_day=5)))
        await keeper.tell(TokensSampled(user="ada", num_tokens=5))
        await keeper.ask(ListKeys())
    async with kept(path) as keeper:
        with pytest.raises(QuotaExceeded) as error:
            await keeper.ask(AdmitUser(key=issued.key.id))
        await keeper.ask(AdmitUser(key=issued.key.id, is_counted=False))

    assert DAY - 1000 == error.value.retry_after_seconds


async def test_keeper_resets_usage_at_midnight(tmp_path):
    """By the wall clock, while the process runs."""
    now = [1000.0]
    async with kept(tmp_path / "keys.sqlite", clock=lambda: now[0]) as keeper:
        issued = await keeper.ask(CreateKey(user="ada", quotas=Quotas(max_tokens_per_day=5), expires_at=2 * DAY))
        await keeper.tell(TokensSampled(user="ada", num_tokens=5))
        with pytest.raises(QuotaExceeded):
            await keeper.ask(AdmitUser(key=issued.key.id))
        now[0] = DAY
        await keeper.ask(AdmitUser(key=issued.key.id))
        now[0] = 2 * DAY
        with pytest.raises(Unauthorized):
            await keeper.ask(AdmitUser(key=issued.key.id))


async def test_keeper_does_not_start_with_another_kind_of_file(tmp_path):
    """The setting is named before anything is served."""
    path = tmp_path / "keys.sqlite"
    path.write_text("a diary\n" * 200)
    with pytest.raises(Exception, match="is not a file of keys") as error:
        async with kept(path):
            pass

    assert isinstance(root_cause(error.value), ConfigError)


async def test_keeper_acknowledges_only_written_keys(tmp_path, monkeypatch):
    """While another process holds the file for too long: 503, nothing is promised, and what was used is kept."""
    monkeypatch.setattr("areal_actors_service.accounts._BUSY_SECONDS", 0.01)
    path = tmp_path / "keys.sqlite"
    async with kept(path) as keeper:
        issued = await keeper.ask(CreateKey(user="ada"))
        await keeper.tell(TokensSampled(user="ada", num_tokens=5))
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            for message in (RevokeKey(key=issued.key.id), CreateKey(user="bob")):
                with pytest.raises(Unavailable, match="locked"):
                    await keeper.ask(message)
            other.execute("ROLLBACK")
        await keeper.ask(IdentifyUser(secret=issued.secret))
        await keeper.ask(RevokeKey(key=issued.key.id))
        with pytest.raises(Unauthorized):
            await keeper.ask(IdentifyUser(secret=issued.secret))
    with closing(AccountStore(path)) as store:
        contents = store.read()

    assert {("ada", 0): 5} == contents.usage
    assert 1000.0 == contents.keys[0].revoked_at
