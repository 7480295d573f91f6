"""The routes of stored answers: ``GET`` and ``DELETE /v1/responses/{id}``, and the items of its input.

The same lookup replaces the references in the input of a new request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from areal_actors.domain import Credential, InteractionId
from areal_actors.errors import InvalidRequest, NotFound
from areal_actors.kernel import Ref
from areal_actors.messages import DescribeAnswer, HideAnswer, Sessions, StoredAnswer
from areal_actors.proxy.access import Authenticator, UserAccess
from areal_actors.proxy.dialects.base import TokenBytes
from areal_actors.proxy.dialects.fields import wrong
from areal_actors.proxy.dialects.responses.stored import (
    find_references,
    format_input_items,
    format_stored_response,
    page_of,
    replace_references,
)
from areal_actors.proxy.exchange import Exchange

_MAX_ITEMS = 100
_DEFAULT_ITEMS = 20


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
        answers: dict[InteractionId, StoredAnswer] = {}
        for name in names:
            try:
                answers[name] = await self.sessions.ask(DescribeAnswer(credential=credential, interaction=name))
            except NotFound as error:
                raise InvalidRequest(
                    f"The input refers to an item of {name}, which is not an answer of this session; send the item.",
                    param="input",
                ) from error
        return replace_references(body, answers)

    async def retrieve_or_delete(self, exchange: Exchange) -> None:
        """Answer with the response, or hide it from further requests that name it; it is trained nevertheless."""
        if exchange.method == "GET":
            await exchange.send_json(200, self._format(await self._find(exchange)))
            return
        # Not deleted from the session: an answer that the agent acted upon belongs to its episode.
        hidden = HideAnswer(credential=await self._credential(exchange), interaction=InteractionId(exchange.item))
        name = await self.sessions.ask(hidden)
        await exchange.send_json(200, {"id": name, "object": "response", "deleted": True})

    async def list_input_items(self, exchange: Exchange) -> None:
        """Answer with a page of the items of the request; the last ones come first, as in OpenAI's endpoint."""
        query = exchange.query
        order, limit = query.get("order", "desc"), query.get("limit", str(_DEFAULT_ITEMS))
        if order not in ("asc", "desc"):
            raise wrong("order", "asc or desc", order)
        if not limit.isdecimal() or not 0 < int(limit) <= _MAX_ITEMS:
            raise wrong("limit", f"a number from 1 to {_MAX_ITEMS}", limit)
        items = format_input_items(await self._find(exchange))
        await exchange.send_json(200, page_of(items, order=order, after=query.get("after"), limit=int(limit)))

    def _format(self, stored: StoredAnswer) -> dict[str, Any]:
        return format_stored_response(stored, model=self.model, token_bytes=self.token_bytes)

    async def _find(self, exchange: Exchange) -> StoredAnswer:
        message = DescribeAnswer(credential=await self._credential(exchange), interaction=InteractionId(exchange.item))
        return await self.sessions.ask(message)

    async def _credential(self, exchange: Exchange) -> Credential:
        return await self.access.authorise(self.authenticator.identify(exchange))
