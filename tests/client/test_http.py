"""Clients to inject: of the library that the installed SDKs take."""

from __future__ import annotations

from importlib import metadata

import httpx
import httpx2
import pytest

from areal_actors.client import create_agent_http_client

pytestmark = pytest.mark.anyio

NEW, OLD = ["httpx2<3,>=2.12", "anyio"], ["httpx<1,>=0.23", "anyio"]


@pytest.mark.parametrize(
    ("openai", "anthropic", "library"),
    [
        (NEW, NEW, httpx2),
        (NEW, None, httpx2),
        (None, NEW, httpx2),
        (OLD, NEW, httpx),
        (NEW, OLD, httpx),
        (OLD, None, httpx),
        (None, None, httpx),
    ],
)
async def test_agent_http_client_follows_the_installed_sdks(openai, anthropic, library, monkeypatch):
    """One of httpx2 where all that are installed ask for it, one of httpx otherwise."""

    def requires(name):
        found = {"openai": openai, "anthropic": anthropic}[name]
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "requires", requires)
    async with create_agent_http_client() as client:
        assert isinstance(client, library.AsyncClient)


async def test_agent_http_client_is_accepted_by_the_sdks():
    """Both SDKs accept what an agent of this environment is given."""
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    async with create_agent_http_client() as client:
        openai.AsyncOpenAI(api_key="key", base_url="http://127.0.0.1:1/v1", http_client=client)
        anthropic.AsyncAnthropic(api_key="key", base_url="http://127.0.0.1:1", http_client=client)
