"""``python -m tests.chaos.crowd --sessions 1000``: many live sessions at a service that is killed again and again.

One process holds all sessions. Each takes turns with pauses between them, ends, and is replaced by another. The service
is killed ``--every`` seconds after it has answered, and started again. Afterwards each turn and end that was
acknowledged must be in the journal as it was told; rewards are not compared. ``soak-sessions.json`` has, for each life
of the service, its memory before it was killed, the seconds from its start to an answer, and how long turns took that
met no kill.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sqlite3
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
import click
import httpx
import numpy as np
import psutil
from attrs import asdict, define, field, frozen
from tests.chaos.play import free_port, settings
from tests.chaos.processes import ADMIN_KEY, Child, Failed, marked, spawn

MIN_TURNS, MAX_TURNS = 3, 10
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 8.0
"""Pauses between attempts, as those of the OpenAI SDK. A thousand sessions that ask twice a second while the service
starts need a whole core."""
START_SECONDS = 300.0
"""The longest time until a service answers."""
MEGABYTE = 2**20


@frozen(kw_only=True)
class Life:
    """One process of the service, from its start to its kill. ``seconds`` are those from the start to an answer."""

    began: float
    seconds: float
    cpu_seconds: float
    megabytes: float
    num_turns: int
    p50: float
    p99: float
    live: int


@define
class Crowd:
    """The sessions, and what they were told."""

    url: str
    pause_seconds: float
    random: random.Random
    client: httpx.AsyncClient
    turns: dict[str, str] = field(factory=dict)
    """The text of each acknowledged turn, by its id."""
    ends: dict[str, float] = field(factory=dict)
    """The last reward of each session whose end was acknowledged."""
    counts: Counter[str] = field(factory=Counter)
    latencies: list[float] = field(factory=list)
    """Of turns that met no kill, in this life."""
    life: int = 0
    num_live: int = 0
    answered: anyio.Event = field(factory=anyio.Event)
    problems: list[str] = field(factory=list)

    async def post(
        self, path: str, key: str, body: dict[str, Any], **headers: str
    ) -> tuple[dict[str, Any], float | None]:
        """Ask until there is an answer; returns it, and its seconds if the first request was answered."""
        began, num = time.monotonic(), 0
        while True:
            life = self.life
            sent = {"authorization": f"Bearer {key}", "x-stainless-retry-count": str(num), **headers}
            try:
                response = await self.client.post(f"{self.url}{path}", json=body, headers=sent)
            except httpx.TransportError:
                self.counts["requests cut off or refused"] += 1
            else:
                if response.status_code == httpx.codes.OK:
                    is_of_this_life = life == self.life  # the answer may have been on its way at the kill
                    if is_of_this_life:
                        self.answered.set()
                    return response.json(), time.monotonic() - began if num == 0 and is_of_this_life else None
                self.counts[f"answers {response.status_code}"] += 1
                if response.status_code < httpx.codes.INTERNAL_SERVER_ERROR and response.status_code not in (409, 429):
                    raise Failed(f"{path}: {response.status_code} {response.text[:300]}")
            await anyio.sleep(min(FIRST_RETRY_SECONDS * 2**num, MAX_RETRY_SECONDS) * (1 - self.random.random() / 4))
            num += 1

    async def pause(self) -> None:
        """Do what takes an agent time."""
        await anyio.sleep(self.random.expovariate(1 / self.pause_seconds))

    async def play(self) -> None:
        """Play one session after another."""
        await anyio.sleep(self.random.random() * self.pause_seconds)
        while True:
            opened, _ = await self.post("/rl/v1/start_session", ADMIN_KEY, {"task_id": "soak"})
            self.num_live += 1
            try:
                await self.talk(opened["session_id"], opened["api_key"])
            except Failed as error:
                self.problems.append(str(error))
            self.num_live -= 1

    async def talk(self, session: str, key: str) -> None:
        """Take some turns, and end the session with a reward."""
        messages: list[dict[str, str]] = []
        for number in range(self.random.randint(MIN_TURNS, MAX_TURNS)):
            messages.append({"role": "user", "content": f"say {number}"})
            body = {"model": "policy", "messages": messages, "max_tokens": 8}
            answer, seconds = await self.post("/v1/chat/completions", key, body, **{"idempotency-key": uuid4().hex})
            text = answer["choices"][0]["message"]["content"] or ""
            self.turns[answer["id"]] = text
            messages.append({"role": "assistant", "content": text})
            if seconds is not None:
                self.latencies.append(seconds)
            await self.pause()
        reward = round(self.random.random(), 6)
        await self.post("/rl/v1/finalize", key, {"final_reward": reward})
        self.ends[session] = reward


async def soak(
    directory: Path, *, num_sessions: int, minutes: float, every: float, pause: float, seed: int
) -> dict[str, Any]:
    """Hold the sessions for so long; returns what was measured. Raises ``Failed``."""
    port = free_port()
    config = settings(port, seed=seed, batch_size=16) | {
        "sessions": {"lifetimes": {"idle_seconds": 3600.0}},
        "serve": {"group_timeout_seconds": 600.0},
        "eval_dataset": None,
        # Rare ones would be lost with each process, and the same steps made again.
        "checkpoint": {"every_steps": 2, "keep": 2},
    }
    config["rollout"] = {"group_size": 1, "max_concurrent_rollouts": 2 * num_sessions, "max_head_offpolicyness": 4096}
    (directory / "soak.yaml").write_text(json.dumps(config), encoding="utf-8")
    lives: list[Life] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
    async with httpx.AsyncClient(timeout=120.0, limits=limits) as client, anyio.create_task_group() as tasks:
        crowd = Crowd(f"http://127.0.0.1:{port}", pause, random.Random(seed), client)
        began = time.monotonic()
        service = start(directory)
        for _ in range(num_sessions):
            tasks.start_soon(crowd.play)
        while True:
            with anyio.move_on_after(START_SECONDS):
                await crowd.answered.wait()
            if not crowd.answered.is_set() or not service.is_alive:
                raise Failed(f"life {crowd.life} has answered nothing: {dict(crowd.counts)}\n{service.output_tail()}")
            process = psutil.Process(service.process.pid)
            seconds, cpu = time.monotonic() - service.began, sum(process.cpu_times()[:2])
            await anyio.sleep(every)
            if not service.is_alive:
                raise Failed(f"life {crowd.life} ended by itself:\n{service.output_tail()}")
            found = np.array(crowd.latencies or [math.nan])
            lives.append(
                Life(
                    began=round(service.began - began, 1),
                    seconds=round(seconds, 2),
                    cpu_seconds=round(cpu, 2),
                    megabytes=round(process.memory_info().rss / MEGABYTE, 1),
                    num_turns=len(crowd.latencies),
                    p50=round(float(np.percentile(found, 50)), 3),
                    p99=round(float(np.percentile(found, 99)), 3),
                    live=crowd.num_live,
                )
            )
            click.echo(json.dumps(asdict(lives[-1]) | {"turns": len(crowd.turns)}))
            if time.monotonic() > began + 60 * minutes:
                break
            service.kill()
            crowd.life, crowd.answered, crowd.latencies = crowd.life + 1, anyio.Event(), []
            service = start(directory)
        tasks.cancel_scope.cancel()
    if code := service.interrupt(15, 300):
        raise Failed(f"the service left with {code}:\n{service.output_tail()}")
    problems = [*crowd.problems, *compare(directory / "run", crowd)]
    return {
        "sessions": num_sessions,
        "minutes": minutes,
        "kills": len(lives) - 1,
        "turns": len(crowd.turns),
        "ends": len(crowd.ends),
        "counts": dict(crowd.counts),
        "problems": problems,
        "lives": [asdict(life) for life in lives],
    }


def start(directory: Path) -> Child:
    """Start the service, which goes on with what it has."""
    arguments = ["-m", "areal_actors", "serve", str(directory / "soak.yaml"), "--run-dir", str(directory / "run")]
    arguments += ["--resume"] if (directory / "run" / "config.yaml").exists() else []
    return spawn("service", arguments, directory=directory, variables={})


def compare(run: Path, crowd: Crowd) -> list[str]:
    """Return what is not in the journal as it was told.

    The tables are read, since ``SqliteJournal.read`` leaves out sessions that were trained.
    """
    with sqlite3.connect(run / "journal.sqlite") as journal:
        rows = journal.execute("SELECT interaction, status, output FROM turns").fetchall()
        ended = {session for (session,) in journal.execute("SELECT session FROM endings")}
    turns = {name: json.loads(output)[0].get("content") or "" for name, status, output in rows if status == "completed"}
    problems = [f"not in the journal: turn {name}" for name in crowd.turns if name not in turns]
    problems += [
        f"otherwise in the journal: turn {name}: {turns[name]!r} instead of {text!r}"
        for name, text in crowd.turns.items()
        if turns.get(name, text) != text
    ]
    return problems + [f"not in the journal: the end of {name}" for name in crowd.ends if name not in ended]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.crowd")
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds from an answer to the kill")
    parser.add_argument("--pause", type=float, default=60.0, help="mean seconds between two turns of a session")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path(), help="where the figures are written")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        try:
            found = anyio.run(
                lambda: soak(
                    Path(name),
                    num_sessions=options.sessions,
                    minutes=options.minutes,
                    every=options.every,
                    pause=options.pause,
                    seed=options.seed,
                )
            )
        finally:
            for process in marked(Path(name)):
                process.kill()
    (options.output / "soak-sessions.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    click.echo(json.dumps({key: value for key, value in found.items() if key != "lives"}, indent=1))


if __name__ == "__main__":
    main()
