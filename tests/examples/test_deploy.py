"""The files of ``examples/deploy``: read by the programs that they are for, where those are installed."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from areal_actors.cli import cli

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
UNIT = (DEPLOY / "areal-actors.service").read_text()


def accepts(words: list[str]) -> bool:
    """Whether the command line knows these options; the configuration is not loaded."""
    result = CliRunner().invoke(cli, [*words, "no_such_setting=1"])
    return "no_such_setting" in result.output


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="apt-get install systemd")
def test_systemd_accepts_the_unit(tmp_path: Path):
    """With paths of this machine in place of those of the example."""
    text = UNIT.replace("/srv/areal/.venv/bin/areal-actors", "/bin/true").replace("/srv/areal", str(tmp_path))
    unit = tmp_path / "areal-actors.service"
    unit.write_text(text.replace("User=areal", "User=root"))

    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)

    complaints = [line for line in done.stderr.splitlines() if "areal-actors.service" in line]
    assert [] == complaints


def test_the_commands_of_the_files_are_those_of_the_program(monkeypatch):
    """The unit's, the image's and the service's of the compose file."""
    monkeypatch.chdir(ROOT)
    (started,) = re.findall(r"^ExecStart=\S+ (.+)$", UNIT, re.MULTILINE)
    (default,) = re.findall(r"^CMD (\[.+\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    composed = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["areal"]["command"]

    assert accepts([word.replace("serve.yaml", "examples/serve.yaml") for word in shlex.split(started)])
    assert accepts(yaml.safe_load(default))
    assert accepts(composed)


def test_the_image_copies_files_that_there_are():
    """And installs the versions that were tried."""
    text = (DEPLOY / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for word in line.split()[:-1]]

    assert copied
    assert all((ROOT / word).exists() for word in copied)
    assert "-c constraints.txt" in text
    assert "USER 1000" in text
