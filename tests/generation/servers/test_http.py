"""What is said of a server that does not answer."""

from __future__ import annotations

import socket

import pytest

from areal_actors.errors import EngineError
from areal_actors.generation.servers.http import ask, create_client

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("suffix", "path"), [("", "health"), ("/", "/health"), ("/models/one/", "/health")])
async def test_error_names_the_address_that_was_asked(suffix, path):
    """As one would type it into a browser, whatever the slashes."""
    with socket.socket() as unused:  # bound, and not listening
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}{suffix}"
        async with create_client(url, api_key=None, read_timeout_seconds=5) as client:
            with pytest.raises(EngineError, match="cannot be reached") as caught:
                await ask(client, "GET", path)

    assert str(caught.value).startswith(f"{url.rstrip('/')}/health cannot")
