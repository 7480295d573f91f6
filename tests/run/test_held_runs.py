"""Training runs that a program holds: over cells of a notebook, or for a block."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from areal_actors import RunConfig, Server, Trainer, create_config, serve, train
from areal_actors.dashboard import RunDirectory
from areal_actors.dashboard.run_record import read_record
from areal_actors.domain import RunStatus
from areal_actors.errors import ArealError, ConfigError
from areal_actors.training.stored_checkpoints import find_checkpoints

pytestmark = pytest.mark.anyio


class Constant:
    """An agent that asks once. ``called`` is set by its first episode."""

    def __init__(self, *, fails: bool = False) -> None:
        self.called = anyio.Event()
        self._fails = fails

    async def run(self, data, base_url, api_key, http_client, **extra_kwargs):
        """Ask for four tokens; the reward is the share of even ones among the characters of the answer."""
        if self._fails:
            raise ValueError("broken agent <b>")
        body = {"model": "policy", "messages": [{"role": "user", "content": "say"}], "max_tokens": 4}
        answer = await http_client.post(
            f"{base_url}/chat/completions", json=body, headers={"Authorization": f"Bearer {api_key}"}
        )
        self.called.set()
        text = answer.json()["choices"][0]["message"]["content"] or ""
        return sum(ord(character) % 2 == 0 for character in text) / max(len(text), 1)


def configure(where: Path, **settings: object) -> RunConfig:
    """A job whose steps take a fraction of a second."""
    (where / "problems.jsonl").write_text('{"question": "say"}\n' * 4)
    return create_config(
        {
            "experiment_name": "held",
            "fileroot": str(where / "runs"),
            "model": "tiny",
            "total_steps": 2,
            "batch_size": 1,
            "dataset": {"jsonl": str(where / "problems.jsonl")},
            "rollout": {"group_size": 2},
            "engine": {"max_length": 64},
            "trainer": {"advantages": {"drop_zero_variance": False}},
            "logging": {"display": "none"},
            **settings,
        }
    )


async def in_a_cell(what) -> None:
    """Run ``what`` in a task that ends with it, as a notebook does."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(what)


async def test_held_run_stops_with_checkpoint(tmp_path: Path):
    """Each call is made by another task; the run trains between them, and goes on where it was stopped."""
    agent = Constant()
    config = configure(tmp_path, total_steps=100_000)
    training = Trainer(config).open(agent, run_dir=tmp_path / "run")
    found = []

    async def start() -> None:
        found.append(await training.start())

    with anyio.fail_after(120):
        await in_a_cell(start)
        (run,) = found
        await agent.called.wait()
        assert not run.is_over
        assert "<th>status</th><td>running</td>" in run._repr_html_()
        # A cell that waits is interrupted: the run is left alone.
        with anyio.CancelScope() as interrupted:
            interrupted.cancel()
            await run.wait()
        assert not run.is_over
        await in_a_cell(training.aclose)
        await training.aclose()

    directory = RunDirectory(path=tmp_path / "run")
    assert run.is_over
    record = read_record(directory)
    assert record is not None
    assert (RunStatus.INTERRUPTED, "interrupted by its program") == (record.status, record.reason)
    stopped = await run.wait()
    assert [stopped.version] == [checkpoint.step for checkpoint in find_checkpoints(directory.checkpoints)][-1:]
    assert "interrupted" in run._repr_html_()

    resumed = configure(tmp_path, total_steps=stopped.steps + 1)
    async with Trainer(resumed).open(Constant(), run_dir=tmp_path / "run", resume=True) as run:
        with anyio.fail_after(120):
            assert stopped.steps + 1 == (await run.wait()).steps


async def test_held_run_returns_summary(tmp_path: Path):
    """Leaving its block afterwards has nothing to stop."""
    with anyio.fail_after(120):
        async with Trainer(configure(tmp_path)).open(Constant(), run_dir=tmp_path / "run") as run:
            summary = await run.wait()
            assert summary == await run.summarize()

    assert 2 == summary.steps
    record = read_record(RunDirectory(path=tmp_path / "run"))
    assert record is not None
    assert RunStatus.FINISHED == record.status


async def test_held_run_raises_error_of_refused_start(tmp_path: Path):
    """No file is left, and it can be closed."""
    training = Trainer(configure(tmp_path)).open(run_dir=tmp_path / "run")

    with pytest.raises(ConfigError, match="agent to train"):
        await training.start()
    with anyio.fail_after(5), pytest.raises(ConfigError):
        await training.aclose()
    assert not (tmp_path / "run").exists()


async def test_held_run_raises_error_where_awaited(tmp_path: Path):
    """By ``wait``; by ``aclose`` only if nothing waited."""
    for is_waiting in (True, False):
        training = Trainer(configure(tmp_path)).open(Constant(fails=True), run_dir=tmp_path / f"run{is_waiting}")
        with anyio.fail_after(120):
            run = await training.start()
            if is_waiting:
                with pytest.raises(ArealError, match="broken agent"):
                    await run.wait()
                await training.aclose()
            else:
                while not run.is_over:  # noqa: ASYNC110 - to wait for the run would count as having been told
                    await anyio.sleep(0.05)
                with pytest.raises(ArealError, match="broken agent"):
                    await training.aclose()
        assert "<td>failed</td>" in run._repr_html_()
        assert "<b>" not in run._repr_html_()


@pytest.mark.parametrize("starts", [Trainer, Server, train, serve])
@pytest.mark.parametrize(
    ("given", "hint"),
    [("job.yaml", "load_config('job.yaml')"), (Path("job.yaml"), "load_config"), ({}, "create_config")],
)
def test_trainer_refuses_other_types_than_configuration(starts, given, hint):
    """With what makes a configuration of it."""
    with pytest.raises(ConfigError, match="takes a RunConfig") as caught:
        starts(given)
    assert hint in str(caught.value)
