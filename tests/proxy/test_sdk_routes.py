"""The routes that the SDKs of the vendors ask for: each is answered, or refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from areal_actors.proxy import create_app
from areal_actors.proxy.app import NOT_OFFERED
from areal_actors.proxy.exchange import Operations
from areal_actors_testing.serving import open_scripted_proxy

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
    ("DELETE", "/responses/{response_id}"),
    ("GET", "/responses/{response_id}/input_items"),
    ("GET", "/models"),
    ("GET", "/models/{model}"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_id}"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
}
OF_ANSWERED_PATHS = {("GET", "/chat/completions"), ("DELETE", "/models/{model}")}
"""Other methods of paths that are answered: 405 names the ones that there are."""


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


def test_the_sdks_routes_are_found():
    """The pattern reads the sources as they are now."""
    assert len(ROUTES) > 200
    assert set(ROUTES) >= ANSWERED


def test_every_route_of_the_sdks_is_answered_or_refused_with_a_reason(operations):
    """A client that uses a resource of its SDK is told what is not offered, and what to do instead."""
    for method, path in ROUTES:
        found, reason = operations.find(path), operations.explain(path)
        if (method, path) in ANSWERED:
            assert is_answered(operations, method, path), path
        elif (method, path) in OF_ANSWERED_PATHS:
            assert found is not None, path
            assert not is_answered(operations, method, path), path
        else:
            assert found is None, path
            assert reason is not None, path


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "is_anthropics"),
    [("/v1/embeddings", False), ("/v1/messages/batches", True), ("/v1/responses/compact", False)],
)
async def test_a_refused_route_says_what_is_not_offered(path, is_anthropics):
    """In the dialect of the client, below a session as well; the answer is not worth a retry."""
    reason = NOT_OFFERED[path.removeprefix("/v1/")]
    async with open_scripted_proxy() as proxy, proxy.open_session() as session, httpx.AsyncClient() as http:
        prefix = session.base_url.rstrip("/").removesuffix("/v1")
        for url in (proxy.url + path, prefix + path):
            answer = await http.post(url, json={})

            assert answer.status_code == 404
            assert reason in answer.json()["error"]["message"]
            assert (answer.json().get("type") == "error") is is_anthropics
