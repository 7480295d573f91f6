"""Temporary directories do not outlive the process that made them for long."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from areal_actors.errors import ConfigError
from areal_actors.lib.scratch import process_directory, scratch_directory

HOLDER = """
import sys
from areal_actors.lib.scratch import scratch_directory
with scratch_directory() as directory:
    print(directory, flush=True)
    sys.stdin.read()
"""


def test_scratch_directory_is_removed():
    """And so are directories in it that may not be written."""
    with scratch_directory() as directory:
        (directory / "kept").mkdir(mode=0o500)
        assert directory.parent == process_directory()

    assert not directory.exists()


def test_scratch_of_a_killed_process_is_removed_by_the_next(tmp_path: Path):
    """As long as it lives, others leave it alone."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as living:
        assert living.stdout is not None
        kept = Path(living.stdout.readline().strip())
        subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
        assert kept.is_dir()
        living.kill()
        living.wait()
        assert kept.is_dir()

        subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)

    assert not kept.exists()
    assert [*tmp_path.rglob("*")] == [tmp_path / f"areal-{os.getuid()}"]


@pytest.mark.usefixtures("fresh_process_directory")
def test_scratch_directory_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its owner could replace a socket there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    root = tmp_path / f"areal-{os.getuid()}"
    root.mkdir()
    root.chmod(0o777)

    with pytest.raises(ConfigError, match="can be used by others"):
        process_directory()


@pytest.fixture
def fresh_process_directory():
    """Forget that this process has a directory for the length of a test, and do not lose that directory."""
    found = process_directory()
    process_directory.cache_clear()
    yield
    process_directory.cache_clear()
    assert found.is_dir()
