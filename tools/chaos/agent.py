"""An external agent as a process of its own: the ``openai`` SDK with its own retries, and a ledger of what it was told.

``python -m tools.chaos.agent --url URL --ledger FILE``; the admin key is in ``OPENAI_API_KEY``. It plays one session
after another until it is told to stop (SIGTERM: after the present one). Started again with the same ledger it goes on
with the session that it was killed in, or leaves that alone (``--leave``). What it does in a session follows from the
session's id, so that it can be done twice.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
from attrs import define, field
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from tools.chaos.ledger import Ledger, Line, read_ledger

MAX_RETRIES = 30
SECONDS = 60.0
MAX_TURNS = 4
# The SDK waits up to eight seconds between two tries, and the service is away all the time here.
openai._base_client.MAX_RETRY_DELAY = 1.0  # type: ignore[attr-defined]


class Gone(Exception):
    """The service knows the session no longer."""

    def __init__(self, status: int, doing: str) -> None:
        super().__init__(f"{status} to {doing}")
        self.status, self.doing = status, doing


@define
class Session:
    """Where a session stands, as its ledger has it."""

    id: str
    api_key: str
    turns: list[tuple[str, str, str]] = field(factory=list)
    """The id of each, what was asked, what was answered."""
    rewarded: set[str] = field(factory=set)

    @property
    def plan(self) -> random.Random:
        """Decides what happens in this session, the same each time that it is asked."""
        return random.Random(self.id)

    @property
    def num_turns(self) -> int:
        """How long the session is to be."""
        return self.plan.randint(1, MAX_TURNS)

    def reward(self, turn: int) -> float:
        """What the turn is worth; no two of them are worth the same. ``turn`` -1 is the end of the session."""
        return random.Random(f"{self.id} {turn}").random()

    def choice(self, what: str, turn: int) -> float:
        """A number below 1 that decides about a turn."""
        return random.Random(f"{self.id} {what} {turn}").random()


class Service:
    """The routes beside completions, asked until they answer."""

    def __init__(self, url: str, admin_key: str) -> None:
        self.url = url
        self._admin_key = admin_key
        self._client = httpx.Client(base_url=url, timeout=SECONDS)

    def start(self, **arguments: Any) -> Mapping[str, Any]:
        """Open a session."""
        return self._post("start_session", self._admin_key, arguments)

    def call(self, name: str, session: Session, **arguments: Any) -> Mapping[str, Any]:
        """Say something about a session. Raises ``Gone``."""
        return self._post(name, session.api_key, arguments)

    def _post(self, name: str, key: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        deadline = time.monotonic() + 10 * SECONDS
        while time.monotonic() < deadline:
            try:
                response = self._client.post(
                    f"/rl/v1/{name}", json=arguments, headers={"authorization": f"Bearer {key}"}
                )
            except httpx.TransportError:
                time.sleep(0.05)
                continue
            if response.status_code == httpx.codes.OK:
                answer: Mapping[str, Any] = response.json()
                return answer
            if response.status_code < httpx.codes.INTERNAL_SERVER_ERROR and response.status_code not in (429, 409):
                raise Gone(response.status_code, f"{name}: {response.text[:200]}")
            time.sleep(0.2)
        raise TimeoutError(f"{name} was not answered for {10 * SECONDS} s")


class Agent:
    """Plays sessions and writes down what it is told."""

    def __init__(self, service: Service, ledger: Ledger) -> None:
        self._service = service
        self._ledger = ledger

    def open(self, **arguments: Any) -> Session:
        """A session of its own."""
        opened = self._service.start(task_id="chaos", **arguments)
        self._ledger.write("session", session=opened["session_id"], api_key=opened["api_key"], **arguments)
        return Session(id=opened["session_id"], api_key=opened["api_key"])

    def play(self, session: Session) -> None:
        """Go on with a session to its end, from wherever it stands."""
        try:
            while len(session.turns) < session.num_turns:
                self._turn(session)
            self._reward_last(session)
            self._finalize(session)
        except Gone as gone:
            self._ledger.write("gone", session=session.id, status=gone.status, doing=gone.doing)

    def leave(self, session: Session) -> None:
        """Never come back to it."""
        self._ledger.write("left", session=session.id)

    def _turn(self, session: Session) -> None:
        self._reward_last(session)
        number = len(session.turns)
        asked = f"say {number}: " + "la " * int(12 * session.choice("length", number))
        interaction, answer = self._ask(session, asked, is_streaming=session.choice("streaming", number) < 0.5)
        self._ledger.write("turn", session=session.id, interaction=interaction, asked=asked, answer=answer)
        session.turns.append((interaction, asked, answer))

    def _reward_last(self, session: Session) -> None:
        """Reward the last turn, if it is to be rewarded, and the end of the session does not reward it anyway."""
        number = len(session.turns) - 1
        if not session.turns or session.choice("rewarding", number) < 0.5:
            return
        interaction = session.turns[-1][0]
        if interaction not in session.rewarded:
            reward = session.reward(number)
            self._ledger.write("wanted", session=session.id, interaction=interaction, reward=reward)
            self._service.call("set_reward", session, completion_id=interaction, reward=reward)
            self._ledger.write("rewarded", session=session.id, interaction=interaction, reward=reward)
            session.rewarded.add(interaction)

    def _finalize(self, session: Session) -> None:
        reward = session.reward(-1)
        self._ledger.write("wanted", session=session.id, interaction=None, reward=reward)
        self._service.call("finalize", session, final_reward=reward)
        self._ledger.write("rewarded", session=session.id, interaction=None, reward=reward)
        self._ledger.write("final", session=session.id)

    def _ask(self, session: Session, asked: str, *, is_streaming: bool) -> tuple[str, str]:
        """The id and the text of an answer; a stream that breaks is asked for again, as any agent would."""
        messages: list[ChatCompletionMessageParam] = []
        for _, question, answer in session.turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": asked})
        client = OpenAI(
            base_url=f"{self._service.url}/v1", api_key=session.api_key, max_retries=MAX_RETRIES, timeout=SECONDS
        )
        with client:
            while True:
                try:
                    return (_stream if is_streaming else _complete)(client, messages)
                except openai.APIStatusError as error:
                    if error.status_code < httpx.codes.INTERNAL_SERVER_ERROR:
                        raise Gone(error.status_code, f"ask: {error}") from error
                except (openai.APIError, httpx.TransportError):
                    time.sleep(0.05)


def _complete(client: OpenAI, messages: list[ChatCompletionMessageParam]) -> tuple[str, str]:
    completion = client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
    return completion.id, completion.choices[0].message.content or ""


def _stream(client: OpenAI, messages: list[ChatCompletionMessageParam]) -> tuple[str, str]:
    """A stream counts when its last event has come."""
    text, name, is_finished = "", "", False
    with client.chat.completions.create(model="policy", messages=messages, max_tokens=8, stream=True) as chunks:
        for chunk in chunks:
            name = chunk.id
            for choice in chunk.choices:
                text += choice.delta.content or ""
                is_finished = is_finished or choice.finish_reason is not None
    if not is_finished:
        raise httpx.RemoteProtocolError("The stream ended before its last event.")
    return name, text


def unfinished(lines: list[Line]) -> list[Session]:
    """The sessions of a ledger that are not over."""
    sessions: dict[str, Session] = {}
    for line in lines:
        name = line["session"]
        match line["kind"]:
            case "session":
                sessions[name] = Session(id=name, api_key=line["api_key"])
            case "turn":
                sessions[name].turns.append((line["interaction"], line["asked"], line["answer"]))
            case "rewarded" if line["interaction"] is not None:
                sessions[name].rewarded.add(line["interaction"])
            case "final" | "gone" | "left":
                del sessions[name]
    return list(sessions.values())


def main() -> None:
    """Play until told to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--leave", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    options = parser.parse_args()
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stopping.append(number))
    agent = Agent(Service(options.url, os.environ["OPENAI_API_KEY"]), Ledger(options.ledger))
    for session in unfinished(list(read_ledger(options.ledger))):
        (agent.leave if options.leave else agent.play)(session)
    deadline = time.monotonic() + options.seconds
    while not stopping and time.monotonic() < deadline:
        _play_some(agent)


def _play_some(agent: Agent) -> None:
    """A session by itself, or two that are compared with each other."""
    if random.random() < 0.75:
        agent.play(agent.open())
        return
    group = f"pair-{random.getrandbits(64):x}"
    pair = [agent.open(group_id=group, group_size=2), agent.open(group_id=group, group_size=2)]
    for session in pair:
        agent.play(session)


if __name__ == "__main__":
    main()
