"""Results that clients fetch later, by the id of their request.

A request is submitted once, however often it arrives, and its result can be fetched any number of times until it is
dropped. The requests of one training client have consecutive numbers and run in their order, whatever order they
arrive in: the SDK sends the parts of a batch at once.

::

    submit(model, 3) ─┐          ┌─▶ running 1 ─▶ 2 ─▶ 3 ─▶ … one task for each training client
    submit(model, 1) ─┼─ by number
    submit(model, 2) ─┘          └─ a result by its id ◀── wait(id), a long poll
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping

import anyio
from anyio.abc import TaskGroup
from attrs import define, field, frozen

from areal_actors.errors import ArealError, CheckpointError, InvalidRequest, NotFound, RequestError, TrainingDiverged
from areal_actors.kernel import root_cause
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.lib.telemetry import get_logger

_log = get_logger(__name__)

MAX_FINISHED = 20_000
"""Results that are kept; the SDK fetches each within seconds."""
MAX_AHEAD = 10_000
"""Requests of one client that may wait for an earlier one."""

Result = bytes | Mapping[str, object]
"""The body of a result: protobuf, or a JSON document."""
Work = Callable[[], Awaitable[Result]]


@frozen(kw_only=True)
class Failure:
    """A request that failed; ``is_users`` says whether sending it again as it is would fail again."""

    message: str
    is_users: bool


@define(eq=False)
class _Future:
    ended: anyio.Event = field(factory=anyio.Event)
    outcome: Result | Failure | None = None


@define(eq=False)
class _Queue:
    """The requests of one training client that wait for their turn."""

    next_number: int
    waiting: dict[int, tuple[_Future, Work]] = field(factory=dict)
    changed: ChangeSignal = field(factory=ChangeSignal)
    scope: anyio.CancelScope = field(factory=anyio.CancelScope)


def _is_users(error: ArealError) -> bool:
    """Return whether the client has caused an error, so that the same request would fail again."""
    return isinstance(error, CheckpointError | TrainingDiverged) or (
        isinstance(error, RequestError) and error.status < 500  # noqa: PLR2004 - HTTP's errors of servers
    )


class Futures:
    """The requests in flight and the results of those that ended. ``tasks`` run them."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._futures: dict[str, _Future] = {}
        self._finished: OrderedDict[str, None] = OrderedDict()
        self._queues: dict[str, _Queue] = {}
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._polls: set[anyio.CancelScope] = set()

    def submit(self, request_id: str, work: Work) -> None:
        """Run ``work`` at once, unless a request of this id has arrived before."""
        if request_id not in self._futures:
            future = self._futures[request_id] = _Future()
            self._scopes[request_id] = anyio.CancelScope()
            self._tasks.start_soon(self._run_alone, request_id, future, work)

    def submit_in_order(self, queue: str, number: int, work: Work) -> str:
        """Run ``work`` after all earlier numbers of ``queue``; return the id of the request.

        Raises ``NotFound`` for an unknown queue, and ``InvalidRequest`` for a number too far ahead of the next one.
        """
        found = self._queues.get(queue)
        if found is None:
            raise NotFound(f"There is no model {queue!r}; it was unloaded, or belongs to another server.")
        request_id = f"{queue}:{number}"
        if request_id in self._futures:
            return request_id
        if number < found.next_number:
            raise InvalidRequest(f"Request {number} has run, and its result was dropped.", param="seq_id")
        if number > found.next_number + MAX_AHEAD:
            raise InvalidRequest(f"Request {number} is too far ahead of {found.next_number}.", param="seq_id")
        found.waiting[number] = (self._futures.setdefault(request_id, _Future()), work)
        found.changed.notify()
        return request_id

    def open_queue(self, queue: str, *, first: int) -> None:
        """Begin to run the requests of a training client, from the number ``first`` on."""
        if queue not in self._queues:
            self._queues[queue] = _Queue(next_number=first)
            self._tasks.start_soon(self._run_queue, queue, self._queues[queue])

    def close_queue(self, queue: str) -> None:
        """Cancel the requests of a training client that has gone; their results are failures."""
        found = self._queues.pop(queue, None)
        if found is not None:
            found.scope.cancel()

    def cancel(self, request_id: str) -> None:
        """Cancel a request outside a queue; one that has ended, or is unknown, stays as it is."""
        if request_id in self._scopes:
            self._scopes[request_id].cancel()

    async def wait(self, request_id: str, *, seconds: float) -> Result | Failure | None:
        """Return the outcome of a request, or ``None`` if it takes longer. Raises ``NotFound`` for an unknown id."""
        future = self._futures.get(request_id)
        if future is None:
            raise NotFound(f"There is no request {request_id!r}, or its result was dropped; send it again.")
        with anyio.move_on_after(seconds) as poll:
            self._polls.add(poll)
            try:
                await future.ended.wait()
            finally:
                self._polls.discard(poll)
        return future.outcome

    async def drain(self, *, seconds: float) -> None:  # noqa: ARG002 - polls end at once
        """Let all polls end without an outcome, since the server stops."""
        for poll in self._polls:
            poll.cancel()

    async def _run_alone(self, request_id: str, future: _Future, work: Work) -> None:
        with self._scopes[request_id]:
            await self._run(request_id, future, work)
        del self._scopes[request_id]

    async def _run_queue(self, name: str, queue: _Queue) -> None:
        with queue.scope:
            while True:
                while queue.next_number not in queue.waiting:
                    await queue.changed.wait()
                number = queue.next_number
                future, work = queue.waiting.pop(number)
                queue.next_number += 1
                await self._run(f"{name}:{number}", future, work)
        for number, (future, _) in queue.waiting.items():
            self._finish(f"{name}:{number}", future, Failure(message="The model was unloaded.", is_users=True))

    async def _run(self, request_id: str, future: _Future, work: Work) -> None:
        outcome: Result | Failure = Failure(message="The request was cancelled.", is_users=True)
        try:
            outcome = await work()
        except ArealError as error:
            outcome = Failure(message=str(error), is_users=_is_users(error))
        except ExceptionGroup as group:  # of the samples of one request
            cause = root_cause(group)
            outcome = Failure(message=str(cause), is_users=isinstance(cause, ArealError) and _is_users(cause))
        except Exception as error:  # noqa: BLE001 - an error belongs to its request, and other clients go on
            _log.warning("tinker_request_failed", request=request_id, error=repr(error))
            outcome = Failure(message=f"{type(error).__name__}: {error}", is_users=False)
        finally:
            self._finish(request_id, future, outcome)

    def _finish(self, request_id: str, future: _Future, outcome: Result | Failure) -> None:
        future.outcome = outcome
        future.ended.set()
        self._finished[request_id] = None
        while len(self._finished) > MAX_FINISHED:
            self._futures.pop(self._finished.popitem(last=False)[0], None)
