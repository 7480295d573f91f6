"""A real Prometheus scrapes a proxy, and every panel of the dashboard asks for metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from pathlib import Path

import anyio
import httpx
import pytest
import yaml
from tests.stacks.inference_stack import encode, open_inference_stack

from areal_actors.messages import DescribeEndpoint
from areal_actors.proxy import ProxyServer
from areal_actors.testing.engines import EchoEngine

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
NUMBERS = {
    "step_reward": 0.5,
    "step_source_reward": {"a-b": 0.25, "a.b": 0.75},
    "journal_bytes": 4096.0,
    "not_learning": {"equal_rewards": 1.0, "cut_answers": 0.0},
}


def expressions() -> list[str]:
    """The queries of the dashboard, for all services, and those of the alerts."""
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    found += [rule["expr"] for group in groups for rule in group["rules"]]
    return [expression.replace("$instance", ".*") for expression in found]


def test_dashboard_asks_for_documented_metrics():
    """Each panel stands on a name of the documentation, or on a number of a step."""
    document = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
    names = {name for expression in expressions() for name in re.findall(r"(?:areal|process)_\w+", expression)}

    assert len(names) > 20
    for name in names:
        known = name.removesuffix("_bucket").removeprefix("areal_step_")
        assert f"`{known}`" in document or f"`{name}`" in document, name


async def find_free_port() -> int:
    """A port that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="apt-get install prometheus")
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_prometheus_reads_what_a_service_says(tmp_path: Path):
    """With the configuration of the examples: the target is up, the numbers arrive, and no query is malformed."""
    engine = EchoEngine(lambda _: encode("one two"))
    async with open_inference_stack(engine=engine, max_seconds=60) as inference:
        proxy = ProxyServer(
            sessions=inference.sessions,
            exports=inference.exports,
            capacity=inference.capacity,
            generation=inference.generation,
            read_run=lambda: NUMBERS,
        )
        url = (await (await inference.system.spawn(proxy)).ask(DescribeEndpoint())).url
        text = (DEPLOY / "prometheus.yml").read_text()
        config = tmp_path / "prometheus.yml"
        shutil.copy(DEPLOY / "alerts.yml", tmp_path)
        config.write_text(text.replace("127.0.0.1:8080", url.removeprefix("http://")).replace("15s", "1s"))
        port = await find_free_port()
        command = ["prometheus", f"--config.file={config}", f"--web.listen-address=127.0.0.1:{port}"]
        command.append(f"--storage.tsdb.path={tmp_path / 'data'}")
        with (tmp_path / "log").open("w") as log:
            process = await anyio.to_thread.run_sync(lambda: subprocess.Popen(command, stderr=log, stdout=log))
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:

                async def ask(query: str) -> list[dict]:
                    answer = (await http.get("/api/v1/query", params={"query": query})).json()
                    assert "success" == answer["status"], (query, answer)
                    return answer["data"]["result"]

                with anyio.fail_after(50):
                    while True:
                        try:
                            if found := await ask("areal_step_reward"):
                                break
                        except (httpx.TransportError, ValueError):
                            pass  # Prometheus is starting, and answers without JSON
                        await anyio.sleep(0.2)
                assert "0.5" == found[0]["value"][1]
                for expression in expressions():
                    await ask(expression)
                rewards = await ask("areal_step_source_reward")
                by_source = {each["metric"]["source"]: each["value"][1] for each in rewards}
                assert {"a-b": "0.25", "a.b": "0.75"} == by_source
                causes = {each["metric"]["cause"]: each["value"][1] for each in await ask("areal_not_learning")}
                assert {"equal_rewards": "1", "cut_answers": "0"} == causes
                (build,) = await ask("areal_build_info")
                assert build["metric"]["version"]
        finally:
            process.terminate()
            await anyio.to_thread.run_sync(process.wait)
