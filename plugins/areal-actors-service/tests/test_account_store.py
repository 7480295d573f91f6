"""The file of keys."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing

import pytest

from areal_actors.domain import Quotas
from areal_actors.errors import ConfigError, Unavailable
from areal_actors_service.accounts import AccountBook, AccountStore, Claim, Contents


@pytest.fixture
def path(tmp_path):
    return tmp_path / "service" / "keys.sqlite"


def fill(store: AccountStore, user: str = "ada", **claims):
    """Keep a new key."""
    issued = AccountBook().issue(Claim(user=user, **claims), 100.0)
    store.put_key(issued.user, issued.key)
    return issued


def test_store_reads_back_keys_and_usage(path):
    """Users, keys and use, in one piece, by a store that has not written them."""
    with closing(AccountStore(path)) as store, closing(AccountStore(path)) as other:
        quotas = Quotas(max_sessions=0, max_tokens_per_day=2**53)
        first = fill(store, "Jos\u00e9", experiment="e", trial="t", quotas=quotas, expires_at=200.0)
        second = fill(store, "林")
        store.add_usage({("林", 5): 7, ("Jos\u00e9", 5): 1})
        store.add_usage({("林", 5): 3})
        store.revoke(second.key.id, 150.0)
        store.revoke(second.key.id, 160.0)
        contents = other.read()

    assert (first.user, second.user) == contents.users
    assert (first.key, 150.0) == (contents.keys[0], contents.keys[1].revoked_at)
    assert {("林", 5): 10, ("Jos\u00e9", 5): 1} == contents.usage


def test_store_creates_its_file_with_the_first_key(path):
    """A service without users leaves no file."""
    with closing(AccountStore(path)) as store:
        assert Contents() == store.read()
        assert not store.has_changed()
        assert not path.exists()


def test_store_is_readable_by_its_owner_only(path):
    """The file and what SQLite lays beside it; no key is in any of them."""
    with closing(AccountStore(path)) as store:
        secret = fill(store).secret
        files = sorted(path.parent.iterdir())

        assert len(files) == 3
        for file in files:
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert secret.encode() not in file.read_bytes()


def test_store_notices_changes_of_other_processes(path):
    """Of others only: one's own are known, and reading makes everything known."""
    with closing(AccountStore(path)) as store, closing(AccountStore(path)) as other:
        store.read()
        fill(other)

        assert store.has_changed()
        store.read()
        assert not store.has_changed()
        fill(store)
        assert not store.has_changed()
        assert other.has_changed()


def test_store_drops_usage_of_old_days(path):
    """A month is kept."""
    with closing(AccountStore(path)) as store:
        fill(store)
        store.add_usage({("ada", 1): 1})
        store.add_usage({("ada", 40): 1})

        assert {("ada", 40): 1} == store.read().usage


def _write_text(path):
    path.write_text("user,key\nada,secret\n" * 100)


def _write_half(path):
    with closing(AccountStore(path)) as store:
        fill(store)
    path.write_bytes(path.read_bytes()[:3000])


def _write_another(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE songs (name TEXT)")


def _write_newer(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")


def _write_nonsense(path):
    with closing(AccountStore(path)) as store:
        fill(store)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE users SET max_sessions = -5")
        connection.commit()


@pytest.mark.parametrize("spoil", [_write_text, _write_half, _write_another, _write_newer, _write_nonsense])
def test_store_refuses_another_kind_of_file(path, spoil):
    """By name, with what to do, and without touching it."""
    path.parent.mkdir()
    spoil(path)
    before = path.read_bytes()
    with closing(AccountStore(path)) as store, pytest.raises(ConfigError, match=r"users\.path: .*keys\.sqlite"):
        store.read()

    assert before == path.read_bytes()


def test_store_names_a_directory_that_cannot_be_written(tmp_path):
    """What cannot be kept is not promised."""
    (tmp_path / "file").write_text("")
    with (
        closing(AccountStore(tmp_path / "file" / "keys.sqlite")) as store,
        pytest.raises(Unavailable, match=r"keys\.sqlite"),
    ):
        fill(store)


_WRITER = """
import os, signal, sys
from pathlib import Path
from areal_actors_service.accounts import AccountBook, AccountStore, Claim
store = AccountStore(Path(sys.argv[1]))
issued = AccountBook().issue(Claim(user="ada"), 100.0)
store.put_key(issued.user, issued.key)
store.revoke(issued.key.id, 150.0)
print(issued.key.id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_store_survives_a_killed_process(path):
    """A key that was handed out and a revocation that was acknowledged are there afterwards."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", _WRITER, str(path)], env=environment, capture_output=True, text=True, check=False
    )
    with closing(AccountStore(path)) as store:
        (key,) = store.read().keys

    assert -signal.SIGKILL == done.returncode, done.stderr
    assert (done.stdout.strip(), 150.0) == (key.id, key.revoked_at)
