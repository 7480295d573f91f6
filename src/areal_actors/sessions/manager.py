"""The session manager: sole owner of sessions, their conversation trees and their rewards.

It composes the pure parts: ``cache`` finds the parent of a request and plans its exact prompt, ``rendering`` turns
messages into token ids and back, and the generation actor samples. Handlers interleave only at awaits, so no handler
sees a tree in the middle of a change.

Events of durable sessions are written to the journal before they are acknowledged (``journal``), and the sessions are
restored when the manager starts.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread
from attrs import define, evolve, field, frozen
from attrs.validators import matches_re, optional

from areal_actors.cache import ConversationTree, Session, SessionSettings, SessionStore
from areal_actors.cache.limits import EpisodeBudget, count_sampled
from areal_actors.cache.roles import AGENT_ROLE
from areal_actors.cache.session import SHARD_NAME, create_token_factory
from areal_actors.domain import (
    Answer,
    AnswerStarted,
    CompletionRequest,
    Credential,
    Interaction,
    InteractionId,
    SampledTokens,
    SampleKey,
    SessionId,
    SessionRecord,
    StreamItem,
    merge_numbers,
)
from areal_actors.errors import NotFound, QuotaExceeded, Unavailable
from areal_actors.journal import Journal, NoJournal, RecoveredSession
from areal_actors.kernel import Actor, Context, Ref
from areal_actors.lib.settings import constant
from areal_actors.lib.telemetry import get_logger
from areal_actors.lib.tracing import start_span
from areal_actors.messages import (
    Capacity,
    CheckCredential,
    CollectSession,
    Complete,
    CountTokens,
    DescribeAnswer,
    DescribeEngine,
    DescribeOwner,
    DescribeSessions,
    EndSession,
    ForgetSession,
    Generation,
    Intake,
    LogNumbers,
    OpenSession,
    SessionClosed,
    SessionFinished,
    SessionOpened,
    SessionOwner,
    Sessions,
    SessionsView,
    SetReward,
    SettlePermit,
    StreamComplete,
    WatchSessions,
)
from areal_actors.rendering import LongText, Renderer, deferring_long_texts
from areal_actors.sessions.journal import SessionJournal, restore_retry_cache, restore_session
from areal_actors.sessions.request import (
    PendingRequest,
    RequestPlanner,
    SampleKeys,
    answer,
    check_complete,
    replay,
    sampling,
)
from areal_actors.sessions.retries import CachedRequest, RetryCache

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_log = get_logger(__name__)

_MANY = 100_000
"""Concurrency of handlers that wait for the journal: they wait together, so that it can batch their events."""


class TemperatureRule(StrEnum):
    """The temperature at which requests of agents are sampled in training. Evaluations sample as requested."""

    AS_REQUESTED = "as_requested"
    """Tokens that are sampled at temperature 0 are not trained."""
    OVERRIDE = "override"
    """That of trainer.temperature, whatever a request says."""
    MINIMUM = "minimum"
    """At least that of trainer.temperature."""

    def bounds(self, temperature: float) -> tuple[float, float]:
        """Return the lowest and the highest temperature, where that of training is ``temperature``."""
        low = 0.0 if self is TemperatureRule.AS_REQUESTED else temperature
        return low, temperature if self is TemperatureRule.OVERRIDE else math.inf


@frozen(kw_only=True)
class SessionsConfig:
    """Lifetimes of sessions."""

    lifetimes: SessionSettings = field(factory=SessionSettings)
    sweep_seconds: float = constant(5.0)
    """Interval at which idle sessions are looked for."""
    temperature_bounds: tuple[float, float] = constant((0.0, math.inf))
    """The lowest and the highest temperature at which the requests of sessions that are trained are sampled."""
    service_name: str | None = field(default=None, validator=optional(matches_re(SHARD_NAME)))
    """Name of this service behind a shared entry point; part of every session's id and key."""


@define(kw_only=True)
class _Extras:
    """State that the actor keeps in addition to the store's session. ``journal`` is set if it is durable."""

    keys: SampleKeys
    permit: int | None = None
    max_tokens: int | None = None
    is_trained: bool = False
    budget: EpisodeBudget = field(factory=EpisodeBudget)
    attempts: RetryCache[PendingRequest] = field(factory=RetryCache)
    journal: SessionJournal | None = None

    def admit(self, tree: ConversationTree, request: CompletionRequest, role: str) -> int | None:
        """Return how many tokens each answer may have within the limits of the episode; ``None`` is any number.

        Raises ``EpisodeLimitReached``.
        """
        budget = self.budget
        is_counted = budget.roles is None or role in budget.roles
        if not budget.is_limited or not is_counted:
            return None
        num_turns, num_tokens = count_sampled(tree, budget.roles)
        return budget.admit(num_turns=num_turns, num_tokens=num_tokens, num_choices=request.num_choices)

    @property
    def changing(self) -> AbstractAsyncContextManager[None]:
        """A lock that keeps the changes of a durable session in one order, in memory and in the journal."""
        return nullcontext() if self.journal is None else self.journal.lock


class SessionManager(Actor[Sessions]):
    """The actor that owns the sessions. ``seed`` keys the samples of sessions that are opened without a key.

    Sessions opened as durable are written to ``journal``; ``recovered`` are those that it contained when this process
    started. ``wall_clock`` returns seconds since 1970.
    """

    def __init__(
        self,
        *,
        renderer: Renderer,
        generation: Ref[Generation],
        capacity: Ref[Capacity] | None = None,
        config: SessionsConfig | None = None,
        seed: int = 0,
        token_factory: Callable[[], str] | None = None,
        journal: Journal | None = None,
        recovered: Mapping[SessionId, RecoveredSession] | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._generation = generation
        self._capacity = capacity
        self._config = config or SessionsConfig()
        self._seed = seed
        tokens = token_factory or create_token_factory(self._config.service_name)
        self._store = SessionStore(token_factory=tokens, settings=self._config.lifetimes)
        self._extras: dict[SessionId, _Extras] = {}
        self._num_retries = 0
        self._has_seen_greedy = False
        self._planner = RequestPlanner(renderer, token_factory=tokens)
        # One at a time, so that long prompts leave the other cores to short ones.
        self._encoding = anyio.CapacityLimiter(1)
        self._intake: Ref[Intake] | None = None
        self._journal = None if isinstance(journal, NoJournal) else journal
        self._recovered = dict(recovered or {})
        self._wall_clock = wall_clock

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:
        """Restore sessions, learn the engine's limits, and end idle sessions while the actor runs."""
        recovered, self._recovered = self._recovered, {}
        now, wall_now = anyio.current_time(), self._wall_clock()
        for session in recovered.values():
            self._store.restore(restore_session(session, now=now, wall_now=wall_now))
            self._extras[session.id] = _Extras(
                keys=SampleKeys.restore(session.started.sample_key, session.turns),
                attempts=restore_retry_cache(session, now=now, wall_now=wall_now),
                journal=self._session_journal(session.id),
                # Durable sessions are those of external agents, whose rewards are waited for.
                is_trained=True,
            )
        await self.learn_engine()
        context.tasks.start_soon(self._expire_idle)
        yield

    async def learn_engine(self, *, max_length: int | None = None) -> None:
        """Ask the engine for its limits. ``max_length``, if given, also bounds prompt plus answer.

        Required before the first completion; owners that do not run the lifespan call it themselves.
        """
        view = await self._generation.ask(DescribeEngine())
        length = view.info.context_length
        self._planner.learn(evolve(view.info, context_length=min(length, max_length or length)))

    def _session_journal(self, session: SessionId) -> SessionJournal | None:
        if self._journal is None:
            return None
        return SessionJournal(session=session, journal=self._journal, clock=self._wall_clock)

    # ------------------------------------------------------------------------------------------- lifecycle

    @OpenSession.handler(concurrency=_MANY)
    async def open(self, message: OpenSession) -> SessionOpened:
        """Open a session with an id and two keys. If it is durable, reply once its start is in the journal."""
        opened = self.open_session(message)
        journal = self._session_journal(opened.session) if message.is_durable else None
        if journal is not None:
            extras = self._extras[opened.session]
            extras.journal = journal
            try:
                await journal.write_start(self._store.get(opened.session), extras.keys.base)
            except Unavailable:
                # The client gets an error and no key, so the session must not remain open.
                del self._extras[opened.session]
                self._store.discard(opened.session)
                raise
        return opened

    def open_session(self, message: OpenSession) -> SessionOpened:
        """Open a session at once, for an owner that is not an actor. It is not written to the journal."""
        if message.max_live is not None and self._store.num_live_of(message.user) >= message.max_live:
            raise QuotaExceeded(f"There may be {message.max_live} live sessions of yours; end one before the next.")
        issued = self._store.create(
            message.task,
            now=anyio.current_time(),
            key=message.api_key,
            group=message.group,
            metadata=message.metadata,
            user=message.user,
            user_key=message.user_key,
            roles=message.roles,
        )
        base = message.key or SampleKey(seed=self._seed, path=(issued.id,))
        self._extras[issued.id] = _Extras(
            keys=SampleKeys(base),
            permit=message.permit,
            max_tokens=message.max_tokens,
            is_trained=message.is_trained,
            budget=EpisodeBudget(limits=message.limits, roles=message.limited_roles),
        )
        return SessionOpened(
            session=issued.id,
            api_key=issued.key,
            completion_key=issued.completion_key,
            role_keys=issued.role_keys,
        )

    @EndSession.handler(concurrency=_MANY)
    async def end(self, message: EndSession) -> SessionClosed:
        """Set the final reward if there is one, and refuse completions from now on. Ending twice is harmless."""
        credential = message.credential
        session = self._store.resolve_control(credential)
        extras = self._extras[session.id]
        if message.final_reward is not None:
            self._for_reward(message.credential)
        async with extras.changing:
            final = None
            if message.final_reward is not None:
                final = session.tree.rewarded(None, message.final_reward, is_outcome=True)
            if extras.journal is not None and (final is not None or not session.is_ended):
                await extras.journal.write_end(final)
            if final is not None:
                session.tree.put_reward(final)
            self._store.end(session.id, anyio.current_time())
        await self._settle(session.id)
        await self._announce(SessionFinished(session=session.id, is_final=message.final_reward is not None))
        return SessionClosed(session=session.id, num_interactions=len(session.tree))

    @SetReward.handler(concurrency=_MANY)
    async def set_reward(self, message: SetReward) -> InteractionId:
        """Assign or replace a reward."""
        session = self._for_reward(message.credential)
        extras = self._extras[session.id]
        if message.interaction is not None:
            # A client that names an interaction has received its answer.
            extras.attempts.note_read(message.interaction)
        async with extras.changing:
            rewarded = session.tree.rewarded(message.interaction, message.reward, is_outcome=message.is_outcome)
            if extras.journal is not None:
                await extras.journal.write_reward(rewarded)
            return session.tree.put_reward(rewarded).id

    @LogNumbers.handler
    async def log(self, message: LogNumbers) -> None:
        """Store named numbers with the session."""
        credential = message.credential
        session = self._store.for_log(credential, anyio.current_time())
        session.tree.logged = merge_numbers(session.tree.logged, message.numbers)

    @CheckCredential.handler
    async def check(self, message: CheckCredential) -> SessionId:
        """Return the session that a credential opens for completions."""
        return self._open_for(message.credential).id

    @DescribeSessions.handler
    async def describe(self, message: DescribeSessions) -> SessionsView:  # noqa: ARG002 - the message says it all
        """Return the counters."""
        num_live = self._store.num_live
        return SessionsView(
            num_live=num_live,
            num_ended=len(self._store) - num_live,
            num_pending=sum(session.tree.num_pending for session in self._store),
            num_retries=self._num_retries,
            num_failed_journals=int(self._journal is not None and self._journal.failure is not None),
        )

    @DescribeOwner.handler
    async def describe_owner(self, message: DescribeOwner) -> SessionOwner:
        """Return who started the session that a credential opens."""
        session = self._resolve(message.credential)
        return SessionOwner(session=session.id, user=session.user, user_key=session.user_key)

    @CollectSession.handler
    async def collect(self, message: CollectSession) -> SessionRecord:
        """Return a copy of a session's current state."""
        snapshot = self._store.get(message.session).snapshot()
        extras = self._extras.get(message.session)
        return snapshot if extras is None else evolve(snapshot, limit=extras.budget.reached)

    @ForgetSession.handler(concurrency=_MANY)
    async def forget(self, message: ForgetSession) -> None:
        """Free a session whose rows were delivered. A live session ends."""
        await self._settle(message.session)
        extras = self._extras.pop(message.session, None)
        if extras is not None and extras.journal is not None:
            extras.journal.note_forgotten()
        with suppress(NotFound):
            self._store.end(message.session, anyio.current_time())
        self._store.acknowledge(message.session)

    def tree(self, session: SessionId) -> ConversationTree:
        """Return the conversation tree of a session, for an owner that is not an actor."""
        return self._store.get(session).tree

    def _for_reward(self, credential: Credential) -> Session:
        return self._store.for_reward(credential, anyio.current_time())

    def _resolve(self, credential: Credential) -> Session:
        return self._store.resolve(credential)

    async def _settle(self, session: SessionId) -> None:
        """Return the permit that was claimed for this session alone, if there is one."""
        extras = self._extras.get(session)
        if self._capacity is None or extras is None or extras.permit is None:
            return
        # Cleared before the await, so that ending the session twice settles the permit once.
        permit, extras.permit = extras.permit, None
        # It never counts as accepted: the rows that an external agent exports go to the client that asked for them.
        # They do not enter the trainer's queue, which would otherwise wait forever for a group to fill the accepted
        # place.
        await self._capacity.tell(SettlePermit(permit=permit, is_accepted=False))

    async def _expire_idle(self) -> None:
        expired: list[SessionId] = []
        while True:
            await anyio.sleep(self._config.sweep_seconds)
            expired += self._store.expire(anyio.current_time())
            # Sessions whose end could not be written stay in the list for the next sweep.
            expired = [session for session in expired if not await self._end_expired(session)]

    async def _end_expired(self, session: SessionId) -> bool:
        """Write and announce the end of an expired session; return whether that succeeded."""
        # The end is written before it is announced: otherwise a process that is killed and restarted would announce it
        # again.
        extras = self._extras.get(session)
        if extras is not None and extras.journal is not None:
            try:
                async with extras.changing:
                    await extras.journal.write_end(None)
            except Unavailable:
                # Already logged; the next sweep tries again.
                return False
        _log.warning("session_expired", session=session)
        await self._settle(session)
        await self._announce(SessionFinished(session=session, is_expired=True))
        return True

    @WatchSessions.handler
    async def watch(self, message: WatchSessions) -> None:
        """Remember the watcher that is notified of sessions that end."""
        self._intake = message.watcher

    async def _announce(self, news: SessionFinished) -> None:
        if self._intake is not None:
            await self._intake.tell(news)

    # ----------------------------------------------------------------------------------------- completions

    @Complete.handler(concurrency=100_000)
    async def complete(self, message: Complete) -> tuple[Answer, ...]:
        """Answer without streaming: record all choices, or none."""
        span = _start_span(message)
        begun = await self._repeat_or_begin(message)
        if not isinstance(begun, PendingRequest):
            return begun
        begun.trace(span)
        return await answer(begun, self._generation)

    @StreamComplete.handler(concurrency=100_000)
    async def stream_complete(self, message: StreamComplete) -> AsyncIterator[StreamItem]:
        """Stream the answer while tokens are sampled.

        The choices of one request are sampled together and delivered one after another.
        """
        span = _start_span(message)
        turn = await self._repeat_or_begin(message)
        if not isinstance(turn, PendingRequest):
            for item in replay(turn, with_tokens=message.request.streams_tokens):
                yield item
            return
        turn.trace(span)
        async with sampling(turn, self._generation) as streams:
            for choice, chunks in zip(turn.choices, streams, strict=True):
                yield AnswerStarted(
                    interaction=choice.interaction,
                    num_prompt_tokens=len(turn.plan.token_ids),
                    choice=choice.index,
                    temperature=turn.plan.request.sampling.temperature,
                )
                async for chunk in chunks:
                    if message.request.streams_tokens:
                        yield SampledTokens(chunk=chunk, choice=choice.index)
                    for delta in choice.feed(chunk):
                        yield delta
                    if choice.has_stopped:
                        break
                for delta in choice.flush():
                    yield delta
                check_complete(turn, choice)
                for answer in await turn.complete(choice):
                    yield answer

    @DescribeAnswer.handler
    async def describe_answer(self, message: DescribeAnswer) -> Interaction:
        """Return a completed answer."""
        session = self._resolve(message.credential)
        turn = session.tree.get(message.interaction)
        if turn.completed_order is None:
            raise NotFound(f"Session {session.id} has no answer {turn.id}: it was not completed.")
        return turn

    @CountTokens.handler
    async def count_tokens(self, message: CountTokens) -> int:
        """Return the length of the prompt, without recording anything."""
        session = self._store.resolve(message.credential)
        request = message.request
        encoded: dict[Hashable, Any] = {}
        while True:
            try:
                with deferring_long_texts(encoded):
                    return len(self._planner.plan(session, request).token_ids)
            except LongText as text:
                encoded[text.key] = await to_thread.run_sync(text.encode, limiter=self._encoding)

    async def _repeat_or_begin(self, message: Complete | StreamComplete) -> tuple[Answer, ...] | PendingRequest:
        """Return the answers of an earlier sending of this request, or the turn that begins with it.

        Long texts of its prompt are tokenised in a thread. A turn begins at once after the last of them, with the tree
        as it is then.
        """
        encoded: dict[Hashable, Any] = {}
        replaced: CachedRequest[PendingRequest] | None = None
        while True:
            # A retry may arrive while a text is encoded in the thread, so check again after each one. Exception: an
            # attempt without a key that already replaced a request could match a second, identical request.
            if replaced is None or replaced.key is not None:
                answers, found = await self._repeat(message)
                if answers is not None:
                    return answers
                replaced = found or replaced
            try:
                with deferring_long_texts(encoded):
                    return self._begin(message, replaced)
            except LongText as text:
                encoded[text.key] = await to_thread.run_sync(text.encode, limiter=self._encoding)

    async def _repeat(
        self, message: Complete | StreamComplete
    ) -> tuple[tuple[Answer, ...] | None, CachedRequest[PendingRequest] | None]:
        """Return the answers of an earlier sending of this request, or ``None``, and the request that it replaces."""
        replaced: CachedRequest[PendingRequest] | None = None
        attempt = message.attempt
        if attempt is None or (not attempt.number and attempt.idempotency_key is None):
            # The client says that it has not sent this request before, and nothing else would tell.
            return None, None
        session = self._open_for(message.credential)
        attempts = self._extras[session.id].attempts
        while (cached := attempts.recognise(attempt, anyio.current_time())) is not None:
            if cached.is_cut:
                replaced = cached
                break
            self._num_retries += 1
            if cached.work is not None:
                await cached.work.wait()
            if cached.answers is not None:
                return tuple(evolve(answer, is_repeated=True) for answer in cached.answers), None
            # The earlier sending ended without an answer, so this retry takes its place.
            attempts.forget(cached)
            replaced = cached
            # With a key, another waiting retry may have begun to sample already; look again and join it.
            if cached.key is None:
                break
        return None, replaced

    def _open_for(self, credential: Credential) -> Session:
        return self._store.for_completion(credential, anyio.current_time())

    def _begin(
        self, message: Complete | StreamComplete, replaced: CachedRequest[PendingRequest] | None
    ) -> PendingRequest:
        """Begin a turn, in the place of the request that is ``replaced``, if any."""
        session = self._open_for(message.credential)
        extras = self._extras[session.id]
        request = message.request
        # Before any that the request names, so that a program with this key cannot choose another role. Not put into
        # the request: its copy costs 3.5 µs.
        tag = session.role_of_key(message.credential.key) or request.tag
        if extras.max_tokens is not None and request.sampling.max_new_tokens > extras.max_tokens:
            request = evolve(request, sampling=evolve(request.sampling, max_new_tokens=extras.max_tokens))
        if extras.is_trained:
            request = self._temper(request)
        plan = self._planner.plan(session, request)
        num_left = extras.admit(session.tree, request, tag or AGENT_ROLE)
        if num_left is not None and request.sampling.max_new_tokens > num_left:
            plan = evolve(plan, request=evolve(request, sampling=evolve(request.sampling, max_new_tokens=num_left)))
        turn = self._planner.begin(
            session,
            plan,
            sample_keys=extras.keys,
            journal=extras.journal,
            is_streaming=isinstance(message, StreamComplete),
            asked=None if replaced is None else replaced.asked,
            tag=tag,
        )
        turn.begin_in(extras.attempts, message.attempt)
        return turn

    def _temper(self, request: CompletionRequest) -> CompletionRequest:
        """Return the request at the temperature that the run wants, before anything is sampled or recorded."""
        (low, high), asked = self._config.temperature_bounds, request.sampling.temperature
        temperature = min(max(asked, low), high)
        if temperature == 0 and not self._has_seen_greedy:
            self._has_seen_greedy = True
            _log.warning("greedy_request", detail=_GREEDY)
        if temperature == asked:
            return request
        return evolve(request, sampling=evolve(request.sampling, temperature=temperature))


_GREEDY = (
    "An agent asks for temperature 0, and such tokens are not trained. Give its requests a temperature, or set "
    "rollout.sampling.temperature: override."
)


def _start_span(message: Complete | StreamComplete) -> Span | None:
    """Start the span of a completion, if its request is traced. It ends with the turn; a repeated answer has none."""
    return None if message.traceparent is None else start_span("completion", {"traceparent": message.traceparent})
