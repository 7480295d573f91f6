"""The actors of a run around an engine without a model, in memory: virtual time holds, and nothing opens a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from types import MappingProxyType
from typing import Any

import anyio
from attrs import frozen

from areal_actors.domain import (
    Answer,
    ChatMessage,
    CompletionRequest,
    Credential,
    DataPosition,
    Ints,
    Sampling,
    SessionId,
    SessionRecord,
)
from areal_actors.generation.actor import GenerationActor
from areal_actors.journal import Journal, read_journal
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.messages import (
    Capacity,
    CollectSession,
    Complete,
    Exports,
    Generation,
    OpenSession,
    SessionOpened,
    Sessions,
)
from areal_actors.models.built_in import create_tiny_tokenizer
from areal_actors.rendering import Renderer, create_renderer
from areal_actors.rollouts.capacity import CapacityGranter
from areal_actors.rollouts.exporter import ExportConfig, Exporter
from areal_actors.rollouts.staleness import CapacityLimits, CapacityState
from areal_actors.sessions.manager import SessionManager, SessionsConfig
from areal_actors.testing.engines import EchoEngine

STOP = 2
"""The id that ends a turn."""

MAX_SECONDS = 20_000
"""Of virtual time; tests in real time say less."""


@cache
def tokenizer() -> Any:
    """The tokenizer behind the renderer."""
    return create_tiny_tokenizer()


@cache
def renderer() -> Renderer:
    """A real renderer; it is made once, because probing a template takes longer than most tests."""
    return create_renderer(tokenizer())


def encode(text: str, *, is_closed: bool = True) -> list[int]:
    """What an engine would have to sample to say ``text``."""
    return [*tokenizer().encode(text, add_special_tokens=False), *([STOP] if is_closed else [])]


def say(*texts: str, role: str = "user") -> tuple[ChatMessage, ...]:
    """Messages, alternately by ``role`` and by the assistant."""
    roles = (role, "assistant")
    return tuple(ChatMessage(role=roles[number % 2], content=text) for number, text in enumerate(texts))


def echo_of(answer: Answer) -> ChatMessage:
    """The answer as a client sends it back."""
    return ChatMessage(role="assistant", content=answer.message.content)


@frozen(kw_only=True)
class InferenceStack:
    """The actors that answer completions, and short ways to ask them."""

    system: ActorSystem
    engine: EchoEngine
    generation: Ref[Generation]
    capacity: Ref[Capacity]
    sessions: Ref[Sessions]
    exports: Ref[Exports]

    async def open(self, task: str = "task", **options: Any) -> SessionOpened:
        """Start a session."""
        return await self.sessions.ask(OpenSession(task=task, **options))

    async def complete(
        self, session: SessionId, messages: Sequence[ChatMessage], *, max_new_tokens: int = 64, **options: Any
    ) -> tuple[Answer, ...]:
        """Ask for an answer."""
        sampling = Sampling(max_new_tokens=max_new_tokens)
        request = CompletionRequest(messages=tuple(messages), sampling=sampling, **options)
        return await self.sessions.ask(Complete(credential=Credential(session=session), request=request))

    async def record(self, session: SessionId) -> SessionRecord:
        """The session as it stands."""
        return await self.sessions.ask(CollectSession(session=session))


@asynccontextmanager
async def open_inference_stack(
    script: Callable[[Ints], Sequence[int]] = lambda prompt: encode("42"),
    *,
    engine: EchoEngine | None = None,
    limits: CapacityLimits | None = None,
    sessions: SessionsConfig | None = None,
    export: ExportConfig | None = None,
    start: DataPosition | None = None,
    exporter: Mapping[str, Any] = MappingProxyType({}),
    journal: Journal | None = None,
    max_seconds: float = MAX_SECONDS,
) -> AsyncIterator[InferenceStack]:
    """Open the actors, the engine's answers scripted by ``script``. What hangs for too long fails.

    ``exporter`` are more options of the exporter.
    """
    engine = engine or EchoEngine(script)
    limits = limits or CapacityLimits(max_concurrent=64, batch_size=64)
    with anyio.fail_after(max_seconds):
        async with ActorSystem.open() as system:
            generation = await system.spawn(GenerationActor(engine), name="generation")
            capacity = await system.spawn(CapacityGranter(CapacityState(limits=limits)), name="capacity")
            manager = SessionManager(
                renderer=renderer(),
                generation=generation,
                capacity=capacity,
                config=sessions,
                journal=journal,
                recovered=None if journal is None else await read_journal(journal),
                wall_clock=anyio.current_time,
            )
            sessions_ref = await system.spawn(manager, name="sessions")
            exporter = Exporter(sessions=sessions_ref, capacity=capacity, config=export, start=start, **exporter)
            exports = await system.spawn(exporter, name="exports")
            yield InferenceStack(
                system=system,
                engine=engine,
                generation=generation,
                capacity=capacity,
                sessions=sessions_ref,
                exports=exports,
            )
