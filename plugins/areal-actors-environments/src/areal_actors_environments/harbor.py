"""Task directories in Harbor's format, as Terminal-Bench 2 has them: an instruction, an environment, and a verifier.

::

    task/
      instruction.md            what the agent is asked
      task.toml                 limits and metadata
      environment/              files of the environment, with a Dockerfile or without
      tests/test.sh             writes /logs/verifier/reward.txt or reward.json
      solution/solve.sh         a reference solution, optional

``dataset: {harbor: DIRECTORY}`` names them. This module reads and checks them; ``task_directories`` runs agents and
verifiers.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from attrs import field, frozen

from areal_actors.datasets import DataPath, DatasetConfig, Rows, plain_row
from areal_actors.errors import DatasetError

INSTRUCTION, SETTINGS = "instruction.md", "task.toml"
_WORK_DIRECTORY = "/app"
_VERIFIER_SECONDS = 600.0
"""Harbor's default."""
_SYSTEM = ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "opt", "proc", "root", "run", "sbin", "sys", "usr")
"""Directories that are the host's where there is no image, so that nothing can be copied there."""
_OURS = ("logs", "tests", "solution", "tmp")
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")
_INERT = ("LABEL", "EXPOSE", "USER", "CMD", "ENTRYPOINT", "SHELL", "STOPSIGNAL", "MAINTAINER", "ARG", "HEALTHCHECK")
"""Instructions of a Dockerfile that change no file and start nothing here."""


@frozen(kw_only=True)
class Copied:
    """A file, or a directory whose contents are copied, and its directory inside."""

    source: Path
    target: str


@frozen(kw_only=True)
class TaskDirectory:
    """One task, as its files say."""

    path: Path
    instruction: str
    work_directory: str = _WORK_DIRECTORY
    copies: tuple[Copied, ...] = ()
    """What the environment contains, in this order."""
    agent_seconds: float | None = None
    """Time limit of the agent; by default that of the episode."""
    verifier_seconds: float = _VERIFIER_SECONDS
    cpus: int | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None
    allows_internet: bool = True
    environment: Mapping[str, str] = field(factory=dict)
    """Variables of agent, verifier and solution."""
    verifier_environment: Mapping[str, str] = field(factory=dict)
    solution_environment: Mapping[str, str] = field(factory=dict)
    is_relocatable: bool = False
    """Whether its scripts find their files by ``$LOGS_DIR`` and their own location, so that it runs without a box."""
    masks: Mapping[str, Path] = field(factory=dict)
    """Files that the agent's box shows in the place of installed modules, by their paths below ``sys.path``."""
    metadata: Mapping[str, Any] = field(factory=dict)

    @property
    def name(self) -> str:
        """The name of the directory."""
        return self.path.name

    @property
    def tests(self) -> Path:
        """The directory of the verifier, which only its box sees."""
        return self.path / "tests"

    @property
    def solution(self) -> Path | None:
        """The script of the reference solution, if there is one."""
        script = self.path / "solution" / "solve.sh"
        return script if script.is_file() else None

    @property
    def directories(self) -> tuple[str, ...]:
        """The directories outside of the working directory that its environment writes to."""
        found = [copied.target for copied in self.copies if not _is_below(copied.target, self.work_directory)]
        tops = dict.fromkeys("/" + path.split("/")[1] for path in found)
        return tuple(top for top in tops if not _is_below(self.work_directory, top))

    @property
    def problem(self) -> dict[str, Any]:
        """The problem that an agent works on."""
        return {
            "name": self.name,
            "instruction": self.instruction,
            "task_directory": str(self.path),
            "metadata": dict(self.metadata),
        }


@frozen(kw_only=True)
class HarborTasks:
    """A directory of task directories in Harbor's format, or one of them."""

    short_form: ClassVar[str] = "path"

    path: DataPath

    @property
    def source(self) -> str:
        """The directory."""
        return str(self.path)

    def load(self, config: DatasetConfig, directory: Path) -> Rows:  # noqa: ARG002 - all of the files are read
        """Return the problem of each task. Raises ``DatasetError`` for what cannot be read or is not supported."""
        tasks = find_task_directories(directory / self.path)
        return [plain_row(load_task(path).problem, str(path)) for path in tasks]


def find_task_directories(path: Path) -> tuple[Path, ...]:
    """Return the task directories in ``path``, by name; ``path`` itself if it is one. Raises ``DatasetError``."""
    if (path / SETTINGS).is_file():
        return (path,)
    try:
        found = tuple(sorted(entry for entry in path.iterdir() if (entry / SETTINGS).is_file()))
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not found:
        raise DatasetError(f"{path} has no task directories: none of its directories has a {SETTINGS}.")
    return found


def load_task(path: Path) -> TaskDirectory:
    """Read a task directory. Raises ``DatasetError`` naming the file for what is missing, wrong or not supported."""
    path = path.absolute()
    try:
        settings = tomllib.loads((path / SETTINGS).read_text(encoding="utf-8"))
        instruction = (path / INSTRUCTION).read_text(encoding="utf-8")
    except OSError as error:
        raise DatasetError(f"The task {path} cannot be read: {error.strerror}: {error.filename}.") from error
    except ValueError as error:  # TOML or UTF-8
        raise DatasetError(f"The task {path} cannot be read: {SETTINGS}: {error}.") from error
    if not (path / "tests" / "test.sh").is_file():
        raise DatasetError(f"The task {path} has no tests/test.sh, which rewards the agent.")
    reader = _Settings(settings, path)
    reader.refuse_unsupported()
    work_directory, environment, copies = _read_environment(path / "environment")
    return TaskDirectory(
        path=path,
        instruction=instruction,
        work_directory=reader.text("environment", "workdir") or work_directory,
        copies=copies,
        agent_seconds=reader.number("agent", "timeout_sec"),
        verifier_seconds=reader.number("verifier", "timeout_sec") or _VERIFIER_SECONDS,
        cpus=reader.whole("environment", "cpus"),
        memory_mib=reader.size("environment", "memory"),
        disk_mib=reader.size("environment", "storage"),
        allows_internet=reader.allows_internet(),
        environment=environment | reader.texts("environment", "env"),
        verifier_environment=reader.texts("verifier", "env"),
        solution_environment=reader.texts("solution", "env"),
        is_relocatable=reader.table("metadata").get("relocatable") is True,
        masks={name: path / file for name, file in reader.texts("metadata", "masks").items()},
        metadata=reader.table("metadata"),
    )


def resolve_variables(variables: Mapping[str, str], host: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Replace ``${NAME}`` and ``${NAME:-default}`` by the host's variables.

    Raises ``DatasetError`` for a name that is not set and has no default.
    """

    def replace(found: re.Match[str]) -> str:
        name, default = found.groups()
        if name not in host and default is None:
            raise DatasetError(f"The task needs the variable {name}, which is not set in the environment of the run.")
        return host.get(name, default or "")

    return {name: _VARIABLE.sub(replace, text) for name, text in variables.items()}


# --------------------------------------------------------------------------------------------------- task.toml


@frozen
class _Settings:
    """The content of ``task.toml``; each reader raises ``DatasetError`` for a value of another kind."""

    content: Mapping[str, Any]
    path: Path

    def table(self, name: str) -> dict[str, Any]:
        return dict(self._checked(name, self.content.get(name, {}), dict, "a table"))

    def number(self, table: str, name: str) -> float | None:
        value = self.table(table).get(name)
        if value is None:
            return None
        number = float(self._checked(f"{table}.{name}", value, (int, float), "a positive number"))
        if isinstance(value, bool) or not 0 < number < float("inf"):
            raise self._error(f"{table}.{name}", value, "a positive number")
        return number

    def whole(self, table: str, name: str) -> int | None:
        number = self.number(table, name)
        return None if number is None else max(int(number), 1)

    def size(self, table: str, name: str) -> int | None:
        """Return ``memory_mb`` or its former form ``memory: 2G``, in MiB."""
        former = self.table(table).get(name)
        if not isinstance(former, str):
            return self.whole(table, f"{name}_mb")
        found = re.fullmatch(r"([0-9.]+)([KMG])B?", former.strip().upper())
        if found is None:
            raise self._error(f"{table}.{name}", former, "a size such as 512M or 2G")
        return max(int(float(found[1]) * {"K": 1 / 1024, "M": 1, "G": 1024}[found[2]]), 1)

    def text(self, table: str, name: str) -> str | None:
        value = self.table(table).get(name)
        return None if value is None else str(self._checked(f"{table}.{name}", value, str, "text"))

    def texts(self, table: str, name: str) -> dict[str, str]:
        found = self._checked(f"{table}.{name}", self.table(table).get(name, {}), dict, "a table")
        return {str(key): str(self._checked(f"{table}.{name}.{key}", text, str, "text")) for key, text in found.items()}

    def allows_internet(self) -> bool:
        table = self.table("environment")
        return table.get("network_mode", "public") == "public" and table.get("allow_internet", True) is not False

    def refuse_unsupported(self) -> None:
        """Raise ``DatasetError`` for a task that would run, but not as it says."""
        environment = self.table("environment")
        reasons = {
            "several steps ([[steps]])": self.content.get("steps"),
            "an image (environment.docker_image)": environment.get("docker_image"),
            "GPUs (environment.gpus)": environment.get("gpus"),
            "MCP servers (environment.mcp_servers)": environment.get("mcp_servers"),
            "services with a health check (environment.healthcheck)": environment.get("healthcheck"),
            f"the system {environment.get('os')}": environment.get("os", "linux") != "linux",
            "several containers (environment/docker-compose.yaml)": any(
                (self.path / "environment" / f"docker-compose.{end}").exists() for end in ("yaml", "yml")
            ),
            "an image of the verifier (tests/Dockerfile)": (self.path / "tests" / "Dockerfile").exists(),
        }
        found = [reason for reason, is_so in reasons.items() if is_so]
        if found:
            raise DatasetError(
                f"The task {self.path} needs {', and '.join(found)}. Task directories run on the files of the host and "
                "of environment/; run this one with Harbor, or leave it out."
            )

    def _checked(self, name: str, value: Any, kinds: Any, expected: str) -> Any:
        if not isinstance(value, kinds):
            raise self._error(name, value, expected)
        return value

    def _error(self, name: str, value: Any, expected: str) -> DatasetError:
        return DatasetError(f"The task {self.path} has {name} = {value!r} in {SETTINGS}; it must be {expected}.")


# ------------------------------------------------------------------------------------------------- environment


def _read_environment(path: Path) -> tuple[str, dict[str, str], tuple[Copied, ...]]:
    """Return the working directory, the variables and the files of an environment.

    Without a Dockerfile, all files are copied to the working directory.
    """
    dockerfile = path / "Dockerfile"
    if not dockerfile.exists():
        return _WORK_DIRECTORY, {}, (Copied(source=path, target=_WORK_DIRECTORY),) if path.is_dir() else ()
    work_directory, has_base = "/", False
    variables: dict[str, str] = {}
    copies: list[Copied] = []
    for number, keyword, rest in _instructions(dockerfile):
        place = f"{dockerfile}, line {number}"
        if keyword == "WORKDIR":
            work_directory = _inside(place, rest, work_directory)
        elif keyword == "ENV":
            if "$" in rest:
                raise _needs_build(place, f"ENV {rest}")
            words = shlex.split(rest)
            if "=" in words[0]:
                variables |= {word.partition("=")[0]: word.partition("=")[2] for word in words}
            else:  # the form without =, which sets one variable
                variables[words[0]] = rest.partition(" ")[2].strip()
        elif keyword in {"COPY", "ADD"}:
            copies += _read_copy(place, rest, path, work_directory)
        elif keyword not in _INERT and (keyword != "FROM" or has_base):
            raise _needs_build(place, f"{keyword} {rest}")
        has_base = has_base or keyword == "FROM"
    work_directory = _WORK_DIRECTORY if work_directory == "/" else work_directory
    if _top(work_directory) in {*_SYSTEM, *_OURS}:
        raise DatasetError(f"{dockerfile} has the working directory {work_directory}; use another, such as /app.")
    return work_directory, variables, tuple(copies)


def _instructions(dockerfile: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the instructions of a Dockerfile, continued lines joined, with the number of their first line."""
    begun, first = "", 0
    for number, line in enumerate(dockerfile.read_text(encoding="utf-8").splitlines(), start=1):
        if line.lstrip().startswith("#") or not (begun or line.strip()):
            continue
        first = first if begun else number
        begun += line.strip()
        if begun.endswith("\\"):
            begun = begun[:-1] + " "
            continue
        keyword, _, rest = begun.partition(" ")
        yield first, keyword.upper(), rest.strip()
        begun = ""


def _needs_build(place: str, what: str) -> DatasetError:
    return DatasetError(
        f"{place} needs a build ({what[:200]}), and images are not built here. Task directories run on the programs "
        "of the host: install what it needs there and remove the line, or run the task with Harbor."
    )


def _read_copy(place: str, rest: str, context: Path, work_directory: str) -> list[Copied]:
    flags = [word for word in rest.split() if word.startswith("--")]
    if any(flag.startswith("--from") for flag in flags) or "<<" in rest or "$" in rest:
        raise _needs_build(place, f"COPY {rest}")
    plain = " ".join(word for word in rest.split() if not word.startswith("--"))
    words = json.loads(plain) if plain.startswith("[") else shlex.split(plain)
    if len(words) < 2:  # noqa: PLR2004 - a source and a target
        raise DatasetError(f"{place} copies nothing: {rest}")
    *sources, target = map(str, words)
    inside = _inside(place, target, work_directory)
    copies = []
    for source in sources:
        if "://" in source or source.endswith((".tar", ".tar.gz", ".tgz", ".tar.xz")):
            raise _needs_build(place, f"COPY {rest}")
        pattern = source.lstrip("/").removeprefix("./") or "."
        found = sorted(context.glob(pattern)) if pattern != "." else [context]
        if not found or any(not one.resolve().is_relative_to(context.resolve()) for one in found):
            raise DatasetError(f"{place} copies {source}, which is not in {context}.")
        for one in found:
            is_renamed = one.is_file() and not target.endswith(("/", ".")) and len(sources) == len(found) == 1
            if is_renamed and PurePosixPath(inside).name != one.name and inside != work_directory:
                raise _needs_build(place, f"COPY {rest}, which renames a file")
            is_named = is_renamed and inside != work_directory
            copies.append(Copied(source=one, target=str(PurePosixPath(inside).parent) if is_named else inside))
    return copies


def _inside(place: str, path: str, work_directory: str) -> str:
    """Return a path of a Dockerfile as an absolute one in which files can be put."""
    joined = os.path.normpath(PurePosixPath(work_directory) / path.strip("\"'"))
    if _top(joined) in {*_SYSTEM, *_OURS} or "$" in path:
        raise _needs_build(place, f"it writes to {joined}")
    return joined


def _top(path: str) -> str:
    return path.lstrip("/").split("/")[0]


def _is_below(path: str, directory: str) -> bool:
    return PurePosixPath(path).is_relative_to(directory)
