"""``python -m tools.chaos.crowd --sessions 1000``: many live sessions at a service that is killed again and again.

One process holds all sessions. Each takes turns with pauses between them, rewards some of its answers, ends, and is
replaced by another. The service is killed at random, ``--every`` seconds after its first answer on the average, and
started again. Afterwards, every turn, reward and end that was acknowledged must be in the journal as it was told,
whether its session is alive, waits or was trained; and the rows that were trained must have exactly these turns of
their session, with the tokens of the journal and the returns of these rewards.

``soak-sessions.json`` has, by minute, the memory of the service and how long turns took that met no kill; and for each
life of the service, the seconds and the CPU time from its start to an answer.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sqlite3
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
import click
import httpx
import numpy as np
import psutil
from attrs import asdict, define, field, frozen
from tools.chaos.play import free_port, settings
from tools.chaos.processes import ADMIN_KEY, Child, Failed, marked, spawn

from areal_actors.interchange import find_dumps, read_rows
from areal_actors.journal.tables import decode_row
from areal_actors.kernel.remote.codec import Codec

MIN_TURNS, MAX_TURNS = 3, 10
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 8.0
"""Pauses between attempts, as those of the OpenAI SDK. A thousand sessions that ask twice a second while the service
starts need a whole core."""
START_SECONDS = 300.0
"""The longest time until a service answers."""
MEGABYTE = 2**20
SAMPLE_SECONDS = 2.0
"""Between two looks at the memory of the service."""
REWARDED_SHARE = 0.5
"""Of the answers that are followed by another turn, how many get a reward of their own."""


@frozen(kw_only=True)
class Life:
    """One process of the service, from its start to its kill. ``seconds`` are those from the start to an answer."""

    began: float
    seconds: float
    cpu_seconds: float
    uptime: float
    live: int


@define
class Minute:
    """What happened in one minute."""

    megabytes: list[float] = field(factory=list)
    latencies: list[float] = field(factory=list)
    """Of turns that met no kill."""
    kills: int = 0

    def summary(self) -> dict[str, Any]:
        """Return its figures. Memory is the largest: a service that has just started holds less."""
        p50, p99 = np.percentile(self.latencies, (50, 99)).round(3).tolist() if self.latencies else (None, None)
        largest = round(max(self.megabytes), 1) if self.megabytes else None
        return {"megabytes": largest, "turns": len(self.latencies), "p50": p50, "p99": p99, "kills": self.kills}


@define
class Crowd:
    """The sessions, and what they were told."""

    url: str
    pause_seconds: float
    random: random.Random
    client: httpx.AsyncClient
    began: float = field(factory=time.monotonic)
    turns: dict[str, str] = field(factory=dict)
    """The text of each acknowledged turn, by its id."""
    rewards: dict[str, float] = field(factory=dict)
    """The acknowledged reward of each turn that has one, by its id; that of an end belongs to the last turn."""
    sessions: dict[str, list[str]] = field(factory=dict)
    """The acknowledged turns of each session."""
    ends: set[str] = field(factory=set)
    """The sessions whose end was acknowledged."""
    counts: Counter[str] = field(factory=Counter)
    minutes: defaultdict[int, Minute] = field(factory=lambda: defaultdict(Minute))
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

    @property
    def minute(self) -> Minute:
        """The minute that runs."""
        return self.minutes[int((time.monotonic() - self.began) // 60)]

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
        """Take some turns, reward some of them, and end the session with a last reward."""
        messages: list[dict[str, str]] = []
        turns = self.sessions[session] = []
        num_turns = self.random.randint(MIN_TURNS, MAX_TURNS)
        for number in range(num_turns):
            messages.append({"role": "user", "content": f"say {number}"})
            body = {"model": "policy", "messages": messages, "max_tokens": 8}
            answer, seconds = await self.post("/v1/chat/completions", key, body, **{"idempotency-key": uuid4().hex})
            text = answer["choices"][0]["message"]["content"] or ""
            self.turns[answer["id"]] = text
            turns.append(answer["id"])
            messages.append({"role": "assistant", "content": text})
            if seconds is not None:
                self.minute.latencies.append(seconds)
            if number + 1 < num_turns and self.random.random() < REWARDED_SHARE:
                reward = round(self.random.random(), 3)
                await self.post("/rl/v1/set_reward", key, {"completion_id": answer["id"], "reward": reward})
                self.rewards[answer["id"]] = reward
            await self.pause()
        reward = round(self.random.random(), 3)
        await self.post("/rl/v1/finalize", key, {"final_reward": reward})
        self.rewards[turns[-1]] = reward
        self.ends.add(session)


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
    config["logging"] |= {"row_dumps": {"every_steps": 1}}
    config["rollout"] = {"group_size": 1, "max_concurrent_rollouts": 2 * num_sessions, "max_head_offpolicyness": 4096}
    (directory / "soak.yaml").write_text(json.dumps(config), encoding="utf-8")
    lives: list[Life] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
    async with httpx.AsyncClient(timeout=120.0, limits=limits) as client, anyio.create_task_group() as tasks:
        crowd = Crowd(f"http://127.0.0.1:{port}", pause, random.Random(seed), client)
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
            until = time.monotonic() + crowd.random.uniform(0, 2 * every)
            while True:
                crowd.minute.megabytes.append(process.memory_info().rss / MEGABYTE)
                if (left := until - time.monotonic()) <= 0:
                    break
                await anyio.sleep(min(left, SAMPLE_SECONDS))
            if not service.is_alive:
                raise Failed(f"life {crowd.life} ended by itself:\n{service.output_tail()}")
            lives.append(
                Life(
                    began=round(service.began - crowd.began, 1),
                    seconds=round(seconds, 2),
                    cpu_seconds=round(cpu, 2),
                    uptime=round(time.monotonic() - service.began - seconds, 2),
                    live=crowd.num_live,
                )
            )
            shown = {"megabytes": round(crowd.minute.megabytes[-1]), "turns": len(crowd.turns), "ends": len(crowd.ends)}
            click.echo(json.dumps(asdict(lives[-1]) | shown))
            if time.monotonic() > crowd.began + 60 * minutes:
                break
            service.kill()
            crowd.minute.kills += 1
            crowd.life, crowd.answered = crowd.life + 1, anyio.Event()
            service = start(directory)
        tasks.cancel_scope.cancel()
    if code := service.interrupt(signal.SIGTERM, 300):
        raise Failed(f"the service left with {code}:\n{service.output_tail()}")
    compared: Counter[str] = Counter()
    problems = [*crowd.problems, *compare(directory / "run", crowd, compared)]
    return {
        "sessions": num_sessions,
        "minutes": minutes,
        "kills": len(lives) - 1,
        "turns": len(crowd.turns),
        "rewards": len(crowd.rewards),
        "ends": len(crowd.ends),
        "compared": dict(compared),
        "counts": dict(crowd.counts),
        "problems": problems,
        "by_minute": [crowd.minutes[minute].summary() for minute in range(max(crowd.minutes) + 1)],
        "lives": [asdict(life) for life in lives],
    }


def start(directory: Path) -> Child:
    """Start the service, which goes on with what it has."""
    arguments = ["-m", "areal_actors", "serve", str(directory / "soak.yaml"), "--run-dir", str(directory / "run")]
    arguments += ["--resume"] if (directory / "run" / "config.yaml").exists() else []
    return spawn("service", arguments, directory=directory, variables={})


def compare(run: Path, crowd: Crowd, compared: Counter[str]) -> Iterator[str]:
    """Yield what is not in the journal or the exported rows as it was told, and count what was ``compared``.

    The tables are read, since ``SqliteJournal.read`` leaves out sessions that were trained.
    """
    codec = Codec()
    with sqlite3.connect(run / "journal.sqlite") as journal:
        rows = journal.execute("SELECT messages, output, record FROM turns").fetchall()
        # What was said of a turn after it had ended replaces what it had then.
        turns = [decode_row(codec, "turns", *row).interaction for row in rows]
        rewards = {turn.id: turn.reward for turn in turns if turn.reward is not None}
        rewards |= dict(journal.execute("SELECT interaction, reward FROM rewards"))
        ended = {session for (session,) in journal.execute("SELECT session FROM endings")}
        trained = journal.execute(
            "SELECT s.session FROM group_sessions s JOIN consumed c ON c.group_id = s.group_id WHERE c.is_trained"
        ).fetchall()
    kept = {turn.id: turn for turn in turns if turn.status == "completed"}
    for name, text in crowd.turns.items():
        compared["turns with the journal"] += 1
        if name not in kept:
            yield f"not in the journal: turn {name}"
        elif (found := kept[name].output.content or "") != text:
            yield f"otherwise in the journal: turn {name}: {found!r} instead of {text!r}"
    for name, reward in crowd.rewards.items():
        compared["rewards with the journal"] += 1
        if rewards.get(name) != reward:
            yield f"otherwise in the journal: the reward of {name}: {rewards.get(name)} instead of {reward}"
    for session in crowd.ends:
        compared["ends with the journal"] += 1
        if session not in ended:
            yield f"not in the journal: the end of {session}"
    exported = read_exports(run / "rows")
    told = {session: turns for session, turns in crowd.sessions.items() if session in crowd.ends}
    for session in {name for (name,) in trained} & told.keys():
        names = told[session]
        compared["sessions with their trained rows"] += 1
        compared["turns with their trained rows"] += len(names)
        compared["rewards with their trained rows"] += sum(name in crowd.rewards for name in names)
        returns = np.cumsum([crowd.rewards.get(name, 0.0) for name in reversed(names)])[::-1].round(3).tolist()
        for name, value in zip(names, returns, strict=True):
            want = [(kept[name].completion.token_ids.tolist() if name in kept else None, value)]
            if exported[name] != want:
                yield f"trained otherwise than told: turn {name} of {session}: {exported[name]} instead of {want}"


def read_exports(root: Path) -> Mapping[str, list[tuple[list[int], float]]]:
    """Return the trained tokens and the return of each turn by its name, once for each row that trains it."""
    found = defaultdict(list)
    for path in find_dumps(root).values():
        for row in read_rows(path):
            for index, name in enumerate(row.turn_names):
                at = (row.turns == index) & (row.loss_mask == 1)
                if at.any():
                    found[name].append((row.token_ids[at].tolist(), round(float(row.returns[at][0]), 3)))
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.chaos.crowd")
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=20.0, help="mean seconds from an answer to a kill")
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
