"""Sessions at a model behind a URL: requests are passed on as they are, and counted; tokens stay unknown.

The agent's base URL leads to a small server in this process, which forwards each request to the model's URL with that
server's key, the model's name and the episode's seed, and passes the answer on byte by byte. ``UpstreamRef`` answers
the messages of the rollout runner, so an episode runs by the same code as one of a model whose tokens are known; it has
rewards and turns, and no rows.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from hashlib import sha256
from http import HTTPStatus
from typing import Any

import httpx
from attrs import define, evolve, field, frozen
from starlette.applications import Starlette

from areal_actors.cache.limits import EpisodeBudget
from areal_actors.client.attribution import parse_root
from areal_actors.domain import (
    ChatMessage,
    Episode,
    Interaction,
    InteractionId,
    InteractionStatus,
    SampleKey,
    SessionId,
    SessionRecord,
)
from areal_actors.errors import ConfigError, NotFound, RewardError, SessionEnded, Unavailable
from areal_actors.lib.exact_json import parse_object
from areal_actors.lib.task_groups import open_tasks
from areal_actors.messages import (
    CollectSession,
    Endpoint,
    EndSession,
    ExportSession,
    ForgetSession,
    OpenSession,
    SessionClosed,
    SessionOpened,
    SetReward,
)
from areal_actors.proxy import ProxyConfig
from areal_actors.proxy.exchange import Exchange, Traffic
from areal_actors.proxy.forwarding import Backend, EveryPath, forward, segments_of
from areal_actors.proxy.server import bind, serve_until_cancelled, url_of

_ROUTES = ("chat/completions", "completions", "responses", "messages")
"""The ends of the paths at which models answer, on the routes of OpenAI and Anthropic."""
_SEEDED = ("chat/completions", "completions")
"""Those that take a seed."""
_MAX_BODY_BYTES = 64 << 20
_MAX_KEPT_BYTES = 1 << 20
_BODY_SECONDS = 60.0
_DRAIN_SECONDS = 1.0
_TIMEOUT = httpx.Timeout(600.0, connect=10.0)


@frozen(kw_only=True)
class Upstream:
    """A server of a model. ``url`` has no ``/v1``; without a ``model``, the name that the agent sends is kept."""

    url: str = field(converter=parse_root)
    model: str | None = None
    openai_key: str | None = field(default=None, repr=False)
    anthropic_key: str | None = field(default=None, repr=False)

    @property
    def label(self) -> str:
        """The name of the model for people."""
        return self.url if self.model is None else f"{self.url} {self.model}"

    def open(self, config: ProxyConfig) -> AbstractAsyncContextManager[tuple[UpstreamRef, Endpoint]]:
        """Serve sessions at this server while the block lasts; see ``open_upstream``."""
        return open_upstream(self, config)


@define
class _Session:
    """The state of a session: what was asked and answered, and the rewards of the answers."""

    id: SessionId
    key: SampleKey | None
    budget: EpisodeBudget
    turns: list[Interaction] = field(factory=list)
    is_ended: bool = False


class UpstreamRef:
    """Answers the messages of the rollout runner to the session manager and to the exporter.

    It is called in the runner's task, as there is nothing to wait for; an actor would have to handle the messages of
    the proxy, too, which need tokens.
    """

    def __init__(self) -> None:
        self.sessions: dict[str, _Session] = {}

    async def ask(self, message: Any) -> Any:
        """Return the reply to ``message``. Raises as the actors do."""
        match message:
            case OpenSession():
                # Random, so that an agent cannot guess the URL of another session.
                session = SessionId(f"{message.task}-{secrets.token_urlsafe(16)}")
                self.sessions[session] = _Session(session, message.key, EpisodeBudget(limits=message.limits))
                return SessionOpened(session=session, api_key=session, completion_key=session)
            case SetReward():
                return _set_reward(self._find(message.credential.session), message)
            case EndSession():
                found = self._find(message.credential.session)
                found.is_ended = True
                return SessionClosed(session=found.id, num_interactions=len(found.turns))
            case CollectSession():
                found = self._find(message.session)
                limit = found.budget.reached
                return SessionRecord(id=found.id, interactions=tuple(found.turns), is_ended=found.is_ended, limit=limit)
            case ExportSession():
                found = self._find(message.session)
                return Episode(
                    session=message.session,
                    member=message.member,
                    reward=math.fsum(turn.reward or 0.0 for turn in found.turns),
                    num_turns=len(found.turns),
                    limit=found.budget.reached,
                )
            case ForgetSession():
                return self.sessions.pop(message.session, None) and None
        raise NotImplementedError(f"a model at a URL cannot answer {type(message).__name__}")

    async def tell(self, message: Any) -> None:
        """Handle ``message`` before returning."""
        await self.ask(message)

    def _find(self, session: SessionId | None) -> _Session:
        found = self.sessions.get(session or "")
        if found is None:
            raise NotFound("There is no such session.")
        return found


def _set_reward(session: _Session, message: SetReward) -> InteractionId:
    turns = session.turns
    if not math.isfinite(message.reward):
        raise RewardError(f"A reward must be a finite number, not {message.reward}.")
    if not turns:
        raise RewardError(f"Session {session.id} has no completed interaction to reward.")
    wanted = turns[-1].id if message.interaction is None else message.interaction
    for index, turn in enumerate(turns):
        if turn.id == wanted:
            turns[index] = evolve(turn, reward=message.reward)
            return wanted
    raise RewardError(f"There is no answer {wanted!r}; streamed answers of other servers cannot be named.")


class _Forwarder(EveryPath):
    def __init__(
        self, upstream: Upstream, sessions: dict[str, _Session], client: httpx.AsyncClient, traffic: Traffic
    ) -> None:
        super().__init__(traffic)
        self._upstream = upstream
        self._sessions = sessions
        self._client = client

    async def serve(self, exchange: Exchange) -> None:
        """Forward a request whose path begins with a session; answer ``/health`` itself."""
        segments = segments_of(exchange)
        body = await exchange.read_body(max_bytes=_MAX_BODY_BYTES, timeout_seconds=_BODY_SECONDS)
        if segments == ["health"]:
            await exchange.send_json(200, {"status": "ok"})
            return
        session = self._sessions.get(segments[0]) if segments else None
        if session is None:
            raise NotFound("The path does not begin with a session; use the base_url that the agent was given.")
        if session.is_ended:
            raise SessionEnded("The session has ended.")
        route = "/".join(segment for segment in segments[1:] if segment != "v1")
        request = parse_object(body) if route in _ROUTES else None
        if request is not None:
            # The tokens of its answers are not known.
            session.budget.admit(num_turns=len(session.turns), num_tokens=0)
            if self._upstream.model is not None:
                request["model"] = self._upstream.model
            if route in _SEEDED and (key := session.key) is not None:
                # Equal in every evaluation with the same problem, sample and seed.
                turn = json.dumps([key.seed, *key.path, len(session.turns)]).encode()
                # Servers take 31 bits at least.
                request.setdefault("seed", int.from_bytes(sha256(turn).digest()[:4], "big") >> 1)
            body = json.dumps(request).encode()
        async with exchange.cut_on_disconnect():
            await self._forward(exchange, session, route, request, body)

    async def _forward(
        self, exchange: Exchange, session: _Session, route: str, request: dict[str, Any] | None, body: bytes
    ) -> None:
        upstream = self._upstream
        url = httpx.URL(upstream.url)
        exchange.scope["raw_path"] = f"{url.path.rstrip('/')}/v1/{route}".encode()
        headers = [(name, value) for name, value in exchange.scope["headers"] if name not in _CREDENTIALS]
        if route.startswith("messages") and upstream.anthropic_key:
            headers.append((b"x-api-key", upstream.anthropic_key.encode()))
        elif upstream.openai_key:
            headers.append((b"authorization", f"Bearer {upstream.openai_key}".encode()))
        # Encoded answers could not be read for the record.
        exchange.scope["headers"] = [*headers, (b"accept-encoding", b"identity")]
        kept = _KeptAnswer(exchange)
        if request is not None:
            kept.on_success = lambda: session.turns.append(_create_turn(session, request, kept.document()))
        try:
            await forward(
                kept.exchange,
                body=body,
                backends=lambda: [Backend("model", str(url.copy_with(raw_path=b"/")))],
                client=self._client,
            )
        except Unavailable as error:
            # The words of the entry point, which forwards in the same way, are about proxies.
            reason = error.__cause__
            detail = "it accepts no connection" if reason is None else f"it gave no whole answer ({reason!r})"
            raise Unavailable(f"The model at {upstream.url} cannot answer: {detail}; ask again.") from error
        exchange.is_started, exchange.status = kept.exchange.is_started, kept.exchange.status


_CREDENTIALS = (b"authorization", b"x-api-key", b"accept-encoding")


class _KeptAnswer:
    """Passes an answer on, and keeps a copy of one that is a JSON document."""

    def __init__(self, exchange: Exchange) -> None:
        self.on_success: Callable[[], None] | None = None
        self._parts: list[bytes] = []
        self._send = exchange._send  # noqa: SLF001 - the same exchange, with a copy of what is sent
        self.exchange = Exchange(exchange.scope, exchange._receive, self._keep)  # noqa: SLF001

    async def _keep(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body" and sum(map(len, self._parts)) < _MAX_KEPT_BYTES:
            self._parts.append(message.get("body", b""))
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if is_last and self.exchange.status == HTTPStatus.OK and self.on_success is not None:
            # Before the client has the whole answer: it may end the episode then.
            self.on_success()
        await self._send(message)

    def document(self) -> dict[str, Any]:
        """Return the answer, or an empty document if it was streamed or is too long."""
        try:
            document = json.loads(b"".join(self._parts))
        except ValueError:
            return {}
        return document if isinstance(document, dict) else {}


def _create_turn(session: _Session, request: dict[str, Any], answer: dict[str, Any]) -> Interaction:
    order = len(session.turns)
    given = request.get("messages")
    messages = given if isinstance(given, list) else [{"role": "user", "content": request.get("input", "")}]
    num_known = sum(len(turn.messages) + (turn.output is not None) for turn in session.turns)
    shown = messages[num_known:] if num_known < len(messages) else messages[-1:]
    messages_shown = []
    for message in shown:
        is_known = isinstance(message, dict)
        content = message.get("content") if is_known else message
        text = content if isinstance(content, str) else json.dumps(content, default=str)
        role = str(message.get("role", "user")) if is_known else "user"
        messages_shown.append(ChatMessage(role=role, content=text))
    # The answers of OpenAI's and Anthropic's routes; a streamed one has no document, and so no text in the report.
    output: str | None = None
    match answer:
        case {"choices": [{"message": {"content": str(text)}}, *_]} | {"choices": [{"text": str(text)}, *_]}:
            output = text
        case {"choices": [{"message": parts}, *_]} | {"content": list(parts)} | {"output": list(parts)}:
            output = json.dumps(parts)
    usage = answer.get("usage") or {}
    return Interaction(
        id=InteractionId(str(answer.get("id") or f"turn-{order}")),
        order=order,
        parent=session.turns[-1].id if session.turns else None,
        messages=tuple(messages_shown),
        prompt_suffix=(),
        num_prompt_tokens=int(usage.get("prompt_tokens") or usage.get("input_tokens") or 0),
        output=None if output is None else ChatMessage(role="assistant", content=output),
        status=InteractionStatus.COMPLETED,
        completed_order=order,
    )


@asynccontextmanager
async def open_upstream(upstream: Upstream, config: ProxyConfig) -> AsyncIterator[tuple[UpstreamRef, Endpoint]]:
    """Serve sessions at ``upstream`` while the block lasts, and yield the endpoint for agents.

    The ref takes the place of the session manager and of the exporter. Raises ``ConfigError`` if the address cannot be
    used.
    """
    ref = UpstreamRef()
    traffic = Traffic()
    limits = httpx.Limits(max_connections=None)
    with bind(config) as listener:
        async with httpx.AsyncClient(timeout=_TIMEOUT, limits=limits) as client, open_tasks() as tasks:
            app = Starlette(routes=[_Forwarder(upstream, ref.sessions, client, traffic)])
            tasks.start_soon(partial(serve_until_cancelled, app, listener, traffic, drain_seconds=_DRAIN_SECONDS))
            yield ref, Endpoint(url=url_of(listener, config.public_host), admin_key="")
            tasks.cancel_scope.cancel()


async def find_upstream(url: str, served_name: str | None, environment: Mapping[str, str]) -> Upstream:
    """Return the server at ``url``, with the keys of ``environment``.

    Without a ``served_name``, it has the name of the server's only model, or none if the server does not list models.
    Raises ``ConfigError`` if it cannot be reached, or has several models.
    """
    openai_key = environment.get("OPENAI_API_KEY")
    upstream = Upstream(
        url=url, model=served_name, openai_key=openai_key, anthropic_key=environment.get("ANTHROPIC_API_KEY")
    )
    if served_name is not None:
        return upstream
    headers = {} if openai_key is None else {"authorization": f"Bearer {openai_key}"}
    try:
        async with httpx.AsyncClient(timeout=_TIMEOUT) as client:
            response = await client.get(f"{upstream.url}/v1/models", headers=headers)
        document = response.json() if response.is_success else {}
    except httpx.HTTPError as error:
        raise ConfigError(f"--model {upstream.url} cannot be reached: {error or type(error).__name__}.") from error
    except ValueError:
        return upstream
    listed = document.get("data") if isinstance(document, dict) else None
    names = [str(one["id"]) for one in listed if isinstance(one, dict) and "id" in one] if listed else []
    if len(names) > 1:
        shown = ", ".join(names[:8])
        raise ConfigError(f"--model {upstream.url} serves {len(names)} models; name one with --served-name: {shown}.")
    return evolve(upstream, model=names[0]) if names else upstream
