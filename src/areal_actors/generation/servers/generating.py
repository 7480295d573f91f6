"""Reading the tokens of a request from the events of an inference server, whichever kind it is."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import httpx

from areal_actors.domain import EngineRequest, Sampling
from areal_actors.errors import EngineError
from areal_actors.generation.servers.dialect import Delta
from areal_actors.generation.servers.http import Answer, address_of, as_answer, failure_of, open_events

__all__ = ["LOGITS_SETTINGS", "are_defaults", "open_deltas"]

LOGITS_SETTINGS = ("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias")
"""The settings of ``Sampling`` that change the logits before a temperature is applied."""


def are_defaults(request: EngineRequest, names: Sequence[str]) -> bool:
    """Return whether the settings ``names`` of ``request`` have their default values."""
    neutral = Sampling()
    return all(getattr(request.sampling, name) == getattr(neutral, name) for name in names)


@asynccontextmanager
async def open_deltas(
    client: httpx.AsyncClient,
    path: str,
    body: Mapping[str, Any],
    parse: Callable[[Any], Delta],
    *,
    headers: Mapping[str, str] | None = None,
    software: str,
) -> AsyncIterator[AsyncIterator[Delta]]:
    """Send a request, and yield the deltas that ``parse`` makes of its events, up to the one that has a finish reason.

    Raises ``InvalidRequest`` if the server refuses the request, and ``EngineError`` if it fails, if ``parse`` raises
    because the event is not one of ``software``, or if the stream ends without a finish reason.
    """
    async with open_events(client, path, body, headers=headers) as events:
        if isinstance(events, Answer):
            raise failure_of(client, path, events)
        async with aclosing(_read_deltas(client, path, events, parse, software)) as deltas:
            yield deltas


async def _read_deltas(
    client: httpx.AsyncClient, path: str, events: AsyncIterator[Any], parse: Callable[[Any], Delta], software: str
) -> AsyncGenerator[Delta]:
    async for event in events:
        try:
            if event.get("error"):
                raise failure_of(client, path, as_answer(event))
            delta = parse(event)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise EngineError(f"{address_of(client, path)} streams what {software} does not: {error!r}") from error
        yield delta
        if delta.finish is not None:
            # Read the stream to its end, so that the connection can be reused.
            with suppress(EngineError):
                await anext(events, None)
            return
    raise EngineError(f"{address_of(client, path)} ended its stream without a reason.")
