"""Control requests of a client, which start, reward, end and export sessions, and the end of a session's block."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from random import Random
from typing import Any

import anyio
import httpx

from areal_actors.client.attribution import unattributed
from areal_actors.client.http import RetryPolicy, create_http_client, lent_client, send_with_retries
from areal_actors.errors import ArealError
from areal_actors.lib.exact_json import dump_json, load_json

_UNDO_SECONDS = 5.0


class ControlCalls:
    """Sends POST requests to one proxy.

    Between ``open`` and ``close`` all requests share one HTTP client; outside, each request creates its own.
    """

    def __init__(
        self, root: str, *, http_client: httpx.AsyncClient | None, retries: RetryPolicy | None, random: Random | None
    ) -> None:
        """Send requests with ``http_client`` if one is given; it is not closed."""
        self.root = root
        self._given = http_client
        self._own: httpx.AsyncClient | None = None
        self._retries = retries or RetryPolicy()
        self._random = random or Random()  # noqa: S311 - jitter

    def open(self) -> None:
        """Create the shared client, unless one was given."""
        if self._given is None:
            self._own = create_http_client()

    async def close(self) -> None:
        """Close the shared client, unless it was given. Closing it twice has no effect."""
        own, self._own = self._own, None
        if own is not None:
            # This only closes sockets, which does not block.
            with anyio.CancelScope(shield=True):
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
        undo: Callable[[dict[str, Any]], Awaitable[Any]] | None = None,
    ) -> dict[str, Any]:
        """Send one request with ``key``, regardless of the session around the caller, and return the answer.

        If the caller is cancelled while the request is in progress, its answer is awaited for a few seconds and passed
        to ``undo``. Raises what ``send_with_retries`` raises.
        """
        url = f"{self.root}/{path}"
        content = dump_json({name: value for name, value in (body or {}).items() if value is not None})
        headers = {"content-type": "application/json"} | ({} if key is None else {"authorization": f"Bearer {key}"})
        # This request carries its own key, which that of a surrounding session must not replace.
        with unattributed():
            async with lent_client(self._given or self._own) as http:

                async def send() -> httpx.Response:
                    return await http.post(url, content=content, params=query, headers=headers)

                response = await send_with_retries(
                    send if undo is None else partial(_send_or_undo, send, undo),
                    policy=self._retries,
                    random=self._random,
                    is_repeatable=is_repeatable,
                    is_patient=is_patient,
                )
        return _parse(response)


def _parse(response: httpx.Response) -> dict[str, Any]:
    reply: dict[str, Any] = load_json(response.content)
    return reply


async def _send_or_undo(
    send: Callable[[], Awaitable[httpx.Response]], undo: Callable[[dict[str, Any]], Awaitable[Any]]
) -> httpx.Response:
    """Send a request, and undo its effect if the caller is cancelled before the answer arrives."""
    outcome: list[httpx.Response | Exception] = []
    shield, is_over = anyio.CancelScope(shield=True), anyio.Event()

    async def run() -> None:
        with shield:
            try:
                outcome.append(await send())
            except Exception as error:  # noqa: BLE001 - raised below, so that it is not wrapped in an exception group
                outcome.append(error)
        is_over.set()

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            try:
                await is_over.wait()
            except anyio.get_cancelled_exc_class():
                # The request continues for a few seconds, then the cancellation is propagated.
                shield.deadline = anyio.current_time() + _UNDO_SECONDS
                raise
    except BaseException:
        if outcome and isinstance(late := outcome[0], httpx.Response) and late.is_success:
            with anyio.move_on_after(_UNDO_SECONDS, shield=True):
                await undo(_parse(late))
        raise
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


_END_SECONDS = 10.0


async def end_block(
    calls: ControlCalls,
    end: Callable[[], Awaitable[Any]] | None,
    *,
    error: BaseException | None,
    is_over: tuple[type[ArealError], ...] = (),
) -> None:
    """End the session with ``end``, unless it is ``None`` because the session was already ended, and close ``calls``.

    This takes ten seconds at most, cancelled or not. The errors in ``is_over`` mean that the session was ended before,
    and are ignored. Other errors are raised, unless the block itself failed: its ``error`` is never replaced by an
    error of ending the session.
    """
    try:
        if end is not None:
            with anyio.move_on_after(_END_SECONDS, shield=True):
                await end()
    except is_over:
        pass
    except ArealError:
        if error is None:
            raise
    finally:
        await calls.close()
