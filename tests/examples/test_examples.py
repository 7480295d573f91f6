"""The programs of ``examples/`` do what they say. Their agents and configurations are tested beside this file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.plugins import needs_plugin

from areal_actors.config import load_config
from areal_actors.datasets import load_problems
from areal_actors.domain import Role
from areal_actors.generation.servers.config import Backend
from areal_actors.lib.plugins import PluginGroup
from areal_actors.lib.references import import_reference
from areal_actors.run.training import Trainer

IN_BOXES = needs_plugin(PluginGroup.SANDBOXES, "bubblewrap")
EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str) -> str:
    """What the program prints, run from the root of the repository as a person would."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", f"examples/{name}"],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=EXAMPLES.parent,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_every_example_is_listed():
    """The table of the README names every file, and none that is not there."""
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = [path for path in EXAMPLES.rglob("*") if path.suffix in {".py", ".yaml", ".sh"}]

    assert [] == [path.name for path in files if f"`{path.relative_to(EXAMPLES)}`" not in listed]


@pytest.mark.parametrize("name", ["embed_asyncio.py", "embed_trio.py"])
def test_embedding_is_short(name):
    """Opening the actors in one's own app takes less than thirty lines, imports included."""
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < 30


def test_embed_asyncio():
    """Two turns make one row: each sampled token is trained, with the discounted return of its turn."""
    lines = [line.split() for line in run_example("embed_asyncio.py").splitlines()]
    row = {name: list(map(float, values)) for name, *values in lines}
    trained = [index for index, flag in enumerate(row["loss_mask"]) if flag]

    assert {"input_ids", "loss_mask", "logprobs", "versions", "returns"} == set(row)
    assert {0.9, 1.0} == {row["returns"][index] for index in trained}
    assert all(row["logprobs"][index] < 0 and row["versions"][index] == 0 for index in trained)


def test_embed_trio():
    """Both agents get a row of their own."""
    lines = sorted(run_example("embed_trio.py").splitlines())

    assert ["ada", "ben"] == [line.split()[0] for line in lines]
    assert all(" for the tokens " in line for line in lines)


def test_property_test():
    """The laws hold for the rule."""
    check = import_reference("property_test.py:test_it_keeps_the_laws", directory=EXAMPLES)
    for law in check.pytestmark[0].args[1]:
        check(law)


def test_the_job_of_a_gpu_node_can_be_read():
    """Its servers and its trainer do not share a device; to run it takes two GPUs and SGLang."""
    config = load_config(EXAMPLES / "gpu_node.yaml")
    served = config.served_engine(Path())

    assert served is not None
    assert Backend.SGLANG is served.backend
    assert f"cuda:{served.config.environment['CUDA_VISIBLE_DEVICES']}" != config.trainer.device


def test_the_tiny_job_trains(tmp_path):
    """Two steps of it write metrics, weights and a report."""
    overrides = ["total_steps=2", "rollout.group_size=4", "eval_dataset.size=4", "logging.display=none"]
    config = load_config(EXAMPLES / "tiny.yaml", overrides)
    summary = Trainer(config).train(run_dir=tmp_path)

    assert (2, 2) == (summary.steps, summary.version)
    for file in ("metrics.jsonl", "report.html", "weights/model.safetensors"):
        assert (tmp_path / file).is_file(), file


@pytest.mark.parametrize(
    ("name", "program", "backend"),
    [
        ("anthropic", "sh", "trio"),
        ("blocking", "sh", "asyncio"),
        ("frameworks/requests", "sh", "trio"),
        ("shell", "curl", "asyncio"),
        pytest.param("sandbox", "sh", "trio", marks=IN_BOXES),
        pytest.param("tasks", "sh", "asyncio", marks=[IN_BOXES, needs_plugin(PluginGroup.DATASETS, "harbor")]),
    ],
)
def test_the_tiny_job_trains_agents_of_any_kind(tmp_path, name, program, backend):
    """Anthropic's SDK, child processes, a shell script, sandboxes: a step of each, with rewards for all episodes."""
    before = set(psutil.Process().children(recursive=True))
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    overrides = [
        "total_steps=1",
        "batch_size=2",
        "rollout.group_size=3",
        "rollout.openai.subproc_max_workers=2",
        "eval_dataset=null",
        "logging.display=none",
        "logging.trackers=[]",
    ]
    config = load_config(EXAMPLES / f"{name}.yaml", overrides)
    summary = Trainer(config).train(run_dir=tmp_path, backend=backend)
    failures = tmp_path / "failures.jsonl"

    assert (1, 1) == (summary.steps, summary.version)
    assert not failures.exists() or not failures.read_text()
    assert before == set(psutil.Process().children(recursive=True))


def test_the_job_of_several_sources_trains(tmp_path):
    """A step of it trains groups of both."""
    overrides = ["total_steps=1", "eval_datasets={}", "logging.display=none", "logging.trackers=[]"]
    Trainer(load_config(EXAMPLES / "sources.yaml", overrides)).train(run_dir=tmp_path)
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])

    assert (4, 2) == (row["source/short/groups"], row["source/long/groups"])


def test_one_run_trains_reasoning_and_tool_use(tmp_path):
    """Each source has its agent, its share of the groups and its size of a group; no episode fails."""
    overrides = ["total_steps=1", "logging.display=none"]
    Trainer(load_config(EXAMPLES / "skills.yaml", overrides)).train(run_dir=tmp_path / "run")
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    sources = ("reasoning", "tools")

    assert [3, 1] == [row[f"source/{name}/groups"] for name in sources]
    assert [12, 2] == [row[f"source/{name}/episodes"] for name in sources]
    assert 0 == row["failed_episodes"]
    assert row["source/tools/tokens_mean"] <= 2 * 44
    assert 0 == row["source/reasoning/easy_problems"]


@pytest.mark.parametrize("name", ["mini_swe_agent", "openai_agents_digits"])
def test_the_jobs_of_installed_agents_can_be_read(name):
    """To train takes the agents: ``nox -s train-agents``."""
    config = load_config(EXAMPLES / "agents" / f"{name}.yaml")
    assert config.dataset is not None
    problem = load_problems(config.dataset, import_reference=import_reference).at(0)

    assert "tiny" == config.model
    assert problem.data["task"].startswith("Print digits: ")


def test_the_processes_of_a_machine_are_placed():
    """The example names every role; ``nox -s placement`` runs it, as it takes a dozen processes."""
    config = load_config(EXAMPLES / "local_processes.yaml")

    assert set(Role) == set(config.scheduler.roles.placed)
    assert load_config(EXAMPLES / "tiny.yaml").rollout == config.rollout
