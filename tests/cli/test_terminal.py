"""What a person sees at a terminal: the screen after each command has drawn, redrawn and ended."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from tests.stacks.terminal import Terminal

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK = ("logging.trackers=[]", "engine.num_threads=1", "batch_size=2", "rollout.group_size=2", "total_steps=2")

SCREENS = {
    # command: its configuration, and what stands on the screen when it has ended
    "train": ("tiny.yaml", ["step 2/2", "2 of 2 steps in", "reward 0.", "weights: ", "  areal-actors eval "]),
    "eval": ("tiny.yaml", ["16 problems, 16 episodes, 0 of them failed", "avg@1", "Report: "]),
    "try": ("tiny.yaml", ["problem 0: ", "user: say", "the episodes of a training step take about"]),
}


@pytest.mark.parametrize("command", SCREENS)
def test_command_ends_with_words_for_people(command: str, tmp_path: Path):
    """Nothing that was printed is overwritten, and nothing is for programs alone."""
    config, words = SCREENS[command]
    with Terminal(command, str(EXAMPLES / config), f"fileroot={tmp_path}", *QUICK) as terminal:
        assert terminal.wait() == 0
        text = terminal.text

    assert f"tiny: loading tiny to {'evaluate' if command == 'eval' else command} it" in text
    assert all(word in text for word in words), text
    assert not re.search(r'^\{"|left -|[+]0\.0000', text, re.MULTILINE), text


def test_json_at_a_terminal_is_the_last_line(tmp_path: Path):
    """A person can ask for what a program gets."""
    words = ("train", str(EXAMPLES / "tiny.yaml"), f"fileroot={tmp_path}", "eval_dataset=null", *QUICK, "--json")
    with Terminal(*words, size=(2000, 30)) as terminal:
        assert terminal.wait() == 0

        assert json.loads(terminal.text.splitlines()[-1])["steps"] == 2


def test_serve_shows_address_sessions_and_groups(tmp_path: Path):
    """As long as it serves: the address and the line to copy work, and sessions are counted as they come and go."""
    words = ("serve", str(EXAMPLES / "serve.yaml"), f"fileroot={tmp_path}", *QUICK, "rollout.group_size=1")
    with Terminal(*words, size=(120, 40)) as terminal:
        text = terminal.wait_for("listening", "0 live, 0 ended", "0 trained", "─ serving ─", "http")
        found = re.search(r'export OPENAI_BASE_URL=(\S+) OPENAI_API_KEY="\$\(cat (\S+)\)"', text.replace("\n", ""))
        assert found, text
        admin = {"authorization": f"Bearer {Path(found[2]).read_text().strip()}"}
        with httpx.Client(base_url=found[1], trust_env=False, timeout=60) as client:
            root = found[1].removesuffix("/v1")
            for number in range(2):
                started = client.post(f"{root}/rl/v1/start_session", json={"task_id": f"say-{number}"}, headers=admin)
                own = {"authorization": f"Bearer {started.raise_for_status().json()['api_key']}"}
                terminal.wait_for(f"1 live, {number} ended")
                question = {"model": "policy", "max_tokens": 2, "messages": [{"role": "user", "content": "say"}]}
                client.post("chat/completions", json=question, headers=own).raise_for_status()
                client.post(f"{root}/rl/v1/finalize", json={"final_reward": number}, headers=own).raise_for_status()
        text = terminal.wait_for("step 1/2", "0 live, 2 ended", "2 trained", "─ serving ─")
        assert f"listening  {root}" in text
        terminal.type("\x03")
        assert terminal.wait() == 0
        text = terminal.text

    assert "1 of 2 steps in" in text, text
    assert re.search(r"^  areal-actors serve .* --resume$", text.replace("\n", ""), re.MULTILINE) or "--resume" in text
    assert not re.search(r'^\{"', text, re.MULTILINE)


HANGING = """\
import anyio

class Agent:
    async def run(self, data, **extra_kwargs):
        if data["hangs"]:
            await anyio.sleep_forever()
        raise ValueError(f"seen {data}")
"""


def test_try_prints_groups_as_they_end_and_what_there_is_after_ctrl_c(tmp_path: Path):
    """A person who does not want to wait loses nothing."""
    (tmp_path / "agent.py").write_text(HANGING)
    (tmp_path / "problems.jsonl").write_text('{"hangs": false}\n{"hangs": true}\n')
    (tmp_path / "job.yaml").write_text(
        "experiment_name: hanging\nmodel: tiny\ntotal_steps: 1\ndataset: {jsonl: problems.jsonl}\n"
        'rollout: {workflow: "agent.py:Agent", group_size: 2}\nengine: {max_length: 128}\n'
    )
    with Terminal("try", str(tmp_path / "job.yaml")) as terminal:
        terminal.wait_for("problem 0: none   2 failed")
        terminal.type("\x03")
        assert terminal.wait() == 130
        text = terminal.text

    assert "=== failed 2 times: Agent.run raised ValueError: seen {'hangs': False}" in text
    # The path may be longer than a line of the terminal.
    assert 'agent.py", line 7, in run' in " ".join(text.split())
    assert "Interrupted: the rest was not run." in text
    assert "2 of 2 episodes failed" in text
