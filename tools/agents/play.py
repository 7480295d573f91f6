"""What the model says to agents: a script of turns for each thread of an episode, found by labels in the prompt.

The task of a thread carries the label ``[[main:0]]`` (``[[sub:0]]`` for a sub-agent), and every scripted answer carries
the label of its turn: ``[[main:1]]``, ``[[main:2]]``, ... So a prompt alone tells which turn comes next, and which
answer it continues, however the proxy links it. The summary that a compaction asks for has the label ``[[summary:4]]``
after the fourth turn, so that the script continues after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Any

import anyio
import numpy as np
from attrs import define, field, frozen

from areal_actors.domain import Chunk, EngineRequest
from areal_actors.errors import CapacityExhausted
from areal_actors.testing.engines import EchoEngine
from areal_actors_testing.exactness import Recorded

__all__ = ["Call", "Cue", "Fault", "Kind", "PlayEngine", "Script", "Turn", "read_cue"]

_NUM_BEFORE_HOLD = 24
"""Tokens of an answer that is held open: enough for an agent to see its first words."""
_STOP = "<|im_end|>"
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_RESULT = re.compile(r"<tool_response>.*?</tool_response>", re.DOTALL)
_LABEL = re.compile(r"\[\[(main|sub|summary):(\d+)\]\]")
_MAIN = ("main", "summary")
_MATCH = "match:"


class Fault(StrEnum):
    """What befalls the first request for a turn; the second one is answered."""

    NONE = "none"
    BUSY = "busy"
    """Refused with 429, so that the agent tries again."""
    HELD = "held"
    """Held open after a few tokens, until the agent hangs up."""


@frozen
class Call:
    """A call of a tool.

    A text ``match:PATTERN`` in its arguments stands for the last match of the pattern's group in the prompt, such as
    the id of a sub-agent in a result.
    """

    name: str
    arguments: Mapping[str, Any]


@frozen
class Turn:
    """One scripted answer."""

    calls: tuple[Call, ...] = ()
    text: str = ""
    fault: Fault = Fault.NONE


@frozen(kw_only=True)
class Script:
    """The turns of each thread.

    ``summary`` matches the last user message of a compaction, ``side`` that of a side call. A request that offers no
    tools is a side call, too (a title, for example), unless the agent ``has_tools`` never.
    """

    main: tuple[Turn, ...]
    sub: tuple[Turn, ...] = ()
    summary: str | None = None
    side: str | None = None
    has_tools: bool = True


class Kind(StrEnum):
    """What a request is."""

    TURN = "turn"
    SUMMARY = "summary"
    SIDE = "side"


@frozen(kw_only=True)
class Cue:
    """A prompt, read.

    ``echoes`` are the labels of the answers in the prompt, the oldest first; ``summary`` is that of the summary of a
    compaction.
    """

    kind: Kind
    thread: str = "main"
    number: int = 0
    echoes: tuple[str, ...] = ()
    summary: str | None = None

    @property
    def label(self) -> str:
        """The label of the answer."""
        name = "summary" if self.kind is Kind.SUMMARY else self.thread
        return f"[[{name}:{self.number}]]"


def read_cue(prompt: str, script: Script) -> Cue:
    """Return what a rendered prompt asks for."""
    turns = [(match[1], match[2]) for match in _TURN.finditer(prompt)]
    if turns and turns[-1][0] == "assistant":  # the header that asks for the answer
        turns.pop()
    said = [(role, _RESULT.sub("", text)) for role, text in turns if role != "system"]
    labels = [(name, int(number)) for _, text in said for name, number in _LABEL.findall(text)]
    is_main = any(name in _MAIN for name, _ in labels)
    names = _MAIN if is_main else ("sub",)
    numbers = [number for name, number in labels if name in names]
    echoes = [label for role, text in said if role == "assistant" for label in _labels(text, names)[:1]]
    summaries = [label for _, text in said for label in _labels(text, ("summary",))]
    read: dict[str, Any] = {"echoes": tuple(echoes), "summary": summaries[-1] if summaries and is_main else None}
    last = said[-1][1] if said else ""
    if script.summary is not None and numbers and re.search(script.summary, last):
        return Cue(kind=Kind.SUMMARY, number=max(numbers), **read)
    is_side = script.side is not None and re.search(script.side, last) is not None
    if is_side or not numbers or (script.has_tools and "<tools>" not in prompt):
        return Cue(kind=Kind.SIDE, **read)
    return Cue(kind=Kind.TURN, thread="main" if is_main else "sub", number=1 + max(numbers), **read)


def _labels(text: str, names: tuple[str, ...]) -> list[str]:
    return [f"[[{name}:{number}]]" for name, number in _LABEL.findall(text) if name in names]


def _fill_in(value: Any, prompt: str) -> Any:
    if isinstance(value, list):
        return [_fill_in(each, prompt) for each in value]
    if isinstance(value, str) and value.startswith(_MATCH):
        return next(iter(re.findall(value.removeprefix(_MATCH), prompt)[::-1]), "unknown")
    return value


def _format_turn(turn: Turn, label: str, prompt: str) -> str:
    calls = [
        json.dumps({"name": call.name, "arguments": {k: _fill_in(v, prompt) for k, v in call.arguments.items()}})
        for call in turn.calls
    ]
    return "\n".join([f"{label} {turn.text or 'Next.'}", *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)])


@define
class _Sampled:
    prompt: np.ndarray
    token_ids: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)


class PlayEngine(EchoEngine):
    """An engine that follows a script, and records the tokens that it saw and sampled."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(self._speak, vocab_size=len(tokenizer), context_length=1 << 20, has_grammars=True)
        self.script = Script(main=())
        self.cues: dict[str, Cue] = {}
        """What each request asked for, by its id."""
        self.prompts: dict[str, str] = {}
        self.held = anyio.Event()
        self._tokenizer = tokenizer
        self._sampled: dict[str, _Sampled] = {}
        self._faults: set[str] = set()

    def begin(self, script: Script) -> None:
        """Start another episode."""
        self.script = script
        self.cues, self.prompts, self._sampled, self._faults = {}, {}, {}, set()
        self.held = anyio.Event()

    def recorded(self) -> dict[str, Recorded]:
        """Return the tokens of every request, by its id."""
        return {
            name: Recorded(
                prompt=one.prompt, token_ids=one.token_ids, logprobs=one.logprobs, versions=[0] * len(one.token_ids)
            )
            for name, one in self._sampled.items()
        }

    def _speak(self, prompt: Any) -> list[int]:
        text = self._tokenizer.decode(prompt.tolist())
        answer = self._answer(read_cue(text, self.script), text)
        return [int(i) for i in self._tokenizer.encode(answer + _STOP, add_special_tokens=False)]

    def _turn(self, cue: Cue) -> Turn:
        turns = self.script.sub if cue.thread == "sub" else self.script.main
        return turns[cue.number - 1] if cue.number <= len(turns) else Turn(text="There is nothing left to do.")

    def _answer(self, cue: Cue, prompt: str) -> str:
        if cue.kind is Kind.SIDE:
            return "A short title"
        if cue.kind is Kind.SUMMARY:
            return f"<summary>{cue.label} The task is half done.</summary>"
        return _format_turn(self._turn(cue), cue.label, prompt)

    @asynccontextmanager
    async def generate(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[Chunk]]:
        """Sample as scripted; the faults of a turn befall its first request only."""
        prompt = self._tokenizer.decode(request.prompt.tolist())
        cue = read_cue(prompt, self.script)
        fault = Fault.NONE
        if cue.kind is Kind.TURN and cue.label not in self._faults:
            fault = self._turn(cue).fault
            self._faults.add(cue.label)
        if fault is Fault.BUSY:
            raise CapacityExhausted("There is no room for this request; try again later.", retry_after_seconds=0.0)
        self.cues[request.id], self.prompts[request.id] = cue, prompt
        sampled = self._sampled[request.id] = _Sampled(request.prompt)
        async with super().generate(request) as chunks:
            yield self._record(chunks, sampled, is_held=fault is Fault.HELD)

    async def _record(self, chunks: AsyncIterator[Chunk], sampled: _Sampled, *, is_held: bool) -> AsyncIterator[Chunk]:
        async for chunk in chunks:
            sampled.token_ids += [int(i) for i in chunk.token_ids]
            sampled.logprobs += [float(value) for value in chunk.logprobs]
            yield chunk
            if is_held and len(sampled.token_ids) >= _NUM_BEFORE_HOLD:
                self.held.set()
                await anyio.sleep_forever()
