"""Random programs of asks, tells, cancellations, crashes and stops, against what must always hold.

* Every ask has exactly one outcome, and a reply is the reply to that very ask.
* A handler whose asker left is cancelled or never begins; a handler begins at most once for each message.
* The mailbox never exceeds its bound, and is empty at the end; nothing is queued, parked, running or waiting.
* Each told message is handled at most once, those of one sender in order.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import anyio
import pytest
from attrs import frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_actors.errors import ActorStopped, DeadlineExceeded, NotFound, RemoteError
from areal_actors.kernel import Actor, ActorSystem, Message, Ref, Restart, Stop
from areal_actors.testing import virtual_backend

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("placement")]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest):
    """Both loops, in virtual time."""
    return virtual_backend(request.param)


class Theatre:
    """Address of the actor that plays the programs."""


@frozen(kw_only=True)
class Serial(Message[Theatre, int]):
    id: int
    seconds: float
    ending: str


@frozen(kw_only=True)
class Concurrent(Message[Theatre, int]):
    id: int
    seconds: float
    ending: str


@frozen(kw_only=True)
class Told(Message[Theatre, None]):
    id: int
    seconds: float
    ending: str


class Stage(Actor[Theatre]):
    def __init__(self, journal: list[tuple[str, int]]) -> None:
        self.journal = journal

    async def play(self, message: Serial | Concurrent | Told) -> int:
        self.journal.append(("begin", message.id))
        try:
            await anyio.sleep(message.seconds)
            if message.ending == "not found":
                raise NotFound(str(message.id))
            if message.ending == "broken":
                raise ValueError(message.id)
        finally:
            self.journal.append(("end", message.id))
        return message.id

    @Serial.handler
    async def serial(self, message: Serial) -> int:
        return await self.play(message)

    @Concurrent.handler(concurrency=2)
    async def concurrent(self, message: Concurrent) -> int:
        return await self.play(message)

    @Told.handler
    async def told(self, message: Told) -> None:
        await self.play(message)


@frozen(kw_only=True)
class Step:
    """One step of a program: when it starts, what it sends, and how long it waits."""

    at: float
    kind: str
    seconds: float
    ending: str
    patience: float | None
    by_scope: bool


times = st.integers(min_value=0, max_value=6).map(float)
steps = st.builds(
    Step,
    at=times,
    kind=st.sampled_from(["serial", "serial", "concurrent", "concurrent", "tell"]),
    seconds=times,
    ending=st.sampled_from(["fine", "fine", "fine", "not found", "broken"]),
    patience=st.none() | times,
    by_scope=st.booleans(),
)


async def ask(ref: Ref[Theatre], number: int, step: Step, outcomes: Counter[tuple[int, str]]) -> None:
    kind = Serial if step.kind == "serial" else Concurrent
    message = kind(id=number, seconds=step.seconds, ending=step.ending)
    await anyio.sleep(step.at)
    scope_patience = step.patience if step.by_scope and step.patience is not None else 10_000.0
    with anyio.move_on_after(scope_patience) as scope:
        try:
            reply = await ref.ask(message, timeout=None if step.by_scope else step.patience)
            assert reply == number
            outcomes[number, "reply"] += 1
        except NotFound as error:
            outcomes[number, "error"] += (step.ending, error.message) == ("not found", str(number))
        except RemoteError as error:
            outcomes[number, "error"] += (step.ending, error.type_name) == ("broken", "ValueError")
        except DeadlineExceeded:
            assert step.patience is not None
            outcomes[number, "deadline"] += 1
        except ActorStopped:
            outcomes[number, "stopped"] += 1
    if scope.cancelled_caught:
        outcomes[number, "cancelled"] += 1


async def tell(ref: Ref[Theatre], number: int, step: Step, outcomes: Counter[tuple[int, str]]) -> None:
    await anyio.sleep(step.at)
    try:
        await ref.tell(Told(id=number, seconds=step.seconds, ending=step.ending))
        outcomes[number, "accepted"] += 1
    except ActorStopped:
        outcomes[number, "stopped"] += 1


@given(
    program=st.lists(steps, max_size=12),
    bound=st.integers(min_value=1, max_value=4),
    stop_at=st.none() | times,
    restarts=st.integers(min_value=0, max_value=3),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
async def test_ask_has_exactly_one_outcome_in_random_programs(program, bound, stop_at, restarts):
    """And afterwards nothing is left of it."""
    journal: list[tuple[str, int]] = []
    outcomes: Counter[tuple[int, str]] = Counter()
    async with ActorSystem.open(grace=3) as system:
        ref = await system.spawn(
            partial(Stage, journal),
            mailbox_size=bound,
            supervision=Restart(max_restarts=restarts, backoff_seconds=0.5, window_seconds=1000, then=Stop()),
        )
        async with anyio.create_task_group() as tasks:
            for number, step in enumerate(program):
                tasks.start_soon(tell if step.kind == "tell" else ask, ref, number, step, outcomes)
            if stop_at is not None:
                await anyio.sleep(stop_at)
                await ref.stop(grace=2)
        await ref.stop(grace=100)
        statistics = ref.statistics()

    assert (0, 0, 0) == (statistics.num_queued, statistics.num_parked, statistics.num_waiting_senders)
    assert set(range(len(program))) == {number for number, _ in outcomes}
    assert all(count == 1 for count in outcomes.values())
    assert len(outcomes) == len(program)
    begun = Counter(number for what, number in journal if what == "begin")
    assert begun == Counter(number for what, number in journal if what == "end")
    assert all(count == 1 for count in begun.values())
    for number, outcome in outcomes:
        assert outcome not in ("reply", "error") or begun[number] == 1


@given(
    texts=st.lists(st.integers(min_value=0, max_value=3), min_size=1, max_size=40),
    bound=st.integers(min_value=1, max_value=5),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
async def test_tell_keeps_the_order_of_each_sender(texts, bound):
    """With several senders and small mailboxes; each message is handled exactly once."""
    journal: list[tuple[str, int]] = []
    async with ActorSystem.open() as system:
        ref = await system.spawn(Stage(journal), mailbox_size=bound)

        async def send(sender: int) -> None:
            for position, text in enumerate(texts):
                if text == sender:
                    await ref.tell(Told(id=position, seconds=0.0, ending="fine"))

        async with anyio.create_task_group() as tasks:
            for sender in range(4):
                tasks.start_soon(send, sender)
        await ref.stop()

    handled = [number for what, number in journal if what == "begin"]
    assert sorted(handled) == list(range(len(texts)))
    for sender in range(4):
        own = [number for number in handled if texts[number] == sender]
        assert own == sorted(own)
