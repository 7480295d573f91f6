"""The entry point of several services as a process of its own: what ``areal-actors entry`` does."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping

import anyio

from areal_actors.core import ActorSystem
from areal_actors.errors import ConfigError
from areal_actors.messages import DescribeEndpoint
from areal_actors.proxy.entry import EntryConfig, EntryServer

__all__ = ["parse_backends", "run_entry"]


def parse_backends(words: Iterable[str]) -> dict[str, str]:
    """``a=http://host:port`` as a name and a URL. Raises ``ConfigError``."""
    backends: dict[str, str] = {}
    for word in words:
        name, equals, url = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} names no service; write NAME=URL, as in a=http://127.0.0.1:8001")
        if name in backends:
            raise ConfigError(f"{name} is given twice; each service has a name of its own, its setting sessions.home")
        backends[name] = url
    return backends


def run_entry(backends: Mapping[str, str], *, host: str, port: int, announce: Callable[[str], object]) -> None:
    """Forward until a signal comes. Raises ``ConfigError`` for addresses that cannot be used."""
    try:
        config = EntryConfig(backends=backends, host=host, port=port)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    anyio.run(_run, config, announce)


async def _run(config: EntryConfig, announce: Callable[[str], object]) -> None:
    async with ActorSystem.open() as system:
        serving = await system.spawn(EntryServer(config), name="entry")
        endpoint = await serving.ask(DescribeEndpoint())
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            announce(f"Listening at {endpoint.url} for {', '.join(sorted(config.backends))}")
            async for _ in signals:
                break
