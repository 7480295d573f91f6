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


def test_a_killed_holder_holds_nothing(tmp_path):
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


def test_two_in_one_process_are_two(tmp_path):
    """Another engine of the same process is another one; a closed descriptor holds nothing."""
    first = take(tmp_path / "lock")
    assert take(tmp_path / "lock") is None

    os.close(first)
    assert not is_held(tmp_path / "lock")


@pytest.mark.parametrize("code", NO_LOCKS)
def test_no_locks_are_not_another_holder(tmp_path, monkeypatch, code):
    """Who asks decides what that means; no descriptor is left open."""

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda *args: opened.append(real(*args)) or opened[-1])
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        is_held(tmp_path / "lock")

    assert code == caught.value.errno
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(*opened)


def test_a_lock_that_cannot_be_opened_is_an_error(tmp_path):
    """It is not taken for a lock that another process holds."""
    with pytest.raises(FileNotFoundError):
        take(tmp_path / "nowhere" / "lock")


def test_a_reader_who_looks_does_not_keep_a_holder_out(tmp_path):
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
