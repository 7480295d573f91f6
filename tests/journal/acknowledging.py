"""A process that writes sessions to the journal it is given and prints the name of each event once it is durable.

``python acknowledging.py PATH FIRST``: ``FIRST`` numbers its sessions, so that names differ from life to life.
"""

from __future__ import annotations

import os
import sys
from itertools import count
from pathlib import Path

import anyio

from areal_actors.domain import JournalEvent, RewardSet, SessionForgotten, SessionId
from areal_actors.journal import JournalConfig, SqliteJournal
from areal_actors_testing.journal_contract import create_start, create_turn


async def tell(journal: SqliteJournal, line: str, *events: JournalEvent) -> None:
    await journal.write(*events)
    os.write(1, f"{line}\n".encode())


async def live(journal: SqliteJournal, session: str) -> None:
    """One session after another; every third is forgotten, so that the file is tidied meanwhile."""
    for number in count():
        name = f"{session}-{number}"
        await tell(journal, f"start {name}", create_start(name))
        for turn in range(3):
            event = create_turn(name, turn, num_tokens=200)
            reward = RewardSet(session=event.session, interaction=event.interaction.id, reward=float(turn))
            await tell(journal, f"turn {name} {turn}", event, reward)
        if number % 3 == 0:
            os.write(1, f"forget {name}\n".encode())
            journal.note(SessionForgotten(session=SessionId(name)))


async def main(path: Path, first: str) -> None:
    async with SqliteJournal.open(path, JournalConfig()) as journal, anyio.create_task_group() as tasks:
        for writer in range(4):
            tasks.start_soon(live, journal, f"{first}-{writer}")


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), sys.argv[2])
