"""The proxy over real sockets, seen by a plain HTTP client: its routes, and who may use them."""

from __future__ import annotations

import httpx
import pytest
from tests.proxy.plain import BODY, CHAT, bearer, start

from areal_actors.cache import SessionSettings
from areal_actors.proxy import ProxyConfig
from areal_actors_testing.serving import open_scripted_proxy

pytestmark = pytest.mark.anyio


async def test_session_from_start_to_export():
    """Every route of the life of a session, by URL, in the forms that are documented."""
    async with open_scripted_proxy() as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        granted = await http.post("/grant_capacity", headers=proxy.admin_headers)
        started = await start(http, proxy, task_id="task-0-0")
        session, own = started["session_id"], bearer(started["api_key"])
        first = (await http.post(f"/{session}{CHAT}", json=BODY)).json()
        second = (await http.post(f"/{session}{CHAT}", json=BODY)).json()
        named = await http.post(
            f"/{session}/rl/set_reward", json={"interaction_id": first["id"], "reward": 0.5}, headers=own
        )
        last = await http.post(f"/{session}/rl/set_reward", json={"reward": 1.0}, headers=own)
        ended = await http.post(f"/{session}/rl/end_session", headers=own)
        exports = [
            await http.post(
                "/export_trajectories",
                json={"session_id": session, "discount": 0.9, "style": "individual"},
                headers=proxy.admin_headers,
            )
            for _ in range(2)
        ]

    assert session.startswith("task-0-0-")
    assert granted.json()["capacity"] == 1023
    assert first["choices"][0]["message"]["content"] == "one two three "
    assert named.json() == {"status": "success", "interaction_id": first["id"]}
    assert last.json() == {"status": "success", "interaction_id": second["id"]}
    assert ended.json()["interaction_count"] == 2
    assert exports[0].json() == exports[1].json()
    assert [row["reward"] for row in exports[0].json()["trajectories"]] == [0.5, 1.0]


async def test_session_by_key_alone():
    """``GET /rl/v1/start_session``, chat by key in either header, rewards by query, and finalize."""
    async with open_scripted_proxy() as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        started = await http.get("/rl/v1/start_session", params={"task_id": "t"}, headers=proxy.admin_headers)
        key, session = started.json()["api_key"], started.json()["session_id"]
        by_bearer = await http.post(CHAT, json=BODY, headers=bearer(key))
        by_x_api_key = await http.post("/chat/completions", json=BODY, headers={"x-api-key": key})
        named = await http.post(CHAT, json=BODY | {"session_id": session}, headers=bearer(key))
        rewarded = await http.post(
            "/rl/v1/set_reward",
            params={"session_id": session, "completion_id": by_bearer.json()["id"], "reward": "0.25"},
            headers=bearer(key),
        )
        finalized = await http.post("/rl/v1/finalize", json={"final_reward": 1}, headers=bearer(key))
        late = await http.post(CHAT, json=BODY, headers=bearer(key))

    assert [r.status_code for r in (by_bearer, by_x_api_key, named, rewarded, finalized)] == [200] * 5
    assert finalized.json()["interaction_count"] == 3
    assert late.status_code == 410
    assert late.json()["error"]["code"] == "session_ended"


async def test_permissions_of_each_key():
    """No key, wrong keys, other sessions' keys and other people's sessions are refused, each with its status."""
    async with open_scripted_proxy() as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        mine, other = await start(http, proxy), await start(http, proxy)
        statuses = {
            "no key": (await http.post(CHAT, json=BODY)).status_code,
            "wrong key": (await http.post(CHAT, json=BODY, headers=bearer("sk-wrong"))).status_code,
            "placeholder on a URL": (
                await http.post(f"/{mine['session_id']}{CHAT}", json=BODY, headers=bearer("DUMMY"))
            ).status_code,
            "another's key on a URL": (
                await http.post(f"/{mine['session_id']}{CHAT}", json=BODY, headers=bearer(other["api_key"]))
            ).status_code,
            "another's session by query": (
                await http.post(
                    CHAT, json=BODY, params={"session_id": mine["session_id"]}, headers=bearer(other["api_key"])
                )
            ).status_code,
            "unknown session": (await http.post(f"/nobody{CHAT}", json=BODY)).status_code,
            "start without admin key": (await http.post("/rl/start_session", json={})).status_code,
            "export with a session's key": (
                await http.post("/export_trajectories", json={}, headers=bearer(mine["api_key"]))
            ).status_code,
            "the administrator ends it": (
                await http.post("/rl/end_session", json={"session_id": mine["session_id"]}, headers=proxy.admin_headers)
            ).status_code,
        }

    assert statuses == {
        "no key": 401,
        "wrong key": 401,
        "placeholder on a URL": 200,
        "another's key on a URL": 401,
        "another's session by query": 401,
        "unknown session": 404,
        "start without admin key": 401,
        "export with a session's key": 401,
        "the administrator ends it": 200,
    }


async def test_admin_key_is_not_a_session_key():
    """Every request of the administrator would become one of its turns."""
    async with open_scripted_proxy() as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        body = {"api_key": proxy.endpoint.admin_key}
        answer = await http.post("/rl/start_session", json=body, headers=proxy.admin_headers)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "api_key"
    assert proxy.endpoint.admin_key not in answer.text


async def test_invalid_reward_is_refused():
    """NaN, text, nothing, an unknown completion, and a session that is settled."""
    settings = SessionSettings(grace_seconds=0.0)
    async with open_scripted_proxy(settings=settings) as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        started = await start(http, proxy)
        session, http.headers["x-api-key"] = started["session_id"], started["api_key"]
        path = f"/{session}/rl/set_reward"
        early = await http.post(path, json={"reward": 1})
        await http.post(f"/{session}{CHAT}", json=BODY)
        nan_body = await http.post(path, content=b'{"reward": NaN}')
        nan_query = await http.post(path, params={"reward": "nan"})
        text = await http.post(path, json={"reward": "good"})
        quoted, flag = [await http.post(path, json={"reward": value}) for value in ("0.5", True)]
        listed = await http.post(path, json={"reward": [1]})
        nothing = await http.post(path, json={})
        unknown = await http.post(path, json={"reward": 1, "completion_id": "chatcmpl-none"})
        two = await http.post(path, json={"reward": 1, "completion_id": "chatcmpl-1", "interaction_id": "chatcmpl-2"})
        await http.post(f"/{session}/rl/end_session")
        settled = await http.post(path, json={"reward": 1})

    assert early.status_code == 404
    assert [r.status_code for r in (nan_body, nan_query, text, quoted, flag, listed, nothing)] == [400] * 7
    assert {r.json()["error"]["param"] for r in (nan_query, text, quoted, flag, listed, nothing)} == {"reward"}
    assert unknown.status_code == 404
    assert (two.status_code, two.json()["error"]["param"]) == (400, "completion_id")
    assert settled.status_code == 410


async def test_misspelt_argument_is_refused():
    """Otherwise the session would silently be in no group, and the reward would go to the last answer."""
    config = ProxyConfig(inert_parameters=("trace",))
    async with open_scripted_proxy(config=config) as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        apart = await http.post("/rl/start_session", json={"group_idd": "g"}, headers=proxy.admin_headers)
        http.headers["x-api-key"] = (await start(http, proxy))["api_key"]
        answer = (await http.post(CHAT, json=BODY)).json()["id"]
        body, query = {"reward": 1, "completionid": answer}, {"reward": "1", "completionid": answer}
        elsewhere = [await http.post("/rl/set_reward", json=body), await http.post("/rl/set_reward", params=query)]
        known = await http.post("/rl/set_reward", json={"reward": 1, "nothing": None, "trace": "t-1"})

    assert [r.status_code for r in (apart, *elsewhere)] == [400] * 3
    assert "did you mean group_id?" in apart.json()["error"]["message"]
    assert {r.json()["error"]["param"] for r in elsewhere} == {"completionid"}
    assert known.status_code == 200


async def test_start_without_capacity_is_429():
    """429 with a time to wait; a place that is free again is taken again."""
    async with open_scripted_proxy(max_sessions=1) as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        conflicting = await http.post("/rl/start_session", json={"api_key": "short"}, headers=proxy.admin_headers)
        await start(http, proxy)
        full = await http.post("/rl/start_session", json={}, headers=proxy.admin_headers)

    assert conflicting.status_code == 400
    assert full.status_code == 429
    assert int(full.headers["retry-after"]) >= 1
    assert full.json()["error"]["type"] == "rate_limit_error"


async def test_unknown_path_and_method_are_errors():
    """404 and 405 speak the dialect, too, and echo nothing of the path."""
    async with open_scripted_proxy() as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        missing = await http.post("/secret-session/v1/embeddings", json={})
        method = await http.get(CHAT)

    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert "secret-session" not in missing.text
    assert (method.status_code, method.headers["allow"]) == (405, "POST")


async def test_unforeseen_error_is_logged_and_hidden(caplog):
    """A bug answers 500 with the request's id and not a word more; the log has the id, and no session in full."""

    async def script(request):
        raise ValueError("secret of the house")
        yield

    async with open_scripted_proxy(script) as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        session = (await start(http, proxy))["session_id"]
        response = await http.post(f"/{session}{CHAT}", json=BODY)

    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"
    assert "secret" not in response.text
    assert "Traceback" not in response.text
    assert response.headers["x-request-id"] in response.json()["error"]["message"]
    assert [response.headers["x-request-id"] in record.getMessage() for record in caplog.records] == [True]
    assert "secret of the house" in caplog.text
    assert session not in caplog.text


async def test_choices_and_agent_tags_reach_the_sessions():
    """``n`` makes siblings, each with a name of its own, and the header names the agent that asked."""
    async with open_scripted_proxy() as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        started = await start(http, proxy)
        session, http.headers["x-api-key"] = started["session_id"], started["api_key"]
        path = f"/{session}{CHAT}"
        answer = (await http.post(path, json=BODY | {"n": 2}, headers={"x-areal-agent": "critic"})).json()
        second = answer["choices"][1]["interaction_id"]
        rewarded = await http.post(f"/{session}/rl/set_reward", json={"completion_id": second, "reward": 1})

    assert len(answer["choices"]) == 2
    assert answer["id"] == answer["choices"][0]["interaction_id"] != second
    assert rewarded.status_code == 200
    assert proxy.sessions.requests[0].tag == "critic"
