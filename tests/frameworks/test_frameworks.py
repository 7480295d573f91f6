"""Agents of frameworks train by the command line, and talk to nobody but the model.

``nox -s frameworks`` trains all of them, each in an environment of its own. Here those whose framework is installed are
trained; the two that need none, a script that blocks and a shell command, are trained with the other examples.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.frameworks.training import GUARD, ROOT, complaints, load_frameworks, run_elsewhere, train_one_step

from areal_actors.config import load_config

FRAMEWORKS = load_frameworks()
STEP = {"step": 1, "loss": 0.5, "reward": 0.1, "trained_tokens": 10, "failed_episodes": 0}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, framework in FRAMEWORKS.items() if framework.client])
def test_its_agent_trains(name, tmp_path):
    """One step: a loss, trained tokens, no failed episode, and no request to another machine."""
    framework = FRAMEWORKS[name]
    if not framework.is_installed:
        pytest.skip(f"needs {framework.install}")

    assert [] == train_one_step(framework.config, tmp_path / "run")


@pytest.mark.parametrize("name", [name for name, framework in FRAMEWORKS.items() if not framework.program])
def test_its_agent_runs_elsewhere(name, tmp_path):
    """With a server in its environment and nothing but the problem in its arguments, it earns a reward."""
    framework = FRAMEWORKS[name]
    if not framework.is_installed:
        pytest.skip(f"needs {framework.install}")

    assert [] == run_elsewhere(framework.config, tmp_path)


def test_every_example_is_trained():
    """Each configuration beside the agents is in the list, and each can be read."""
    configs = set((ROOT / "examples" / "frameworks").glob("*.yaml"))

    assert configs <= {framework.config for framework in FRAMEWORKS.values()}
    for framework in FRAMEWORKS.values():
        load_config(framework.config)


def test_every_example_says_what_it_needs():
    """The first line of a configuration, and the documentation, have the command that installs its framework."""
    page = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
    for framework in FRAMEWORKS.values():
        assert f"areal-actors train {framework.config.relative_to(ROOT)}" in page
        if framework.module:
            assert framework.install in framework.config.read_text(encoding="utf-8").splitlines()[0]
            assert framework.install in page


def test_every_environment_is_one_of_the_clients():
    """Frameworks are trained in versions that are known to understand the proxy."""
    described = tomllib.loads((ROOT / "tests" / "clients" / "environments.toml").read_text(encoding="utf-8"))
    clients = {framework.client for framework in FRAMEWORKS.values() if framework.client}

    assert clients <= set(described)
    assert 4 == len(clients)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, None),
        ({"loss": float("nan")}, "step 1: the loss is nan"),
        ({"reward": None}, "step 1: the reward is None"),
        ({"trained_tokens": 0}, "step 1: no token was trained"),
        ({"failed_episodes": 2}, "step 1: 2 episodes failed"),
    ],
)
def test_a_step_is_judged(tmp_path, change, complaint):
    """Every way in which a step can be worthless is named."""
    (tmp_path / "metrics.jsonl").write_text(json.dumps(STEP | change) + "\n", encoding="utf-8")

    assert ([complaint] if complaint else []) == complaints(tmp_path, tmp_path / "network.log")


def test_a_run_is_judged(tmp_path):
    """So are failures, peers, and steps that never were."""
    (tmp_path / "failures.jsonl").write_text('{"reason": "raised"}\n', encoding="utf-8")
    (tmp_path / "network.log").write_text("socket.connect\n", encoding="utf-8")

    assert [
        "it asked for the network: socket.connect",
        'an episode failed: {"reason": "raised"}',
        "it made no step",
    ] == complaints(tmp_path, tmp_path / "network.log")


def run_guarded(code: str, log: Path) -> subprocess.CompletedProcess[str]:
    """A Python process with the guard, and what it prints."""
    environment = os.environ | {"PYTHONPATH": str(GUARD), "NETWORK_LOG": str(log)}
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize(
    "attempt",
    [
        "socket.create_connection(('192.0.2.1', 80), timeout=1)",
        "socket.getaddrinfo('telemetry.example', 443)",
        "socket.gethostbyname('telemetry.example')",
        "socket.socket(type=socket.SOCK_DGRAM).sendto(b'', ('192.0.2.1', 53))",
        "subprocess.run([sys.executable, '-c', 'import socket; socket.getaddrinfo(b\"a.example\", 1)'], check=True)",
    ],
)
def test_the_guard_refuses_the_network(tmp_path, attempt):
    """By name or address, in children too; each attempt leaves a line."""
    ran = run_guarded(f"import socket, subprocess, sys; {attempt}", tmp_path / "log")

    assert "this process may talk to this machine only" in ran.stderr
    assert 1 == len((tmp_path / "log").read_text(encoding="utf-8").splitlines())


def test_the_guard_lets_the_proxy_through(tmp_path):
    """Loopback, by address and by name, and sockets of files."""
    code = """
import os, socket, tempfile
listener = socket.create_server(("127.0.0.1", 0))
socket.create_connection(("localhost", listener.getsockname()[1])).close()
socket.create_connection(listener.getsockname()).close()
with tempfile.TemporaryDirectory() as directory:
    path = os.path.join(directory, "socket")
    beside = socket.socket(socket.AF_UNIX)
    beside.bind(path)
    beside.listen()
    socket.socket(socket.AF_UNIX).connect(path)
"""
    ran = run_guarded(code, tmp_path / "log")

    assert (0, False) == (ran.returncode, (tmp_path / "log").exists()), ran.stderr


def test_every_agent_works_elsewhere():
    """None imports the library: with a base URL and a key, each is an agent of any server."""
    for path in (ROOT / "examples" / "frameworks").glob("*.py"):
        assert not re.search(r"^\s*(from|import) areal", path.read_text(encoding="utf-8"), re.MULTILINE), path.name
