"""What durability costs: CPU time and bytes of a turn in the journal, by how many write at once.

A turn costs twice: until it is acknowledged, when it is in the log, and later, when the log is moved into the tables.
The baseline is the least that one would write by hand: rows made ready before, and ``executemany`` of sqlite3 in one
transaction per batch of the same size. Beside it, what it takes to hand a function to a thread and to be woken.
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import anyio
import numpy as np
from benchmarks.harness import Result, cpu_us_per_operation

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
from areal_actors.journal.codec import TABLES, Table, encode
from areal_actors.journal.migrations import migrate
from areal_actors.kernel import OwnThread
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


def _batches(turns: Sequence[TurnEnded], size: int) -> list[Sequence[TurnEnded]]:
    return [turns[start : start + size] for start in range(0, len(turns), size)]


def _raw(turns: Sequence[TurnEnded], size: int) -> float:
    """CPU µs per turn of ``executemany`` with rows that are ready."""
    (sql, _), *_ = encode(turns[0], 1, 0.0)
    rows = [[row for seq, turn in batch for _, row in encode(turn, seq, 0.0)] for batch in _numbered(turns, size)]
    with tempfile.TemporaryDirectory() as directory:
        connection = sqlite3.connect(Path(directory) / "raw.sqlite", isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        migrate(connection)

        def write() -> None:
            connection.execute("DELETE FROM turns")
            start = time.process_time()
            for batch in rows:
                connection.execute("BEGIN IMMEDIATE")
                connection.executemany(sql, batch)
                connection.execute("COMMIT")
            spent.append(time.process_time() - start)

        spent: list[float] = []
        for _ in range(3):
            write()
        connection.close()
    return min(spent) / len(turns) * 1e6


def _numbered(turns: Sequence[TurnEnded], size: int) -> list[list[tuple[int, TurnEnded]]]:
    numbered = list(enumerate(turns, 1))
    return [numbered[start : start + size] for start in range(0, len(numbered), size)]


async def _journal(turns: Sequence[TurnEnded], num_writers: int) -> tuple[float, float, float]:
    """CPU µs per turn until it is acknowledged, and in all, and bytes per turn on disk, with so many writers."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal.sqlite"
        async with SqliteJournal.open(path) as journal:
            await journal.write(create_start("bench"))
            start = time.process_time()

            async def write(own: Sequence[TurnEnded]) -> None:
                for turn in own:
                    await journal.write(turn)

            async with anyio.create_task_group() as tasks:
                for writer in range(num_writers):
                    tasks.start_soon(write, turns[writer::num_writers])
            acknowledged = time.process_time() - start
        moved = time.process_time() - start
        return acknowledged / len(turns) * 1e6, moved / len(turns) * 1e6, path.stat().st_size / len(turns)


def _round_trip(backend: str, number: int) -> float:
    """CPU µs to run an empty function on a thread and to wait for it."""

    async def ask() -> float:
        async with OwnThread.open() as thread:
            start = time.process_time()
            for _ in range(number):
                await thread.run(int)
            return time.process_time() - start

    return min(anyio.run(ask, backend=backend) for _ in range(3)) / number * 1e6


def _result(name: str, value: float, unit: str, **more: object) -> Result:
    return Result(benchmark="journal", name=name, value=value, unit=unit, **more)  # type: ignore[arg-type]


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - what the runner calls
    """Turns of 250 tokens from 1, 16 and 64 writers on both loops; encoding and bytes also of long ones."""
    number = 320 if quick else 1920
    turns = [_turn(index, 250) for index in range(number)]
    results = [_result(f"thread round trip ({b})", _round_trip(b, 300), "µs") for b in ("asyncio", "trio")]
    for num_writers in _WRITERS:
        raw = f"raw executemany, batches of {num_writers}"
        baseline = _raw(turns, num_writers)
        results.append(_result(raw, baseline, "µs"))
        for backend in ("asyncio", "trio"):
            measure = partial(anyio.run, _journal, turns, num_writers, backend=backend)
            rounds = [measure() for _ in range(2 if quick else 4)]
            acknowledged, moved = min(a for a, _, _ in rounds), min(m for _, m, _ in rounds)
            name, detail = f"{num_writers} writers ({backend})", {"bytes_per_turn": round(rounds[0][2])}
            results.append(_result(f"turn until acknowledged, {name}", acknowledged, "µs", detail=detail))
            results.append(_result(f"turn in all, {name}", moved, "µs"))
            results.append(_result(f"turn in all over raw, {name}", moved / baseline, "ratio", baseline=raw))
    return results + _sizes(quick=quick)


def _encode_all(turns: Sequence[TurnEnded]) -> None:
    for turn in turns:
        encode(turn, 1, 0.0)


def _decode_all(table: Table, rows: Sequence[Mapping[str, object]]) -> None:
    for row in rows:
        table.decode(row)


def _sizes(*, quick: bool) -> list[Result]:
    """What encoding and decoding take, and the bytes of a row, for short and long turns."""
    results = []
    table = next(table for table in TABLES if table.name == "turns")
    for num_tokens in (250, 4000):
        turns = [_turn(index, num_tokens) for index in range(20 if quick else 100)]
        encoded = [encode(turn, 1, 0.0)[0][1] for turn in turns]
        rows = [dict(zip(("seq", *table.columns), row, strict=True)) for row in encoded]
        cost = cpu_us_per_operation(partial(_encode_all, turns), num_operations=len(turns))
        back = cpu_us_per_operation(partial(_decode_all, table, rows), num_operations=len(rows))
        size = sum(len(value) for row in encoded for value in row if isinstance(value, str | bytes)) / len(turns)
        results += [
            _result(f"encode {num_tokens} tokens", cost, "µs"),
            _result(f"decode {num_tokens} tokens", back, "µs"),
            _result(f"row of {num_tokens} tokens", size, "bytes"),
        ]
    return results
