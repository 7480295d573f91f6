"""Checkpoints: exact resume, whole or not at all, full disks, strangers' files."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_actors.errors import CheckpointError
from areal_actors.lib import atomic_write
from areal_actors.training.checkpoints import (
    Contents,
    generator_states,
    save_checkpoint,
    set_generator_states,
)
from areal_actors.training.config import ComputeDtype, Decay, OptimizerConfig, TrainerConfig
from areal_actors.training.directories import atomic_directory
from areal_actors.training.stored_checkpoints import find_checkpoints, find_latest
from areal_actors.training.trainer import PolicyTrainer

CONFIG = TrainerConfig(
    dtype=ComputeDtype.FLOAT32,
    num_minibatches=2,
    optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, decay=Decay.COSINE, num_decay_steps=6),
)


@contextmanager
def largest_file(num_bytes: int):
    """A limit of the operating system on the size of any file that this process writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save_small(root, step, *, value=1.0, counters=None, **kwargs):
    """A checkpoint of one tensor."""
    contents = Contents(parts={"model": {"w": torch.full((4,), value)}}, counters=counters or {})
    return save_checkpoint(root, contents, step=step, **kwargs)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, make_model, make_agent_group):
    """Saving, loading into another model and going on gives the same weights, bit for bit."""
    batches = [[make_agent_group(2 * step), make_agent_group(2 * step + 1)] for step in range(5)]
    straight = PolicyTrainer(make_model(), CONFIG)
    for batch in batches:
        straight.train_step(batch)

    first = PolicyTrainer(make_model(), CONFIG)
    for batch in batches[:2]:
        first.train_step(batch)
    first.save(tmp_path, counters={"next": 17})
    resumed = PolicyTrainer(make_model(seed=5), CONFIG)
    counters = resumed.restore(tmp_path)
    statistics = [resumed.train_step(batch) for batch in batches[2:]]

    assert counters == {"next": 17}
    assert [found.version for found in statistics] == [3, 4, 5]
    expected = straight.state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in resumed.state_dict().items())


def test_random_numbers_go_on_where_they_were(tmp_path, make_model):
    """Torch's generator continues after a restore as it would have without it."""
    trainer = PolicyTrainer(make_model(), CONFIG)
    trainer.save(tmp_path)
    expected = torch.rand(3)
    torch.rand(5)

    trainer.restore(tmp_path)

    assert torch.equal(expected, torch.rand(3))


def test_restore_without_checkpoint_returns_none(tmp_path, make_model):
    """Without a complete checkpoint a trainer stays as it is."""
    trainer = PolicyTrainer(make_model(), CONFIG)

    assert trainer.restore(tmp_path / "absent") is None


def test_a_checkpoint_of_another_model_is_refused(tmp_path, make_model):
    """Names and shapes must fit; the message names the tensors."""
    PolicyTrainer(make_model("qwen2"), CONFIG).save(tmp_path)

    with pytest.raises(CheckpointError, match="another model"):
        PolicyTrainer(make_model("llama"), CONFIG).restore(tmp_path)


def test_only_the_last_checkpoints_are_kept(tmp_path):
    """Older checkpoints go when a newer one is complete."""
    for step in range(4):
        save_small(tmp_path, step, num_kept=2)

    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [2, 3]


def test_saving_a_step_again_replaces_it(tmp_path):
    """The second checkpoint of a step is the one that counts, and no trace of the first remains."""
    save_small(tmp_path, 3, value=1.0)
    save_small(tmp_path, 3, value=2.0)

    assert torch.equal(torch.full((4,), 2.0), find_latest(tmp_path).load("model")["w"])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_a_crash_while_replacing_loses_nothing(tmp_path):
    """Between moving the old one aside and the new one in, the old one is found."""
    save_small(tmp_path, 3)
    (tmp_path / "step-00000003").rename(tmp_path / f"step-00000003{atomic_write.REPLACED}")

    assert find_latest(tmp_path).step == 3


@pytest.mark.parametrize("damage", ["no document", "half a document", "truncated", "missing file", "foreign"])
def test_incomplete_checkpoints_are_ignored(tmp_path, damage):
    """A checkpoint that is not whole is passed over for the one before it."""
    save_small(tmp_path, 1)
    broken = save_small(tmp_path, 2).path
    document = broken / "checkpoint.json"
    match damage:
        case "no document":
            document.unlink()
        case "half a document":
            document.write_text(document.read_text()[:20])
        case "truncated":
            (broken / "model.safetensors").write_bytes(b"x")
        case "missing file":
            (broken / "model.safetensors").unlink()
        case "foreign":
            document.write_text(json.dumps({"format": 99, "step": 2, "sizes": {}, "counters": {}}))

    assert find_latest(tmp_path).step == 1


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=8), st.integers(1, 3))
def test_the_checkpoint_just_written_is_the_latest(tmp_path_factory, steps, num_kept):
    """Also after those of an attempt that got further and was abandoned."""
    root = tmp_path_factory.mktemp("checkpoints")
    written: list[int] = []
    for step in steps:
        saved = save_small(root, step, num_kept=num_kept)
        written = [*(former for former in written if former < step), step][-num_kept:]

        assert find_latest(root) == saved
        assert [checkpoint.step for checkpoint in find_checkpoints(root)] == written


def test_restore_goes_on_from_the_last_write_not_from_the_highest_step(tmp_path, make_model):
    """A directory holds later steps of an abandoned attempt."""
    trainer = PolicyTrainer(make_model(), CONFIG)
    for trainer.version in (20, 30, 10):
        trainer.save(tmp_path)
    resumed = PolicyTrainer(make_model(), CONFIG)
    resumed.restore(tmp_path)

    assert 10 == resumed.version


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_damage_of_the_right_size_is_passed_over(tmp_path_factory, data):
    """Any other bytes in any file, such as the zeros of a lost page cache, leave the checkpoint unused."""
    root = tmp_path_factory.mktemp("checkpoints")
    parts = {name: {"w": torch.arange(1.0, 9)} for name in ("adapter_model", "model", "optimizer", "rng")}
    for step in (1, 2):
        save_checkpoint(root, Contents(parts=parts, documents={"adapter_config.json": {"r": 8}}), step=step)
    broken = root / "step-00000002"
    file = data.draw(st.sampled_from(sorted(path for path in broken.rglob("*.*") if path.name != "checkpoint.json")))
    before = file.read_bytes()
    first = data.draw(st.integers(0, len(before) - 1))
    last = data.draw(st.integers(first + 1, len(before)))
    after = before[:first] + bytes(last - first) + before[last:]
    file.write_bytes(after)

    assert find_latest(root).step == (2 if after == before else 1)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_bit_of_the_document_changes_nothing_in_silence(tmp_path_factory, data):
    """The position in the problems and the count of steps are those that were written, or of the checkpoint before."""
    root = tmp_path_factory.mktemp("checkpoints")
    for step in (1, 2):
        save_small(root, step, counters={"next": 64 * step, "share": 0.5, "of": {"a": [step]}})
    before = find_latest(root)
    document = before.path / "checkpoint.json"
    content = bytearray(document.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    document.write_bytes(content)

    found = find_latest(root)
    assert found == before or found.step == 1


def test_damage_of_the_only_checkpoint_is_an_error_that_names_the_file(tmp_path, make_model):
    """Weights of which half is zero are not trained on, and training does not begin anew either."""
    trainer = PolicyTrainer(make_model(), CONFIG)
    file = trainer.save(tmp_path).path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))

    with pytest.raises(CheckpointError, match=r"step-00000000: model\.safetensors has other contents"):
        trainer.restore(tmp_path)


def test_the_chosen_step_is_restored_and_no_other(tmp_path, make_model):
    """The roles of a run take the step that its controller has chosen."""
    trainer = PolicyTrainer(make_model(), CONFIG)
    for trainer.version in (1, 2):
        trainer.save(tmp_path)
    trainer.restore(tmp_path, step=1)

    assert 1 == trainer.version
    with pytest.raises(CheckpointError, match=r"step 3 .* is gone"):
        trainer.restore(tmp_path, step=3)


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path, make_model):
    """A write that the system refuses raises with the path and the bytes needed, and leaves the older one."""
    trainer = PolicyTrainer(make_model(), CONFIG)
    trainer.save(tmp_path)
    trainer.version = 1

    with largest_file(1000), pytest.raises(CheckpointError, match=r"step-00000001 .* needs [\d,]+ bytes"):
        trainer.save(tmp_path)

    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]


def test_leftovers_of_a_crash_are_swept(tmp_path):
    """A partial directory of a killed writer disappears with the next save and is never read."""
    partial = tmp_path / ".step-00000009.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")

    save_small(tmp_path, 1)

    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_restoring_into_another_schedule_keeps_the_count(tmp_path, make_model, make_agent_group):
    """The number of updates is part of the checkpoint: a changed schedule continues from it."""
    trainer = PolicyTrainer(make_model(), CONFIG)
    trainer.train_step([make_agent_group(0), make_agent_group(1)])
    trainer.save(tmp_path)

    longer = PolicyTrainer(make_model(), evolve(CONFIG, num_minibatches=1))
    longer.restore(tmp_path)

    assert trainer._optimizer.learning_rate == longer._optimizer.learning_rate


def test_a_file_that_cannot_be_synced_is_not_there(tmp_path, monkeypatch):
    """After a crash, it might be missing."""

    def refuse(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    with (
        pytest.raises(CheckpointError, match="could not be written"),
        atomic_directory(tmp_path / "there", num_bytes=1) as partial,
    ):
        (partial / "file").write_text("x")

    assert [] == list(tmp_path.iterdir())


def test_each_device_gets_its_own_state_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the eleventh, whose name comes before that of the third."""
    given = [torch.tensor([index], dtype=torch.uint8) for index in range(12)]
    taken: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: given)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(given))
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", taken.extend)
    set_generator_states(generator_states())

    assert [int(state) for state in given] == [int(state) for state in taken]


@contextmanager
def busy_writer(trainer):
    """The thread that writes has something else to do until the block ends."""
    released = threading.Event()
    trainer._writer = ThreadPoolExecutor(1)
    trainer._writer.submit(released.wait)
    try:
        yield
    finally:
        released.set()


def test_a_checkpoint_in_the_background_is_of_its_step(tmp_path, make_model, make_agent_group):
    """Steps change the weights before anything is written; a resumed run still equals the uninterrupted one."""
    trainer = PolicyTrainer(make_model(), CONFIG)
    batches = [[make_agent_group(step)] for step in range(4)]
    for batch in batches[:2]:
        trainer.train_step(batch)
    with busy_writer(trainer):
        write = trainer.begin_save(tmp_path, counters={"next": 2})
        for batch in batches[2:]:
            trainer.train_step(batch)
        assert find_checkpoints(tmp_path) == ()
    saved = write.result(timeout=60)

    resumed = PolicyTrainer(make_model(seed=5), CONFIG)
    assert resumed.restore(tmp_path) == {"next": 2}
    assert (saved.step, resumed.version) == (2, 2)
    for batch in batches[2:]:
        resumed.train_step(batch)
    expected = trainer.state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in resumed.state_dict().items())


@pytest.mark.parametrize("is_async", [True, False])
def test_a_checkpoint_waits_for_the_one_before(tmp_path, make_model, is_async):
    """There is one copy at a time, and no writer takes the files of another for leftovers."""
    trainer = PolicyTrainer(make_model(), CONFIG)
    with ThreadPoolExecutor(1) as other:
        with busy_writer(trainer):
            first = trainer.begin_save(tmp_path, num_kept=2)
            trainer.version = 1
            second = other.submit(trainer.begin_save if is_async else trainer.save, tmp_path, num_kept=2)
            assert not second.done()
            assert not first.done()
        saved = second.result(timeout=60)
        assert first.done()
        assert (saved.result(timeout=60) if is_async else saved).step == 1

    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [0, 1]


def test_a_write_in_the_background_that_fails_leaves_the_older_checkpoint(tmp_path, make_model, make_agent_group):
    """The future has the error; training goes on, and so does saving once there is room."""
    trainer = PolicyTrainer(make_model(), CONFIG)
    trainer.save(tmp_path)
    trainer.train_step([make_agent_group(0)])
    with largest_file(1000), pytest.raises(CheckpointError, match=r"step-00000001 .* needs [\d,]+ bytes"):
        trainer.begin_save(tmp_path).result(timeout=60)

    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [0]
    trainer.train_step([make_agent_group(1)])
    assert trainer.begin_save(tmp_path).result(timeout=60).step == 2


def test_a_process_that_exits_waits_for_its_checkpoint(tmp_path):
    """Also one that was interrupted: the main thread is gone, and the write is not."""
    code = f"""
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from areal_actors.training.trainer import PolicyTrainer

config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
PolicyTrainer(LlamaForCausalLM(config)).begin_save(Path({str(tmp_path)!r}))
raise KeyboardInterrupt
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert "KeyboardInterrupt" in ended.stderr
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [0]


def test_a_process_that_is_killed_within_a_write_leaves_whole_checkpoints(tmp_path):
    """Saves follow one another without a pause, each of weights that are the number of its step."""
    code = f"""
import os
from pathlib import Path
import torch
from areal_actors.training import checkpoints
from areal_actors.training.trainer import PolicyTrainer
from transformers import LlamaConfig, LlamaForCausalLM

write_tensors = checkpoints.write_tensors
def write(path, tensors, **kwargs):
    write_tensors(path, tensors, **kwargs)
    os.write(1, f"{{path.parent.name}} {{path.name}}\\n".encode())
checkpoints.write_tensors = write

config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
trainer = PolicyTrainer(LlamaForCausalLM(config))
while True:
    trainer.version += 1
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight.fill_(trainer.version)
    trainer.begin_save(Path({str(tmp_path)!r}), num_kept=2)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        # One of the three files of the third checkpoint is written, and the others are not yet.
        next(line for line in child.stdout if "00000003" in line)
        child.kill()

    found = find_checkpoints(tmp_path)
    assert found
    for checkpoint in found:
        values = {value for tensor in checkpoint.load("model").values() for value in tensor.unique().tolist()}
        assert {float(checkpoint.step)} == values
