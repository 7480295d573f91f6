"""The journal: CPU time until a turn is durable, with 1, 16 and 64 writers at once, and its bytes on disk.

The baseline is what one would write by hand: a row of ``sqlite3`` with the arrays of the turn and its texts, in one
transaction per batch of as many rows as there are writers.
"""

from __future__ import annotations

import pickle
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
import numpy as np
from attrs import evolve
from benchmarks.harness import Result

from areal_actors.domain import ChatMessage, Completion, FinishReason, TurnEnded
from areal_actors.journal import SqliteJournal
from areal_actors_testing.journal_contract import create_start, create_turn

_RANDOM = np.random.default_rng(7)
_WRITERS = (1, 16, 64)
_NUM_TOKENS = 250
_NUM_PROMPT_TOKENS = 125
_CHARACTERS_PER_TOKEN = 4
_GATE = 4.0
"""The journal keeps an order over all sessions, restores trees and wakes its writers; the baseline does not."""


def _text(num_tokens: int) -> str:
    return "".join(map(chr, _RANDOM.integers(97, 122, num_tokens * _CHARACTERS_PER_TOKEN)))


def _turn(number: int) -> TurnEnded:
    """Return a turn of 125 new prompt tokens and 250 sampled ones."""
    turn, logprobs = create_turn("bench", number), -_RANDOM.random(_NUM_TOKENS)
    interaction = evolve(
        turn.interaction,
        messages=(ChatMessage(role="user", content=_text(_NUM_PROMPT_TOKENS)),),
        prompt_suffix=_RANDOM.integers(3, 50_000, _NUM_PROMPT_TOKENS),
        num_prompt_tokens=_NUM_PROMPT_TOKENS,
        completion=Completion(
            token_ids=_RANDOM.integers(3, 50_000, _NUM_TOKENS),
            logprobs=logprobs,
            raw_logprobs=logprobs * 1.1,
            versions=np.zeros(_NUM_TOKENS),
            finish=FinishReason.STOP,
        ),
        output=ChatMessage(role="assistant", content=_text(_NUM_TOKENS)),
    )
    return evolve(turn, interaction=interaction)


def _write_by_hand(turns: Sequence[TurnEnded], size: int) -> float:
    """Return CPU µs per turn of ``executemany``."""
    with tempfile.TemporaryDirectory() as directory:
        connection = sqlite3.connect(Path(directory) / "raw.sqlite", isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("CREATE TABLE turns (id TEXT PRIMARY KEY, turn BLOB)")
        start = time.process_time()
        for first in range(0, len(turns), size):
            rows = [(turn.interaction.id, pickle.dumps(turn)) for turn in turns[first : first + size]]
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT INTO turns VALUES (?, ?)", rows)
            connection.execute("COMMIT")
        spent = time.process_time() - start
        connection.close()
    return spent / len(turns) * 1e6


async def _write(turns: Sequence[TurnEnded], num_writers: int) -> tuple[float, float]:
    """Return CPU µs per turn, with so many writers and until the journal is closed, and bytes per turn on disk."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal.sqlite"
        start = time.process_time()
        async with SqliteJournal.open(path) as journal:
            await journal.write(create_start("bench"))

            async def write(own: Sequence[TurnEnded]) -> None:
                for turn in own:
                    await journal.write(turn)

            async with anyio.create_task_group() as tasks:
                for writer in range(num_writers):
                    tasks.start_soon(write, turns[writer::num_writers])
        spent = time.process_time() - start
        return spent / len(turns) * 1e6, path.stat().st_size / len(turns)


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the signature of every benchmark
    """Return the cost of turns from 1, 16 and 64 writers on both loops, and the ratio to the baseline."""
    turns = [_turn(number) for number in range(320 if quick else 1920)]
    rounds = 2 if quick else 4
    results = []
    for num_writers in _WRITERS:
        by_hand = f"by hand, batches of {num_writers}"
        baseline = min(_write_by_hand(turns, num_writers) for _ in range(rounds))
        results.append(Result(benchmark="journal", name=by_hand, value=baseline, unit="µs"))
        for backend in ("asyncio", "trio"):
            measured = [anyio.run(_write, turns, num_writers, backend=backend) for _ in range(rounds)]
            spent, name = min(value for value, _ in measured), f"{num_writers} writers ({backend})"
            detail = {"bytes_per_turn": round(measured[0][1])}
            results += [
                Result(benchmark="journal", name=f"turn, {name}", value=spent, unit="µs", detail=detail),
                Result(benchmark="journal", name=f"turn over baseline, {name}", value=spent / baseline, unit="ratio",
                       baseline=by_hand, gate=_GATE),
            ]  # fmt: skip
    return results
