"""The online service: it trains on what agents elsewhere do, as a run over a dataset would, and ends as it was asked to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil
import pytest
from click.testing import CliRunner

from areal_actors.__main__ import cli
from areal_actors.client import OpenAIProxyClient, create_agent_http_client
from areal_actors.config import RunConfig, create_config, load_config
from areal_actors.dashboard import RunDirectory
from areal_actors.datasets import Problems, load_problems
from areal_actors.messages import Endpoint
from areal_actors.run import Server, Trainer
from areal_actors.run.serving import describe_service
from areal_actors.telemetry import logging_to_stream
from areal_actors.training.checkpoints import find_checkpoints
from areal_actors.workflows import import_reference

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MAX_SECONDS = 120.0
QUICK = ("logging.tensorboard=false", "logging.display=plain", "engine.num_threads=1")


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    path = RunDirectory(path=run_dir).metrics
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


# ------------------------------------------------------------------------------------------ equal rows, equal losses


def essence(run_dir: Path) -> list[dict[str, Any]]:
    """What a run learnt, without the time that it took, and what was sampled meanwhile."""
    took = ("seconds", "per_second", "sampled_tokens")
    return [{k: v for k, v in row.items() if not k.endswith(took)} for row in read_metrics(run_dir)]


def rollouts(run_dir: Path) -> dict[str, list[str]]:
    """The dumped rows of both steps, by version and task; episodes of a group end in any order."""
    root = RunDirectory(path=run_dir).rollouts
    files = [path for path in root.rglob("*.jsonl") if path.parent.name in ("0", "1")]
    return {str(path.relative_to(root)): sorted(path.read_text().splitlines()) for path in files}


class Driver:
    """Runs the agent of a configuration on its problems, by way of a service elsewhere."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.agent = import_reference("tiny_agent.py:TinyAgent", directory=EXAMPLES)()

    async def drive(self, endpoint: Endpoint, problems: Problems) -> None:
        """The batches one after another; a service that is synchronous has room for no more than one."""
        size, members = self.config.batch_size, range(self.config.rollout.group_size)
        async with create_agent_http_client() as http:
            for step in range(self.config.total_steps):
                async with anyio.create_task_group() as tasks:
                    for position in range(step * size, (step + 1) * size):
                        for member in members:
                            tasks.start_soon(self._play, endpoint, http, problems, position, member)

    async def _play(
        self, endpoint: Endpoint, http: httpx.AsyncClient, problems: Problems, position: int, member: int
    ) -> None:
        client = OpenAIProxyClient(
            endpoint.url,
            admin_key=endpoint.admin_key,
            group_id=f"problem-{position}",
            group_size=self.config.rollout.group_size,
            position=position,
            member=member,
            seed=self.config.seed,
        )
        async with client as session:
            data = dict(problems.at(position).data)
            injected = {"base_url": session.base_url, "api_key": session.api_key, "http_client": http}
            await session.end_session(await self.agent.run(data, **injected))


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_service_learns_what_a_run_over_the_dataset_learns(tmp_path: Path, backend: str):
    """The same problems, seed and agent, synchronously: every dumped row and every figure of every step is equal."""
    settings = ("total_steps=2", "batch_size=3", "rollout.group_size=4", "engine.deterministic=true")
    more = ("trainer.dtype=float32", "eval_dataset=null", "engine.max_concurrent=12", *QUICK)
    config = load_config(EXAMPLES / "tiny.yaml", (*settings, *more))
    problems = load_problems(config.dataset, import_reference=import_reference, shuffle_seed=config.seed)
    inline, served = tmp_path / "inline", tmp_path / "served"
    Trainer(config).train(run_dir=inline, backend=backend)
    driver = Driver(config)

    async def serve() -> None:
        async with anyio.create_task_group() as tasks:

            def announce(endpoint: Endpoint, _directory: RunDirectory) -> None:
                tasks.start_soon(driver.drive, endpoint, problems)

            await Server(config).run(run_dir=served, announce=announce)
            tasks.cancel_scope.cancel()

    anyio.run(serve, backend=backend)

    assert 6 == len(rollouts(inline))
    assert rollouts(inline) == rollouts(served)
    assert essence(inline)[-2:] == essence(served)[-2:]
    assert all(row["loss"] and row["grad_norm"] for row in essence(served)[-2:])
