"""The cost of durability: CPU time and bytes of a turn in the journal, by the number of concurrent writers.

The baseline is rows that are ready, written by ``execute`` of sqlite3 in one transaction per batch of the same size.
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio
import numpy as np
from benchmarks.harness import Result

from areal_actors.domain import (
    ChatMessage,
    Completion,
    FinishReason,
    Interaction,
    InteractionId,
    InteractionStatus,
    SessionId,
    TurnEnded,
)
from areal_actors.journal import SqliteJournal
from areal_actors.journal.tables import create_tables, encode_event
from areal_actors.kernel.remote.codec import Codec
from areal_actors.testing.journal_contract import create_start

_RANDOM = np.random.default_rng(7)
_WRITERS = (1, 16, 64)
_CHARACTERS_PER_TOKEN = 4


def _text(num_tokens: int) -> str:
    return "".join(map(chr, _RANDOM.integers(97, 122, num_tokens * _CHARACTERS_PER_TOKEN)))


def _turn(number: int, num_tokens: int) -> TurnEnded:
    """A turn with half as many new tokens in the prompt as in the answer, raw log-probabilities of their own."""
    logprobs = -_RANDOM.random(num_tokens)
    turn = Interaction(
        id=InteractionId(f"chatcmpl-{number:032x}"),
        order=number,
        messages=(ChatMessage(role="user", content=_text(num_tokens // 2)),),
        prompt_suffix=_RANDOM.integers(3, 50_000, num_tokens // 2),
        num_prompt_tokens=num_tokens // 2,
        completion=Completion(
            token_ids=_RANDOM.integers(3, 50_000, num_tokens),
            logprobs=logprobs,
            raw_logprobs=logprobs * 1.1,
            versions=np.zeros(num_tokens),
            finish=FinishReason.STOP,
        ),
        output=ChatMessage(role="assistant", content=_text(num_tokens)),
        status=InteractionStatus.COMPLETED,
        completed_order=number,
    )
    return TurnEnded(session=SessionId("bench"), interaction=turn, frame=(b"a" * 16,) * 3, ended_at=1.5)


def _raw(turns: Sequence[TurnEnded], size: int) -> float:
    """Return the CPU µs per turn of sqlite3 with rows that are ready."""
    codec = Codec()
    rows = [statement for seq, turn in enumerate(turns) for statement in encode_event(codec, turn, seq, 0.0)]
    with tempfile.TemporaryDirectory() as directory:
        connection = sqlite3.connect(Path(directory) / "raw.sqlite", isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        create_tables(connection)
        start = time.process_time()
        for first in range(0, len(rows), size):
            connection.execute("BEGIN IMMEDIATE")
            for sql, values in rows[first : first + size]:
                connection.execute(sql, values)
            connection.execute("COMMIT")
        spent = time.process_time() - start
        connection.close()
    return spent / len(turns) * 1e6


async def _journal(turns: Sequence[TurnEnded], num_writers: int) -> tuple[float, float, float]:
    """Return CPU µs and wall-clock µs per turn until it is acknowledged, and bytes per turn on disk."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal.sqlite"
        async with SqliteJournal.open(path) as journal:
            await journal.write(create_start("bench"))
            start, wall = time.process_time(), time.perf_counter()

            async def write(own: Sequence[TurnEnded]) -> None:
                for turn in own:
                    await journal.write(turn)

            async with anyio.create_task_group() as tasks:
                for writer in range(num_writers):
                    tasks.start_soon(write, turns[writer::num_writers])
            spent, elapsed = time.process_time() - start, time.perf_counter() - wall
        return spent / len(turns) * 1e6, elapsed / len(turns) * 1e6, path.stat().st_size / len(turns)


def _result(name: str, value: float, unit: str, **more: object) -> Result:
    return Result(benchmark="journal", name=name, value=value, unit=unit, **more)  # type: ignore[arg-type]


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - what the runner calls
    """Measure turns of 250 tokens from 1, 16 and 64 writers on both loops."""
    turns = [_turn(index, 250) for index in range(320 if quick else 1920)]
    num_rounds = 2 if quick else 4
    results = []
    for num_writers in _WRITERS:
        raw = f"raw sqlite3, batches of {num_writers}"
        baseline = min(_raw(turns, num_writers) for _ in range(num_rounds))
        results.append(_result(raw, baseline, "µs"))
        for backend in ("asyncio", "trio"):
            measure = partial(anyio.run, _journal, turns, num_writers, backend=backend)
            rounds = [measure() for _ in range(num_rounds)]
            spent, elapsed = min(each[0] for each in rounds), min(each[1] for each in rounds)
            name, detail = f"{num_writers} writers ({backend})", {"bytes_per_turn": round(rounds[0][2])}
            results.append(_result(f"turn, {name}", spent, "µs", detail=detail))
            results.append(_result(f"turn over raw, {name}", spent / baseline, "ratio", baseline=raw))
            results.append(_result(f"wall-clock time per turn, {name}", elapsed, "µs"))
    return results
