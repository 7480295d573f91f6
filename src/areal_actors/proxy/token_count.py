"""Counting the tokens of a prompt without answering it: Anthropic's ``messages/count_tokens``."""

from __future__ import annotations

from attrs import frozen

from areal_actors.core import Ref
from areal_actors.messages import CountTokens, Sessions
from areal_actors.proxy.anthropic import AnthropicDialect
from areal_actors.proxy.auth import Gatekeeper, read_key
from areal_actors.proxy.config import ProxyConfig
from areal_actors.proxy.exchange import Exchange
from areal_actors.proxy.visitors import Visitors

__all__ = ["TokenCountEndpoint"]


@frozen(kw_only=True)
class TokenCountEndpoint:
    """The route. The count is what ``usage.input_tokens`` would be if the same body were sent to be answered."""

    dialect: AnthropicDialect
    sessions: Ref[Sessions]
    gatekeeper: Gatekeeper
    config: ProxyConfig
    visitors: Visitors

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request; nothing is remembered of it."""
        limits = self.config
        body = await exchange.read_json(max_bytes=limits.max_body_bytes, timeout_seconds=limits.body_timeout_seconds)
        named = body.get("session_id") or exchange.query.get("session_id")
        credential = self.gatekeeper.credential(
            key=read_key(exchange.headers),
            in_path=exchange.session,
            in_request=named if isinstance(named, str) else None,
        )
        request = self.dialect.parse(body).request
        if self.visitors.is_nobodys(credential):
            await self._count(exchange, CountTokens(credential=credential, request=request))
        else:
            async with self.visitors.visit(credential, is_counted=False) as visit:
                await self._count(exchange, CountTokens(credential=visit.credential, request=request))

    async def _count(self, exchange: Exchange, message: CountTokens) -> None:
        await exchange.send_json(200, {"input_tokens": await self.sessions.ask(message)})
