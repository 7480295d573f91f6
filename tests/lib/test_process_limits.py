"""Settings of processes that run nothing but this library: open files and garbage collection."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from areal_actors.lib.process_limits import open_files_limit, tuned_gc

SHOW = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
LOWER = (
    "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))"
)


def run(code: str) -> int:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="macOS calls a limit infinite and refuses it")
def test_command_raises_the_limit_of_open_files():
    """The soft limit becomes the hard one."""
    raising = "from areal_actors.lib.process_limits import raise_open_files_limit; raise_open_files_limit()"

    assert run(f"{LOWER}\n{raising}\n{SHOW}") == open_files_limit()


def test_tuned_gc_restores_the_collector():
    """What was there is permanent within, and new objects are looked at less often; an error changes nothing."""
    kept, before = gc.get_threshold(), (700, 10, 10)
    gc.set_threshold(*before)
    with pytest.raises(KeyError), tuned_gc():
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold()[0] > before[0]
        raise KeyError

    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before
    gc.set_threshold(*kept)


def test_tuned_gc_keeps_a_disabled_collector_off():
    """A threshold of 0 was set on purpose."""
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with tuned_gc():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
