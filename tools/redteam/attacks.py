"""Requests of an agent that wants a reward it has not earned, made from a seed.

The agent has what a run gives it, the URL of its session and its completion key, and more than it could have: the ids
and completion keys of another live session, of one that has ended and of one that is forgotten. It has no session key,
no user's key and not the administrator's. Of the sessions that are over, it has seen what the runner sent, with their
keys. ``Attacker`` makes one request after the other; ``open_arena`` is attacked.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import anyio
import httpx
from attrs import evolve, field, frozen
from tests.client.service import open_service

from areal_actors.cache import SessionSettings
from areal_actors.domain import SessionId
from areal_actors.journal import SqliteJournal
from areal_actors.messages import CollectSession, ForgetSession
from areal_actors.proxy import ProxyConfig
from areal_actors.run.inference import Inference, InferenceConfig
from areal_actors.sessions.intake import IntakeConfig
from areal_actors.sessions.manager import SessionsConfig

__all__ = ["Arena", "Attack", "Attacker", "Victim", "connect", "create_arena", "open_arena", "open_durable_arena"]

CONTROL = ("rl/set_reward", "rl/end_session", "rl/finalize")
FORBIDDEN = (*CONTROL * 5, "export_trajectories", "rl/start_session", "grant_capacity", "keys", "keys/x")
"""Operations that no agent may do; rewards and ends are most of them."""
METHODS = (*["POST"] * 24, "GET", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
_SHARE_OF_ODD_JSON = 0.2
_SHARE_OF_RAW = 0.1
_SHARE_OF_REPLAYS = 0.2
FRAMINGS = ("two lengths", "length and chunks", "odd chunks", "folded", "short", "absolute", "old", "bare")
_SHARE_OF_ODD_PATHS = 0.15
"""The others reach their operation, which is where keys are judged."""
QUESTION = {"messages": [{"role": "user", "content": "one two three"}]}
_LIFETIMES = SessionSettings(grace_seconds=0)
"""At once: the runner of an external agent may correct a reward in the grace period, with the key of the session."""


State = list[tuple[str, bool, tuple[float | None, ...]]]
"""Of each session its id, whether it has ended, and the rewards of its turns."""
Inspect = Callable[[str], Awaitable[tuple[bool, tuple[float | None, ...]]]]


@frozen(kw_only=True)
class Victim:
    """A session as the agent knows it."""

    id: str
    completion_key: str = field(repr=False)
    interactions: tuple[str, ...] = ()


@frozen(kw_only=True)
class Attack:
    """One request. ``operation`` is what it means to do."""

    operation: str
    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    content: bytes
    framing: str | None = None
    """How the bytes of the request mislead a server about where it ends; ``None``: sent by httpx."""
    is_replay: bool = False
    """Whether it repeats a request that the runner has sent, with its key, to a session that is over."""

    def raw(self, host: str) -> bytes:
        """The bytes of the request, with its framing, and of the same once more where they mislead about its end."""
        size = len(self.content)
        line, length = f"{self.method} {self.target} HTTP/1.1\r\n", f"content-length: {size}\r\n"
        fields = f"host: {host}\r\n" + "".join(f"{name}: {value}\r\n" for name, value in self.headers if value)
        again = f"{line}{fields}{length}\r\n".encode() + self.content
        heads: dict[str, tuple[str, bytes]] = {
            "two lengths": (f"{line}{fields}{length}content-length: 0\r\n", self.content + again),
            "length and chunks": (f"{line}{fields}{length}transfer-encoding: chunked\r\n", b"0\r\n\r\n" + again),
            "odd chunks": (f"{line}{fields}transfer-encoding : xchunked\r\n", again),
            "folded": (f"{line}{fields}x-a: b\r\n authorization: Bearer x\r\n{length}", self.content),
            "short": (f"{line}{fields}content-length: {max(size - 5, 0)}\r\n", self.content + again),
            "absolute": (f"{self.method} http://admin@{host}{self.target} HTTP/1.1\r\n{fields}{length}", self.content),
            "old": (f"{line.replace('1.1', '1.0')}{fields}", self.content),
            "bare": (f"{line}{fields}{length}".replace("\r\n", "\n"), self.content + again),
        }
        head, rest = heads[self.framing or "short"]
        return head.encode() + b"\r\n" + rest


@frozen
class Attacker:
    """Makes requests. The first of ``victims`` is the agent's own session, ``secrets`` are further keys to try.

    ``captured`` are requests of the runner to sessions that are over, which the agent has seen.
    """

    random: Random
    victims: tuple[Victim, ...]
    secrets: tuple[str, ...] = ("DUMMY", "sk-admin", "sk-user-x", "null", "true", "*", "%00")

    captured: tuple[Attack, ...] = ()
    share_of_replays: float = _SHARE_OF_REPLAYS

    def attack(self) -> Attack:
        """The next request."""
        if self.captured and self.random.random() < self.share_of_replays:
            return self.replay(self.random.choice(self.captured))
        operation = self.random.choice(FORBIDDEN)
        query = self._arguments() if self.random.random() < 0.4 else {}
        body = {} if query and self.random.random() < 0.5 else self._arguments()
        target = self._path(operation)
        if query:
            target += "?" + str(httpx.QueryParams({name: str(value) for name, value in query.items()}))
        return Attack(
            operation=operation,
            method=self.random.choice(METHODS),
            target=target,
            headers=self._headers(),
            content=self._written(body) if body else b"",
            framing=self.random.choice(FRAMINGS) if self.random.random() < _SHARE_OF_RAW else None,
        )

    def replay(self, captured: Attack) -> Attack:
        """A captured request as it was, or for another session: in its path, its query, its body or its headers."""
        old, target, content = self.random.choice(self.victims[2:]), captured.target, captured.content
        new, headers = self.random.choice(self.victims[:2]), list(captured.headers)
        if self.random.random() < 0.5:
            target = target.replace(old.id, new.id)
        if self.random.random() < 0.3 and new.id not in target:
            target = f"/{new.id}{target}"
        if self.random.random() < 0.3:
            target += f"?session_id={new.id}"
        if self.random.random() < 0.5:
            text = content.decode()
            for name, other in zip((old.id, *old.interactions), (new.id, *new.interactions), strict=True):
                text = text.replace(name, other)
            content = text.encode()
        if self.random.random() < 0.3:
            headers.append((self.random.choice(("authorization", "x-api-key")), self._secret()))
            self.random.shuffle(headers)
        return evolve(captured, target=target, content=content, headers=tuple(headers))

    def _written(self, body: dict[str, Any]) -> bytes:
        """The body as JSON, and sometimes as what a parser may read in two ways."""
        text = json.dumps(body)
        if self.random.random() > _SHARE_OF_ODD_JSON:
            return text.encode()
        literal = self.random.choice(("NaN", "Infinity", "-Infinity", "1e400", "0x10", "null", "[1]", "9" * 400))
        form = str(httpx.QueryParams({name: str(value) for name, value in body.items()}))
        return self.random.choice(
            (
                f'{text[:-1]}, "session_id": {json.dumps(self.victims[0].id)}, {text[1:]}'.encode(),
                f'{{"reward": {literal}, "final_reward": {literal}}}'.encode(),
                b'{"reward": ' + b"[" * 500 + b"]" * 500 + b"}",
                b"\xef\xbb\xbf" + text.encode(),
                text.encode("utf-16"),
                form.encode(),
                text.replace("session_id", "Session_Id").replace("reward", "Reward").encode(),
                f"[{text}]".encode(),
            )
        )

    def _victim(self) -> Victim:
        return self.victims[0] if self.random.random() < 0.5 else self.random.choice(self.victims)

    def _path(self, operation: str) -> str:
        """Some way to write the operation's path: with a session before it, ``/v1`` anywhere, escaped, in capitals."""
        words = operation.split("/")
        if operation in CONTROL and self.random.random() < 0.6:
            words.insert(0, self._victim().id)
        for _ in range(self.random.choice((0, 0, 1, 2))):
            words.insert(self.random.randint(0, len(words)), "v1")
        if self.random.random() < _SHARE_OF_ODD_PATHS:
            words.insert(self.random.randint(0, len(words)), self.random.choice(("", ".", "..", "V1", "x")))
            words = [self._escaped(word) for word in words]
            join, end = self.random.choice(("/", "//", "%2F", "%2f", ";/")), ("", "/", "%20", "%00", ".json", ";x=1")
            return "/" + join.join(words) + self.random.choice(end)
        return "/" + "/".join(words)

    def _escaped(self, word: str) -> str:
        if not word:
            return word
        place = self.random.randrange(len(word))
        escaped = f"{word[:place]}%{ord(word[place]):02X}{word[place + 1 :]}"
        return self.random.choice((word, word, escaped, word.upper()))

    def _arguments(self) -> dict[str, Any]:
        value: Any = self.random.choice((1000.0, 1000, "1000", "1e3", True, -1.0, 0.5, 1e38))
        victim = self._victim()
        arguments = {"reward": value, "final_reward": value}
        if victim.interactions and self.random.random() < 0.6:
            arguments[self.random.choice(("interaction_id", "completion_id"))] = self.random.choice(victim.interactions)
        if self.random.random() < 0.5:
            arguments["session_id"] = self._victim().id
        for name in ("api_key", "completion_key", "key", "has_control", "is_capability", "access_token", "user"):
            if self.random.random() < 0.15:
                arguments[name] = self.random.choice((self._secret(), True))
        return arguments

    def _secret(self) -> str:
        known = [text for victim in self.victims for text in (victim.completion_key, victim.id)]
        own = self.victims[0].completion_key
        return own if self.random.random() < 0.5 else self.random.choice((*known, *self.secrets))

    def _headers(self) -> tuple[tuple[str, str], ...]:
        found = [("content-type", self.random.choice(("application/json", "text/plain", "")))]
        kinds = ("none", "bearer", "bearer", "x-api-key", "both", "twice", "odd")
        kind = self.random.choice(kinds)
        if kind in ("bearer", "both", "twice"):
            scheme = self.random.choice(("Bearer", "bearer", "BEARER", "Bearer ", "Basic", "Token"))
            found.append(("authorization", f"{scheme} {self._secret()}"))
        if kind in ("x-api-key", "both"):
            found.append(("x-api-key", self._secret()))
        if kind == "twice":
            found.append(("authorization", f"Bearer {self._secret()}"))
        if kind == "odd":
            name = self.random.choice(("api-key", "cookie", "proxy-authorization", "x-admin-key", "x-forwarded-user"))
            found.append((name, self._secret()))
        if self.random.random() < 0.1:
            found.append(("x-http-method-override", "POST"))
        if self.random.random() < 0.1:
            found.append(("x-original-url", f"/{self._victim().id}/rl/set_reward"))
        return tuple(found)


@frozen(kw_only=True)
class Arena:
    """A service with a live session for the attacker, and one more; one has ended, one is forgotten."""

    url: str
    admin_key: str = field(repr=False)
    http: httpx.AsyncClient
    inspect: Inspect
    """Returns what may not change of a session: whether it has ended, and its rewards."""
    own: dict[str, str] = field(repr=False)
    other: dict[str, str] = field(repr=False)
    victims: tuple[Victim, ...]
    captured: tuple[Attack, ...]
    """What the runner has sent to the sessions that are over."""

    async def send(self, attack: Attack) -> httpx.Response:
        """The answer; of several, the first that is a success."""
        if attack.framing is not None:
            return await self.send_raw(attack)
        url = httpx.URL(self.url).copy_with(raw_path=attack.target.encode())
        return await self.http.request(attack.method, url, headers=list(attack.headers), content=attack.content)

    async def send_raw(self, attack: Attack) -> httpx.Response:
        """The answer to bytes that httpx would not send."""
        host = self.url.removeprefix("http://")
        name, port = host.rsplit(":", 1)
        received = b""
        with anyio.move_on_after(10):
            async with await anyio.connect_tcp(name, int(port)) as stream:
                with suppress(anyio.BrokenResourceError, anyio.EndOfStream, OSError):
                    await stream.send(attack.raw(host))
                    await stream.send_eof()
                    while True:
                        received += await stream.receive()
        statuses = [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3})", received)]
        success = next((status for status in statuses if 200 <= status < 300), None)
        return httpx.Response(success or (statuses[0] if statuses else 400), content=received)

    async def state(self) -> State:
        """What may not change of the sessions, except for the last one, which is forgotten."""
        return [(victim.id, *await self.inspect(victim.id)) for victim in self.victims[:3]]

    async def complete(self, key: str) -> httpx.Response:
        """An honest turn."""
        return await self.http.post("/v1/chat/completions", json=QUESTION, headers={"authorization": f"Bearer {key}"})

    async def finalize(self, session: dict[str, str], reward: float) -> tuple[float | None, ...]:
        """What the runner does in the end; returns the rewards of the turns."""
        headers = {"authorization": f"Bearer {session['api_key']}"}
        answer = await self.http.post("/rl/finalize", json={"final_reward": reward}, headers=headers)
        assert answer.status_code == 200, answer.text
        return (await self.inspect(session["session_id"]))[1]


@asynccontextmanager
async def open_arena() -> AsyncIterator[Arena]:
    """Open everything, with two turns in each session."""
    config = InferenceConfig(sessions=SessionsConfig(lifetimes=_LIFETIMES))
    async with open_service(config) as inference, connect(inference.endpoint.url) as http:
        yield await _open_victims(inference, http)


@asynccontextmanager
async def open_durable_arena(directory: Path, before: Arena | None = None) -> AsyncIterator[tuple[Arena, Inference]]:
    """Open a service with a journal.

    ``before`` is the arena of the service that has run in ``directory`` until now. Its sessions are restored.
    """
    config = InferenceConfig(
        proxy=ProxyConfig(drain_seconds=0.0, admin_key="sk-admin-of-the-test"),
        sessions=SessionsConfig(lifetimes=_LIFETIMES),
        intake=IntakeConfig(grace_seconds=0.0),
    )
    async with (
        SqliteJournal.open(directory / "journal.sqlite") as journal,
        open_service(config, journal=journal) as inference,
        connect(inference.endpoint.url) as http,
    ):
        if before is None:
            yield await _open_victims(inference, http), inference
        else:
            url = inference.endpoint.url
            yield evolve(before, url=url, http=http, inspect=partial(_collect, inference)), inference


def connect(url: str) -> httpx.AsyncClient:
    """A client, which keeps its connections."""
    return httpx.AsyncClient(base_url=url, timeout=30)


async def _open_victims(inference: Inference, http: httpx.AsyncClient) -> Arena:
    inspect = partial(_collect, inference)
    arena = await create_arena(inference.endpoint.url, inference.endpoint.admin_key, http, inspect)
    await inference.sessions.ask(ForgetSession(session=SessionId(arena.victims[3].id)))
    return arena


async def _collect(inference: Inference, session: str) -> tuple[bool, tuple[float | None, ...]]:
    record = await inference.sessions.ask(CollectSession(session=SessionId(session)))
    return record.is_ended, tuple(turn.reward for turn in record.interactions)


async def create_arena(url: str, admin_key: str, http: httpx.AsyncClient, inspect: Inspect) -> Arena:
    """Start the sessions of a service that listens at ``url``, and end the third and the fourth."""
    started, victims = [], []
    for name in ("own", "other", "ended", "forgotten"):
        admin = {"authorization": f"Bearer {admin_key}"}
        session = (await http.post("/rl/start_session", json={"task_id": name}, headers=admin)).json()
        key = {"authorization": f"Bearer {session['completion_key']}"}
        asked = [await http.post("/v1/chat/completions", json=QUESTION, headers=key) for _ in range(2)]
        names = tuple(answer.json()["id"] for answer in asked)
        victims.append(Victim(id=session["session_id"], completion_key=session["completion_key"], interactions=names))
        started.append(session)
    own, other, ended, forgotten = started
    captured = []
    for session, victim in zip((ended, forgotten), victims[2:], strict=True):
        for attack in _control(session, victim):
            answer = await http.request(
                attack.method, attack.target, headers=list(attack.headers), content=attack.content
            )
            assert answer.is_success, answer.text
            captured.append(attack)
    return Arena(
        url=url,
        admin_key=admin_key,
        http=http,
        inspect=inspect,
        own=own,
        other=other,
        victims=tuple(victims),
        captured=tuple(captured),
    )


def _control(session: dict[str, str], victim: Victim) -> list[Attack]:
    """What a runner sends in order to reward and end a session, once by URL and once by key."""
    first, last = victim.interactions
    bearer = ("authorization", f"Bearer {session['api_key']}")
    requests = [
        (f"/{victim.id}/rl/set_reward", bearer, {"interaction_id": first, "reward": 0.75}),
        ("/rl/set_reward", ("x-api-key", session["api_key"]), {"completion_id": last, "reward": 0.5}),
        ("/rl/finalize", bearer, {"final_reward": 0.25, "session_id": victim.id}),
        (f"/{victim.id}/rl/end_session", bearer, {}),
    ]
    return [
        Attack(
            operation=target.split("/", 1)[-1],
            method="POST",
            target=target,
            headers=(("content-type", "application/json"), key),
            content=json.dumps(body).encode(),
            is_replay=True,
        )
        for target, key, body in requests
    ]
