"""Asking and telling: replies, errors, order, room, deadlines, and askers that leave."""

from __future__ import annotations

import asyncio
import math

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import checkpoint
from attrs import field, frozen

from areal_actors.errors import (
    ActorStopped,
    CapacityExhausted,
    ConfigError,
    DeadlineExceeded,
    NotFound,
    RemoteError,
)
from areal_actors.kernel import Actor, ActorSystem, Message, Stop
from areal_actors.testing import virtual_backend

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("placement")]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest):
    """Both loops, in virtual time."""
    return virtual_backend(request.param)


class Desk:
    """Address of the actor under test."""


@frozen(kw_only=True)
class Echo(Message[Desk, int]):
    n: int


@frozen(kw_only=True)
class Work(Message[Desk, str]):
    """Takes time."""

    seconds: float = 1.0
    name: str = "work"


FAULTS: list[BaseException] = []


def keep(error: BaseException | int) -> int:
    """Exceptions do not travel: the message holds the place of one."""
    if isinstance(error, int):
        return error
    FAULTS.append(error)
    return len(FAULTS) - 1


@frozen(kw_only=True)
class Fail(Message[Desk, None]):
    error: int = field(converter=keep)


@frozen(kw_only=True)
class Note(Message[Desk, None]):
    text: str


@frozen(kw_only=True)
class Remaining(Message[Desk, float]):
    """Seconds until the deadline that the handler sees."""


class Clerk(Actor[Desk]):
    def __init__(self) -> None:
        self.seen: list[str] = []

    @Echo.handler
    async def echo(self, message: Echo) -> int:
        return message.n

    @Work.handler
    async def work(self, message: Work) -> str:
        self.seen.append(f"{message.name} begins")
        try:
            await anyio.sleep(message.seconds)
        except BaseException:
            self.seen.append(f"{message.name} cancelled")
            raise
        self.seen.append(f"{message.name} ends")
        return message.name

    @Fail.handler
    async def fail(self, message: Fail) -> None:
        raise FAULTS[message.error]

    @Note.handler
    async def note(self, message: Note) -> None:
        await checkpoint()
        self.seen.append(message.text)

    @Remaining.handler
    async def remaining(self, message: Remaining) -> float:
        return anyio.current_effective_deadline() - anyio.current_time()


async def test_ask_returns_its_reply():
    """Each of many concurrent asks gets its own."""
    async with ActorSystem.open() as system:
        ref = await system.spawn(Clerk())
        replies = {}

        async def ask(n: int) -> None:
            replies[n] = await ref.ask(Echo(n=n))

        async with anyio.create_task_group() as tasks:
            for n in range(100):
                tasks.start_soon(ask, n)

        assert {n: n for n in range(100)} == replies
        assert ref.statistics().num_handled == 100


async def test_ask_raises_an_areal_error_of_the_handler_with_its_class():
    """Same class, same attributes, a new object without the actor's traceback; the actor lives on."""
    error = CapacityExhausted("no room", retry_after_seconds=7.5)
    async with ActorSystem.open() as system:
        ref = await system.spawn(Clerk())
        with pytest.raises(CapacityExhausted, match="no room") as caught:
            await ref.ask(Fail(error=error))

        assert caught.value is not error
        assert (429, 7.5) == (caught.value.status, caught.value.retry_after_seconds)
        assert "fail" not in {frame.name for frame in caught.traceback}
        assert await ref.ask(Echo(n=1)) == 1
        assert ref.statistics().num_failed == 1


GROUP = BaseExceptionGroup("two", [ActorStopped("a consequence"), ExceptionGroup("inner", [NotFound("it")])])


@pytest.mark.parametrize(
    ("error", "kind", "attributes"),
    [
        (ConfigError(("a: wrong", "b: wrong")), ConfigError, {"problems": ("a: wrong", "b: wrong")}),
        (GROUP, NotFound, {"message": "it"}),
    ],
    ids=["own constructor", "root cause of a group"],
)
async def test_ask_raises_what_was_raised_on_purpose(error, kind, attributes):
    """Reconstruction copies attributes and calls no constructor; a group is its root cause."""
    async with ActorSystem.open() as system:
        ref = await system.spawn(Clerk())
        with pytest.raises(kind) as caught:
            await ref.ask(Fail(error=error))

        assert attributes.items() <= vars(caught.value).items()


async def test_ask_raises_other_errors_as_text():
    """With the type's name, the message and the traceback."""
    async with ActorSystem.open() as system:
        ref = await system.spawn(Clerk(), name="desk")
        with pytest.raises(RemoteError, match="desk: ValueError: odd") as caught:
            await ref.ask(Fail(error=ValueError("odd")))

        assert caught.value.type_name == "ValueError"
        assert "in fail" in caught.value.traceback


async def test_handler_awaiting_a_cancelled_future_fails_like_any_other():
    """A CancelledError in a task that was not cancelled fails the ask, or crashes the actor."""
    async with ActorSystem.open() as system:
        ref = await system.spawn(Clerk(), supervision=Stop())
        with pytest.raises(RemoteError, match="CancelledError"):
            await ref.ask(Fail(error=asyncio.CancelledError()))
        assert await ref.ask(Echo(n=1)) == 1
        await ref.tell(Fail(error=asyncio.CancelledError()))

        assert "was cancelled from outside this actor" in str((await system.watch(ref)).error)


async def test_messages_of_one_sender_arrive_in_order():
    """Across tells and asks, and across a full mailbox."""
    clerk = Clerk()
    async with ActorSystem.open() as system:
        ref = await system.spawn(clerk, mailbox_size=3)
        for n in range(20):
            await ref.tell(Note(text=str(n)))
        await ref.ask(Echo(n=0))

        assert [str(n) for n in range(20)] == clerk.seen


async def test_tell_to_a_full_mailbox_waits_in_order():
    """No sender overtakes another one."""
    clerk = Clerk()
    async with ActorSystem.open() as system, anyio.create_task_group() as tasks:
        ref = await system.spawn(clerk, mailbox_size=1)
        tasks.start_soon(ref.ask, Work(seconds=10))
        await wait_all_tasks_blocked()
        await ref.tell(Note(text="first"))
        for text in ("second", "third"):
            tasks.start_soon(ref.tell, Note(text=text))
            await wait_all_tasks_blocked()

        assert (1, 2) == (ref.statistics().num_queued, ref.statistics().num_waiting_senders)
        await ref.ask(Echo(n=0))
        assert ["work begins", "work ends", "first", "second", "third"] == clerk.seen


async def test_tell_cancelled_while_waiting_for_room_sends_nothing():
    """Its message is never handled."""
    clerk = Clerk()
    async with ActorSystem.open() as system, anyio.create_task_group() as tasks:
        ref = await system.spawn(clerk, mailbox_size=1)
        tasks.start_soon(ref.ask, Work(seconds=10))
        await wait_all_tasks_blocked()
        await ref.tell(Note(text="kept"))
        with anyio.move_on_after(1) as scope:
            await ref.tell(Note(text="given up"))

        assert scope.cancelled_caught
        await ref.ask(Echo(n=0))
        assert ["work begins", "work ends", "kept"] == clerk.seen


async def test_ask_timeout_cancels_the_handler():
    """The asker learns where its message was; the actor goes on with the next."""
    clerk = Clerk()
    async with ActorSystem.open() as system:
        ref = await system.spawn(clerk, name="desk")
        with pytest.raises(
            DeadlineExceeded,
            match=r"Work to actor 'desk'.* was not answered before its deadline; (its handler|the actor)",
        ):
            await ref.ask(Work(seconds=10), timeout=2)

        assert await ref.ask(Echo(n=5)) == 5
        assert ["work begins", "work cancelled"] == clerk.seen
        assert ref.statistics().num_cancelled == 1


async def test_ask_that_times_out_in_the_queue_is_never_handled():
    """Its handler never starts."""
    clerk = Clerk()
    async with ActorSystem.open() as system, anyio.create_task_group() as tasks:
        ref = await system.spawn(clerk)
        tasks.start_soon(ref.ask, Work(seconds=10))
        await wait_all_tasks_blocked()
        with pytest.raises(DeadlineExceeded, match="still queued"):
            await ref.ask(Work(name="late"), timeout=1)

        assert ref.statistics().num_queued == 0
        await ref.ask(Echo(n=0))
        assert ["work begins", "work ends"] == clerk.seen


async def test_ask_is_cancelled_by_an_enclosing_deadline():
    """``fail_after`` and ``move_on_after`` around an ask behave as around anything else."""
    async with ActorSystem.open() as system:
        ref = await system.spawn(Clerk())
        with anyio.move_on_after(1) as scope:
            await ref.ask(Work(seconds=10))
        with pytest.raises(TimeoutError) as caught, anyio.fail_after(1):
            await ref.ask(Work(seconds=10))

        assert scope.cancelled_caught
        assert not isinstance(caught.value, DeadlineExceeded)


async def test_handler_sees_the_nearest_deadline():
    """Of the asker's timeout and the scopes around it, so that deadlines shrink along a chain."""
    async with ActorSystem.open() as system:
        ref = await system.spawn(Clerk())

        assert math.inf == await ref.ask(Remaining())
        assert await ref.ask(Remaining(), timeout=500) == pytest.approx(500, abs=10)
        with anyio.fail_after(300):
            assert await ref.ask(Remaining(), timeout=500) == pytest.approx(300, abs=10)
        assert math.inf == await ref.ask(Remaining())


async def test_ask_cancelled_by_its_asker_cancels_the_handler():
    """At once, and the actor serves the next."""
    clerk = Clerk()
    async with ActorSystem.open() as system:
        ref = await system.spawn(clerk)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ref.ask, Work(seconds=1000))
            await wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        assert await ref.ask(Echo(n=1)) == 1

        assert ["work begins", "work cancelled"] == clerk.seen


async def test_ask_cancelled_in_the_queue_is_dropped():
    """Only the first of three ever begins."""
    clerk = Clerk()
    async with ActorSystem.open() as system:
        ref = await system.spawn(clerk)
        async with anyio.create_task_group() as tasks:
            for name in ("a", "b", "c"):
                tasks.start_soon(ref.ask, Work(name=name, seconds=60))
                await wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        await ref.ask(Echo(n=1))

        assert ["a begins", "a cancelled"] == clerk.seen
        assert ref.statistics().num_cancelled == 3


async def test_ask_waiting_for_room_can_be_cancelled_or_admitted():
    """Asks queue for room like tells."""
    clerk = Clerk()
    async with ActorSystem.open() as system, anyio.create_task_group() as tasks:
        ref = await system.spawn(clerk, mailbox_size=1)
        for name in ("a", "b", "c"):
            tasks.start_soon(ref.ask, Work(name=name, seconds=5))
            await wait_all_tasks_blocked()
        with pytest.raises(DeadlineExceeded):
            await ref.ask(Work(name="d"), timeout=0.5)

        assert await ref.ask(Echo(n=1)) == 1
        assert [f"{name} {what}" for name in "abc" for what in ("begins", "ends")] == clerk.seen


async def test_senders_learn_that_their_actor_has_ended():
    """Those of the running, the queued, the waiting and later messages."""
    outcomes: list[str] = []

    async def ask(message: Message) -> None:
        with pytest.raises(ActorStopped) as caught:
            await ref.ask(message)
        outcomes.append(str(caught.value))

    async def tell() -> None:
        with pytest.raises(ActorStopped) as caught:
            await ref.tell(Note(text=""))
        outcomes.append(str(caught.value))

    async with ActorSystem.open() as system:
        ref = await system.spawn(Clerk(), mailbox_size=1, supervision=Stop())
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask, Work(seconds=100))
                await wait_all_tasks_blocked()
            tasks.start_soon(tell)
            await wait_all_tasks_blocked()
            await ref.stop(grace=0)
        with pytest.raises(ActorStopped, match=r"takes no more messages \(stopped\)"):
            await ref.ask(Echo(n=1))
        with pytest.raises(ActorStopped):
            await ref.tell(Note(text=""))

        assert 4 == len(outcomes)
        assert 2 == sum("was not sent" in outcome for outcome in outcomes)


async def test_refs_compare_by_address():
    """They compare by address and say where they point."""
    async with ActorSystem.open(name="here") as system:
        first, second = await system.spawn(Clerk()), await system.spawn(Clerk())

        assert first != second
        assert 2 == len({first, second})
        assert "<Ref here/clerk-2>" == repr(second)
        assert first != "clerk"
