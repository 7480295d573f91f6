"""What a newcomer sees when a run fails to learn, through the public command."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.stacks.commands import start_command

AGENT = """\
from openai import AsyncOpenAI

class Careless:
    async def run(self, data, base_url, api_key, **extra_kwargs):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "say"}], max_tokens=4
            )
        return data["reward"]
"""

CONFIG = """\
experiment_name: careless
model: tiny
total_steps: 3
batch_size: 2
dataset: {jsonl: problems.jsonl}
rollout: {workflow: "careless.py:Careless", group_size: 4}
engine: {max_length: 128}
logging: {display: plain}
"""


def train(where: Path) -> subprocess.CompletedProcess[str]:
    """The ended command, whose job and run are in ``where``."""
    log = where / "log"
    words = ("train", str(where / "job.yaml"), "--run-dir", str(where / "run"))
    # The network of a company, whose proxy the agent's client must not use.
    company = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9")
    with start_command(*words, log=log, variables=company) as process:
        output, _ = process.communicate(timeout=120)
    return subprocess.CompletedProcess("train", process.wait(), output, log.read_text())


def test_train_prints_the_verdict_and_agent_failures(tmp_path: Path):
    """The traceback with file and line is on the terminal once, and in ``failures.jsonl`` for each episode.

    The reason why nothing was learned ends the output of the terminal, and is in the JSON of the last line.
    """
    (tmp_path / "careless.py").write_text(AGENT)
    (tmp_path / "job.yaml").write_text(CONFIG)
    problems = [{"reward": 1.0}] * 3 + [{"question": "without a reward"}]
    (tmp_path / "problems.jsonl").write_text("\n".join(json.dumps(problem) for problem in problems))

    done = train(tmp_path)
    assert 0 == done.returncode, done.stderr

    assert "evaluating" not in done.stderr  # there are no held-out problems
    assert 1 == done.stderr.count('careless.py", line 9, in run')
    assert 1 == done.stderr.count("    KeyError: 'reward'\n")
    lines = (tmp_path / "run" / "failures.jsonl").read_text().splitlines()
    assert lines
    assert all("line 9, in run" in json.loads(line)["traceback"] for line in lines)
    summary = json.loads(done.stdout.splitlines()[-1])
    assert "6 of 6 groups had equal rewards in the last 3 steps: nothing to learn" in summary["verdict"]
    assert f"This run did not learn: {summary['verdict']}" in done.stderr
    assert summary["verdict"] in (tmp_path / "run" / "report.html").read_text()


def test_failed_run_leaves_a_record_and_a_report(tmp_path: Path):
    """A custom metric raises in the first step, after the run has begun."""
    broken = """
calls = []

def broken(batch):
    calls.append(batch)
    if len(calls) > 1:  # the first call tries the function before the run begins
        raise OSError("the meter is gone")
    return {}
"""
    (tmp_path / "careless.py").write_text(AGENT + broken)
    (tmp_path / "job.yaml").write_text(CONFIG + "trainer: {metrics: ['careless.py:broken']}\n")
    (tmp_path / "problems.jsonl").write_text(json.dumps({"reward": 1.0}) + "\n")

    done = train(tmp_path)
    assert 1 == done.returncode, done.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert "failed" == record["status"]
    assert "the meter is gone" in record["reason"]
    assert "the meter is gone" in (tmp_path / "run" / "report.html").read_text()
