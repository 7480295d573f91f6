"""Sessions of a service with several processes: each process has a session manager, which owns the sessions it opened.

::

    agent ─▶ proxy 0 ─▶ session manager 0 ─┐                         ┌── exporter, intake, rollouts
             proxy 1 ─▶ session manager 1 ─┼─▶ generation    router ◀┘
             proxy 2 ─▶ session manager 2 ─┘                   └──▶ session managers 0, 1, 2

A session's id and keys end with the number of its process (``cache.session``). Requests about a session go to that
process (``proxy.router``), so its history stays there; only prompts and sampled tokens cross to the engine's process.
``SessionRouter`` is the session manager for the actors that exist once, among them the proxy of the first process.

A process that dies is replaced, and restores its sessions from its journal. The first process never knows their turns;
its journal has the starts of these sessions and the fact that they were forgotten, so that a group is kept as long as
one of its sessions is.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import anyio
from attrs import evolve

from areal_actors.cache.session import process_of
from areal_actors.domain import (
    SampleKey,
    SessionForgotten,
    SessionStarted,
    StreamItem,
)
from areal_actors.errors import ActorStopped, JournalError, Unavailable, Unreachable
from areal_actors.journal import Journal, JournalConfig, NoJournal, SqliteJournal, read_journal
from areal_actors.kernel import Actor, ActorState, Context, Message, Ref
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import (
    CheckCredential,
    CollectSession,
    Complete,
    CountTokens,
    DescribeAnswer,
    DescribeOwner,
    DescribeSessions,
    EndSession,
    ForgetEpisodes,
    ForgetSession,
    HideAnswer,
    LogNumbers,
    NoteRefusal,
    OpenEpisode,
    OpenSession,
    RecordTurn,
    SessionOpened,
    Sessions,
    SessionsView,
    SetReward,
    ShardOpened,
    Shards,
    StreamComplete,
    WatchSessions,
)

_log = get_logger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")

_MANY = 100_000
_PAUSE_SECONDS = 0.1
_DESCRIBE_SECONDS = 1.0


def shard_journal(journal: Path, process: int) -> Path:
    """Return the path at which process ``process`` of the service with ``journal`` keeps its sessions."""
    return journal.with_name(f"{journal.stem}-{process}{journal.suffix}")


@asynccontextmanager
async def open_shard_journals(
    journal: Path, config: JournalConfig, *, num_processes: int, is_kept: bool = True
) -> AsyncIterator[tuple[SqliteJournal, ...]]:
    """Open the journals of the further processes of the service with ``journal``, before these open them.

    Unless ``is_kept``, they only serve to replace a process, and those of an earlier run are removed. Raises
    ``JournalError`` for a journal with sessions of a process that there is no more.
    """
    paths = {
        path.stem.removeprefix(f"{journal.stem}-"): path
        for path in journal.parent.glob(f"{journal.stem}-*{journal.suffix}")
    }
    found = {int(name): path for name, path in paths.items() if name.isdigit()}
    if not is_kept:
        for path in found.values():
            for name in (path, *(path.with_name(path.name + ending) for ending in ("-wal", "-shm"))):
                name.unlink(missing_ok=True)
        found = {}
    async with AsyncExitStack() as stack:
        journals = []
        for number, path in sorted(found.items()):
            opened = await stack.enter_async_context(SqliteJournal.open(path, config))
            if number < num_processes:
                journals.append(opened)
            elif await read_journal(opened):
                raise JournalError(
                    f"{path} has sessions of process {number} of this service, and proxy.num_processes is "
                    f"{num_processes}. Set it to {number + 1} or more, or move the file away to give these sessions up."
                )
        yield tuple(journals)


def _home_of(message: Any) -> int:
    """Return the number of the process whose session ``message`` is about."""
    if isinstance(message, (CollectSession, ForgetSession)):
        return process_of(message.session)
    credential = message.credential
    return process_of(credential.session or credential.key or "")


def _handler_of(*messages: type[Message[Sessions, Any]]) -> Callable[[F], F]:
    """Return a decorator that makes a method the handler of several messages."""

    def mark(method: F) -> F:
        for message in messages:
            message.handler(concurrency=_MANY)(method)
        return method

    return mark


class SessionRouter(Actor[Sessions | Shards]):
    """The actor that passes messages about sessions to the session managers of ``num_processes`` processes.

    ``local`` is the manager of the first process, to which new sessions go as well. Durable sessions of other processes
    are noted in ``journal``, that of the first. ``clock`` returns seconds since 1970.
    """

    def __init__(
        self,
        local: Ref[Sessions],
        *,
        num_processes: int,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._managers = {0: local}
        self._num_processes = num_processes
        self._journal = None if isinstance(journal, NoJournal) else journal
        self._clock = clock
        self._turns = cycle(range(num_processes))
        self._changed = ChangeSignal()
        self._context: Context

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:
        """Store the context, whose background tasks wait for processes that are being replaced."""
        self._context = context
        yield

    @ShardOpened.handler
    async def add(self, message: ShardOpened) -> None:
        """Send sessions to another process from now on."""
        self._managers[message.process] = message.sessions
        self._changed.notify()

    # --------------------------------------------------------------------------------------------- new sessions

    @OpenSession.handler(concurrency=_MANY)
    async def open(self, message: OpenSession) -> SessionOpened:
        """Open a session in the process whose turn it is."""
        if message.api_key is not None:
            # The session has to be where requests with the client's own key arrive.
            process = process_of(message.api_key)
        elif message.user is not None:
            # All sessions of a user are in one process, which knows how many live.
            process = crc32(message.user.encode()) % self._num_processes
        else:
            process = next(self._turns)
        manager = self._managers.get(process)
        # It has not started yet, is being replaced, or there is none of that number.
        if manager is None or manager.statistics().state is not ActorState.RUNNING:
            process = 0
        if process and message.episode is not None:
            process, message = await self._place_episode(process, message)
        try:
            opened = await self._managers[process].ask(message)
        except Unreachable as error:
            raise Unavailable("The process of this session ended; start the session again.") from error
        if message.is_durable and self._journal is not None and process_of(opened.session):
            key = message.key or SampleKey(seed=0, path=())
            started = SessionStarted(session=opened.session, key_digest=b"", sample_key=key, started_at=self._clock())
            try:
                await self._journal.write(started)
            except JournalError as error:
                raise Unavailable("The start of this session could not be made durable.") from error
        return opened

    async def _place_episode(self, process: int, message: OpenSession) -> tuple[int, OpenSession]:
        """Return the process in which an episode's session is opened, and the message to it.

        The first process records the episodes of all processes, so that a run is resumed from one journal. An agent
        that starts over is answered from it, so its session is opened there.
        """
        assert message.episode is not None
        assert message.key is not None
        recorded = await self._managers[0].ask(OpenEpisode(place=message.episode, key=message.key))
        if recorded is None:
            return process, evolve(message, episode=None)
        if recorded.turns:
            return 0, message
        return process, evolve(message, episode=None, record=recorded.name)

    @ForgetSession.handler(concurrency=_MANY)
    async def forget(self, message: ForgetSession) -> None:
        """Free a session. Its process may be away; the callers do not wait for that."""
        if not process_of(message.session):
            await self._managers[0].tell(message)
            return
        self._context.tasks.start_soon(self._forget, message)

    async def _forget(self, message: ForgetSession) -> None:
        try:
            await self.route(message)
        except (ActorStopped, Unreachable):
            return  # the run ends; its next start sees what is left
        # In this order: the first process deletes the group of a session that it knows to be forgotten.
        if self._journal is not None:
            self._journal.note(SessionForgotten(session=message.session))

    # ------------------------------------------------------------------------------------------- known sessions

    @_handler_of(
        CheckCredential,
        CollectSession,
        Complete,
        CountTokens,
        DescribeAnswer,
        DescribeOwner,
        EndSession,
        HideAnswer,
        LogNumbers,
        NoteRefusal,
        SetReward,
    )
    async def route(self, message: Message[Sessions, R]) -> R:
        """Ask the session's process; if it dies meanwhile, ask its successor. ``message`` may be handled twice."""
        process = _home_of(message)
        if process >= self._num_processes:
            process = 0  # not one of ours: the first process knows how to refuse it
        while process not in self._managers:
            await self._changed.wait()
        while True:
            try:
                return await self._managers[process].ask(message)
            except (ActorStopped, Unreachable) as error:
                # A message that was not sent had its connection closed, with the run.
                if not process or (isinstance(error, Unreachable) and not error.sent):
                    raise
            await anyio.sleep(_PAUSE_SECONDS)

    @StreamComplete.handler(concurrency=_MANY)
    async def stream_complete(self, message: StreamComplete) -> AsyncIterator[StreamItem]:
        """Stream an answer of the first process; the proxies of the others ask their own sessions."""
        async with self._managers[0].stream(message) as items:
            async for item in items:
                yield item

    # -------------------------------------------------------------------------------------------- all processes

    @DescribeSessions.handler(concurrency=64)
    async def describe(self, message: DescribeSessions) -> SessionsView:
        """Return the sums of the counters of all processes that answer."""
        views: list[SessionsView] = []

        async def ask(manager: Ref[Sessions]) -> None:
            with anyio.move_on_after(_DESCRIBE_SECONDS), suppress(ActorStopped, Unreachable):
                views.append(await manager.ask(message))

        async with anyio.create_task_group() as tasks:
            for manager in self._managers.values():
                tasks.start_soon(ask, manager)
        return SessionsView(
            num_live=sum(view.num_live for view in views),
            num_ended=sum(view.num_ended for view in views),
            num_pending=sum(view.num_pending for view in views),
            num_retries=sum(view.num_retries for view in views),
            num_failed_journals=sum(view.num_failed_journals for view in views),
        )

    @_handler_of(ForgetEpisodes, OpenEpisode, RecordTurn, WatchSessions)
    async def ask_first(self, message: Message[Sessions, R]) -> R:
        """Ask the first process, which records the episodes of agents that the run itself runs."""
        return await self._managers[0].ask(message)
