"""The mailbox as bookkeeping: bounds, order, lanes, and entries that are given up."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from areal_actors.kernel.mailbox import Mailbox, Ticket


class MailboxMachine(RuleBasedStateMachine):
    """Compares a mailbox with three plain lists that obey its rules obviously."""

    def __init__(self) -> None:
        super().__init__()
        self.bound = 3
        self.mailbox = Mailbox(self.bound)
        self.data: deque[str] = deque()
        self.senders: deque[Ticket] = deque()
        self.parked: dict[str, deque[str]] = {"a": deque(), "b": deque()}
        self.count = 0
        self.wakes = 0

    def size(self) -> int:
        return len(self.data) + sum(map(len, self.parked.values()))

    def admit(self) -> None:
        while self.senders and self.size() < self.bound:
            self.data.append(self.senders.popleft().entry)

    def fresh(self) -> str:
        self.count += 1
        return f"entry {self.count}"

    @rule()
    def offer(self) -> None:
        entry = self.fresh()
        fits = self.size() < self.bound and not self.senders and not self.mailbox.closed
        assert fits is self.mailbox.offer(entry)
        if fits:
            self.data.append(entry)

    @rule()
    def queue(self) -> None:
        ticket = Ticket(self.fresh())
        self.mailbox.queue(ticket)
        if self.mailbox.closed:
            assert ticket.admitted is False
        else:
            self.senders.append(ticket)
            self.admit()

    @rule(lane=st.sampled_from(["a", "b"]), is_parked=st.booleans())
    def take(self, *, lane: str, is_parked: bool) -> None:
        """Take one entry; a reader that cannot handle it now parks it in the room that it left."""
        self.admit_if_open()
        expected = self.data.popleft() if self.data else None
        taken = self.mailbox.take()
        assert expected == taken
        if taken is not None and is_parked:
            self.mailbox.park(lane, taken)
            self.parked[lane].append(taken)
        self.mailbox.admit()
        self.admit_if_open()

    def admit_if_open(self) -> None:
        if not self.mailbox.closed:
            self.admit()

    @rule(lane=st.sampled_from(["a", "b"]))
    def unpark(self, lane: str) -> None:
        expected = self.parked[lane].popleft() if self.parked[lane] else None
        assert expected == self.mailbox.unpark(lane)
        if expected is not None:
            self.admit_if_open()

    @precondition(lambda self: self.data)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        """An asker that left while its ask was queued."""
        entry = data.draw(st.sampled_from(sorted(self.data)))
        self.data.remove(entry)
        assert self.mailbox.discard(entry)
        self.admit_if_open()

    @precondition(lambda self: any(self.parked.values()))
    @rule(data=st.data())
    def discard_parked(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from([name for name, waiting in self.parked.items() if waiting]))
        entry = data.draw(st.sampled_from(sorted(self.parked[lane])))
        self.parked[lane].remove(entry)
        assert self.mailbox.discard(entry)
        self.admit_if_open()

    @precondition(lambda self: self.senders)
    @rule(data=st.data(), by_ticket=st.booleans())
    def leave(self, *, data: st.DataObject, by_ticket: bool) -> None:
        """A sender that stopped waiting for room."""
        ticket = data.draw(st.sampled_from(list(self.senders)))
        self.senders.remove(ticket)
        assert self.mailbox.discard_ticket(ticket) if by_ticket else self.mailbox.discard(ticket.entry)
        assert ticket.admitted is None

    @rule()
    def restore(self) -> None:
        """A new incarnation starts: what was parked goes first, in order within its lane."""
        for waiting in (lane for lane in self.mailbox.parked.copy()):
            self.data.extendleft(reversed(self.parked[waiting]))
            self.parked[waiting].clear()
        self.mailbox.restore()

    @precondition(lambda self: self.count > 15)
    @rule()
    def close(self) -> None:
        self.mailbox.close()
        assert all(ticket.admitted is False for ticket in self.senders)
        self.senders.clear()

    @rule()
    def sleep(self) -> None:
        self.mailbox.wake = self.woken

    def woken(self) -> None:
        self.wakes += 1

    @invariant()
    def never_above_its_bound(self) -> None:
        assert self.size() == len(self.mailbox) <= self.bound

    @invariant()
    def holds_what_was_accepted_in_order(self) -> None:
        assert list(self.data) == list(self.mailbox.data)
        assert list(self.senders) == list(self.mailbox.senders)

    def teardown(self) -> None:
        left = [*self.data, *(entry for lane in self.parked.values() for entry in lane)]
        assert sorted(left) == sorted(self.mailbox.drain())
        assert len(self.mailbox) == 0


TestMailbox = MailboxMachine.TestCase


def test_mailbox_without_room_is_refused():
    """A bound below one would block every sender for ever."""
    with pytest.raises(ValueError, match="at least 1"):
        Mailbox(0)
