"""The control requests of a client: sessions start, are rewarded and end by them. Completions are the agents' matter."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import anyio
import httpx
import orjson

from areal_actors.client.attribution import unattributed
from areal_actors.client.http import create_http_client
from areal_actors.client.retries import RetryPolicy, send_with_retries

__all__ = ["ControlCalls"]


class ControlCalls:
    """Posts to one proxy. Between ``open`` and ``close`` all requests share a client, outside each has its own."""

    def __init__(
        self, root: str, *, http_client: httpx.AsyncClient | None, retries: RetryPolicy | None, random: Random | None
    ) -> None:
        """``http_client`` is used where there is one, and left open."""
        self.root = root
        self._given = http_client
        self._own: httpx.AsyncClient | None = None
        self._retries = retries or RetryPolicy()
        self._random = random or Random()  # noqa: S311 - jitter

    def open(self) -> None:
        """Begin to share a client."""
        if self._given is None:
            self._own = create_http_client()

    async def close(self) -> None:
        """Close the shared client, unless it was given. Closing twice is harmless."""
        own, self._own = self._own, None
        if own is not None:
            with anyio.CancelScope(shield=True):  # closes sockets; waits for nobody
                await own.aclose()

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        key: str | None,
        query: Mapping[str, str] | None = None,
        is_repeatable: bool = True,
        is_patient: bool = False,
    ) -> dict[str, Any]:
        """The answer to one request, which is sent under ``key`` whatever session surrounds the caller.

        Raises what ``send_with_retries`` raises.
        """
        url = f"{self.root}/{path}"
        content = orjson.dumps({name: value for name, value in (body or {}).items() if value is not None})
        headers = {"content-type": "application/json"} | ({} if key is None else {"authorization": f"Bearer {key}"})
        with unattributed():
            async with self._http() as http:
                response = await send_with_retries(
                    lambda: http.post(url, content=content, params=query, headers=headers),
                    policy=self._retries,
                    random=self._random,
                    is_repeatable=is_repeatable,
                    is_patient=is_patient,
                )
        reply: dict[str, Any] = orjson.loads(response.content)
        return reply

    @asynccontextmanager
    async def _http(self) -> AsyncIterator[httpx.AsyncClient]:
        """The client in use; a passing one where none is shared."""
        open_client = self._given or self._own
        if open_client is not None:
            yield open_client
            return
        async with create_http_client() as passing:
            yield passing
