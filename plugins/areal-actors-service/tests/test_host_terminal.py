"""What an operator sees of a host at a terminal."""

from __future__ import annotations

from pathlib import Path

from tests.stacks.terminal import Terminal

CONFIG = """\
experiment_name: shared
model: tiny
total_steps: 1
engine: {max_length: 128}
"""


def test_host_shows_where_it_listens_until_ctrl_c(tmp_path: Path):
    """Its address, the file of its key and the page of its trials; nothing overwrites them."""
    (tmp_path / "job.yaml").write_text(CONFIG)
    with Terminal("host", str(tmp_path / "job.yaml"), f"fileroot={tmp_path}", size=(200, 30)) as terminal:
        shown = terminal.wait_for("Listening at http://127.0.0.1:", "the admin key is in", "Watch its trials at http")
        terminal.type("\x03")
        assert terminal.wait() == 0

        assert all(line in terminal.text for line in shown.splitlines() if line.startswith(("Listening", "Watch")))
        assert "shared: starting the host; services load tiny on first use" in terminal.text
