"""The OpenAPI document: of 3.1, about the routes that there are, and true of what they answer."""

from __future__ import annotations

import httpx
import orjson
import pytest

from areal_actors.proxy import ProxyConfig, create_app
from areal_actors.proxy.dialects.chat.request import CHAT_FIELDS
from areal_actors.proxy.dialects.fields import Support
from areal_actors.proxy.exchange import Operations
from areal_actors.proxy.openapi import create_document, describe_routes
from areal_actors_testing.serving import open_scripted_proxy

jsonschema = pytest.importorskip("jsonschema", reason="needs a JSON schema validator: pip install jsonschema")


@pytest.fixture
def anyio_backend() -> str:
    """Use one event loop: dialects do not depend on it."""
    return "asyncio"


MESSAGES = [{"role": "user", "content": "one two three"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
DOCUMENT = orjson.loads(orjson.dumps(create_document(describe_routes())))
CHAT = DOCUMENT["paths"]["/v1/chat/completions"]["post"]


def fits(schema, value) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


# --------------------------------------------------------------------------------------------------- the document


def test_openapi_schemas_are_valid():
    """Of draft 2020-12, as OpenAPI 3.1 has it; references lead somewhere."""
    schemas = [*DOCUMENT["components"]["schemas"].values()]
    for item in DOCUMENT["paths"].values():
        for operation in (item[method] for method in ("get", "post") if method in item):
            bodies = [operation["requestBody"]] if "requestBody" in operation else []
            for body in (*bodies, *operation["responses"].values()):
                schemas += [media["schema"] for media in body["content"].values() if "schema" in media]

    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
        name = schema.get("$ref", "#/components/schemas/Error").rpartition("/")[2]
        assert name in DOCUMENT["components"]["schemas"]


def test_openapi_routes_are_those_served():
    """Operations, methods and sessions in paths, as the table has them that serves; every description has a name."""
    app = create_app(sessions=None, exports=None, capacity=None)
    (operations,) = [route for route in app.routes if isinstance(route, Operations)]
    found = {}
    for path, item in DOCUMENT["paths"].items():
        name, session = operations.find(path)
        methods = {method.upper() for method in item if method != "parameters"}
        assert (session is not None) is path.startswith("/{session_id}")
        found.setdefault(name, set()).update(methods)
    ids = [item[method]["operationId"] for item in DOCUMENT["paths"].values() for method in item if len(method) < 5]

    # ``HEAD`` is every ``GET`` without a body.
    assert {name: {*operation.methods} - {"HEAD"} for name, operation in operations._table.items()} == found
    assert len(ids) == len(set(ids))


def test_openapi_requests_follow_the_field_tables():
    """Every parameter, with what becomes of it; what is refused has no value that asks for something."""
    schema = CHAT["requestBody"]["content"]["application/json"]["schema"]
    refused = [p.name for p in CHAT_FIELDS.fields if p.support is Support.REFUSED]

    assert [p.name for p in CHAT_FIELDS.fields] == list(schema["properties"])
    assert all(p.kind is not None for p in CHAT_FIELDS.fields if p.support is Support.HONOURED)
    assert not any(fits(schema, {"messages": MESSAGES, name: "x" * 9}) for name in refused)
    assert all(fits(schema, {"messages": MESSAGES, name: None}) for name in refused)


def test_openapi_has_configured_inert_fields():
    """A name that the settings ignore is described as ignored; what is honoured stays so."""
    routes = describe_routes(["mystery", "echo", "temperature"])
    properties = routes[0].request["properties"]

    assert "ignored" in properties["mystery"]["description"]
    assert "ignored" in properties["echo"]["description"]
    assert "ignored" not in properties["temperature"]["description"]


# ----------------------------------------------------------------------------------------------------- is it true?


VALID = {
    "temperature": [0, 2, 0.5, None],
    "top_p": [0, 0.1, 1],
    "reasoning_effort": ["low", "none", "max", None],
    "top_k": [-1, 0, 5],
    "min_p": [0, 1],
    "n": [1, 2],
    "stop": ["x", ["x", "y"], None],
    "logit_bias": [{"17": 1.5}, {}],
    "seed": [-5, 2**62],
    "max_tokens": [1, 100],
    "metadata": [{"a": "b"}],
    "stream_options": [{"include_usage": True}],
    "tools": [[TOOL], [], None],
    "tool_choice": ["auto", "none"],
    "model": ["m", None],
    "user": ["anything", 5],
    "echo": [False, None],
    "unknown": [None, [], {}],
}
INVALID = {
    "temperature": [-1, 2.5, "1", []],
    "top_p": [-0.1, 1.1],
    "reasoning_effort": ["huge", 3],
    "top_k": [-2, 0.5],
    "n": [0, 129, "1"],
    "stop": [[""], ["x"] * 17, 5],
    "logit_bias": [{"a": 1}, {"1": 101}, 5],
    "seed": [2**63, "1"],
    "max_tokens": [0, 1.5],
    "metadata": [{"a": 1}],
    "tools": [5, [5]],
    "model": ["", 5],
    "echo": [True],
    "messages": [[], None, "hello", [{"role": "robot", "content": "x"}], [{"content": "x"}]],
    "unknown": [5],
}


@pytest.mark.anyio
@pytest.mark.parametrize("is_valid", [True, False])
async def test_openapi_agrees_with_the_parser(is_valid: bool):  # noqa: FBT001
    """Value by value: what fits is answered, what does not is refused with 400."""
    schema = CHAT["requestBody"]["content"]["application/json"]["schema"]
    async with open_scripted_proxy() as proxy, proxy.open_session() as session, httpx.AsyncClient() as http:
        for name, values in (VALID if is_valid else INVALID).items():
            for value in values:
                body = {"messages": MESSAGES, name: value}
                answer = await http.post(f"{session.base_url}/chat/completions", json=body)

                assert is_valid is fits(schema, body), body
                assert (200 if is_valid else 400) == answer.status_code, (body, answer.text)


@pytest.mark.anyio
async def test_routes_page_lists_the_routes():
    """At the URL that the terminal shows, without a key, and below a path of a proxy in front."""
    async with open_scripted_proxy() as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        pages = [await http.get(path) for path in ("/", "/docs", "/v1/docs")]
        alive = await http.get("/livez")

    assert {"text/html; charset=utf-8"} == {page.headers["content-type"] for page in pages}
    assert 1 == len({page.text for page in pages})
    paths = {path for path in DOCUMENT["paths"] if not path.startswith("/{session_id}")}
    assert all(f" {path}</code>" in pages[0].text for path in paths)
    assert (200, {"status": "ok", "requests": 0}) == (alive.status_code, alive.json())


@pytest.mark.anyio
async def test_openapi_document_follows_the_settings():
    """The document names the parameters that the proxy ignores."""
    config = ProxyConfig(inert_parameters=("mystery",))
    async with open_scripted_proxy(config=config) as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        document = (await http.get("/openapi.json")).json()

    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert "mystery" in body["content"]["application/json"]["schema"]["properties"]
