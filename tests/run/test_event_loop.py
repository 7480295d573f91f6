"""``event_loop: uvloop``, in the process of a run and in those that it starts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from openai import AsyncOpenAI
from tests.run.trained import CONFIG, NAME, train

from areal_actors.cli import cli
from areal_actors.lib import loops
from areal_actors.lib.loops import EventLoop

pytest.importorskip("uvloop", reason='pip install "areal_actors[uvloop]"')


class LoopAgent:
    """An agent whose reward is 1 if it streams an answer on uvloop."""

    async def run(self, data: dict[str, Any], *, base_url: str, http_client: Any, api_key: str) -> float:
        """Ask with a stream, and tell which loop runs this process."""
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        messages = [{"role": "user", "content": str(data)}]
        events = await client.chat.completions.create(model="m", messages=messages, max_tokens=8, stream=True)
        finish = [event.choices[0].finish_reason async for event in events][-1]
        return float(finish is not None and "uvloop" in type(asyncio.get_running_loop()).__module__)


@pytest.mark.parametrize(
    "placed", [(), ("scheduler.roles={proxy: {}, rollout: {}}", "scheduler.local.oversubscribe=true")]
)
def test_uvloop_streams_and_trains(tmp_path: Path, placed: tuple[str, ...]):
    """Its agents, which run where the rollout does, see the loop."""
    agent = f"rollout.workflow={__name__}.LoopAgent"
    result = train(tmp_path, NAME, "event_loop=uvloop", agent, *placed)

    assert 0 == result.exit_code, result.output
    records = [json.loads(line) for line in (tmp_path / NAME / "metrics.jsonl").read_text().splitlines()]
    assert [1.0] == [record["reward"] for record in records if record.get("reward") is not None]


def test_child_processes_use_event_loop_of_parent(monkeypatch: pytest.MonkeyPatch):
    """On uvloop by a variable, otherwise on asyncio."""

    async def look() -> dict[str, str]:
        return dict(loops.child_variables())

    async def name() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert {} == loops.run(look) == loops.run(look, backend="trio", event_loop=EventLoop.UVLOOP)
    found = loops.run(look, event_loop=EventLoop.UVLOOP)
    for key, value in found.items():
        monkeypatch.setenv(key, value)
    assert "uvloop" == loops.run(name)
    assert "uvloop" not in loops.run(name, event_loop=EventLoop.ASYNCIO)


@pytest.mark.parametrize("command", ["train", "serve"])
def test_a_missing_package_is_named(tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch):
    """By commands that start an event loop, and nothing is written."""
    monkeypatch.setattr(loops, "find_spec", lambda _: None)
    result = CliRunner().invoke(cli, [command, str(CONFIG), "event_loop=uvloop", f"fileroot={tmp_path}"])

    assert 2 == result.exit_code, result.output
    assert "event_loop: uvloop is not installed: pip install 'areal_actors[uvloop]'" in result.output
    assert not [*tmp_path.iterdir()]
