"""One session after another: random clients talk to a real session manager in front of a recording engine.

All of a session follows from its number and the seed. What it checks is in ``areal_actors_testing.exactness`` (tokens),
in ``links`` (parents), and in ``agreement`` (what the clients of a protocol read).
"""

from __future__ import annotations

import itertools
import json
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import anyio
import orjson
from attrs import define, evolve, field, frozen
from tools.fuzz.agreement import find_disagreements
from tools.fuzz.clients import CLIENTS
from tools.fuzz.links import Asked, Links
from tools.fuzz.moves import Talk, begin, choose_move, compact
from tools.fuzz.recording import ORDER, Order, RecordingEngine
from tools.fuzz.words import Reply, Wire
from tools.fuzz.writing import STOPS, Writer

from areal_actors.cache import export_trajectories
from areal_actors.cache.export import STYLES
from areal_actors.direct.in_process import InlineRef
from areal_actors.domain import Answer, Attempt, Credential, FinishReason, Interaction, InteractionStatus, SessionRecord
from areal_actors.errors import ContextLengthExceeded, EngineError, RenderError, Unavailable
from areal_actors.generation.actor import GenerationActor
from areal_actors.lib.exact_json import dump_json, parse_object
from areal_actors.messages import (
    CollectSession,
    Complete,
    ForgetSession,
    OpenSession,
    Sessions,
    SetReward,
    StreamComplete,
)
from areal_actors.sessions.manager import SessionManager
from areal_actors_testing.exactness import (
    Recorded,
    find_prompt_violations,
    find_return_violations,
    find_row_violations,
)
from areal_actors_testing.families import FAMILIES

__all__ = ["Outcome", "Stage", "open_stage"]

MAX_TALKS = 5
_CHECKED = 0.3
"""Share of the prompts that are read."""
_FAULTS: tuple[Callable[[], FinishReason | EngineError], ...] = (
    lambda: FinishReason.ABORT,
    lambda: EngineError("the engine has failed"),
)


@define
class Outcome:
    """What came of one session."""

    family: str
    protocol: str
    session: int
    counts: Counter[str] = field(factory=Counter)
    violations: list[str] = field(factory=list)
    requests: list[Wire] = field(factory=list)


@frozen(kw_only=True)
class Stage:
    """A manager of one family's sessions, and its engine."""

    family: str
    engine: RecordingEngine
    manager: SessionManager
    sessions: InlineRef[Sessions]

    async def play(self, protocol: str, *, seed: int, number: int, max_steps: int = 24) -> Outcome:
        """Play one session, export it in all styles, and look for violations."""
        session = _Session(self, protocol, Random(f"{seed}/{self.family}/{protocol}/{number}"), number)
        try:
            await session.play(max_steps)
        except Exception:  # noqa: BLE001 - whatever it is, it is a finding
            session.outcome.violations.append(traceback.format_exc())
        return session.outcome


async def open_stage(family: str) -> Stage:
    """Set up for one family."""
    renderer = FAMILIES[family].create_renderer()
    engine = RecordingEngine(Random(0), vocab_size=renderer.vocab_size)
    numbers = itertools.count()
    manager = SessionManager(
        renderer=renderer,
        generation=InlineRef(GenerationActor(engine), name="generation"),
        token_factory=lambda: f"{next(numbers):08d}",
    )
    await manager.learn_engine()
    return Stage(family=family, engine=engine, manager=manager, sessions=InlineRef(manager, name="sessions"))


class _Session:
    """The clients of one session."""

    def __init__(self, stage: Stage, protocol: str, rng: Random, number: int) -> None:
        self.outcome = Outcome(family=stage.family, protocol=protocol, session=number)
        self._stage = stage
        self._rng = rng
        self._client = CLIENTS[protocol]
        self._links = Links()
        self._asked: dict[str, Asked] = {}
        self._talks: list[Talk] = []
        self._steps = itertools.count()
        self._credential = Credential(key="none")

    async def play(self, max_steps: int) -> None:
        """Talk, reward, export, check."""
        stage, rng = self._stage, self._rng
        stage.engine.begin()
        stage.engine.rng = rng
        opened = stage.manager.open_session(OpenSession(task="fuzz"))
        self._credential = Credential(key=opened.api_key)
        for _ in range(rng.randrange(1, max_steps + 1)):
            if rng.random() < 0.04:
                await self._ask_together()
            else:
                await self._ask(self._next())
        await self._reward(opened.session)
        record = await stage.sessions.ask(CollectSession(session=opened.session))
        self._check(record, stage.engine.recorded())
        await stage.sessions.ask(ForgetSession(session=opened.session))

    # ------------------------------------------------------------------------------------------------- asking

    def _next(self) -> Talk:
        rng, number = self._rng, next(self._steps)
        if not self._talks or rng.random() < 0.04:
            return begin(self._client, rng, number)
        talk = self._talks[-1] if rng.random() < 0.85 else rng.choice(self._talks)
        return choose_move(rng)(talk, rng, number)

    async def _ask_together(self) -> None:
        """Several requests at once, some of them equal."""
        first = self._next()
        others = [first if self._rng.random() < 0.5 else self._next() for _ in range(self._rng.randrange(1, 3))]
        async with anyio.create_task_group() as tasks:
            for talk in (first, *others):
                tasks.start_soon(partial(self._ask, talk, has_pauses=True))

    async def _ask(self, talk: Talk, *, has_pauses: bool = False) -> None:
        rng = self._rng
        body = self._body(talk)
        self.outcome.requests.append(body)
        tools = [tool["name"] for tool in talk.tools]
        order = Order(Writer(FAMILIES[self._stage.family], rng, tools), has_pauses=has_pauses, after=rng.randrange(4))
        if rng.random() < 0.02:
            order.fault = rng.choice(_FAULTS)()
        asked = self._links.ask(talk)
        for sending in range(2):
            replies = await self._send(body, order, asked, talk, sending)
            if replies is not None or rng.random() < 0.3:
                break
        for reply in replies or ():
            self._keep(asked, talk, reply)
        if rng.random() < 0.05:
            self._talks.append(evolve(talk, last=None))  # to be asked again, or gone on from without its answer
        del self._talks[:-MAX_TALKS]

    def _keep(self, asked: Asked, talk: Talk, reply: Reply) -> None:
        self._asked[reply.interaction] = asked
        answered = talk.answered(reply, self._rng)
        self._links.answer(asked, reply.interaction, answered)
        self._talks.append(answered)

    def _body(self, talk: Talk) -> Wire:
        rng = self._rng
        limit = rng.randrange(1, 12) if rng.random() < 0.1 else 400
        said = talk.entries[talk.num_unsaid :] if talk.named else talk.entries
        body = self._client.body(talk.system, said, talk.tools, limit)
        if talk.named:
            body["previous_response_id"] = talk.named
        if talk.options:
            body["chat_template_kwargs"] = talk.options
        if rng.random() < 0.4:
            body["stream"] = True
        if rng.random() < 0.2:
            body |= self._rarities(body)
        return body

    def _rarities(self, body: Wire) -> Wire:
        """Now and then something else is asked for."""
        rng = self._rng
        stops = "stop_sequences" if "system" in body or self.outcome.protocol == "messages" else "stop"
        ways: list[Wire] = [{stops: list(STOPS)}, {"store": False}, {"seed": 7}, {"temperature": 0.5}]
        ways += [{"stop_token_ids": [rng.randrange(384)]}]
        if self.outcome.protocol == "chat":
            ways += [{"n": 2}, {"n": 3}]
        if self.outcome.protocol != "messages":
            ways.append({"parallel_tool_calls": False})
        if self.outcome.protocol == "messages" and "tools" in body:
            ways.append({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}})
        return rng.choice(ways)

    async def _send(self, body: Wire, order: Order, asked: Asked, talk: Talk, sending: int) -> list[Reply] | None:
        """One sending of a request; ``None`` if no answer came."""
        rng, counts = self._rng, self.outcome.counts
        before = len(self._stage.manager.tree(self._session_id()))
        attempt = Attempt(fingerprint=str(asked.moment), number=sending) if rng.random() < 0.3 else None
        replies: list[Reply] | None = None
        token = ORDER.set(order)
        try:
            with anyio.CancelScope() as scope:
                order.hang_up = scope if rng.random() < 0.03 else None
                replies = await self._complete(body, attempt)
        except (RenderError, ContextLengthExceeded, Unavailable, EngineError) as error:
            counts[f"refused: {type(error).__name__}"] += 1
            if isinstance(error, RenderError):
                self.outcome.violations.append(f"the history is refused: {error}")
            if isinstance(error, ContextLengthExceeded) and self._talks:
                self._talks[:] = [compact(self._talks[-1], rng, next(self._steps))]
            order.fault = None
        finally:
            ORDER.reset(token)
        if not order.has_pauses:
            self._note(before, asked, talk)
        if replies is not None and attempt is not None and rng.random() < 0.3:
            await self._send_again(body, attempt, replies)
        return replies

    def _session_id(self) -> Any:
        return self._stage.manager._resolve(self._credential).id  # no message tells it

    def _note(self, before: int, asked: Asked, talk: Talk) -> None:
        """The turns that have begun with this request, whose prompt has all that the client has said."""
        tree = self._stage.manager.tree(self._session_id())
        turns = tree.snapshot().interactions[before:]
        for turn in turns:
            self._asked.setdefault(turn.id, asked)
        if turns and self._rng.random() < _CHECKED:
            prompt = self._decode(tree.prompt_tokens(turns[0]))
            for entry in talk.entries:
                role, text = entry.keys[0][0], entry.keys[0][-1]
                if role != "assistant" and not any(
                    said.strip() in prompt
                    for said in (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
                ):
                    self.outcome.violations.append(f"{turns[0].id} lacks {text!r}, said as {role}")

    def _decode(self, ids: Any) -> str:
        return FAMILIES[self._stage.family].create_renderer().decode(ids)

    async def _complete(self, body: Wire, attempt: Attempt | None) -> list[Reply]:
        dialect, sessions = self._client.dialect, self._stage.sessions
        parsed = dialect.parse(parse_object(_dumped(body)), tag=None)
        credential = self._credential
        if not parsed.is_stream:
            message = Complete(credential=credential, request=parsed.request, attempt=attempt)
            answers = await sessions.ask(message)
            self._compare(parsed, answers)
            return self._client.read(_sent(dialect.format_answers(parsed, answers)))
        wording = dialect.open_stream(parsed)
        asking = StreamComplete(credential=credential, request=parsed.request, attempt=attempt)
        async with sessions.stream(asking) as items:
            said = [item async for item in items]
        self._compare(parsed, [item for item in said if isinstance(item, Answer)])
        return self._client.read_stream(b"".join([*map(wording.feed, said), wording.finish()]))

    def _compare(self, parsed: Any, answers: Sequence[Answer]) -> None:
        renderer = FAMILIES[self._stage.family].create_renderer()
        for answer in answers:
            self.outcome.violations += find_disagreements(self._client, parsed, answer, renderer)
            self.outcome.counts["compared"] += 1

    async def _send_again(self, body: Wire, attempt: Attempt, replies: Sequence[Reply]) -> None:
        """A retry reads the same answer, and leaves no turn."""
        before = len(self._stage.manager.tree(self._session_id()))
        again = await self._complete(body, evolve(attempt, number=attempt.number + 1))
        num_new = len(self._stage.manager.tree(self._session_id())) - before
        if [reply.interaction for reply in replies] != [reply.interaction for reply in again] or num_new:
            self.outcome.violations.append(f"a retry of {replies[0].interaction} was sampled again")
        self.outcome.counts["retries"] += 1

    # ----------------------------------------------------------------------------------------------- checking

    async def _reward(self, session: Any) -> None:
        for turn in self._stage.manager.tree(session).snapshot().interactions:
            if turn.status is InteractionStatus.COMPLETED and self._rng.random() < 0.5:
                reward = self._rng.gauss(0, 1)
                message = SetReward(credential=self._credential, interaction=turn.id, reward=reward)
                await self._stage.sessions.ask(message)

    def _check(self, record: SessionRecord, log: dict[str, Recorded]) -> None:
        outcome = self.outcome
        outcome.violations += find_prompt_violations(record, log)
        discount, rows = self._rng.random(), {}
        for style in STYLES:
            exported = export_trajectories(record, discount=discount, style=style)
            found = list(find_row_violations(exported.trajectories, exported.untrained, log))
            outcome.violations += [f"{style}: {violation}" for violation in found]
            rows[style] = exported.trajectories
        outcome.violations += find_return_violations(rows)
        self._check_links(record)
        self._count(record, log)
        for entry in exported.untrained:
            outcome.counts[f"untrained: {entry.reason}"] += entry.num_tokens
        outcome.counts["trained"] += sum(row.num_trained_tokens for row in exported.trajectories)

    def _check_links(self, record: SessionRecord) -> None:
        by_id = {turn.id: turn for turn in record.interactions}
        for turn in record.interactions:
            if turn.parent is not None and turn.fork is None:
                self._check_end(by_id[turn.parent], turn)
            asked = self._asked.get(turn.id)
            if asked is not None:
                wrong = self._links.judge(asked, turn)
                if wrong is not None:
                    self.outcome.violations.append(wrong)
                self.outcome.counts["links judged"] += 1

    def _check_end(self, parent: Interaction, turn: Interaction) -> None:
        """An answer that sampled its end has no second one; one that was cut may go on in any way."""
        assert parent.completion is not None
        ends = FAMILIES[self._stage.family].create_renderer().stop_token_ids
        sampled = parent.completion.token_ids
        is_closed = len(sampled) > 0 and int(sampled[-1]) in ends
        if is_closed and int(turn.prompt_suffix[0]) in ends:
            self.outcome.violations.append(f"{parent.id} has two ends before {turn.id}")

    def _count(self, record: SessionRecord, log: dict[str, Recorded]) -> None:
        counts = self.outcome.counts
        counts["turns"] += len(log)
        counts["sampled"] += sum(len(seen.token_ids) for seen in log.values())
        for turn in record.interactions:
            counts["linked"] += turn.parent is not None
            counts["extended"] += turn.parent is not None and turn.token_parent == turn.parent
            if turn.fork is not None:
                counts[f"fork: {turn.fork}"] += 1


def _dumped(body: Wire) -> bytes:
    """As the client's library writes it."""
    try:
        return orjson.dumps(body)
    except TypeError:  # an integer that only Python can write
        return json.dumps(body).encode()


def _sent(document: Any) -> Any:
    """As it arrives."""
    return json.loads(dump_json(document))
