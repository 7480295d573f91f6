"""Workers are added to a role and removed from it while their run goes on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.__main__ import cli
from areal_actors.config import create_config, load_config, save_config
from areal_actors.dashboard import RunDirectory
from areal_actors.dashboard.run_record import (
    ReplicaCount,
    RunRecord,
    RunStatus,
    read_replicas,
    write_record,
)
from areal_actors.domain import Role
from areal_actors.errors import ConfigError, RunDirectoryError, SchedulerError
from areal_actors.lib.locks import hold
from areal_actors.lib.references import import_reference
from areal_actors.run.plan import PlacedRole, RunPlan
from areal_actors.run.scaling import Scaling, check_scalable, parse_sizes, restore_replicas, scale_run, wait_scaled
from areal_actors.run.training import Trainer
from areal_actors.viewer import describe_runs, format_runs

TINY = Path(__file__).parents[2] / "examples" / "tiny.yaml"
TinyAgent = import_reference("tiny_agent.py:TinyAgent", directory=TINY.parent)
SECONDS = 120.0
SETTINGS = {"experiment_name": "e", "model": "tiny", "total_steps": 1}
COMPARED = ("step", "reward", "tokens", "trained_tokens", "episodes", "failed_episodes")


class Workers:
    """Workers that serve as soon as they are kept, and a scaling that keeps them."""

    def __init__(self, directory: Path, *, replicas: int = 1, resume: bool = False, num_fit: int = 8) -> None:
        self.config = create_config({**SETTINGS, "scheduler": {"roles": {"generation": {"replicas": replicas}}}})
        self.directory = RunDirectory(path=directory)
        plan = restore_replicas(RunPlan(config=self.config, directory=self.directory, resume=resume))
        self.kept: set[str] = set()
        self.drained: list[str] = []
        self.fails = False
        self._num_fit = num_fit
        self.scaling = Scaling(
            plan,
            [Role.GENERATION],
            keep=self._keep,
            drain=self._drain,
            find_serving=self._find_serving,
            check_fits=self._check_fits,
        )

    async def _keep(self, role: Role, name: str) -> None:
        assert role is Role.GENERATION
        if self.fails:
            raise SchedulerError("no room")
        self.kept.add(name)
        try:
            await anyio.sleep_forever()
        finally:
            self.kept.remove(name)

    async def _drain(self, role: Role, name: str) -> None:
        assert name in self.kept, "a worker is drained while it serves"
        self.drained.append(name)

    async def _find_serving(self, role: Role) -> set[str]:
        return self.kept

    def _check_fits(self, placed: Mapping[Role, PlacedRole]) -> None:
        if placed[Role.GENERATION].config.replicas > self._num_fit:
            raise SchedulerError(f"{self._num_fit} fit")


@asynccontextmanager
async def open_workers(directory: Path, **options: Any) -> AsyncIterator[Workers]:
    """The workers of a run that goes on in ``directory``."""
    await anyio.Path(directory / "logs").mkdir(parents=True, exist_ok=True)
    workers = Workers(directory, **options)
    save_config(workers.config, workers.directory.config)
    write_record(workers.directory, RunRecord(status=RunStatus.RUNNING))
    with hold(workers.directory.lock):
        async with anyio.create_task_group() as tasks:
            workers.scaling.start(tasks)
            yield workers
            tasks.cancel_scope.cancel()


async def ask(directory: Path, number: int) -> None:
    """Scale as the command does, and wait until so many serve."""
    await to_thread.run_sync(partial(scale_run, directory, {"generation": number}, answer_seconds=SECONDS))
    await to_thread.run_sync(partial(wait_scaled, directory, {"generation": number}, seconds=SECONDS))


@pytest.mark.anyio
async def test_a_run_has_as_many_workers_as_were_asked_for_last(tmp_path: Path) -> None:
    """The eldest stay, each of the others is drained before it ends, and names are used again."""
    async with open_workers(tmp_path / "run") as workers:
        await ask(tmp_path / "run", 3)
        assert {"generation-0", "generation-1", "generation-2"} == workers.kept
        assert not workers.drained
        await ask(tmp_path / "run", 1)
        assert {"generation-0"} == workers.kept
        assert {"generation-1", "generation-2"} == set(workers.drained)
        await ask(tmp_path / "run", 2)
        assert {"generation-0", "generation-1"} == workers.kept
        table = format_runs(describe_runs([tmp_path / "run"]))

    assert {"generation": ReplicaCount(configured=1, wanted=2, serving=2)} == read_replicas(workers.directory)
    assert "generation: 2 of 2 serve" in table
    assert not [*workers.directory.scale_requests.iterdir()]


@pytest.mark.anyio
async def test_the_number_is_kept_by_the_next_controller(tmp_path: Path) -> None:
    """Unless the configuration has another one than before."""
    async with open_workers(tmp_path / "run"):
        await ask(tmp_path / "run", 3)
    async with open_workers(tmp_path / "run", resume=True) as workers:
        while len(workers.kept) != 3:
            await anyio.lowlevel.checkpoint()
    async with open_workers(tmp_path / "run", resume=True, replicas=2) as workers:
        while len(workers.kept) != 2:
            await anyio.lowlevel.checkpoint()


@pytest.mark.anyio
async def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """The controller knows its machine; the command shows its answer."""
    async with open_workers(tmp_path / "run", num_fit=2) as workers:
        with pytest.raises(SchedulerError, match="2 fit"):
            await ask(tmp_path / "run", 3)
        assert {"generation-0"} == workers.kept
        await ask(tmp_path / "run", 2)


@pytest.mark.anyio
async def test_an_added_worker_that_cannot_run_ends_no_run(tmp_path: Path) -> None:
    """It is given up, with the reason; one of the configuration still ends the run."""
    async with open_workers(tmp_path / "run") as workers:
        while not workers.kept:
            await anyio.lowlevel.checkpoint()
        workers.fails = True
        with pytest.raises(SchedulerError, match=r"generation-1 was given up: no room|scaled to 1 meanwhile"):
            await ask(tmp_path / "run", 2)
        assert {"generation-0"} == workers.kept


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generation"], "ROLE=NUMBER"),
        (["generation=two"], "ROLE=NUMBER"),
        (["generation=0"], "1 to 256"),
        (["generation=-1"], "1 to 256"),
        (["generation=100000"], "1 to 256"),
        (["generatoin=2"], "did you mean generation\\?"),
        (["x=2"], "x. is not a role of a run\\. Roles that can be scaled: generation, proxy"),
        (["trainer=2"], "exactly one"),
        (["proxy=2"], "controller process"),
    ],
)
def test_nonsense_is_refused(words: list[str], message: str) -> None:
    """With what is possible."""
    config = create_config({**SETTINGS, "scheduler": {"roles": {"generation": {}}}})
    with pytest.raises(ConfigError, match=message):
        check_scalable(config, parse_sizes(words))


def test_a_run_that_does_not_run_is_not_scaled(tmp_path: Path) -> None:
    """A directory without a run, a killed run, a run in one process, and one that does not answer."""
    directory = RunDirectory(path=tmp_path / "run")
    directory.path.mkdir()
    with pytest.raises(RunDirectoryError, match="not the directory of a run"):
        scale_run(directory.path, {"generation": 2})
    save_config(create_config(SETTINGS), directory.config)
    with pytest.raises(RunDirectoryError, match="not begun"):
        scale_run(directory.path, {"generation": 2})
    write_record(directory, RunRecord(status=RunStatus.RUNNING))
    result = CliRunner().invoke(cli, ["scale", str(directory.path), "generation=2"])
    assert (1, True) == (result.exit_code, "is killed" in result.stderr)
    with hold(directory.lock):
        with pytest.raises(ConfigError, match="fixed"):
            scale_run(directory.path, {"generation": 2})
        placed = {**SETTINGS, "scheduler": {"roles": {"generation": {}}}}
        save_config(create_config(placed), directory.config)
        with pytest.raises(RunDirectoryError, match="has not answered"):
            scale_run(directory.path, {"generation": 2}, answer_seconds=0.2)
    assert not [*directory.scale_requests.iterdir()]


@given(st.dictionaries(st.sampled_from([*Role]).map(str), st.integers(1, 9)))
def test_sizes_are_read_as_they_are_written(sizes: dict[str, int]) -> None:
    """One word for each role."""
    assert sizes == parse_sizes([f"{role}={number}" for role, number in sizes.items()])


class GatedAgent(TinyAgent):
    """Takes one turn when the step that its episode belongs to may begin. A step has four episodes."""

    def __init__(self, gates: Mapping[int, anyio.Event]) -> None:
        super().__init__()
        self.gates, self.num_begun = gates, 0

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """As that of the example."""
        self.num_begun += 1
        if gate := self.gates.get((self.num_begun - 1) // 4 + 1):
            await gate.wait()
        return await super().run(data, **extra_kwargs)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.anyio
async def test_a_run_goes_on_with_more_engines_and_with_fewer(tmp_path: Path) -> None:
    """From one real engine to two and back. In float32, each step is that of a run that is not scaled."""
    settings = (
        *("total_steps=4", "batch_size=2", "rollout.group_size=2", "eval_dataset=null"),
        *("logging={display: none, trackers: []}", "engine.dtype=float32", "trainer.dtype=float32"),
    )
    placed = ("scheduler.roles={generation: {}}", "scheduler.local.oversubscribe=true")
    gates = {2: anyio.Event(), 4: anyio.Event()}
    run_dir = tmp_path / "run"

    def read_steps(path: Path) -> list[dict[str, Any]]:
        found = path / "metrics.jsonl"
        return [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []

    await Trainer(load_config(TINY, settings)).run(GatedAgent({}), run_dir=tmp_path / "undisturbed")
    with anyio.fail_after(SECONDS):
        async with anyio.create_task_group() as tasks:
            training = Trainer(load_config(TINY, (*settings, *placed))).run
            tasks.start_soon(partial(training, GatedAgent(gates), run_dir=run_dir))
            while len(read_steps(run_dir)) < 1:  # noqa: ASYNC110 - the run writes a file
                await anyio.sleep(0.05)
            await ask(run_dir, 2)
            gates[2].set()
            while len(read_steps(run_dir)) < 3:  # noqa: ASYNC110
                await anyio.sleep(0.05)
            await ask(run_dir, 1)
            gates[4].set()
    steps, undisturbed = read_steps(run_dir), read_steps(tmp_path / "undisturbed")

    assert [1, 2, 2, 1] == [record["engines"] for record in steps]
    assert [{key: record[key] for key in COMPARED} for record in undisturbed] == [
        {key: record[key] for key in COMPARED} for record in steps
    ]
    assert all(record["behaviour_gap_max"] < 1e-3 for record in steps)
