"""``areal-actors tasks``: solutions of task directories are checked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from areal_actors.cli.commands import cli
from areal_actors.errors import SandboxError
from areal_actors.sandbox import SandboxConfig, create_sandbox

EXAMPLES = Path(__file__).parents[3] / "examples" / "tasks"


@pytest.fixture
def bubblewrap():
    """Skips where there is none, with the install line."""
    pytest.importorskip("areal_actors_sandbox", reason="needs a plug-in: pip install -e plugins/areal-actors-sandbox")
    try:
        create_sandbox("bubblewrap").check(SandboxConfig(backend="bubblewrap"))
    except SandboxError as error:
        pytest.skip(str(error))


def test_tasks_check_finds_bad_tasks(bubblewrap, tmp_path):
    """A verifier that rewards nothing, or a solution that fails, is found, with the reason."""
    for name in ("good", "generous", "unsolved"):
        shutil.copytree(EXAMPLES / "digits", tmp_path / name)
    (tmp_path / "generous" / "tests" / "test.sh").write_text("#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n")
    (tmp_path / "unsolved" / "solution" / "solve.sh").write_text("#!/bin/sh\necho why >&2\nexit 3\n")
    ended = CliRunner().invoke(cli, ["tasks", "check", str(tmp_path)])

    assert 1 == ended.exit_code
    assert "BAD generous: solution and nothing give 1 1\nok  good: solution and nothing give 1 0\n" in ended.output
    assert "BAD unsolved: solution and nothing give - 0\n" in ended.output
    assert "It exited with status 3. The end of its stderr:\nwhy" in ended.output
    assert "1 of 3 tasks are good." in ended.output
