"""The files that a run writes, for tests of what reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from areal_actors.dashboard import RunDirectory

SCRIPT = "<script>document.title = 'broken into'</script>"
"""Text of a model that must stay text."""


def step(number: int, **metrics: Any) -> dict[str, Any]:
    return {"step": number, "version": number, "phase": "rl", "reward": number / 10, "eval_reward": None, **metrics}


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_run(path: Path, *, num_steps: int = 3) -> RunDirectory:
    """Write a run of ``num_steps`` steps with two groups, a conversation of two branches, and failures of two kinds."""
    directory = RunDirectory(path=path)
    path.mkdir(parents=True)
    directory.logs.mkdir()
    directory.config.write_text("experiment_name: shown\nproxy: {admin_key: areal-admin-0123456789abcdefghij}\n")
    write_lines(directory.metrics, [step(number, loss=0.5, entropy=1.0) for number in range(1, num_steps + 1)])
    for task, rewards in ((0, (0.0, 1.0)), (11, (1.0, 1.0))):
        rows = [
            {
                "task_id": task,
                "sample_idx": sample,
                "reward": reward,
                "seqlen": 5,
                "prompt_len": 3,
                "head_version": 1,
                "tail_version": 2,
                "prompt": "<system>tools</system>",
                "completion": f"answer {sample} {SCRIPT}",
                "token_ids": [1, 2, 3, 4, 5],
                "trained": [[3, 5]],
            }
            for sample, reward in enumerate(rewards)
        ]
        write_lines(directory.rollouts / "1" / f"{task}.jsonl", rows)
    turn = {
        "fork": "root",
        "token_parent": None,
        "tag": None,
        "reward": None,
        "return": 1.0,
        "credit": "rewarded",
        "failure": None,
        "messages": [{"role": "user", "content": SCRIPT}],
        "answer": {"role": "assistant", "content": "four", "tool_calls": [{"name": "add", "arguments": "{}"}]},
        "num_prompt_tokens": 9,
        "num_tokens": 2,
        "finish": "stop",
        "tokens": [["fo", -0.1], ["ur", -3.5]],
        "versions": [[1, 1], [2, 1]],
        "mask": [[1, 2]],
    }
    branch = turn | {"id": "b", "parent": "a", "fork": "edited_answer", "mask": [[0, 2]]}
    session = {
        "session": "train-0…",
        "version": 1,
        "is_eval": False,
        "task_id": "0",
        "sample_idx": 1,
        "reward": 1.0,
        "logged": {"format_ok": 1.0},
        "seconds": 2.5,
        "failure": None,
        "untrained": [{"interaction": "b", "reason": "turned_away", "num_tokens": 2}],
        "turns": [turn | {"id": "a", "parent": None}, branch],
        "num_turns": 2,
    }
    other = session | {"version": 2, "task_id": "7", "turns": [], "num_turns": 0, "failure": "gave up", "untrained": []}
    write_lines(directory.sessions, [session, other])
    write_lines(directory.advantages, [{"step": 2, "turns": {"a": [[0.5, 1], [-0.25, 1]]}}])
    failure = {"task_id": "4", "sample_idx": 0, "version": 1, "turns": 1, "seconds": 1.0, "outcome": "failed"}
    write_lines(
        directory.failures,
        [
            failure | {"failure": "ValueError: no", "traceback": "line 9 key sk-abcdefghijklmnopqrstuvwxyz012345"},
            failure | {"failure": "TimeoutError: late", "traceback": None},
            failure | {"failure": "ValueError: no", "traceback": "line 9", "version": 2},
        ],
    )
    return directory
