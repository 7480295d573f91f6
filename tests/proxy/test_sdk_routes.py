"""The routes that the SDKs of the vendors ask for: each is answered, or refused in the dialect of its client."""

from __future__ import annotations

import re
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from areal_actors.proxy import create_app
from areal_actors.proxy.exchange import Operations
from areal_actors_testing.serving import open_scripted_proxy


@pytest.fixture
def anyio_backend() -> str:
    """Use one event loop: dialects do not depend on it."""
    return "asyncio"


ASKED = re.compile(r'self\._(get|post|put|patch|delete|get_api_list)\(\s*(?:path_template\(\s*)?f?"(/[^"]*)"')
METHODS = {"get_api_list": "GET"}


def routes_of(sdk) -> set[tuple[str, str]]:
    """Method and path of every request in the source of an SDK's resources."""
    files = (Path(sdk.__file__).parent / "resources").rglob("*.py")
    found = {pair for file in files for pair in ASKED.findall(file.read_text())}
    return {(METHODS.get(verb, verb.upper()), path.partition("?")[0]) for verb, path in found}


ROUTES = sorted(routes_of(openai) | routes_of(anthropic))
ANSWERED = {
    ("POST", "/chat/completions"),
    ("POST", "/completions"),
    ("POST", "/responses"),
    ("POST", "/responses/input_tokens"),
    ("GET", "/responses/{response_id}"),
    ("GET", "/models"),
    ("GET", "/models/{model}"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_id}"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
}


@pytest.fixture(scope="module")
def operations() -> Operations:
    """The routes of the proxy."""
    app = create_app(sessions=None, exports=None, capacity=None)
    (found,) = [route for route in app.routes if isinstance(route, Operations)]
    return found


def is_answered(operations: Operations, method: str, path: str) -> bool:
    """Whether an operation takes this method at this path."""
    found = operations.find(path)
    return found is not None and method in operations.methods(found[0])


def test_sdk_routes_are_found():
    """The pattern reads the sources as they are now."""
    assert len(ROUTES) > 200
    assert set(ROUTES) >= ANSWERED


def test_sdk_routes_are_answered_or_refused(operations):
    """No route of an SDK is taken for another one, such as a stored response for a session."""
    for method, path in ROUTES:
        assert is_answered(operations, method, path) is ((method, path) in ANSWERED), path


@pytest.mark.anyio
@pytest.mark.parametrize(("path", "is_anthropics"), [("/v1/embeddings", False), ("/v1/messages/batches", True)])
async def test_unknown_route_is_refused_in_the_dialect_of_the_client(path, is_anthropics):
    """Below a session as well."""
    async with open_scripted_proxy() as proxy, proxy.open_session() as session, httpx.AsyncClient() as http:
        prefix = session.base_url.rstrip("/").removesuffix("/v1")
        for url in (proxy.url + path, prefix + path):
            answer = await http.post(url, json={})

            assert answer.status_code == 404
            assert "There is no POST route of this form" in answer.json()["error"]["message"]
            assert (answer.json().get("type") == "error") is is_anthropics
