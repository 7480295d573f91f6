"""Limits of open files: ours are raised as far as the system allows."""

from __future__ import annotations

import subprocess
import sys

import pytest

from areal_actors.lib.process_limits import open_files_limit

SHOW = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
LOWER = (
    "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))"
)


def run(code: str) -> int:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="macOS calls a limit infinite and refuses it")
def test_a_command_may_open_what_the_system_allows():
    """The soft limit becomes the hard one."""
    raising = "from areal_actors.lib.process_limits import raise_open_files_limit; raise_open_files_limit()"

    assert run(f"{LOWER}\n{raising}\n{SHOW}") == open_files_limit()


def test_importing_the_library_changes_no_limit():
    """A program that embeds it has its own."""
    embedding = "import areal_actors.run, areal_actors.proxy, areal_actors.lib.process_limits"

    assert run(f"{LOWER}\n{embedding}\n{SHOW}") == 128
