"""What the drivers share: tasks in, outcomes out, and the scenarios over three things that every client can do.

A driver is a program in an environment of its own, in which ``areal_actors`` is not installed. It reads one task a line
(JSON) from its standard input, plays the scenario against the URL of the task, and prints one line: what came of it.
Only the standard library is used here.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import json
import os
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    "REPORT_SCHEMA",
    "TOOLS",
    "TOOL_SCHEMAS",
    "Client",
    "NotApplicable",
    "Report",
    "Reported",
    "Task",
    "leave_at_first",
    "population",
    "run_tool",
    "serve",
    "weather",
]


class NotApplicable(Exception):
    """The client has no such thing; the message says why."""


@dataclass(frozen=True)
class Task:
    """One scenario: where to send it, and the label that its conversations carry.

    ``extra`` are fields that the client is to add to the body of its requests.
    """

    protocol: str
    scenario: str
    label: str
    session_url: str
    root_url: str
    api_key: str
    extra: Mapping[str, Any] | None = None

    @property
    def openai_url(self) -> str:
        """The base URL of OpenAI's SDK."""
        return f"{self.session_url}/v1"

    @property
    def anthropic_url(self) -> str:
        """The base URL of Anthropic's SDK, which joins ``/v1`` by itself."""
        return self.session_url

    def with_label(self, label: str) -> Task:
        """The same for another conversation."""
        return replace(self, label=label)


def weather(city: str, days: float) -> str:
    """Forecast the weather of a city.

    Args:
        city: the name of the city.
        days: how far ahead.
    """
    return f"{city}: 21 degrees in {days:g} days"


def population(city: str) -> str:
    """Count the people of a city.

    Args:
        city: the name of the city.
    """
    return f"{city}: 421878 people"


TOOLS: dict[str, Callable[..., str]] = {"weather": weather, "population": population}
_CITY = {"type": "string", "description": "the name of the city"}
TOOL_SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": _CITY, "days": {"type": "number", "description": "how far ahead"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "population": {
        "type": "object",
        "properties": {"city": _CITY},
        "required": ["city"],
        "additionalProperties": False,
    },
}
"""For the clients that do not make schemas of functions."""
REPORT_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
Report = Mapping[str, Any]


class Reported(Exception):
    """A failure that the client reports in its own way (``how``) instead of raising it."""

    def __init__(self, how: str, message: str) -> None:
        super().__init__(message)
        self.how = how


class Client:
    """One client in one protocol. A driver fills in what its client can do; the scenarios follow from that."""

    async def talk(self, task: Task, *questions: str, has_tools: bool = False, is_stream: bool = False) -> list[str]:
        """Hold one conversation, in the client's own manner: ask, let it run its tools, and go on from its memory.

        Returns the final text of every turn.
        """
        raise NotApplicable("it does not converse")

    async def report(self, task: Task, question: str) -> Report:
        """Ask for structured output."""
        raise NotApplicable("it has no structured output")

    async def hang_up(self, task: Task, question: str) -> None:
        """Ask for a stream, read its first text, and leave."""
        raise NotApplicable("it does not stream")

    # ------------------------------------------------------------------------------------------ the scenarios

    async def single_turn(self, task: Task) -> None:
        """A question, an answer."""
        await self._converse(task, "Good morning")

    async def by_key(self, task: Task) -> None:
        """The same by the key alone, on a URL that names no session."""
        await self._converse(replace(task, session_url=task.root_url), "Good evening")

    async def three_turns(self, task: Task) -> None:
        """Two follow-up turns, the second answer with thinking."""
        await self._converse(task, "One", "Two, ponder this", "Three")

    async def streaming(self, task: Task) -> None:
        """Three turns, streamed."""
        await self._converse(task, "One", "Two, ponder this", "Three", is_stream=True)

    async def tool(self, task: Task) -> None:
        """A call, its result, and one more turn."""
        await self._use_tools(task, "How is the weather?")

    async def parallel_tools(self, task: Task) -> None:
        """Two calls in one answer, and one more turn."""
        await self._use_tools(task, "How are both, weather and population?", num_results=2)

    async def thoughtful_tool(self, task: Task) -> None:
        """A call after thinking."""
        await self._use_tools(task, "Please ponder the weather")

    async def six_turns(self, task: Task) -> None:
        """A longer conversation: text, calls and thinking by turns, all of it echoed again and again."""
        await self._talk_long(task)

    async def six_turns_streamed(self, task: Task) -> None:
        """The same, streamed."""
        await self._talk_long(task, is_stream=True)

    async def streaming_tools(self, task: Task) -> None:
        """Two calls in one streamed answer."""
        await self._use_tools(task, "How are both, weather and population?", num_results=2, is_stream=True)

    async def twenty_at_once(self, task: Task) -> None:
        """Twenty conversations of two turns in one session, side by side."""
        labels = [f"{task.label}x{number}" for number in range(20)]
        await asyncio.gather(*(self._converse(task.with_label(label), "One", "Two") for label in labels))

    async def previous_response(self, task: Task) -> None:
        """Three turns, of which each names the answer before instead of repeating it."""
        raise NotApplicable("it does not use previous_response_id")

    async def structured(self, task: Task) -> None:
        """An object of a given schema."""
        report = await self.report(task, f"[{task.label}] Please report")
        expect(f"Zürich [{task.label}]", str(report["city"]))
        expect("21", str(report["degrees"]))

    async def cancelled(self, task: Task) -> None:
        """The client leaves in mid-stream. That the proxy noticed is judged there."""
        await self.hang_up(task, f"[{task.label}] Please recite")

    async def wrong_key(self, task: Task) -> None:
        """401."""
        wrong = replace(task, session_url=task.root_url, api_key="sk-wrong")
        await self.talk(wrong, f"[{task.label}] Hello")

    async def bad_parameter(self, task: Task) -> None:
        """400: a parameter that cannot be honoured."""
        await self.talk(replace(task, extra={"surprise": True}), f"[{task.label}] Hello")

    async def busy(self, task: Task) -> None:
        """429."""
        await self.talk(task, f"[{task.label}] Are you busy?")

    async def overflow(self, task: Task) -> None:
        """400: more than the context holds."""
        await self.talk(task, f"[{task.label}] " + "漢" * 12_000)

    async def _converse(self, task: Task, *questions: str, is_stream: bool = False) -> None:
        asked = [f"[{task.label}] {question}" for question in questions]
        answers = await self.talk(task, *asked, is_stream=is_stream)
        for question, answer in zip(asked, answers, strict=True):
            expect(f"You said: {question} — ünïcödé 漢 🙂", answer)

    async def _talk_long(self, task: Task, *, is_stream: bool = False) -> None:
        asked = [f"[{task.label}] {question}" for question, _ in LONG_TALK]
        answers = await self.talk(task, *asked, has_tools=True, is_stream=is_stream)
        for (_, part), answer in zip(LONG_TALK, answers, strict=True):
            expect(part, answer)

    async def _use_tools(self, task: Task, question: str, *, num_results: int = 1, is_stream: bool = False) -> None:
        asked = (f"[{task.label}] {question}", f"[{task.label}] Thank you")
        answer, thanks = await self.talk(task, *asked, has_tools=True, is_stream=is_stream)
        for result in RESULTS[:num_results]:
            expect(f"Zürich [{task.label}]: {result}", answer)
        expect(f"You said: {asked[1]}", thanks)


RESULTS = ("21 degrees in 2 days", "421878 people")
LONG_TALK = (
    ("Hello", "You said: "),
    ("How is the weather?", RESULTS[0]),
    ("How are both, weather and population?", RESULTS[1]),
    ("Please ponder this", "You said: "),
    ("Please ponder the weather", RESULTS[0]),
    ("Thank you", "You said: "),
)
"""Questions, and a part of each answer."""


def expect(part: str, whole: str) -> None:
    """Raise unless ``whole`` contains ``part``, white space at its ends aside."""
    if part.strip() not in whole:
        raise AssertionError(f"{part!r} is not in {whole!r}")


_MOMENT_SECONDS = 0.5


async def leave_at_first(
    events: AsyncIterator[Any], is_text: Callable[[Any], object], *, patience_seconds: float | None = None
) -> None:
    """Read ``events`` in a task, and cancel the task in mid-wait once there was text: how an application gives up.

    It also gives up when its patience is over.

    For clients whose generators, when they are closed, leave the connection to the garbage collector.
    """
    has_text = asyncio.Event()

    async def read() -> None:
        async for event in events:
            if is_text(event):
                has_text.set()

    task = asyncio.create_task(read())
    waiting = asyncio.create_task(has_text.wait())
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED, timeout=patience_seconds)
    waiting.cancel()
    await asyncio.sleep(_MOMENT_SECONDS)  # until it has read what has arrived
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    gc.collect()  # some leave the connection to the garbage collector even so


# ------------------------------------------------------------------------------------------------------ the program


def serve(clients: Mapping[str, Client]) -> None:
    """Play the tasks of the standard input, one after another, until it ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints, prints elsewhere
    asyncio.run(_play_all(clients, lambda line: print(line, file=out, flush=True)))


async def _play_all(clients: Mapping[str, Client], reply: Callable[[str], None]) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        reply(json.dumps(await _play(clients, Task(**json.loads(line)))))


async def _play(clients: Mapping[str, Client], task: Task) -> dict[str, Any]:
    """The outcome of one scenario: ``ok``, ``failed`` (with the exceptions, outermost first) or ``not applicable``."""
    play: Callable[[Task], Awaitable[None]] = getattr(clients[task.protocol], task.scenario)
    try:
        await play(task)
    except NotApplicable as reason:
        return {"outcome": "not applicable", "why": str(reason)}
    except BaseException as error:  # noqa: BLE001 - whatever a client raises is its answer to the scenario
        traceback.print_exc(file=sys.stderr)
        return {"outcome": "failed", "why": f"{type(error).__name__}: {error}"[:500], "errors": _chain(error)}
    return {"outcome": "ok"}


def _chain(error: BaseException | None) -> list[dict[str, Any]]:
    """The exception and what caused it: class, status, code."""
    chain: list[dict[str, Any]] = []
    while error is not None and len(chain) < 8:
        cls = type(error)
        status = getattr(error, "status_code", None)
        code = getattr(error, "code", None)
        chain.append(
            {
                "class": getattr(error, "how", f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}"),
                "status": status if isinstance(status, int) else None,
                "code": code if isinstance(code, str) else None,
                "message": str(error)[:200],
            }
        )
        error = error.__cause__ or error.__context__
    return chain


async def run_tool(name: str, arguments: Mapping[str, Any]) -> str:
    """What a client without a loop of its own does with a call."""
    result = TOOLS[name](**arguments)
    return await result if inspect.isawaitable(result) else result
