"""Environments of inference servers: how they are made, what is left of one that fails, and how a run finds them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import areal_actors
from areal_actors.errors import ConfigError, EngineError
from areal_actors.generation.servers.config import Backend, ServerConfig
from areal_actors.generation.servers.environments import (
    TRIED_VERSIONS,
    Build,
    InstallPlan,
    create_plan,
    default_directory,
    find_environment,
    format_plan,
    install,
)
from areal_actors.generation.servers.launching import find_kind, format_command

ROOT = Path(__file__).parents[3]
VERSION = TRIED_VERSIONS[Backend.SGLANG]
LAUNCHER = "import json, sys; print(json.dumps([sys.prefix, *sys.argv[1:]]))\n"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory of wheels, which is all that pip looks at: of SGLang, its launcher alone."""
    wheels = tmp_path_factory.mktemp("wheels")
    with zipfile.ZipFile(wheels / f"sglang-{VERSION}-py3-none-any.whl", "w") as wheel:
        about = f"sglang-{VERSION}.dist-info"
        wheel.writestr("sglang/__init__.py", "")
        wheel.writestr("sglang/launch_server.py", LAUNCHER)
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: sglang\nVersion: {VERSION}\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/entry_points.txt", "[console_scripts]\nsglang = sglang.launch_server:main\n")
        wheel.writestr(f"{about}/RECORD", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_CONFIG_FILE", os.devnull)
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(wheels))
        patch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
        yield wheels


@pytest.fixture(scope="module")
def installed(index: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment of that SGLang."""
    directory = tmp_path_factory.mktemp("servers") / "sglang"
    install(_plan(directory), announce=lambda _: None)
    return directory


def _plan(directory: Path, build: Build = Build.CUDA) -> InstallPlan:
    return create_plan(Backend.SGLANG, build, directory, uv=None)


def test_versions_are_those_of_the_extras() -> None:
    """One number in the project file, in the plan and in the requirements of the CPU build."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    requirements = Path(areal_actors.__file__).parent / "generation" / "servers" / "requirements"
    for backend, version in TRIED_VERSIONS.items():
        assert [pin.partition(";")[0] for pin in extras[backend]] == [f"{backend}=={version}"]
    assert f"sglang=={VERSION}" in (requirements / "sglang-cpu-nodeps.txt").read_text().split()


@pytest.mark.parametrize("uv", [None, "/usr/bin/uv"])
@pytest.mark.parametrize("build", Build)
@pytest.mark.parametrize("backend", TRIED_VERSIONS)
def test_plan_makes_an_environment_and_installs_the_tried_version_in_it(backend, build, uv, tmp_path: Path) -> None:
    """By uv or by pip of this Python; never into this Python."""
    plan = create_plan(backend, build, tmp_path / "servers", uv=uv)
    lines = format_plan(plan).splitlines()

    assert uv is None or all(line.startswith(uv) for line in lines)
    assert f"{tmp_path}/servers/bin/python" in " ".join(lines[1:])
    assert all("--python" in line for line in lines[1:])
    assert ".partial" not in "\n".join(lines)
    texts = [Path(word).read_text() for word in " ".join(lines).split() if word.endswith(".txt")]
    assert re.search(rf"{backend}(-cpu)?=={TRIED_VERSIONS[backend]}", "\n".join([*lines, *texts]))
    # The route that describes a vLLM server fails in an environment without pip.
    assert backend is not Backend.VLLM or any(line.endswith(" pip") for line in lines)


def test_installed_server_is_found_and_started(installed: Path, tmp_path: Path) -> None:
    """By the setting that the command prints, or by default where the command puts it by default."""
    named = ServerConfig(python=str(installed / "bin" / "python"))
    found = find_environment(Backend.SGLANG, named)
    assert found is not None
    assert (found.version, found.build) == (VERSION, Build.CUDA)
    command = format_command(find_kind(Backend.SGLANG), named, model=Path("/m"), port=5)
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert str(installed) in output
    assert '"--model-path", "/m"' in output

    user = {"XDG_DATA_HOME": str(tmp_path)}
    assert find_environment(Backend.SGLANG, ServerConfig(), user) is None
    default = default_directory(Backend.SGLANG, user)
    default.parent.mkdir(parents=True)
    default.symlink_to(installed)
    by_default = find_environment(Backend.SGLANG, ServerConfig(), user)
    assert by_default is not None
    assert by_default.python == default / "bin" / "python"


def test_scripts_of_an_environment_name_its_final_directory(installed: Path) -> None:
    """It is made under another name, which pip writes into them."""
    assert f"#!{installed}/bin/python" in (installed / "bin" / "sglang").read_text()
    assert ".partial" not in (installed / "bin" / "activate").read_text()
    assert [path.name for path in installed.parent.iterdir() if "partial" in path.name] == []


def test_repeated_installation_does_nothing(installed: Path) -> None:
    """A supervisor may run it at each start. Another build needs --force, and another directory is never replaced."""
    said: list[str] = []
    install(_plan(installed), announce=said.append)
    assert said == [f"{installed} has sglang {VERSION} for cuda already."]
    with pytest.raises(ConfigError, match=r"for cuda; --force replaces it by sglang .* for cpu"):
        install(_plan(installed, Build.CPU), announce=said.append)


def test_cpu_build_starts_by_its_own_module(installed: Path, tmp_path: Path) -> None:
    """SGLang needs names on a CPU that a file of this library supplies."""
    directory = tmp_path / "sglang"
    commands = _plan(directory).commands
    plan = InstallPlan(backend=Backend.SGLANG, build=Build.CPU, directory=directory, commands=commands[:1])
    install(plan, announce=lambda _: None)
    config = ServerConfig(python=str(directory / "bin" / "python"))
    command = format_command(find_kind(Backend.SGLANG), config, model=Path("/m"), port=5)
    assert command[1:3] == ["-m", "areal_sglang_cpu"]
    assert command[4:6] == ["--device", "cpu"]
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "No module named 'torch'" in failed.stderr


def test_foreign_directory_is_refused_and_kept(tmp_path: Path) -> None:
    """Also with --force: only what the command made is replaced."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "thesis.tex").write_text("years")
    with pytest.raises(ConfigError, match=r"was not made by this command; name another --dir"):
        install(_plan(tmp_path / "sglang"), is_forced=True, announce=lambda _: None)
    assert (tmp_path / "sglang" / "thesis.tex").read_text() == "years"


def test_nothing_is_left_of_an_installation_that_fails(index: Path, tmp_path: Path) -> None:
    """The message names the command; what the installer said stands above it."""
    plan = create_plan(Backend.VLLM, Build.CUDA, tmp_path / "vllm", uv=None)
    with pytest.raises(EngineError, match=r"vllm is not installed: a command ended with status 1.*vllm==0"):
        install(plan, announce=lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == [".vllm.lock"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_installation_leaves_no_environment_under_its_name(
    number: signal.Signals, index: Path, tmp_path: Path
) -> None:
    """After Ctrl-C nothing is left; after kill -9, the next installation removes what was."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "uv").write_text(
        f"#!/bin/sh\n{sys.executable} -m venv --without-pip $7 && echo made && exec sleep 60\n"
    )
    (binaries / "uv").chmod(0o755)
    target = tmp_path / "servers" / "sglang"
    command = [sys.executable, "-m", "areal_actors", "server", "install", "sglang", "--cuda", "--dir", str(target)]
    environment = os.environ | {"PATH": f"{binaries}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True, start_new_session=True
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "made\n"
        os.killpg(process.pid, number)
        process.wait()
    left = {path.name for path in target.parent.iterdir()}
    assert "sglang" not in left
    assert (".sglang.partial" in left) == (number is signal.SIGKILL)
    if number is signal.SIGKILL:
        install(_plan(target), announce=lambda _: None)
        assert {path.name for path in target.parent.iterdir()} == {"sglang", ".sglang.lock"}
