"""The recording of the first contact: the page comes from what a shell printed, and shows nothing of the machine."""

from __future__ import annotations

import pytest
from benchmarks.recording import COMMANDS, PAGE, format_page, parse_recording

MACHINE = {"cpu": "a processor", "cores": 2, "python": "3.11"}
HIDDEN = {"/srv/clone": "REPOSITORY", "/tmp/place": "~"}


def recorded(last: float, *, num_commands: int = len(COMMANDS)):
    """Return the commands of a shell whose training ended with the reward ``last``."""
    lines: list[str] = []
    for command in COMMANDS[:num_commands]:
        if command.startswith("areal-actors train"):
            lines += ["watch it at http://127.0.0.1:9/?token=abc-d_e", "saving to /tmp/place/runs"]
            lines.append(f'{{"steps": 17, "reward_first": 0.1, "reward_last": {last}}}')
        lines += [f"one line {number}" for number in range(200 if "pip" in command else 1)]
        lines.append("=-=recorded 2.500 1.000 0.250")
    return parse_recording(lines)


def test_the_page_has_each_command_with_its_output_and_times():
    """Installations are cut; tokens and the paths of the machine are hidden."""
    page = format_page(recorded(0.7), MACHINE, [3.0, 2.0, 1.0], hidden=HIDDEN)

    assert [f"## `{command}`" for command in COMMANDS] == [line for line in page.splitlines() if line[:2] == "##"]
    assert "rose from 0.10 to 0.70" in page
    assert "| `areal-actors runs` | 2.5 s | 1.2 s |" in page
    assert "... 198 lines ..." in page
    assert "?token=...\nsaving to ~/runs\n" in page


def test_a_reward_that_does_not_rise_makes_no_page():
    """A recording shows learning, or says that there was none."""
    with pytest.raises(SystemExit, match="did not rise"):
        format_page(recorded(0.1), MACHINE, [], hidden=HIDDEN)


def test_a_command_that_failed_is_not_among_the_recorded():
    """The first command without a time is the one that failed."""
    assert COMMANDS[:4] == tuple(one.command for one in recorded(0.7, num_commands=4))


def test_the_committed_page_has_todays_commands():
    """Whoever changes a command records again."""
    headings = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("## ")]

    assert [f"## `{command}`" for command in COMMANDS] == headings
