"""Durable sessions, and journals that make them wait, that break, or that a killed process has left."""

from __future__ import annotations

import anyio
from tests.stacks.inference_stack import InferenceStack

from areal_actors.domain import Credential, JournalEvent, SampleKey
from areal_actors.errors import JournalError
from areal_actors.journal import MemoryJournal
from areal_actors.journal.sqlite import Store
from areal_actors.messages import EndSession, SetReward

KEY = SampleKey(seed=7, path=("t",))


class Gated(MemoryJournal):
    """Writes when it is allowed to; ``writes`` are the events that were written together."""

    def __init__(self, *, is_open: bool = True) -> None:
        super().__init__()
        self.writes: list[tuple[JournalEvent, ...]] = []
        self.gate = anyio.Event()
        if is_open:
            self.gate.set()

    async def write(self, *events: JournalEvent) -> None:
        await self.gate.wait()
        self.writes.append(events)
        await super().write(*events)


class Breakable(MemoryJournal):
    """A disk that is full from some moment on."""

    is_broken = False

    async def write(self, *events: JournalEvent) -> None:
        await anyio.lowlevel.checkpoint()
        if self.is_broken:
            raise JournalError("the disk is full")
        await super().write(*events)

    def note(self, *events: JournalEvent) -> None:
        if not self.is_broken:
            super().note(*events)


def read_events(store: Store) -> list[JournalEvent]:
    """Return the events to restore."""
    events: list[JournalEvent] = []
    seq = 0
    while page := store.read_page(seq):
        events += [event for _, event in page]
        seq = page[-1][0]
    return events


class Killed(MemoryJournal):
    """The journal of a process that was killed: it reads what was written, and later writes are discarded."""

    def __init__(self, journal: MemoryJournal) -> None:
        super().__init__(journal.events)


async def open_durable(inference: InferenceStack, **options: object):
    return await inference.open(is_durable=True, key=KEY, **options)


async def reward(inference: InferenceStack, session: str, value: float, interaction: str | None = None) -> str:
    message = SetReward(credential=Credential(session=session, has_control=True), reward=value, interaction=interaction)
    return await inference.sessions.ask(message)


async def end(inference: InferenceStack, session: str, final_reward: float | None = None) -> None:
    await inference.sessions.ask(
        EndSession(credential=Credential(session=session, has_control=True), final_reward=final_reward)
    )
