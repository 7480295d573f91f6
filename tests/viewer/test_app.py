"""The server of the page, over real sockets: who may read, what is answered, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import anyio
import httpx
import pytest
from tests.stacks.run_files import step

from areal_actors.dashboard import RunDirectory
from areal_actors.errors import ConfigError
from areal_actors.viewer import PollIntervals, open_page, view_run

pytestmark = pytest.mark.anyio


@pytest.fixture
async def page(directory):
    """A page of one run, and a client that has followed its URL."""
    run = view_run(directory)
    async with open_page({run.name: run}) as url, httpx.AsyncClient(base_url=url.split("?")[0]) as client:
        yield client, url


async def test_page_url_exchanges_its_token_for_a_cookie(page):
    """The token becomes a cookie that scripts and other sites cannot use, and leaves the address."""
    client, url = page
    redirect = await client.get(url)

    assert (303, "/") == (redirect.status_code, redirect.headers["location"])
    cookie = redirect.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    found = await client.get("/")
    assert 200 == found.status_code
    assert "default-src 'none'" in found.headers["content-security-policy"]
    assert "no-store" == found.headers["cache-control"]


@pytest.mark.parametrize("path", ["/", "/static/page.js", "/api/run?run=shown/trial"])
@pytest.mark.parametrize("token", [None, "wrong", "é"])
async def test_page_requires_its_token(page, path, token):
    """Not as a cookie, a bearer or in the URL."""
    client, _ = page
    client.cookies.clear()
    for given in (
        {"params": {"token": token}} if token is not None else {},
        {"headers": {"authorization": f"Bearer {token}".strip().encode()}},
        {"headers": {"cookie": f"areal_page_{client.base_url.port}={token}".encode()}},
    ):
        answer = await client.get(path, **given)
        assert 401 == answer.status_code
        assert "token" in answer.json()["error"]


async def test_page_accepts_a_bearer_token(page):
    """Each reader of the API answers with JSON, under the headers of the page."""
    client, url = page
    client.headers["authorization"] = f"Bearer {url.split('token=')[1]}"
    run = {"run": "shown/trial"}

    (row,) = (await client.get("/api/runs")).json()["runs"]
    assert ("shown/trial", 3, 0.3) == (row["name"], row["steps"], row["reward_last"])
    assert {"proxy.admin_key": "area…"} == row["settings"]
    assert 3 == (await client.get("/api/run", params=run)).json()["steps"]
    curves = (await client.get("/api/curves", params=run | {"key": "reward"})).json()
    assert ([1.0, 2.0, 3.0], [0.1, 0.2, 0.3]) == (curves["x"], curves["curves"]["shown/trial"]["reward"]["mean"])
    numbers = await client.get("/api/metrics.csv", params=run)
    assert "attachment" in numbers.headers["content-disposition"]
    assert "run,step,version,reward,loss,entropy\r\nshown/trial,1,1,0.1,0.5,1" in numbers.text
    assert 2 == len((await client.get("/api/failures", params=run)).json()["failures"])
    assert 2 == len((await client.get("/api/session", params=run | {"index": 0})).json()["turns"])
    assert 2 == len((await client.get("/api/groups", params=run | {"version": 1})).json()["groups"])
    assert 2 == len((await client.get("/api/group", params=run | {"version": 1, "task": 0})).json()["episodes"])
    assert [] == (await client.get("/api/served", params=run)).json()["sessions"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/run?run=other", 404),
        ("/api/run", 404),
        ("/api/session?run=shown/trial&index=9", 404),
        *(
            (f"/api/{request}", 400)
            for request in (
                "session?run=shown/trial",
                "session?run=shown/trial&index=x",
                "group?run=shown/trial&task=0",
                "groups?run=shown/trial&version=one",
                "groups?run=shown/trial&trait=odd",
                "curves?run=shown/trial&axis=mood",
                "curves?run=shown/trial&low=x",
                "curves?run=shown/trial&points=",
                "failures?run=shown/trial&first=x",
            )
        ),
        ("/api/group?run=shown/trial&version=1&task=..%2f..%2fmetrics", 404),
        ("/static/..%2f__init__.py", 404),
        ("/static/app.py", 404),
        ("/elsewhere", 404),
    ],
)
async def test_page_refuses_invalid_requests(page, path, status):
    """And no file outside of the page's own is read."""
    client, url = page
    client.headers["authorization"] = f"Bearer {url.split('token=')[1]}"

    assert status == (await client.get(path)).status_code
    assert 405 == (await client.post(path)).status_code


async def test_unreadable_run_does_not_hide_the_others(directory, tmp_path):
    """Its row says why, and so does every other request for it."""
    broken = RunDirectory(path=tmp_path / "broken" / "trial")
    broken.metrics.mkdir(parents=True)
    runs = {run.name: run for run in (view_run(directory), view_run(broken))}
    async with open_page(runs, token="right") as url, httpx.AsyncClient(base_url=url.split("/?")[0]) as client:
        client.headers["authorization"] = "Bearer right"
        shown, hidden = (await client.get("/api/runs")).json()["runs"]
        answer = await client.get("/api/run", params={"run": "broken/trial"})

    assert ("shown/trial", 3) == (shown["name"], shown["steps"])
    assert ("broken/trial", "unreadable") == (hidden["name"], hidden["status"])
    assert "Is a directory" in hidden["reason"]
    assert 500 == answer.status_code


async def test_page_shows_a_run_without_files(tmp_path):
    """The page opens before the first step."""
    run = view_run(RunDirectory(path=tmp_path), status=lambda: {"trainer": {"num_queued": 2}})
    async with open_page({run.name: run}, token="right") as url, httpx.AsyncClient() as client:
        client.base_url = url.split("/?")[0]
        client.headers["authorization"] = "Bearer right"
        found = (await client.get("/api/run", params={"run": run.name})).json()
        assert (True, 0, {"trainer": {"num_queued": 2}}) == (found["is_live"], found["steps"], found["actors"])
        for path, part in (("failures", "failures"), ("groups", "groups"), ("served", "sessions"), ("curves", "x")):
            assert [] == (await client.get(f"/api/{path}", params={"run": run.name})).json()[part]


async def test_page_events_name_changed_parts(directory):
    """A stream that is open does not keep the server."""
    run = view_run(directory)
    heard = []
    ready, over = anyio.Event(), anyio.Event()

    async def listen(url: str) -> None:
        headers = {"authorization": "Bearer right"}
        address = url.replace("/?token=right", "/api/events")
        async with httpx.AsyncClient() as client, client.stream("GET", address, headers=headers) as stream:
            async for line in stream.aiter_lines():
                ready.set()
                if line.startswith("data: "):
                    heard.append(json.loads(line.removeprefix("data: ")))
                    over.set()

    with anyio.fail_after(20):
        page = open_page({run.name: run}, token="right", intervals=PollIntervals(seconds=0.1))
        async with anyio.create_task_group() as tasks, page as url:
            tasks.start_soon(listen, url)
            await ready.wait()
            while not over.is_set():  # a change before the first look is not heard
                with directory.metrics.open("a") as file:
                    file.write(json.dumps(step(4)) + "\n")
                with anyio.move_on_after(0.2):
                    await over.wait()

    assert {"run": "shown/trial", "parts": ["metrics"]} == heard[0]


async def test_page_names_a_port_in_use(directory):
    """Before anything is shown; the message names the option of the command, or the setting of a run."""
    run = view_run(directory)
    async with open_page({run.name: run}) as url:
        port = int(url.split(":")[2].split("/")[0])
        with pytest.raises(ConfigError, match=f"^--port: 127.0.0.1:{port} is in use"):
            async with open_page({run.name: run}, port=port):
                pass
        with pytest.raises(ConfigError, match=r"^logging\.page_port: .* is in use"):
            async with open_page({run.name: run}, port=port, prefix="logging.page_"):
                pass


def test_view_command_serves_until_interrupted(directory, tmp_path):
    """A real process without arguments; its page answers, and Ctrl-C ends it with status 0."""
    directory.path.parent.rename(tmp_path / "runs")
    command = [sys.executable, "-m", "areal_actors", "view"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("1 run at http://127.0.0.1:")
        answer = httpx.get(line.split()[-1], follow_redirects=True)
        process.send_signal(signal.SIGINT)
        status = process.wait(30)

    assert 200 == answer.status_code
    assert 0 == status
