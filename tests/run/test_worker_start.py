"""The start of a worker process: by hand, and by a process that is gone."""

from __future__ import annotations

import subprocess
import sys


def test_worker_ends_with_its_parent():
    """Its standard input closes, also when nothing can be connected to."""
    spec = b'{"name": "p", "life": 1, "addresses": ["unix:/nowhere/at/all.sock"], "secret": "%s"}\n' % (b"00" * 32)
    command = [sys.executable, "-m", "areal_actors.worker"]
    ended = subprocess.run(command, input=spec, capture_output=True, timeout=120, check=False)

    assert ended.returncode == 0


def test_worker_started_by_hand_explains_itself():
    """What it is told cannot be read: it says who starts workers."""
    command = [sys.executable, "-m", "areal_actors.worker"]
    ended = subprocess.run(command, input=b"hello\n", capture_output=True, timeout=120, check=False)

    assert ended.returncode == 1
    assert b"areal-actors train, with scheduler.roles" in ended.stderr
