"""Which model answers: the session's policy, or the trained model that a request names. The one place that decides.

A session's key or URL, or the administrator's key, opens the trained models, too. What they answer is no turn of the
session: it is in no tree and in no export.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from attrs import frozen

from areal_actors.core import Ref
from areal_actors.domain import Credential, TrainedModel, is_model_identifier
from areal_actors.messages import CheckCredential, ListModels, ModelInUse, Models, Sessions, UseModel
from areal_actors.proxy.auth import Gatekeeper

__all__ = ["Selection"]


@frozen(kw_only=True)
class Selection:
    """Who answers. Without ``models``, it is always the policy."""

    sessions: Ref[Sessions]
    gatekeeper: Gatekeeper
    models: Ref[Models] | None = None

    def may_select(self, name: object) -> bool:
        """Whether the ``model`` of a request could be that of a trained model, by its form."""
        return self.models is not None and isinstance(name, str) and is_model_identifier(name)

    @asynccontextmanager
    async def select(self, name: str, credential: Credential) -> AsyncIterator[ModelInUse | None]:
        """Borrow the model called ``name`` for one request; ``None`` if there is none, and the policy answers.

        Raises:
            RequestError: the credential opens nothing, or the model cannot be opened.
        """
        if self.models is None:
            yield None
            return
        await self._check(credential)
        async with self.models.stream(UseModel(name=name)) as items:
            yield await anext(items, None)

    async def list(self) -> tuple[TrainedModel, ...]:
        """The models that a request can name."""
        return () if self.models is None else await self.models.ask(ListModels())

    async def list_for(self, credential: Credential) -> tuple[TrainedModel, ...]:
        """The same for this credential. Raises ``RequestError`` for one that opens nothing."""
        await self._check(credential)
        return await self.list()

    async def _check(self, credential: Credential) -> None:
        if not self.gatekeeper.is_admin(credential.key):
            await self.sessions.ask(CheckCredential(credential=credential))
