"""Task directories as they are read: settings, a Dockerfile that only copies, and errors that name the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_actors.datasets import DatasetConfig
from areal_actors.errors import DatasetError
from areal_actors_environments.harbor import HarborTasks, find_task_directories, load_task, resolve_variables


@pytest.fixture
def write(tmp_path: Path):
    """Writes a task directory with these files in addition to the smallest ones."""

    def write(files: dict[str, str] | None = None, *, name: str = "task") -> Path:
        smallest = {"instruction.md": "Do it.\n", "task.toml": "", "tests/test.sh": "true"}
        for file, text in {**smallest, **(files or {})}.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / name

    return write


def test_task_directory_has_harbor_defaults(write):
    """An empty /app, ten minutes for the verifier, and no limit of the agent."""
    task = load_task(write())
    assert ("task", "Do it.\n", "/app", ()) == (task.name, task.instruction, task.work_directory, task.copies)
    assert (None, 600.0, None, True) == (
        task.agent_seconds,
        task.verifier_seconds,
        task.memory_mib,
        task.allows_internet,
    )
    assert (None, False) == (task.solution, task.is_relocatable)


def test_task_settings_of_all_versions_are_read(write):
    """Sizes as numbers or in their former form; the network by its mode or by its former flag."""
    settings = """
        version = "1.0"
        [metadata]
        difficulty = "easy"
        [agent]
        timeout_sec = 120
        user = "root"
        [verifier]
        timeout_sec = 1.5
        env = {KEY = "${KEY}"}
        [environment]
        cpus = 2
        memory = "4G"
        storage_mb = 100
        allow_internet = false
        build_timeout_sec = 600.0
        """
    task = load_task(write({"task.toml": settings}))
    assert (120.0, 1.5, 2, 4096, 100) == (
        task.agent_seconds,
        task.verifier_seconds,
        task.cpus,
        task.memory_mib,
        task.disk_mib,
    )
    assert (False, {"difficulty": "easy"}, {"KEY": "${KEY}"}) == (
        task.allows_internet,
        task.metadata,
        task.verifier_environment,
    )
    by_mode = load_task(write({"task.toml": "[environment]\nnetwork_mode = 'no-network'"}, name="other"))
    assert not by_mode.allows_internet


DOCKERFILE = """
# The base is replaced by the host.
FROM python:3.11-slim AS base
LABEL a=b
WORKDIR /project/repo
ENV LANG=C.UTF-8 NAME="two words"
ENV OLD value of it
COPY --chown=root:root a.txt \\
     b.txt ./
COPY src/ /project/repo/lib/
COPY ["c.txt", "/data/"]
COPY a.txt copy/a.txt
ADD . .
CMD ["bash"]
"""


def test_dockerfile_with_copies_needs_no_build(write):
    """Its working directory, its variables, and its files in their order."""
    files = {f"environment/{name}": name for name in ("a.txt", "b.txt", "c.txt", "src/d.py")}
    path = write({"environment/Dockerfile": DOCKERFILE, **files})
    task = load_task(path)

    assert "/project/repo" == task.work_directory
    assert {"LANG": "C.UTF-8", "NAME": "two words", "OLD": "value of it"} == task.environment
    assert [
        ("a.txt", "/project/repo"),
        ("b.txt", "/project/repo"),
        ("src", "/project/repo/lib"),
        ("c.txt", "/data"),
        ("a.txt", "/project/repo/copy"),
        (".", "/project/repo"),
    ] == [(str(one.source.relative_to(path / "environment")), one.target) for one in task.copies]
    assert ("/data",) == task.directories


def test_environment_without_dockerfile_is_copied(write):
    """All of it, to the working directory, which task.toml may name."""
    task = load_task(write({"environment/a.txt": "a", "task.toml": "[environment]\nworkdir = '/workspace'"}))
    assert "/workspace" == task.work_directory
    assert ["environment"] == [one.source.name for one in task.copies]


REFUSED = {
    "a command": ("RUN apt-get install -y gcc", r"Dockerfile, line 3 needs a build \(RUN apt-get install -y gcc\)"),
    "several stages": ("FROM scratch", r"line 3 needs a build \(FROM scratch\)"),
    "another stage's files": ("COPY --from=base /a /b", r"line 3 needs a build"),
    "a download": ("ADD https://example.com/a.txt /app/", "line 3 needs a build"),
    "an archive": ("ADD a.tar.gz /app/", "line 3 needs a build"),
    "a system directory": ("COPY a.txt /etc/a.txt", "line 3 needs a build .it writes to /etc/a.txt"),
    "the directory of the tests": ("COPY a.txt /tests/", "line 3 needs a build .it writes to /tests"),
    "a variable": ("COPY a.txt $HOME/", "line 3 needs a build"),
    "a new name": ("COPY a.txt data/b.txt", "line 3 needs a build .*renames a file"),
    "a missing file": ("COPY missing.txt .", "line 3 copies missing.txt, which is not in"),
    "a file from outside": ("COPY ../instruction.md .", "line 3 copies ../instruction.md, which is not in"),
}


@pytest.mark.parametrize(("line", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_dockerfile_that_needs_a_build_is_refused(write, line, reason):
    """With the line, what is in it, and what to do."""
    path = write({"environment/Dockerfile": f"FROM a\n\n{line}\n", "environment/a.txt": ""})
    with pytest.raises(DatasetError, match=reason):
        load_task(path)


MISTAKES = {
    "no settings": ({"task.toml": "[agent"}, r"task cannot be read: task\.toml: "),
    "a text for a number": (
        {"task.toml": "[agent]\ntimeout_sec = '60'"},
        r"agent\.timeout_sec = '60' in task\.toml; it must be a positive number",
    ),
    "a time that is not positive": ({"task.toml": "[verifier]\ntimeout_sec = 0"}, "must be a positive number"),
    "a size": ({"task.toml": "[environment]\nmemory = 'much'"}, "a size such as 512M or 2G"),
    "a value for a table": ({"task.toml": "agent = 1"}, "agent = 1 in task.toml; it must be a table"),
    "an image": ({"task.toml": "[environment]\ndocker_image = 'a'"}, r"needs an image \(environment\.docker_image\)"),
    "steps and GPUs": ({"task.toml": "[environment]\ngpus = 1\n[[steps]]\nname = 'a'"}, "several steps .*, and GPUs"),
    "several containers": ({"environment/docker-compose.yaml": ""}, "several containers"),
    "an image of the verifier": ({"tests/Dockerfile": ""}, "an image of the verifier"),
}


@pytest.mark.parametrize(("files", "reason"), MISTAKES.values(), ids=MISTAKES.keys())
def test_task_that_cannot_run_is_named(write, files, reason):
    """With the setting, its value and what was expected."""
    with pytest.raises(DatasetError, match=reason):
        load_task(write(files))


@pytest.mark.parametrize("name", ["instruction.md", "task.toml", "tests/test.sh"])
def test_task_with_a_missing_file_is_named(write, name):
    """Each of the three that a task needs."""
    path = write()
    (path / name).unlink()
    with pytest.raises(DatasetError, match=name):
        load_task(path)


def test_directory_without_tasks_is_refused(write, tmp_path):
    """Other directories next to tasks are left alone."""
    (tmp_path / "empty").mkdir()
    write(name="b")
    write(name="a")
    assert ["a", "b"] == [path.name for path in find_task_directories(tmp_path)]
    with pytest.raises(DatasetError, match=r"empty has no task directories: none of its directories has a task\.toml"):
        HarborTasks(path="empty").load(DatasetConfig(jsonl="unused"), tmp_path)
    with pytest.raises(DatasetError, match="nowhere cannot be read: No such file or directory"):
        find_task_directories(tmp_path / "nowhere")


def test_task_variables_are_resolved():
    """With their defaults; a name without either is an error."""
    host = {"A": "1"}
    assert {"a": "1", "b": "-2-", "c": "$A"} == resolve_variables({"a": "${A}", "b": "-${B:-2}-", "c": "$A"}, host)
    with pytest.raises(DatasetError, match="needs the variable B"):
        resolve_variables({"b": "${B}"}, host)
