"""The OpenAPI document: of 3.1, about the routes that there are, and true of what they answer."""

from __future__ import annotations

import re

import httpx
import orjson
import pytest

from areal_actors.domain import ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStarted
from areal_actors.proxy import ProxyConfig, create_app
from areal_actors.proxy.dialects.chat.request import CHAT_FIELDS
from areal_actors.proxy.dialects.fields import Support
from areal_actors.proxy.exchange import Operations
from areal_actors.proxy.openapi import create_document, describe_routes
from areal_actors_testing.serving import open_scripted_proxy

jsonschema = pytest.importorskip("jsonschema", reason="needs a JSON schema validator: pip install jsonschema")

MESSAGES = [{"role": "user", "content": "one two three"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
DOCUMENT = orjson.loads(orjson.dumps(create_document(describe_routes())))
CHAT = DOCUMENT["paths"]["/v1/chat/completions"]["post"]


def check(schema, value):
    """Raise unless ``value`` fits, references into the document included."""
    jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(value)


def fits(schema, value) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def described(path: str, method: str):
    """The description of what serves ``path``, be the session's id in it or not."""
    for pattern, item in DOCUMENT["paths"].items():
        if re.fullmatch(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(pattern)), path) and method in item:
            return item[method]
    raise AssertionError(f"{method} {path} is not described")


def check_answer(answer: httpx.Response):
    """Its status, its media type and its body are described where its route is."""
    operation = described(answer.request.url.path, answer.request.method.lower())
    content = operation["responses"][str(answer.status_code)]["content"]
    media = answer.headers["content-type"].split(";")[0]
    if media == "application/json":
        check(content[media]["schema"], answer.json())
    else:
        check(content[media]["schema"], answer.text)


OTHERS = (
    ("completions", {"prompt": "one two", "n": 2, "logprobs": 2}),
    ("messages", {"messages": MESSAGES, "max_tokens": 9}),
    ("messages/count_tokens", {"messages": MESSAGES}),
)


async def call_script(request):
    """Thinks, speaks and calls."""
    yield ReasoningDelta(text="Let me add.")
    yield TextDelta(text="Adding.")
    yield ToolCallStarted(index=0, id="call_7", name="add")
    yield ToolArgumentsDelta(index=0, text='{"a": 1}')


# --------------------------------------------------------------------------------------------------- the document


def test_every_schema_is_one():
    """Of draft 2020-12, as OpenAPI 3.1 has it; references lead somewhere."""
    schemas = [*DOCUMENT["components"]["schemas"].values()]
    for item in DOCUMENT["paths"].values():
        for operation in (item[method] for method in ("get", "post") if method in item):
            bodies = [operation["requestBody"]] if "requestBody" in operation else []
            for body in (*bodies, *operation["responses"].values()):
                schemas += [media["schema"] for media in body["content"].values()]

    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
        name = schema.get("$ref", "#/components/schemas/Error").rpartition("/")[2]
        assert name in DOCUMENT["components"]["schemas"]


def test_every_route_is_described_and_exists():
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


def test_requests_are_described_by_the_table():
    """Every parameter, with what becomes of it; what is refused has no value that asks for something."""
    schema = CHAT["requestBody"]["content"]["application/json"]["schema"]
    refused = [p.name for p in CHAT_FIELDS.fields if p.support is Support.REFUSED]

    assert [p.name for p in CHAT_FIELDS.fields] == list(schema["properties"])
    assert all(p.kind is not None for p in CHAT_FIELDS.fields if p.support is Support.HONOURED)
    assert not any(fits(schema, {"messages": MESSAGES, name: "x" * 9}) for name in refused)
    assert all(fits(schema, {"messages": MESSAGES, name: None}) for name in refused)


def test_settings_are_seen():
    """A name that the settings ignore is described as ignored; what is honoured stays so."""
    routes = describe_routes(["mystery", "echo", "temperature"])
    properties = routes[0].request["properties"]

    assert "ignored" in properties["mystery"]["description"]
    assert "ignored" in properties["echo"]["description"]
    assert "ignored" not in properties["temperature"]["description"]


# ----------------------------------------------------------------------------------------------------- is it true?


@pytest.mark.anyio
async def test_answers_are_as_described():
    """The life of a session, and each way in which it can be refused; JSON and streams."""
    async with open_scripted_proxy(call_script) as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        admin = proxy.admin_headers
        opened = await http.post("/rl/start_session", json={"task_id": "t"}, headers=admin)
        session, key = opened.json()["session_id"], {"authorization": f"Bearer {opened.json()['api_key']}"}
        completing = {"x-api-key": opened.json()["completion_key"]}
        chat = {"messages": MESSAGES, "tools": [TOOL], "logprobs": True, "n": 2}
        answers = [
            opened,
            await http.get("/rl/start_session", headers=admin),
            await http.post("/grant_capacity", headers=admin),
            await http.post("/v1/chat/completions", json=chat, headers=key),
            await http.post("/v1/chat/completions", json=chat | {"stream": True}, headers=key),
            await http.post(f"/{session}/v1/chat/completions", json={"messages": MESSAGES}),
            await http.post(f"/{session}/v1/chat/completions", json={}),
            await http.post("/v1/chat/completions", json={"messages": MESSAGES}),
            *[
                await http.post(f"/v1/{path}", json=body | extra, headers=headers)
                for path, body in OTHERS
                for extra, headers in (({}, key), ({"stream": True}, key), ({"mystery": 1}, key), ({}, {}))
            ],
            response := await http.post(f"/{session}/v1/responses", json={"input": "one"}),
            *[
                await getattr(http, method)(f"/{session}/v1/responses/{response.json()['id']}{path}")
                for method, path in (("get", ""), ("get", "/input_items"), ("delete", ""), ("delete", ""), ("get", ""))
            ],
            await http.get("/v1/responses/resp_1"),
            await http.get("/v1/models/policy"),
            await http.post("/nobody/v1/chat/completions", json={"messages": MESSAGES}),
            await http.post(f"/{session}/rl/set_reward", json={"reward": 1}),
            await http.post(f"/{session}/rl/set_reward", json={"reward": 1}, headers=key),
            await http.post("/rl/set_reward", json={"reward": 1}, headers=completing),
            await http.post("/rl/set_reward", json={"reward": "much"}, headers=key),
            await http.post("/rl/end_session", headers=key),
            await http.post(f"/{session}/rl/finalize", json={"final_reward": 1.0}, headers=key),
            await http.post("/v1/chat/completions", json={"messages": MESSAGES}, headers=key),
            await http.post("/export_trajectories", json={"session_id": session}, headers=admin),
            await http.post("/export_trajectories", json={"session_id": session, "style": "x"}, headers=admin),
            await http.post("/export_trajectories", json={"session_id": session}),
            *[await http.get(path) for path in ("/v1/models", "/health", "/metrics", "/openapi.json")],
        ]

    for answer in answers:
        check_answer(answer)
    assert {200, 400, 401, 403, 404, 410, 422} == {answer.status_code for answer in answers}
    assert DOCUMENT == answers[-1].json()


@pytest.mark.anyio
async def test_chunks_are_as_described():
    """Every event of a stream, the usage too."""
    body = {"messages": MESSAGES, "tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}}
    async with open_scripted_proxy(call_script) as proxy, proxy.open_session() as session, httpx.AsyncClient() as http:
        answer = await http.post(f"{session.base_url}/chat/completions", json=body | {"logprobs": True})
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]

    assert len(events) > 4
    for event in events:
        check({"$ref": "#/components/schemas/ChatCompletionChunk"}, orjson.loads(event))


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
async def test_the_schema_and_the_proxy_agree(is_valid: bool):  # noqa: FBT001
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
async def test_people_find_the_routes():
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
async def test_the_settings_reach_the_document():
    """What the proxy ignores, its document says."""
    config = ProxyConfig(inert_parameters=("mystery",))
    async with open_scripted_proxy(config=config) as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        document = (await http.get("/openapi.json")).json()

    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert "mystery" in body["content"]["application/json"]["schema"]["properties"]
