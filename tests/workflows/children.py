"""Agents that run in child processes, in all the ways that go well and that do not."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from areal_actors.workflows import context as workflow_context

VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY")
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"


class Sync:
    """Blocks, and keeps what its constructor was given."""

    def __init__(self, start: float = 0.0) -> None:
        self.start = start
        self.num_runs = 0

    def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        self.num_runs += 1
        time.sleep(0.001)
        return self.start + data["add"] + 100 * self.num_runs


class Looking:
    """Says in its completion ids what it was given, and where."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> dict[str, float]:
        await asyncio.sleep(0)
        context = workflow_context.get()
        given = [extra_kwargs["base_url"], extra_kwargs["api_key"], type(extra_kwargs["http_client"]).__name__]
        return {
            "|".join(os.environ[name] for name in VARIABLES): float(os.getpid()),
            "|".join(given): float(os.getpgid(0)),
            f"{context.task_id}/{context.member}/{context.is_eval}": 1.0,
            repr(sys.stdin.read()): 2.0,
        }


class Doing:
    """Does what its problem says."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        return getattr(self, data["do"])(data)

    def succeed(self, data: dict[str, Any]) -> float:
        return float(os.getpid())

    def kill_itself(self, data: dict[str, Any]) -> None:
        print("these are my last words", file=sys.stderr, flush=True)  # noqa: T201 - on purpose
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self, data: dict[str, Any]) -> None:
        os._exit(3)

    def crash(self, data: dict[str, Any]) -> None:
        ctypes.string_at(0)

    def fail(self, data: dict[str, Any]) -> None:
        raise ValueError("no such tool")

    def exit(self, data: dict[str, Any]) -> None:
        sys.exit(4)

    def none(self, data: dict[str, Any]) -> None:
        return None

    def nan(self, data: dict[str, Any]) -> float:
        return float("nan")

    def pollute(self, data: dict[str, Any]) -> float:
        os.environ["POLLUTION"] = "yes"
        del os.environ["OPENAI_API_KEY"]
        return 0.0

    def inspect(self, data: dict[str, Any]) -> float:
        return float("POLLUTION" in os.environ)

    def print_a_lot(self, data: dict[str, Any]) -> float:
        print("x" * (3 * 1024 * 1024))  # noqa: T201 - on purpose
        os.write(1, b'{"last": 666, "by_interaction": {}}\n')
        subprocess.run(["echo", "from a child"], check=True)
        return 1.0

    def hang(self, data: dict[str, Any]) -> None:
        """With a child and a grandchild, deaf to SIGTERM; their ids are written where the test looks for them."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", PARENT])
        Path(data["path"]).write_text(f"{os.getpid()} {child.pid}\n")
        time.sleep(600)


class Lingering:
    """Starts a task that would go on in the next episode; tells whether that of the one before was cancelled."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        self.tasks.append(asyncio.create_task(asyncio.sleep(600)))
        await asyncio.sleep(0)
        return float(all(task.cancelled() for task in self.tasks[:-1]))
