"""The proxy in front of the real sessions, renderer and generation, on a real socket; only the engine is scripted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache

from attrs import frozen

from areal_actors.client import OpenAIProxyClient
from areal_actors.domain import Interaction
from areal_actors.kernel import Ref
from areal_actors.messages import CollectSession, Sessions
from areal_actors.models.built_in import create_tiny_tokenizer
from areal_actors.proxy import ProxyConfig
from areal_actors.rendering import Renderer, create_renderer
from areal_actors.rollouts.staleness import CapacityLimits
from areal_actors.run.inference import InferenceConfig, open_actors
from areal_actors.testing.engines import EchoEngine, script_answers


@cache
def renderer() -> Renderer:
    """A real renderer; it has no state worth resetting."""
    return create_renderer(create_tiny_tokenizer())


def sampled(text: str) -> list[int]:
    """What a model samples to say ``text``, end of turn included."""
    return [*renderer().encode(text, is_start=False).tolist(), renderer().stop_token_ids[0]]


@frozen(kw_only=True)
class Stack:
    """What is open: one session of the whole stack."""

    session: OpenAIProxyClient
    engine: EchoEngine
    sessions: Ref[Sessions]

    async def record(self) -> tuple[Interaction, ...]:
        """The interactions of the session as they stand."""
        return (await self.sessions.ask(CollectSession(session=self.session.session_id))).interactions


@asynccontextmanager
async def open_stack(
    *answers: Sequence[int],
    is_gated: bool = False,
    proxy: ProxyConfig | None = None,
    model: Renderer | None = None,
) -> AsyncIterator[Stack]:
    """Open everything; the engine samples ``answers`` one after another. ``model`` renders, by default the tiny one."""
    model = model or renderer()
    engine = EchoEngine(script_answers(*answers), is_gated=is_gated, vocab_size=model.vocab_size)
    limits = CapacityLimits(max_concurrent=4, batch_size=4)
    config = InferenceConfig(limits=limits, proxy=proxy or ProxyConfig())
    async with open_actors(config, engine=engine, renderer=model) as inference:
        endpoint = inference.endpoint
        async with OpenAIProxyClient(endpoint.url, admin_key=endpoint.admin_key) as session:
            yield Stack(session=session, engine=engine, sessions=inference.sessions)
