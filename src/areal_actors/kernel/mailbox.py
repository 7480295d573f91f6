"""A bounded mailbox as plain bookkeeping: no locks, no waiting, no event loop.

::

    senders (waiting) ─▶ data (bounded) ──▶ take()
                            ▲      │ park / unpark
                            └── lanes of concurrent handlers that are at their limit

A sender offers an entry. If there is no room, the sender queues and is admitted in order as room appears, so that no
newcomer overtakes it. Parked entries still count against the bound.

The tasks that wait for a mailbox are managed in ``runtime``; callbacks notify them of changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable


class Ticket:
    """The place of a sender in the queue for room. ``admitted`` is ``None`` while it waits."""

    __slots__ = ("admitted", "entry", "notify")

    def __init__(self, entry: object, notify: Callable[[bool], object] | None = None) -> None:
        self.entry = entry
        self.notify = notify
        self.admitted: bool | None = None

    def decide(self, *, admitted: bool) -> None:
        """Record the admission or refusal, and notify the sender."""
        self.admitted = admitted
        if self.notify is not None:
            self.notify(admitted)


class Mailbox:
    """A queue of at most ``bound`` entries, including parked ones."""

    __slots__ = ("bound", "closed", "data", "num_parked", "parked", "senders", "wake")

    def __init__(self, bound: int) -> None:
        if bound < 1:
            raise ValueError(f"a mailbox of {bound} entries can hold nothing; give mailbox_size at least 1")
        self.bound = bound
        self.closed = False
        self.data: deque[object] = deque()
        self.parked: dict[Hashable, deque[object]] = {}
        self.num_parked = 0
        self.senders: deque[Ticket] = deque()
        self.wake: Callable[[], object] | None = None
        """Called once at the next arrival; set by a reader that found the mailbox empty."""

    def __len__(self) -> int:
        return len(self.data) + self.num_parked

    def offer(self, entry: object) -> bool:
        """Append ``entry`` if the mailbox is open, has room and has no waiting senders; return whether it did."""
        data = self.data
        # Senders that wait go first, even if there is room now.
        if len(data) + self.num_parked >= self.bound or self.closed or self.senders:
            return False
        data.append(entry)
        wake = self.wake
        if wake is not None:
            self.wake = None
            wake()
        return True

    def queue(self, ticket: Ticket) -> None:
        """Wait for room in order.

        ``ticket.notify`` is called when the entry is admitted, or refused because the mailbox closes.
        """
        if self.closed:
            ticket.decide(admitted=False)
        elif not self.senders and self.offer(ticket.entry):
            ticket.decide(admitted=True)
        else:
            self.senders.append(ticket)

    def take(self) -> object | None:
        """Return the next entry, or ``None`` if the mailbox is empty.

        The room that the entry leaves is given to a waiting sender by the next call of ``admit``, ``take`` or
        ``unpark``, so that the reader may still ``park`` the entry in its own room.
        """
        if self.senders:
            self.admit()
        return self.data.popleft() if self.data else None

    def admit(self) -> None:
        """Give free room to waiting senders, in order."""
        while self.senders and len(self) < self.bound and not self.closed:
            ticket = self.senders.popleft()
            self.data.append(ticket.entry)
            ticket.decide(admitted=True)
        if self.data:
            self.wake_reader()

    def park(self, lane: Hashable, entry: object) -> None:
        """Set aside an entry whose handler is at its limit.

        It keeps its place in its lane and counts against the bound.
        """
        self.parked.setdefault(lane, deque()).append(entry)
        self.num_parked += 1

    def unpark(self, lane: Hashable) -> object | None:
        """Return the entry of ``lane`` that has been parked longest, or ``None``."""
        waiting = self.parked.get(lane)
        if not waiting:
            return None
        entry = waiting.popleft()
        self.num_parked -= 1
        self.admit()
        return entry

    def restore(self) -> None:
        """Move parked entries back to the front of the data lane, for a new reader that has no running handlers."""
        for waiting in self.parked.values():
            # ``extendleft`` reverses its argument, so that the oldest entry ends up in front.
            self.data.extendleft(reversed(waiting))
        self.parked.clear()
        self.num_parked = 0

    def discard(self, entry: object) -> bool:
        """Remove one entry wherever it waits, and return whether it was found.

        Entries are compared by identity, or by equality of envelopes.
        """
        for ticket in self.senders:
            if ticket.entry is entry:
                self.senders.remove(ticket)
                return True
        for waiting in (self.data, *self.parked.values()):
            if entry in waiting:
                waiting.remove(entry)
                self.num_parked -= waiting is not self.data
                self.admit()
                return True
        return False

    def discard_ticket(self, ticket: Ticket) -> bool:
        """Stop waiting for room. Return ``False`` if the entry was already admitted (and stays) or refused."""
        if ticket in self.senders:
            self.senders.remove(ticket)
            return True
        return False

    def close(self) -> None:
        """Refuse all further entries, including those of waiting senders; accepted entries can still be taken."""
        self.closed = True
        senders, self.senders = self.senders, deque()
        for ticket in senders:
            ticket.decide(admitted=False)
        self.wake_reader()

    def drain(self) -> tuple[object, ...]:
        """Remove and return all accepted entries that were not taken.

        Order: parked, data, each oldest first.
        """
        left = (*(entry for waiting in self.parked.values() for entry in waiting), *self.data)
        self.parked.clear()
        self.data.clear()
        self.num_parked = 0
        return left

    def wake_reader(self) -> None:
        """Call the reader's wake-up callback, once."""
        wake, self.wake = self.wake, None
        if wake is not None:
            wake()
