"""The stage of the client runs: the real proxy, sessions, renderer and tree around an engine that follows a script.

Everything a client can reach is the real thing, on a socket of this machine. The engine says what ``model`` tells it,
and on a cue holds an answer open for ever (until the client hangs up) or has no room for the request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import anyio
from attrs import frozen
from tests.rendering.templates import QWEN
from tools.clients.model import speak

from areal_actors.domain import Chunk, EngineRequest, SessionId, SessionRecord
from areal_actors.errors import CapacityExhausted
from areal_actors.kernel import Ref
from areal_actors.messages import CollectSession, Endpoint, Sessions
from areal_actors.models.built_in import create_tiny_tokenizer
from areal_actors.proxy import ProxyConfig
from areal_actors.rendering import RendererConfig, create_renderer
from areal_actors.rollouts.staleness import CapacityLimits
from areal_actors.run.inference import InferenceConfig, open_actors
from areal_actors.testing.engines import EchoEngine

__all__ = ["ScriptedEngine", "Stage", "open_stage"]

_NUM_BEFORE_HOLD = 24
"""Tokens of an answer that is held open: enough for a client to see its first words."""
_STOP = "<|im_end|>"


class ScriptedEngine(EchoEngine):
    """An engine that says what ``model`` tells it. ``prompts`` has the text of every prompt, by request id."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(self._speak, vocab_size=len(tokenizer), has_grammars=True)
        self.prompts: dict[str, str] = {}
        self._tokenizer = tokenizer

    def _speak(self, prompt: Any) -> list[int]:
        text = speak(self._tokenizer.decode(prompt.tolist()))
        return [int(i) for i in self._tokenizer.encode(text + _STOP, add_special_tokens=False)]

    @asynccontextmanager
    async def generate(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[Chunk]]:
        """As scripted; on the cues ``recite`` and ``busy``, held open and refused."""
        prompt = self._tokenizer.decode(request.prompt.tolist())
        self.prompts[request.id] = prompt
        question = prompt.rpartition("<|im_start|>user")[2]
        if "busy" in question:
            raise CapacityExhausted("There is no room for this request; try again later.", retry_after_seconds=0.0)
        async with super().generate(request) as chunks:
            yield _held(chunks) if "recite" in question else chunks


async def _held(chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    for _ in range(_NUM_BEFORE_HOLD):
        yield await anext(chunks)
    await anyio.sleep_forever()


E = TypeVar("E", bound=EchoEngine)


@frozen(kw_only=True)
class Stage(Generic[E]):
    """What is open."""

    endpoint: Endpoint
    engine: E
    sessions: Ref[Sessions]

    async def record(self, session: SessionId) -> SessionRecord:
        """The session as it stands."""
        return await self.sessions.ask(CollectSession(session=session))

    async def settle(self) -> None:
        """Return when the engine has nothing in hand; clients that hung up are noticed by then."""
        while (statistics := self.engine.statistics()).running or statistics.waiting:  # noqa: ASYNC110
            await anyio.sleep(0.01)  # the engine counts, and tells nobody


@asynccontextmanager
async def open_stage(
    create_engine: Callable[[Any], E], *, config: ProxyConfig | None = None
) -> AsyncIterator[Stage[E]]:
    """Serve on a free port of this machine until the block is left. ``create_engine`` is given the tokenizer."""
    tokenizer = create_tiny_tokenizer(template=QWEN)
    renderer = create_renderer(tokenizer, config=RendererConfig(tool_format="hermes", reasoning_format="think"))
    engine = create_engine(tokenizer)
    limits = CapacityLimits(max_concurrent=10_000, batch_size=10_000)
    settings = InferenceConfig(limits=limits, proxy=config or ProxyConfig())
    async with open_actors(settings, engine=engine, renderer=renderer) as inference:
        yield Stage(endpoint=inference.endpoint, engine=engine, sessions=inference.sessions)
