"""Which code is said to keep the event loop waiting: that of an agent, and only if it does."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio.lowlevel
import pytest

from areal_actors.lib.references import import_reference
from areal_actors.run.loop_watch import watch_loop

pytestmark = pytest.mark.anyio
AGENT = """
import json
import time

import anyio

class Sleeps:
    async def run(self):
        time.sleep(0.8)

class SleepsInALibrary:
    async def run(self):
        json.dumps([1], default=None, cls=Slow)

class Slow(json.JSONEncoder):
    def encode(self, _):
        time.sleep(0.8)
        return ""

class Computes:
    async def run(self):
        end = time.thread_time() + 0.8
        while time.thread_time() < end:
            pass

class Imports:
    async def run(self):
        import slow_module

class Awaits:
    async def run(self):
        for _ in range(100):
            await anyio.sleep(0.008)
            sum(range(10_000))
"""


@pytest.mark.parametrize(
    ("agent", "place"),
    [
        ("Sleeps", "agent.py:9, in run"),
        ("SleepsInALibrary", "agent.py:17, in encode"),
        ("Computes", "in run"),
        ("Imports", ""),
        ("Awaits", ""),
    ],
)
async def test_watch_names_the_agent_that_blocks(
    agent: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The innermost line of its own code; not the libraries that it imports, nor one that awaits on a busy machine."""
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "slow_module.py").write_text("import time\ntime.sleep(0.8)\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    monkeypatch.delitem(sys.modules, "slow_module", raising=False)
    agents = import_reference(f"agent.py:{agent}", directory=tmp_path)
    async with watch_loop() as watch:
        await anyio.lowlevel.checkpoint()
        await agents().run()

    assert watch.longest.place.endswith(place)
    assert (watch.longest.seconds > 0.3) == bool(place)
