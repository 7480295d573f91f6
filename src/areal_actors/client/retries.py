"""Retries of requests to the proxy: which requests are repeated, and when."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random

import anyio
import httpx
from attrs import field, frozen
from attrs.validators import ge, gt

from areal_actors.client.http import error_of, retry_after
from areal_actors.errors import CapacityExhausted, Unavailable

__all__ = ["RetryPolicy", "send_with_retries"]

_WORTH_RETRYING = frozenset({408, 429, 503})
# After these errors the request has certainly not reached the server.
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@frozen(kw_only=True)
class RetryPolicy:
    """Exponential back-off with jitter, bounded in attempts and in time."""

    max_attempts: int = field(default=6, validator=ge(1))
    first_wait_seconds: float = field(default=0.25, validator=gt(0))
    max_wait_seconds: float = field(default=8.0, validator=gt(0))

    def wait_seconds(self, attempt: int, asked: float | None, random: Random) -> float:
        """Return the wait in seconds after failure number ``attempt`` (from 0).

        A wait that the server asks for (``asked``) takes precedence.
        """
        if asked is not None:
            # Jitter only adds here: a retry before the time that the server named would be refused again.
            return min(asked, self.max_wait_seconds) * random.uniform(1.0, 1.1)
        return float(min(self.first_wait_seconds * 2**attempt, self.max_wait_seconds) * random.uniform(0.5, 1.0))


async def send_with_retries(
    send: Callable[[], Awaitable[httpx.Response]],
    *,
    policy: RetryPolicy,
    random: Random,
    is_repeatable: bool,
    is_patient: bool = False,
) -> httpx.Response:
    """Send until there is an answer that another attempt would not change.

    A request that may have arrived is sent again only if it ``is_repeatable``, i.e. idempotent. A request that
    ``is_patient`` waits for capacity without a limit of attempts, each time as long as the server asks.

    Raises:
        RequestError: the answer was an error; after all attempts, if the error was worth retrying.
        Unavailable: the proxy did not answer.
    """
    attempt = 0
    while True:
        is_last = attempt + 1 >= policy.max_attempts
        asked: float | None = None
        try:
            response = await send()
        except httpx.TransportError as error:
            if is_last or not (is_repeatable or isinstance(error, _NOT_SENT)):
                raise Unavailable(f"The proxy did not answer: {type(error).__name__}: {error}") from error
        else:
            if response.is_success:
                return response
            if is_patient and response.status_code == CapacityExhausted.status:
                asked = max(retry_after(response) or 0.0, policy.first_wait_seconds)
                await anyio.sleep(asked * random.uniform(1.0, 1.1))
                continue
            if is_last or not _is_worth_retrying(response):
                raise error_of(response)
            asked = retry_after(response)
        await anyio.sleep(policy.wait_seconds(attempt, asked, random))
        attempt += 1


def _is_worth_retrying(response: httpx.Response) -> bool:
    return response.status_code in _WORTH_RETRYING and response.headers.get("x-should-retry") != "false"
