"""A file that one process holds: another one is told who, and it is free when that process ends, however it does."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading

import pytest

from areal_actors.lib.locks import NO_LOCKS, LockHeld, hold, is_held, take

HOLDER = """
import sys
from pathlib import Path
from areal_actors.lib.locks import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_lock_is_free_after_its_holder_is_killed(tmp_path):
    """Until then, another process that tries to hold it is told who the holder is."""
    lock = tmp_path / "lock"
    argv = [sys.executable, "-c", HOLDER, str(lock)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(LockHeld) as caught, hold(lock):
            pass
        assert caught.value.holder.startswith(f"process {process.pid} on ")
        assert is_held(lock)
        process.kill()
        process.wait()

        assert not is_held(lock)
        with hold(lock):
            assert lock.read_text().startswith(f"process {os.getpid()} on ")


def test_lock_excludes_within_one_process(tmp_path):
    """Another engine of the same process is another one; a closed descriptor holds nothing."""
    first = take(tmp_path / "lock")
    assert take(tmp_path / "lock") is None

    os.close(first)
    assert not is_held(tmp_path / "lock")


@pytest.mark.parametrize("code", NO_LOCKS)
def test_lock_on_a_file_system_without_locks_is_an_error(tmp_path, monkeypatch, code):
    """Who asks decides what that means; no descriptor is left open."""

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda *args: opened.append(real(*args)) or opened[-1])
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        take(tmp_path / "lock")

    assert code == caught.value.errno
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(*opened)


def test_lock_check_creates_no_file(tmp_path):
    """A directory in which nothing ran stays as it is."""
    assert not is_held(tmp_path / "lock")
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("was_there", [False, True])
def test_lock_holder_removes_its_file(tmp_path, was_there):
    """At the end of its block, if it asks for it; the file of an earlier holder stays."""
    path = tmp_path / "lock"
    if was_there:
        with hold(path):
            pass
    with hold(path) as held:
        held.is_removed = True
        assert is_held(path)

    assert was_there == path.exists()


def test_lock_waiter_takes_the_file_that_replaced_a_removed_one(tmp_path, monkeypatch):
    """It had opened the file before: with its lock on a file without a name, another process could have one, too."""
    path, real, removed = tmp_path / "lock", fcntl.flock, []

    def remove_before(descriptor, operation):
        if len(removed) < 3:
            removed.append(path.unlink())
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_before)
    descriptor = take(path)

    assert os.path.samestat(path.stat(), os.fstat(descriptor))
    assert take(path) is None
    os.close(descriptor)


def test_lock_holders_that_remove_files_never_overlap(tmp_path):
    """Each of several threads makes, holds and removes the lock, again and again."""
    path, inside, most = tmp_path / "lock", [], []

    def work() -> None:
        for _ in range(100):
            descriptor = take(path)
            if descriptor is not None:
                inside.append(descriptor)
                most.append(len(inside))
                inside.remove(descriptor)
                path.unlink()
                os.close(descriptor)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert 1 == max(most)
    assert not path.exists()


def test_lock_that_cannot_be_opened_is_an_error(tmp_path):
    """It is not taken for a lock that another process holds."""
    with pytest.raises(FileNotFoundError):
        take(tmp_path / "nowhere" / "lock")


def test_lock_check_does_not_block_a_holder(tmp_path):
    """``is_held`` takes the lock for an instant; listing runs must not refuse one that starts meanwhile."""
    path = tmp_path / "lock"
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.001):
            is_held(path)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(20):
            with hold(path):
                pass
    finally:
        is_over.set()
        thread.join()
