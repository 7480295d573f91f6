"""The real proxy on a real socket, in front of a script instead of a model.

::

    async with open_scripted_proxy() as proxy:
        async with proxy.open_session() as session:
            client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress

import anyio
from attrs import define, evolve, field, frozen

from areal_actors.cache import Session, SessionSettings, SessionStore
from areal_actors.cache.tree import parse_reward
from areal_actors.client import OpenAIProxyClient
from areal_actors.domain import (
    Answer,
    AnswerStarted,
    ChatMessage,
    Completion,
    CompletionRequest,
    Delta,
    FinishReason,
    Interaction,
    InteractionId,
    InteractionStatus,
    ReasoningDelta,
    RewardScope,
    SessionId,
    SessionRecord,
    StreamItem,
    TextDelta,
    ToolArgumentsDelta,
    ToolCall,
    ToolCallStarted,
    Usage,
    merge_numbers,
)
from areal_actors.errors import NotFound, QuotaExceeded
from areal_actors.kernel import Actor, ActorSystem, Ref
from areal_actors.messages import (
    Accounts,
    CheckCredential,
    CollectSession,
    Complete,
    CountTokens,
    DescribeAnswer,
    DescribeEndpoint,
    DescribeOwner,
    DescribeSessions,
    Endpoint,
    EndSession,
    ForgetSession,
    Intake,
    LogNumbers,
    OpenSession,
    Serving,
    SessionClosed,
    SessionFinished,
    SessionOpened,
    SessionOwner,
    Sessions,
    SessionsView,
    SetReward,
    StreamComplete,
    WatchSessions,
)
from areal_actors.proxy import ProxyConfig, ProxyServer
from areal_actors.rollouts.capacity import CapacityGranter
from areal_actors.rollouts.exporter import Exporter
from areal_actors.rollouts.staleness import CapacityLimits, CapacityState

Script = Callable[[CompletionRequest], AsyncGenerator[Delta, None]]
"""Yields the deltas of an answer. Cancelled, or closed, when the client disconnects."""


async def echo_script(request: CompletionRequest) -> AsyncGenerator[Delta, None]:
    """Yield the last message, word by word."""
    last = request.messages[-1].content or "" if request.messages else request.prompt
    for word in (last or " ".join(map(str, request.prompt_ids))).split(" "):
        yield TextDelta(text=word + " ")


def _num_prompt_tokens(request: CompletionRequest) -> int:
    return len(request.messages) or len(request.prompt_ids) or 1


@define(kw_only=True)
class _Saying:
    """The deltas of one answer so far."""

    request: CompletionRequest
    interaction: InteractionId
    deltas: list[Delta] = field(factory=list)
    is_cut: bool = False

    def message(self) -> ChatMessage:
        calls = {
            delta.index: ToolCall(id=delta.id, name=delta.name, arguments="")
            for delta in self.deltas
            if isinstance(delta, ToolCallStarted)
        }
        for delta in self.deltas:
            if isinstance(delta, ToolArgumentsDelta):
                call = calls[delta.index]
                calls[delta.index] = evolve(call, arguments=call.arguments + delta.text)
        text = "".join(delta.text for delta in self.deltas if isinstance(delta, TextDelta))
        reasoning = "".join(delta.text for delta in self.deltas if isinstance(delta, ReasoningDelta))
        return ChatMessage(
            role="assistant", content=text or None, tool_calls=tuple(calls.values()), reasoning=reasoning or None
        )

    def answer(self) -> Answer:
        number = len(self.deltas)
        finish = FinishReason.LENGTH if self.is_cut else FinishReason.STOP
        logprobs = [-0.5] * number
        completion = Completion(
            token_ids=range(number), logprobs=logprobs, raw_logprobs=logprobs, versions=[0] * number, finish=finish
        )
        usage = Usage(prompt_tokens=_num_prompt_tokens(self.request), completion_tokens=number)
        return Answer(interaction=self.interaction, message=self.message(), completion=completion, usage=usage)


class ScriptedSessions(Actor[Sessions]):
    """A session manager without a model, which answers requests by a script. ``requests`` holds all of them, in order.

    Keys, ends and grace periods are real (``cache.SessionStore``); tokens are made up, one per delta.
    """

    def __init__(self, script: Script = echo_script, *, settings: SessionSettings | None = None) -> None:
        self.requests: list[CompletionRequest] = []
        self._script = script
        self._store = SessionStore(token_factory=lambda: secrets.token_urlsafe(16), settings=settings)
        self._interactions: dict[SessionId, dict[InteractionId, Interaction]] = {}
        self._num_answers = 0
        self._intake: Ref[Intake] | None = None

    @WatchSessions.handler
    async def watch(self, message: WatchSessions) -> None:
        """Store the watcher to notify of sessions that end."""
        self._intake = message.watcher

    @OpenSession.handler
    async def open(self, message: OpenSession) -> SessionOpened:
        """Issue an id and two keys."""
        if message.max_live is not None and self._store.num_live_of(message.user) >= message.max_live:
            raise QuotaExceeded(f"There may be {message.max_live} live sessions of yours; end one before the next.")
        issued = self._store.create(
            message.task,
            now=anyio.current_time(),
            key=message.api_key,
            group=message.group,
            user=message.user,
            user_key=message.user_key,
        )
        self._interactions[issued.id] = {}
        return SessionOpened(session=issued.id, api_key=issued.key, completion_key=issued.completion_key)

    @Complete.handler(concurrency=10_000)
    async def complete(self, message: Complete) -> tuple[Answer, ...]:
        """Run the script once per choice and return the answers."""
        session = self._admit(message)
        answers = []
        for name in self._names(message.request):
            saying = _Saying(request=message.request, interaction=name)
            async with aclosing(self._say(saying)) as deltas:
                async for _ in deltas:
                    pass
            answers.append(self._record(session, saying))
        return tuple(answers)

    @StreamComplete.handler(concurrency=10_000)
    async def stream(self, message: StreamComplete) -> AsyncIterator[StreamItem]:
        """Run the script once per choice, and stream its deltas."""
        session = self._admit(message)
        for index, name in enumerate(self._names(message.request)):
            saying = _Saying(request=message.request, interaction=name)
            num_prompt_tokens = _num_prompt_tokens(message.request)
            yield AnswerStarted(interaction=name, num_prompt_tokens=num_prompt_tokens, choice=index)
            async with aclosing(self._say(saying)) as deltas:
                async for delta in deltas:
                    yield evolve(delta, choice=index)
            yield self._record(session, saying)

    @CheckCredential.handler
    async def check(self, message: CheckCredential) -> SessionId:
        """Return the session that the credential belongs to."""
        credential = message.credential
        return self._store.for_completion(credential, anyio.current_time()).id

    @CountTokens.handler
    async def count_tokens(self, message: CountTokens) -> int:
        """Count one token per message, or per id of a raw prompt, as answers do."""
        self._store.resolve(message.credential)
        return _num_prompt_tokens(message.request)

    @DescribeAnswer.handler
    async def describe_answer(self, message: DescribeAnswer) -> Interaction:
        """Return an answer."""
        session = self._store.resolve(message.credential)
        turn = self._interactions[session.id].get(message.interaction)
        if turn is None:
            raise NotFound(f"Session {session.id} has no answer {message.interaction}.")
        return turn

    @LogNumbers.handler
    async def log(self, message: LogNumbers) -> None:
        """Store named numbers with the session."""
        session = self._store.for_log(message.credential, anyio.current_time())
        session.tree.logged = merge_numbers(session.tree.logged, message.numbers)

    @SetReward.handler
    async def set_reward(self, message: SetReward) -> InteractionId:
        """Reward an interaction, or the last one."""
        session = self._store.for_reward(message.credential, anyio.current_time())
        return self._reward(session, message.interaction, message.reward, is_outcome=message.is_outcome)

    @EndSession.handler
    async def end(self, message: EndSession) -> SessionClosed:
        """End a session."""
        credential = message.credential
        session = self._store.resolve_control(credential)
        if message.final_reward is not None:
            self._reward(session, None, message.final_reward, is_outcome=True)
        self._store.end(session.id, anyio.current_time())
        if self._intake is not None:
            is_final = message.final_reward is not None
            await self._intake.tell(SessionFinished(session=session.id, is_final=is_final))
        return SessionClosed(session=session.id, num_interactions=len(self._interactions[session.id]))

    @DescribeSessions.handler
    async def describe(self, message: DescribeSessions) -> SessionsView:  # noqa: ARG002 - the message has no fields
        """Count the sessions."""
        num_live = self._store.num_live
        return SessionsView(num_live=num_live, num_ended=len(self._store) - num_live, num_pending=0)

    @DescribeOwner.handler
    async def describe_owner(self, message: DescribeOwner) -> SessionOwner:
        """Return the user who started a session."""
        credential = message.credential
        session = self._store.resolve(credential)
        return SessionOwner(session=session.id, user=session.user, user_key=session.user_key)

    @CollectSession.handler
    async def collect(self, message: CollectSession) -> SessionRecord:
        """Return the current state of the session."""
        session = self._store.get(message.session)
        interactions = tuple(self._interactions[session.id].values())
        return SessionRecord(id=session.id, interactions=interactions, is_ended=session.is_ended)

    @ForgetSession.handler
    async def forget(self, message: ForgetSession) -> None:
        """Forget a session; a live one ends."""
        # It may have been forgotten before.
        with suppress(NotFound):
            self._store.end(message.session, anyio.current_time())
        self._store.acknowledge(message.session)

    def _admit(self, message: Complete | StreamComplete) -> Session:
        self.requests.append(message.request)
        return self._store.for_completion(message.credential, anyio.current_time())

    def _names(self, request: CompletionRequest) -> list[InteractionId]:
        self._num_answers += 1
        first = f"{request.id_prefix}{self._num_answers}"
        return [InteractionId(f"{first}-{index}" if index else first) for index in range(request.num_choices)]

    async def _say(self, saying: _Saying) -> AsyncGenerator[Delta, None]:
        async with aclosing(self._script(saying.request)) as deltas:
            async for delta in deltas:
                # Each delta is one token.
                if len(saying.deltas) == saying.request.sampling.max_new_tokens:
                    saying.is_cut = True
                    return
                saying.deltas.append(delta)
                yield delta

    def _record(self, session: Session, saying: _Saying) -> Answer:
        answer = saying.answer()
        interactions = self._interactions[session.id]
        interactions[saying.interaction] = Interaction(
            id=saying.interaction,
            order=len(interactions),
            messages=saying.request.messages,
            prompt_suffix=[0] * answer.usage.prompt_tokens,
            num_prompt_tokens=answer.usage.prompt_tokens,
            completion=answer.completion,
            output=answer.message,
            status=InteractionStatus.COMPLETED,
            completed_order=len(interactions),
            tag=saying.request.tag,
        )
        return answer

    def _reward(
        self, session: Session, interaction: InteractionId | None, reward: float, *, is_outcome: bool
    ) -> InteractionId:
        interactions = self._interactions[session.id]
        name = interaction or next(reversed(interactions), None)
        if name is None or name not in interactions:
            raise NotFound(f"Session {session.id} has no interaction {name}.")
        scope = RewardScope.EPISODE if is_outcome else RewardScope.LAST
        scope = scope if interaction is None else RewardScope.ANSWER
        interactions[name] = evolve(interactions[name], reward=parse_reward(reward), reward_scope=scope)
        return name


@frozen(kw_only=True)
class ScriptedProxy:
    """A running proxy. ``sessions.requests`` holds the requests that it received."""

    endpoint: Endpoint
    sessions: ScriptedSessions
    server: Ref[Serving]
    system: ActorSystem
    accounts: Ref[Accounts] | None = None

    @property
    def url(self) -> str:
        """The URL on which it listens."""
        return self.endpoint.url

    @property
    def admin_headers(self) -> dict[str, str]:
        """The headers of the administrator."""
        return {"authorization": f"Bearer {self.endpoint.admin_key}"}

    def open_session(self, task_id: str = "task", *, api_key: str | None = None) -> OpenAIProxyClient:
        """Return a session, to be entered with ``async with``."""
        return OpenAIProxyClient(self.url, admin_key=self.endpoint.admin_key, task_id=task_id, api_key=api_key)


@asynccontextmanager
async def open_scripted_proxy(
    script: Script = echo_script,
    *,
    config: ProxyConfig | None = None,
    settings: SessionSettings | None = None,
    max_sessions: int = 1024,
    accounts: Actor[Accounts] | None = None,
) -> AsyncIterator[ScriptedProxy]:
    """Serve until the block is left.

    Args:
        script: yields the answers of the model.
        config: the proxy's settings; by default it listens on any free port of this machine.
        settings: how long sessions are kept.
        max_sessions: maximum number of live sessions.
        accounts: the keeper of users and their keys; without it there are no users.
    """
    limits = CapacityLimits(max_concurrent=max_sessions, batch_size=max_sessions)
    sessions = ScriptedSessions(script, settings=settings)
    async with ActorSystem.open() as system:
        sessions_ref = await system.spawn(sessions)
        capacity = await system.spawn(CapacityGranter(CapacityState(limits=limits)))
        exports = await system.spawn(Exporter(sessions=sessions_ref, capacity=capacity))
        keeper = None if accounts is None else await system.spawn(accounts)
        server = await system.spawn(
            ProxyServer(sessions=sessions_ref, exports=exports, capacity=capacity, accounts=keeper, config=config)
        )
        endpoint = await server.ask(DescribeEndpoint())
        yield ScriptedProxy(endpoint=endpoint, sessions=sessions, server=server, system=system, accounts=keeper)
