"""The real proxy, sessions and renderer of a family of models, in front of an engine with a script."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
from attrs import frozen

from areal_actors.client import OpenAIProxyClient
from areal_actors.domain import SessionId, SessionRecord
from areal_actors.kernel import Ref
from areal_actors.messages import CollectSession, Sessions
from areal_actors.rollouts.staleness import CapacityLimits
from areal_actors.run.inference import InferenceConfig, open_actors
from areal_actors.testing.engines import EchoEngine
from areal_actors_testing.families import FAMILIES

__all__ = ["FamilyStack", "open_family_stack"]


@frozen(kw_only=True)
class FamilyStack:
    """A session, and what the engine was asked in it."""

    family: str
    engine: EchoEngine
    http: httpx.AsyncClient
    session: OpenAIProxyClient
    sessions: Ref[Sessions]
    url: str
    admin_key: str

    @property
    def prompts(self) -> list[str]:
        """The prompts of all requests so far."""
        renderer = FAMILIES[self.family].create_renderer()
        return [renderer.decode(request.prompt) for request in self.engine.requests]

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Send a request of the session's agent."""
        headers = {"authorization": f"Bearer {self.session.api_key}"}
        return await self.http.post(f"{self.session.base_url.rstrip('/')}/{path}", json=body, headers=headers)

    async def record(self) -> SessionRecord:
        """Return the session's record."""
        return await self.sessions.ask(CollectSession(session=SessionId(self.session.session_id)))

    async def returns(self, discount: float) -> dict[str, float]:
        """Return the returns of the session's answers by their ids."""
        headers = {"authorization": f"Bearer {self.admin_key}"}
        wanted = {"session_id": self.session.session_id, "style": "individual", "discount": discount}
        answer = await self.http.post(f"{self.url}/export_trajectories", json=wanted, headers=headers)
        return {row["interaction_ids"][-1]: row["returns"][-1] for row in answer.json()["trajectories"]}


@asynccontextmanager
async def open_family_stack(family: str, answers: Sequence[str]) -> AsyncIterator[FamilyStack]:
    """Open a session with a model that gives these answers, written with special tokens; the last one repeatedly."""
    renderer, left = FAMILIES[family].create_renderer(), list(answers)

    def script(_: Any) -> list[int]:
        return FAMILIES[family].sample(left.pop(0) if len(left) > 1 else left[0])

    engine = EchoEngine(script, vocab_size=renderer.vocab_size, context_length=1 << 15)
    config = InferenceConfig(limits=CapacityLimits(max_concurrent=8, batch_size=8))
    async with open_actors(config, engine=engine, renderer=renderer) as inference, httpx.AsyncClient() as http:
        endpoint = inference.endpoint
        async with OpenAIProxyClient(endpoint.url, admin_key=endpoint.admin_key) as session:
            yield FamilyStack(
                family=family,
                engine=engine,
                http=http,
                session=session,
                sessions=inference.sessions,
                url=endpoint.url,
                admin_key=endpoint.admin_key,
            )
