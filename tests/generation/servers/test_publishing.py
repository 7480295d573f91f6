"""What is written for servers, and who removes it."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from attrs import frozen
from safetensors.torch import load_file
from tests.moe import KINDS, create_moe
from transformers import AutoModelForCausalLM

from areal_actors.domain import Snapshot
from areal_actors.generation.servers.publishing import Publisher
from areal_actors.training.publication import DiskPublisher

ANOTHER = """
import sys, time
from pathlib import Path
import torch
from safetensors.torch import load_file
from areal_actors.domain import Snapshot
from areal_actors.generation.servers.publishing import Publisher
directory, model = map(Path, sys.argv[1:])
weights = Publisher(directory, model).write(Snapshot(version=1, state=load_file(model / "model.safetensors")))
print(weights.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(2, 3)}, path / "model.safetensors")
    return path


@pytest.fixture
def another(tmp_path, model):
    """A process that has written weights below ``tmp_path / "shared"``, and lives until its input ends."""
    argv = [sys.executable, "-c", ANOTHER, str(tmp_path / "shared"), str(model)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process, process.stdout.readline().strip()
        process.stdin.close()


def test_only_weights_of_killed_processes_are_removed(tmp_path, model, another):
    """Whatever its number is: in containers all processes have the same one."""
    process, path = another
    publisher = Publisher(tmp_path / "shared", model)
    publisher.remove_leftovers()
    assert (Path(path) / "model.safetensors").exists()

    process.send_signal(signal.SIGKILL)
    process.wait()
    publisher.remove_leftovers()
    assert not list((tmp_path / "shared").iterdir())


def test_publisher_removes_its_weights_when_closed(tmp_path, model):
    """Also when another engine of the same process opens."""
    state = {"weight": torch.zeros(2, 3)}
    first, second = Publisher(tmp_path / "shared", model), Publisher(tmp_path / "shared", model)
    weights = first.write(Snapshot(version=1, state=state))
    later = first.write(Snapshot(version=2, state=state))
    first.keep_only(later.path)
    second.remove_leftovers()

    assert not weights.path.exists()
    assert later.path.exists()

    first.close()
    second.close()
    assert not list((tmp_path / "shared").iterdir())


def test_without_locks_no_leftovers_are_removed(tmp_path, model, monkeypatch):
    """On such a file system, weights are written as ever, and what a killed process left stays."""
    import errno
    import fcntl

    def refuse(*_args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    first, second = Publisher(tmp_path / "shared", model), Publisher(tmp_path / "shared", model)
    weights = first.write(Snapshot(version=1, state={"weight": torch.zeros(2, 3)}))
    second.remove_leftovers()

    assert weights.path.exists()
    first.close()
    assert not list((tmp_path / "shared").iterdir())


@frozen
class Policy:
    """What a trainer publishes."""

    model: torch.nn.Module
    version: int = 1

    def state_dict(self):
        return dict(self.model.state_dict())

    @contextmanager
    def gathered(self):
        yield self.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_servers_are_given_the_tensors_that_checkpoints_have(tmp_path, kind):
    """A lent state dict and a published directory end up as the same files, also where memory merges experts."""
    began, trained = create_moe(kind, seed=0), create_moe(kind, seed=1)
    began.save_pretrained(tmp_path / "model")
    publisher = Publisher(tmp_path / "shared", tmp_path / "model", dtype="bfloat16")
    lent = publisher.write(Snapshot(version=1, state=trained.state_dict()))
    disk = DiskPublisher(root=tmp_path / "disk", dtype=torch.bfloat16).publish(Policy(trained))
    found, expected = (load_file(path / "model.safetensors") for path in (lent.path, disk.path))
    loaded = AutoModelForCausalLM.from_pretrained(lent.path, dtype="auto")

    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    for name, parameter in trained.named_parameters():
        assert torch.equal(parameter.to(torch.bfloat16), loaded.get_parameter(name))
    publisher.close()
