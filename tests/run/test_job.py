"""What a run needs before it begins."""

from __future__ import annotations

import os
from functools import partial

import pytest
from attrs import evolve

from areal_actors.config import create_config
from areal_actors.dashboard import RunDirectory
from areal_actors.dashboard.run_record import RunRecord, write_record
from areal_actors.datasets import DatasetConfig
from areal_actors.domain import RunStatus
from areal_actors.errors import ConfigError, DatasetError, ModelError, WorkflowError
from areal_actors.models import resolve_model
from areal_actors.run.directory import no_checkpoint, prepared_directory
from areal_actors.run.job import create_policy
from areal_actors.run.serving import Server
from areal_actors.run.training import Trainer


def configure(**trainer):
    dataset = {"python": "examples/tiny_agent.py:problems"}
    settings = {"experiment_name": "e", "total_steps": 1, "model": "tiny", "dataset": dataset}
    return create_config({**settings, "trainer": trainer})


def create(device: str, **trainer):
    return create_policy(configure(device=device, **trainer), resolve_model("tiny"))


def test_policy_is_placed_on_device():
    """Named, it is that one; in a gang the ranks take theirs later, and only the first one has weights until then."""
    assert "cpu" == create("cpu").model.device.type
    config, files = configure(gang={"num_processes": 2}), resolve_model("tiny")
    assert "cpu" == create_policy(config, files).model.device.type
    policy = create_policy(config, files, is_first=False)
    assert all(weight.is_meta for weight in policy.model.parameters())


@pytest.mark.parametrize("device", ["cuda:99", "abacus"])
def test_missing_device_is_named(device):
    """Before anything is sampled."""
    with pytest.raises(ConfigError, match=rf"trainer\.device.*{device}"):
        create(device)


@pytest.mark.parametrize("resume", [False, True])
def test_run_directory_is_locked(tmp_path, resume):
    """The second one would move the first one's files away, and prune its checkpoints: it is told who is there."""
    config, directory = configure(), RunDirectory(path=tmp_path / "e" / "trial")
    with prepared_directory(config, directory, resume=False):
        directory.metrics.write_text("{}")
        with (
            pytest.raises(ConfigError, match=rf"trial is in use by process {os.getpid()} on .*trial_name"),
            prepared_directory(config, directory, resume=resume),
        ):
            pass

        assert directory.metrics.exists()
    with prepared_directory(config, directory, resume=resume):
        assert resume == directory.metrics.exists()


def test_run_that_did_not_begin_is_removed(tmp_path):
    """Trying until the configuration is right leaves one directory, and moves no other away."""
    config, directory = configure(), RunDirectory(path=tmp_path / "e" / "trial")
    for _ in range(3):
        with prepared_directory(config, directory, resume=False):
            directory.logs.mkdir(exist_ok=True)
            directory.log.write_text("why it could not begin")

    assert ["trial"] == [path.name for path in directory.path.parent.iterdir() if path.is_dir()]


@pytest.mark.parametrize("has_earlier_run", [False, True])
def test_failed_start_leaves_disk_unchanged(tmp_path, has_earlier_run):
    """An adapter that does not fit the model shows when it is loaded; an earlier run is back in its place."""
    directory = RunDirectory(path=tmp_path / "e" / "trial")
    if has_earlier_run:
        with prepared_directory(configure(), directory, resume=False):
            directory.metrics.write_text("{}")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    config = configure(lora={"target_modules": ["absent"]})
    for run in (partial(Trainer(config).train, "examples/tiny_agent.py:TinyAgent"), Server(config).serve):
        with pytest.raises(ConfigError, match="has no 'absent' to adapt"):
            run(run_dir=directory.path)

        assert before == {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", ["trial", "e/trial", "a/b/e/trial"])
def test_refused_start_leaves_no_lock_and_no_directory(tmp_path, name, resume):
    """Not even an empty one. A file that was in a directory above stays, with the directory."""
    (tmp_path / "a").mkdir()
    directory = RunDirectory(path=tmp_path / name)
    error = "no run in .* to resume" if resume else "wrong"
    with pytest.raises(ConfigError, match=error), prepared_directory(configure(), directory, resume=resume):
        assert directory.lock.exists()
        raise ConfigError("wrong")

    assert [tmp_path / "a"] == list(tmp_path.rglob("*"))


def test_missing_dataset_keeps_earlier_run(tmp_path, monkeypatch):
    """It is loaded while the engine gets its weights, when the record, the journal and the display exist already."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    directory = RunDirectory(path=tmp_path / "e" / "trial")
    with prepared_directory(configure(), directory, resume=False):
        directory.metrics.write_text("{}")
    config = evolve(configure(), dataset=DatasetConfig(huggingface="absent/absent", split="train"))

    with pytest.raises(DatasetError, match="neither a directory here nor in the cache"):
        Trainer(config).train("examples/tiny_agent.py:TinyAgent", run_dir=directory.path)

    assert directory.metrics.read_text() == "{}"
    assert ["trial"] == [path.name for path in directory.path.parent.iterdir() if path.is_dir()]


@pytest.mark.parametrize("work", ["metrics.jsonl", "failures.jsonl", "checkpoints/step-1", "rollout/0/1.jsonl", None])
def test_failed_run_keeps_samples_and_steps(tmp_path, work):
    """Bad input that shows later ends the run, and its results stay; files without content are not results."""
    directory = RunDirectory(path=tmp_path / "e" / "trial")
    with pytest.raises(WorkflowError), prepared_directory(configure(), directory, resume=False):
        directory.record.write_text("{}")
        directory.metrics.touch()
        if work is not None:
            directory.path.joinpath(work).parent.mkdir(parents=True, exist_ok=True)
            directory.path.joinpath(work).write_text("{}")
        raise WorkflowError("the agent does not work any more")

    assert directory.path.exists() == (work is not None)


def test_refused_resumption_keeps_settings(tmp_path):
    """Another model does not fit the checkpoint: exports of the healthy run still find its own settings."""
    directory = RunDirectory(path=tmp_path / "e" / "trial")
    with prepared_directory(configure(), directory, resume=False):
        directory.metrics.write_text("{}")
    before = directory.config.read_text()

    with pytest.raises(ModelError), prepared_directory(evolve(configure(), seed=8), directory, resume=True):
        assert directory.config.read_text() != before
        raise ModelError("it is of another model")

    assert directory.config.read_text() == before
    assert ["config.yaml"] == [path.name for path in directory.path.glob("config*")]


def test_resumed_run_keeps_settings_of_earlier_steps(tmp_path, caplog):
    """Each resumption with other settings adds a file, and names what differs, without keys."""
    directory = RunDirectory(path=tmp_path / "e" / "trial")
    with prepared_directory(configure(), directory, resume=False):
        directory.metrics.write_text("{}")
    first = directory.config.read_text()
    for seed in (8, 9, 9):
        changed = evolve(
            configure(), seed=seed, proxy=evolve(configure().proxy, admin_key=f"secret-of-an-admin-{seed}")
        )
        write_record(directory, RunRecord(status=RunStatus.INTERRUPTED, library_version=f"0.0.{seed}"))
        with prepared_directory(changed, directory, resume=True):
            directory.metrics.touch()

    kept = {path.name: path.read_text() for path in directory.path.glob("config.*.yaml")}
    assert ["config.1.yaml", "config.2.yaml"] == sorted(kept)
    assert first == kept["config.1.yaml"]
    assert "seed: 8" in kept["config.2.yaml"]
    assert "seed: 8 -> 9" in caplog.text
    assert "before=0.0.8" in caplog.text
    assert "of-an-admin" not in caplog.text


@pytest.mark.parametrize("error", [ConfigError("wrong"), KeyboardInterrupt()])
def test_run_keeps_foreign_files_in_directory(tmp_path, error):
    """A start that fails or is interrupted removes what it has written there, and nothing else."""
    directory = RunDirectory(path=tmp_path / "e" / "trial")
    (directory.path / "mine").mkdir(parents=True)
    (directory.path / "mine" / "notes.txt").write_text("of the user")
    with pytest.raises(type(error)), prepared_directory(configure(), directory, resume=False):
        assert directory.config.is_file()
        (directory.path / "logs").mkdir()
        raise error
    assert [directory.path / "mine"] == list(directory.path.iterdir())
    assert [directory.path] == list((tmp_path / "e").iterdir())
    assert (directory.path / "mine" / "notes.txt").is_file()


def test_resume_without_checkpoint_names_the_former_run(tmp_path):
    """It was set aside by a start without --resume; to leave that out once more would not bring it back."""
    directory = RunDirectory(path=tmp_path / "e" / "trial")
    assert "leave --resume out" in str(no_checkpoint(directory))
    (directory.checkpoints / "step-00000002").mkdir(parents=True)
    directory.config.touch()
    former = directory.set_aside()

    assert former == tmp_path / "e" / "trial.1"
    assert f"--run-dir {former}" in str(no_checkpoint(directory))
