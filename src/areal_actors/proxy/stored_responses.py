"""The route of stored answers, ``GET /v1/responses/{id}``.

The same lookup replaces the references in the input of a new request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from areal_actors.domain import Credential, Interaction, InteractionId
from areal_actors.errors import InvalidRequest, NotFound
from areal_actors.kernel import Ref
from areal_actors.messages import DescribeAnswer, Sessions
from areal_actors.proxy.access import Authenticator, UserAccess
from areal_actors.proxy.dialects.base import TokenBytes
from areal_actors.proxy.dialects.responses.stored import (
    find_references,
    format_stored_response,
    replace_references,
)
from areal_actors.proxy.exchange import Exchange


@frozen(kw_only=True)
class StoredResponses:
    """Finds answers by their ids, within the session of a request."""

    sessions: Ref[Sessions]
    authenticator: Authenticator
    access: UserAccess
    model: str = "policy"
    token_bytes: TokenBytes | None = None

    async def resolve(self, body: Mapping[str, Any], credential: Credential) -> Mapping[str, Any]:
        """Return the body of a request with items in the place of the references in its input.

        Raises:
            InvalidRequest: a reference to an item that no answer of the session has.
        """
        # The AI SDK's default OpenAI provider echoes text and reasoning as references, because answers say that they
        # are stored.
        names = find_references(body)
        if not names:
            return body
        credential = await self.access.authorise(credential)
        answers: dict[InteractionId, Interaction] = {}
        for name in names:
            try:
                answers[name] = await self.sessions.ask(DescribeAnswer(credential=credential, interaction=name))
            except NotFound as error:
                raise InvalidRequest(
                    f"The input refers to an item of {name}, which is not an answer of this session; send the item.",
                    param="input",
                ) from error
        return replace_references(body, answers)

    async def retrieve(self, exchange: Exchange) -> None:
        """Answer with the response."""
        credential = await self.access.authorise(self.authenticator.identify(exchange))
        message = DescribeAnswer(credential=credential, interaction=InteractionId(exchange.item))
        stored = await self.sessions.ask(message)
        document = format_stored_response(stored, model=self.model, token_bytes=self.token_bytes)
        await exchange.send_json(200, document)
