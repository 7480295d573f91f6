"""Agents of frameworks train by the command line, and talk to the model only.

``nox -s frameworks`` trains all of them, each in an environment of its own. Here those whose framework is installed are
trained; the two that need none, a script that blocks and a shell command, are trained with the other examples.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools.frameworks.training import GUARD, ROOT, load_frameworks, run_elsewhere, train_one_step

FRAMEWORKS = load_frameworks()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, framework in FRAMEWORKS.items() if framework.client])
def test_framework_agent_trains(name, tmp_path):
    """One step: a loss, trained tokens, no failed episode, and no request to another machine."""
    framework = FRAMEWORKS[name]
    if not framework.is_installed:
        pytest.skip(f"needs {framework.install}")

    assert [] == train_one_step(framework.config, tmp_path / "run")


@pytest.mark.parametrize("name", [name for name, framework in FRAMEWORKS.items() if not framework.program])
def test_framework_agent_runs_elsewhere(name, tmp_path):
    """With a server in its environment and nothing but the problem in its arguments, it earns a reward."""
    framework = FRAMEWORKS[name]
    if not framework.is_installed:
        pytest.skip(f"needs {framework.install}")

    assert [] == run_elsewhere(framework.config, tmp_path)


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
def test_network_guard_refuses_the_network(tmp_path, attempt):
    """By name or address, in children too; each attempt leaves a line."""
    ran = run_guarded(f"import socket, subprocess, sys; {attempt}", tmp_path / "log")

    assert "this process may talk to this machine only" in ran.stderr
    assert 1 == len((tmp_path / "log").read_text(encoding="utf-8").splitlines())


def test_network_guard_lets_the_proxy_through(tmp_path):
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


def test_framework_agents_do_not_import_the_library():
    """None imports the library: with a base URL and a key, each is an agent of any server."""
    for path in (ROOT / "examples" / "frameworks").glob("*.py"):
        assert not re.search(r"^\s*(from|import) areal", path.read_text(encoding="utf-8"), re.MULTILINE), path.name
