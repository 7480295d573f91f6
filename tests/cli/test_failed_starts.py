"""A command that cannot begin a run leaves the disk as it found it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def tree(directory: Path) -> dict[Path, bytes | None]:
    """The content of each file, and each directory."""
    return {path: path.read_bytes() if path.is_file() else None for path in directory.rglob("*")}


LORA, NO_AGENT = "trainer.lora={rank: 1000}", f"rollout.workflow={EXAMPLES / 'tiny_agent.py'}:Missing"


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [
        ("mine", ("train", "tiny.yaml", LORA), "rank: 1000 is more than the smaller dimension"),
        ("not/there/yet", ("train", "tiny.yaml", LORA), "rank: 1000 is more than the smaller dimension"),
        ("mine", ("train", "tiny.yaml", NO_AGENT), "Missing"),
        ("mine/new", ("train", "tiny.yaml", "--resume"), "There is no run in"),
        ("mine", ("serve", "serve.yaml", LORA), "rank: 1000 is more than the smaller dimension"),
    ],
    ids=["model", "new-directory", "agent", "resume", "serve"],
)
def test_failed_start_keeps_existing_files(tmp_path, name, arguments, complaint):
    """In the directory of the run, and beside it; nothing is added, neither a lock nor a directory."""
    (tmp_path / "mine" / "sub").mkdir(parents=True)
    (tmp_path / "mine" / "notes.txt").write_text("of the user")
    (tmp_path / "mine" / "sub" / "config.json").write_text("{}")
    (tmp_path / "beside.txt").write_text("of the user, too")
    before = tree(tmp_path)
    command, configuration, *more = arguments
    done = subprocess.run(
        [
            *(sys.executable, "-m", "areal_actors", command, str(EXAMPLES / configuration), *more),
            *("--run-dir", name, "logging.display=none", "logging.trackers=[]"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert 2 == done.returncode, done.stderr
    assert complaint in done.stderr
    assert before == tree(tmp_path)
