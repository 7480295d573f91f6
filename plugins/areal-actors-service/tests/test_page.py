"""The page of a host: who sees which trials, and how access begins and ends. Only the services are scripted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from attrs import frozen
from scripted_provider import ScriptedProvider
from tests.stacks.run_files import step, write_run

from areal_actors.config import create_config
from areal_actors.dashboard.records import append_lines, format_record
from areal_actors.messages import CreateKey, RevokeKey
from areal_actors.viewer import PollIntervals
from areal_actors_service.host import Host, open_host
from areal_actors_service.messages import TrialId, UseService

pytestmark = pytest.mark.anyio
NAMES = ["sums/ada", "sums/bob", "teams/red"]


@frozen(kw_only=True)
class Hosted:
    host: Host
    fileroot: Path

    @property
    def url(self) -> str:
        return self.host.endpoint.url

    async def key_of(self, user: str, experiment: str, trial: str) -> tuple[str, Any]:
        """A new key and its id."""
        issued = await self.host.accounts.ask(CreateKey(user=user, experiment=experiment, trial=trial))
        return issued.secret or "", issued.key.id

    @asynccontextmanager
    async def visit(self, key: str) -> AsyncIterator[httpx.AsyncClient]:
        """A browser that has sent a key in the form."""
        async with httpx.AsyncClient(base_url=self.url, follow_redirects=True, timeout=30) as browser:
            await browser.post("/login", data={"key": key})
            yield browser


@asynccontextmanager
async def open_hosted(tmp_path: Path, **settings: Any) -> AsyncIterator[Hosted]:
    """A host with three runs that its services have written."""
    fileroot = tmp_path / "runs"
    for name in NAMES:
        write_run(fileroot / name)
    document = {"experiment_name": "shared", "model": "tiny", "total_steps": 1, "host": {"port": 0}}
    config = create_config({**document, "fileroot": str(fileroot), **settings})
    intervals = PollIntervals(seconds=0.1, seconds_after_change=0.2)
    async with open_host(config, provider=ScriptedProvider(), page_intervals=intervals) as host:
        yield Hosted(host=host, fileroot=fileroot)


async def list_names(browser: httpx.AsyncClient) -> list[str]:
    return [run["name"] for run in (await browser.get("/api/runs")).raise_for_status().json()["runs"]]


async def test_page_shows_the_operator_every_trial(tmp_path: Path) -> None:
    """By the printed URL or by the admin key; a service that has no directory yet is listed, too."""
    async with open_hosted(tmp_path) as hosted:
        assert hosted.host.page_url is not None
        async with (
            httpx.AsyncClient(follow_redirects=True) as browser,
            hosted.visit(hosted.host.endpoint.admin_key) as other,
            hosted.host.hosting.stream(UseService(trial=TrialId("new", "one"))) as service,
        ):
            await anext(service)
            page = await browser.get(hosted.host.page_url)
            assert page.status_code == 200
            assert str(page.url) == f"{hosted.url}/"
            found = (await browser.get(f"{hosted.url}/api/runs")).json()["runs"]
            assert await list_names(other) == ["new/one", *NAMES]
    states = {run["name"]: run["state"] for run in found}
    assert states == {"new/one": "running", **dict.fromkeys(NAMES, "stopped")}
    assert next(run["requests"] for run in found if run["name"] == "new/one") == 1


async def test_page_shows_a_user_one_trial(tmp_path: Path) -> None:
    """With its conversations, and without the operator's settings; another's is not there, whatever is asked."""
    async with open_hosted(tmp_path) as hosted:
        key, _ = await hosted.key_of("ada", "sums", "ada")
        async with hosted.visit(key) as browser:
            assert await list_names(browser) == ["sums/ada"]
            own, others = {"run": "sums/ada"}, {"run": "sums/bob"}
            described = (await browser.get("/api/run", params=own)).json()
            assert (described["steps"], described["settings"], described["all_settings"]) == (3, {}, {})
            assert len((await browser.get("/api/groups", params=own)).json()["groups"]) == 3
            for reader in ("run", "curves", "metrics.csv", "failures", "groups", "group", "session", "served"):
                assert (await browser.get(f"/api/{reader}", params=others | {"index": 0})).status_code == 404
            both = await browser.get("/api/curves", params={"run": ["sums/ada", "sums/bob"], "key": "reward"})
            assert list(both.json()["curves"]) == ["sums/ada"]
            shown = [(await browser.get(path)).text for path in ("/", "/api/runs", "/api/run?run=sums/ada")]
            assert key not in "".join(shown)
            assert hosted.host.endpoint.admin_key not in "".join(shown)


async def test_page_hides_conversations_of_a_shared_trial(tmp_path: Path) -> None:
    """Rows do not say whose they are. A revoked user was one, too."""
    async with open_hosted(tmp_path) as hosted:
        key, _ = await hosted.key_of("ada", "teams", "red")
        _, other = await hosted.key_of("bob", "teams", "red")
        await hosted.host.accounts.ask(RevokeKey(key=other))
        async with hosted.visit(key) as browser:
            run = {"run": "teams/red"}
            assert len((await browser.get("/api/curves", params=run)).json()["x"]) == 3
            for reader in ("failures", "groups", "group", "session", "served"):
                refused = await browser.get(f"/api/{reader}", params=run | {"index": 0})
                assert refused.status_code == 403
                assert "only the operator" in refused.json()["error"]


async def write_steps(fileroot: Path) -> None:
    """Two runs that go on."""
    for number in range(4, 1000):
        for name in NAMES[:2]:
            append_lines(fileroot / name / "metrics.jsonl", [format_record(step(number))])
        await anyio.sleep(0.1)


async def test_page_refuses_a_revoked_key(tmp_path: Path) -> None:
    """Also in a page that is open, whose events end."""
    async with open_hosted(tmp_path) as hosted:
        key, name = await hosted.key_of("ada", "sums", "ada")
        async with hosted.visit(key) as browser:
            lines: list[str] = []
            async with browser.stream("GET", "/api/events") as events:
                arriving = events.aiter_lines()
                assert await anext(arriving) == ": connected"
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(write_steps, hosted.fileroot)
                    while not lines or not lines[-1].startswith("data"):
                        lines.append(await anext(arriving))
                    tasks.cancel_scope.cancel()
                await hosted.host.accounts.ask(RevokeKey(key=name))
                with anyio.fail_after(30):
                    lines += [line async for line in arriving]
            assert (await browser.get("/api/runs")).status_code == 401
            assert [line for line in lines if "bob" in line] == []


@pytest.mark.parametrize("key", ["", "sk-user-wrong", "é", "x" * 5000])
async def test_page_asks_again_after_a_wrong_key(tmp_path: Path, key: str) -> None:
    """With what is wrong, as text."""
    async with open_hosted(tmp_path) as hosted, httpx.AsyncClient(base_url=hosted.url) as browser:
        for answer, status in ((await browser.get("/"), 200), (await browser.post("/login", data={"key": key}), 401)):
            assert answer.status_code == status
            assert 'action="/login"' in answer.text
            assert "set-cookie" not in answer.headers
            assert "form-action 'self'" in answer.headers["content-security-policy"]
        for path in ("/api/runs", "/api/events", "/api/run?run=sums/ada"):
            assert (await browser.get(path)).status_code == 401
            assert (await browser.get(path, headers={"authorization": b"Bearer nothing"})).status_code == 401


async def test_page_can_be_switched_off(tmp_path: Path) -> None:
    """By the setting that holds for the pages of runs."""
    async with open_hosted(tmp_path, logging={"page": False}) as hosted, httpx.AsyncClient() as browser:
        assert hosted.host.page_url is None
        assert (await browser.get(f"{hosted.url}/")).json()["error"]["code"]
