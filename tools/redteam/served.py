"""Attacks on ``areal-actors serve`` with two processes, which is killed and resumed.

The service is the program that people start. Its sessions are looked at as their owner does: by exporting them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random

import httpx
from attrs import evolve
from tools.chaos.processes import ADMIN_KEY, Child, spawn, wait_for
from tools.redteam.attacks import Attacker, State, connect, create_arena
from tools.redteam.plays import attack_arena, end_arena

from areal_actors.config import create_config, save_config

__all__ = ["play_served"]

_START_SECONDS = 300.0
_SETTINGS = {
    "experiment_name": "redteam",
    "model": "tiny",
    "seed": 1,
    "total_steps": 1,
    "batch_size": 64,  # more than there are sessions, so that none is trained and forgotten meanwhile
    "rollout": {"group_size": 1},
    "engine": {"max_length": 128},
    "sessions": {"lifetimes": {"grace_seconds": 0.0}},
    "proxy": {"num_processes": 2},
}


async def play_served(
    seed: int, count: int, directory: Path, *, num_restarts: int = 2
) -> tuple[Counter[int], list[str]]:
    """Statuses of ``count`` attacks, and those that succeeded, as ``play`` says; the service is killed in between."""
    save_config(create_config(_SETTINGS), directory / "config.yaml")
    statuses: Counter[int] = Counter()
    successes: list[str] = []
    arena, attacker = None, None
    before: State = []
    for restart in range(num_restarts + 1):
        with _serve(directory, is_resumed=restart > 0) as url:
            async with connect(url) as http:
                inspect = partial(_export, http)
                if arena is None:
                    arena = await create_arena(url, ADMIN_KEY, http, inspect)
                    before = await arena.state()
                arena = evolve(arena, url=url, http=http, inspect=inspect)
                attacker = attacker or Attacker(Random(seed), arena.victims, captured=arena.captured)
                if (now := await arena.state()) != before:
                    successes.append(f"restart {restart}: {before} became {now}")
                    before = now
                span = range(count * restart // (num_restarts + 1), count * (restart + 1) // (num_restarts + 1))
                found, new = await attack_arena(arena, attacker, span, before)
                statuses += found
                successes += new
                if restart == num_restarts:
                    successes += await end_arena(arena)
    return statuses, successes


async def _export(http: httpx.AsyncClient, session: str) -> tuple[bool, tuple[float | None, ...]]:
    """Return whether a session was answered at all, and its reward. An export does not say whether it has ended."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    answer = await http.post("/export_trajectories", json={"session_id": session}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["num_turns"] > 0, (answer.json()["reward"],)


@contextmanager
def _serve(directory: Path, *, is_resumed: bool) -> Iterator[str]:
    """Start the service, wait until both processes answer, and kill it in the end. Yields its URL."""
    log = directory / "service.log"
    offset = log.stat().st_size if log.exists() else 0
    command = ["-m", "areal_actors", "serve", str(directory / "config.yaml"), "--run-dir", str(directory / "run")]
    arguments = [*command, "--json", *(["--resume"] if is_resumed else [])]
    service: Child = spawn("service", arguments, directory=directory, variables={"AREAL_ADMIN_KEY": ADMIN_KEY})
    try:

        def find_url() -> str | None:
            assert service.is_alive, service.output_tail()
            lines = log.read_text(encoding="utf-8")[offset:].splitlines()
            return next((json.loads(line)["url"] for line in lines if line.startswith('{"url"')), None)

        wait_for(lambda: find_url() is not None, _START_SECONDS, "the service")
        yield str(find_url())
    finally:
        service.kill()
