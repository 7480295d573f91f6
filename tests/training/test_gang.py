"""Two real processes train as one: the same losses, gradients, weights and files; and neither waits for a dead one."""

from __future__ import annotations

import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from attrs import asdict, evolve
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.training.conftest import _make_model
from tests.training.gangs import GANG, OtherRank, create_trainer, play
from tests.training.live import LiveBytes, bytes_of
from transformers import AutoModelForCausalLM

from areal_actors.errors import CheckpointError, GangError, TrainingDiverged
from areal_actors.kernel.remote.sockets import is_loopback
from areal_actors.models import create_empty_policy
from areal_actors.training.config import GangBackend, GangConfig
from areal_actors.training.gang import Gang, assign_passes, connect_store, interface_to, open_store
from areal_actors.training.layers import decoder_layers
from areal_actors.training.publication import DiskPublisher
from areal_actors.training.stored_checkpoints import find_latest
from areal_actors.training.trainer import PolicyTrainer
from areal_actors.training.weights import distinct_tensors, export_model, stored_weights

CASES = {
    "tree": {"steps": 3},
    "flat": {"layout": "flat", "model": "qwen2"},
    "recomputed activations": {"activations": "recompute"},
    "ranks that keep different numbers of layers": {"decides_by_rank": True},
    "moments on the host": {"offload": "cpu"},
    "several updates": {"epochs": 2, "minibatches": 2},
    "a penalty in the loss": {"kl": "loss"},
    "a penalty in the reward": {"kl": "reward", "layout": "flat"},
    "fewer passes than ranks": {"groups": 1, "max_packed_tokens": 10_000},
    "an adapter": {"lora": 4, "model": "qwen2"},
    "an adapter and its base": {"lora": 4, "kl": "loss"},
    "an adapter and the one it started from": {"lora": 4, "kl": "loss", "start": "adapter"},
    "an adapter of experts": {"lora": 4, "model": "mixtral", "experts": True},
}


@pytest.fixture(scope="module")
def other() -> Iterator[OtherRank]:
    """A second process for all cases, the last of which kills it: it takes seconds to load torch."""
    rank = OtherRank()
    rank.hear()  # it is there: no case has to wait for that
    yield rank
    rank.end()


@given(st.lists(st.integers(1, 9), max_size=20), st.integers(1, 6))
def test_every_pass_is_in_one_share(sizes, num_ranks):
    """Each once, in shares of one length, no round without work, and no pass larger than one of a round before."""
    shares = assign_passes(sizes, num_ranks=num_ranks)

    dealt = [index for share in shares for index in share if index is not None]
    assert list(range(len(sizes))) == sorted(dealt)
    assert num_ranks == len(shares)
    assert {-(-len(sizes) // num_ranks)} == {len(share) for share in shares}
    rounds = [[sizes[index] for index in found if index is not None] for found in zip(*shares, strict=True)]
    assert all(min(before) >= max(after) for before, after in pairwise(rounds))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """The directory of a trained adapter."""
    path = tmp_path_factory.mktemp("models") / "adapter"
    trained = create_trainer({"lora": 4})
    play(trained, {"steps": 2})
    trained.adapter.save(path)
    return path


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one(other, name, adapter):
    """Losses, norms, gradients, log-probabilities and weights after some steps are those of one process."""
    case = CASES[name]
    if "start" in case:
        case = case | {"start": str(adapter)}
    expected = play(create_trainer(case), case)

    with other.meet(case) as gang:
        trainer = create_trainer(case)
        trainer.join(gang)
        found = play(trainer, case)

    assert {"problem": ""} == other.hear()
    for own, one in zip(found["steps"], expected["steps"], strict=True):
        assert_alike(own, one)
    assert error_of(found["gradients"][0], expected["gradients"][0]) <= 1e-6
    # AdamW divides by what may be tiny: a rounding in one update is more than that in the next.
    for own, one in zip(found["gradients"], expected["gradients"], strict=True):
        assert error_of(own, one) <= 1e-5
    assert error_of(found["weights"], expected["weights"]) <= 1e-6
    for own, one in zip(found["logprobs"], expected["logprobs"], strict=True):
        np.testing.assert_allclose(own, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_holds_its_shard_and_one_layer(other, dtype):
    """Between a forward and a backward pass: the gathered weights of other layers are freed, and not copied."""
    case = {"model": "wide", "dtype": dtype, "is_measured": True}
    weights = list(create_trainer(case).model.model.layers[0].parameters())
    layer, largest = sum(weight.nbytes for weight in weights), max(weight.nbytes for weight in weights)

    with other.meet(case) as gang:
        trainer = create_trainer(case)
        trainer.join(gang)
        found = play(trainer, case)

    heard = other.hear()
    assert heard["problem"] == ""
    assert found["kept"] <= layer
    # Joining: no rank but the first one ever has the whole model.
    assert heard["own"] < 0.6 * sum(weight.nbytes for weight in _make_model("wide").parameters())
    assert heard["peak"] <= heard["own"] + layer + largest


def test_two_processes_compute_in_bfloat16_as_one(other):
    """Weights are gathered in bfloat16 and gradients summed in float32: what one process computes with, to rounding."""
    case = {"dtype": "bfloat16", "steps": 1}
    expected = play(create_trainer(case), case)

    with other.meet(case) as gang:
        trainer = create_trainer(case)
        trainer.join(gang)
        found = play(trainer, case)

    assert {"problem": ""} == other.hear()
    assert all(weight.dtype is torch.float32 for weight in trainer.model.parameters())
    assert error_of(found["gradients"][0], expected["gradients"][0]) <= 1e-2
    assert found["steps"][0].loss == pytest.approx(expected["steps"][0].loss, rel=1e-3)
    for own, one in zip(found["logprobs"], expected["logprobs"], strict=True):
        np.testing.assert_allclose(own, one, atol=0.02)


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"lora": 4},
        {"optimizer": "adamw_bf16", "offload": "cpu"},
        {"is_async": True},
    ],
)
def test_a_checkpoint_moves_between_numbers_of_processes(other, tmp_path, kind):
    """What two have saved one restores, and what one has saved two restore: weights, moments, version, bit for bit."""
    case = {"steps": 2, "save": str(tmp_path / "two"), **kind}
    with other.meet(case) as gang:
        trainer = create_trainer(case)
        trainer.join(gang)
        found = play(trainer, case)
        state = [*distinct_tensors(trainer.model).values(), *trainer._optimizer.state_dict().values()]
        own = bytes_of(state)
    assert {"problem": ""} == other.hear()
    if "lora" not in kind and "is_async" not in kind:  # an adapter is gathered, and so were all weights meanwhile
        assert found["saving"] <= own + 6000  # the state of the random generator
        assert own < 0.6 * sum(tensor.nbytes for tensor in state)

    # Other weights at first, except under an adapter, whose base must be the same.
    restored = kind | {"seed": 0 if "lora" in kind else 1}
    alone = create_trainer({"checkpoint": str(tmp_path / "two"), **restored})
    alone.save(tmp_path / "one")
    # Also when the weights are spread already.
    again = {"steps": 0, "restores_again": kind == {}, **restored}
    for source, target in (("two", "still two"), ("one", "two again")):
        case = {**again, "checkpoint": str(tmp_path / source), "save": str(tmp_path / target)}
        with other.meet(case) as gang:
            trainer = create_trainer(case)
            assert not trainer._optimizer.state_dict()  # the first rank has no room for all moments
            trainer.join(gang)
            if case["restores_again"]:
                trainer.restore(tmp_path / source)
            play(trainer, case)
        assert {"problem": ""} == other.hear()

    saved = [find_latest(tmp_path / name) for name in ("two", "one", "still two", "two again")]
    assert [2, 2, 2, 2] == [checkpoint.step for checkpoint in saved]
    for part in ("adapter_model" if "lora" in kind else "model", "optimizer"):
        first, *rest = [checkpoint.load(part) for checkpoint in saved]
        for found in rest:
            assert first.keys() == found.keys()
            assert all(torch.equal(first[name], found[name]) for name in first)


@pytest.mark.parametrize("case", [{"model": "wide"}, {"model": "mixtral"}, {"model": "mixtral", "lora": 4}])
def test_weights_are_published_layer_by_layer(other, tmp_path, case):
    """They are those of one process, and the first rank holds one layer of them at a time."""
    alone = create_trainer(case)
    play(alone, {"steps": 1})
    expected = DiskPublisher(root=tmp_path / "one", dtype=torch.bfloat16).publish(alone).path
    largest = max(sum(weight.numel() for weight in layer.parameters()) for layer in decoder_layers(alone.model))

    case = {**case, "steps": 1, "publish": str(tmp_path / "two"), "engine": "bfloat16"}
    with other.meet(case) as gang:
        trainer = create_trainer(case)
        trainer.join(gang)
        found = play(trainer, case)
    assert {"problem": ""} == other.hear()

    written, one = (
        load_file(tmp_path / "two/version-00000001/model.safetensors"),
        load_file(expected / "model.safetensors"),
    )
    assert one.keys() == written.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, written[name], rtol=1e-2, atol=1e-3)
    # The views of the rank's own part are counted, too. A whole layer is in the data type of the engine; under an
    # adapter, one weight at a time is merged in float32.
    own = bytes_of(list(trainer.model.parameters()))
    assert found["writing"] <= own + 2 * 2 * largest + (4 * largest if "lora" in case else 0)


@pytest.mark.parametrize("kind", ["wide", "mixtral"])
def test_the_checkpoint_of_a_gang_is_exported_layer_by_layer(other, tmp_path, kind):
    """The export has the weights of the checkpoint bit for bit; one layer and one weight are in memory at a time."""
    case = {"model": kind, "steps": 1, "save": str(tmp_path)}
    with other.meet(case) as gang:
        trainer = create_trainer(case)
        trainer.join(gang)
        play(trainer, case)
    assert {"problem": ""} == other.hear()
    saved = find_latest(tmp_path)
    expected = saved.load("model")
    _make_model(kind).save_pretrained(tmp_path / "model")
    model = create_empty_policy(tmp_path / "model")

    with LiveBytes() as live:
        export_model(model, tmp_path / "export", state=stored_weights(model, saved), max_file_bytes=60_000)

    found = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    assert len(list((tmp_path / "export").glob("model-*.safetensors"))) > 1
    assert not [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
    layers = [sum(weight.nbytes for weight in layer.parameters()) for layer in decoder_layers(model)]
    largest = max(tensor.nbytes for tensor in expected.values())
    # The experts of a layer are copied when they are divided into the weights of files.
    copies = 2 if kind == "mixtral" else 1
    assert live.peak <= copies * max(layers) + 2 * largest
    assert live.peak < sum(tensor.nbytes for tensor in expected.values())


def test_moments_of_another_optimiser_are_refused_by_all_ranks(other, tmp_path):
    """They are read when the ranks meet, and no rank trains without them."""
    trainer = create_trainer({})
    play(trainer, {"steps": 1})
    trainer.save(tmp_path)

    case = {"checkpoint": str(tmp_path), "optimizer": "adamw_bf16"}
    with other.meet(case) as gang:
        trainer = create_trainer(case)
        with pytest.raises(CheckpointError, match="was not made by adamw_bf16"):
            trainer.join(gang)
    assert "was not made by adamw_bf16" in other.hear()["problem"]


def test_torch_reads_the_shards(other, tmp_path):
    """``torch.distributed.checkpoint`` makes whole tensors of them without a gang."""
    hf_storage = pytest.importorskip("torch.distributed.checkpoint.hf_storage", reason="torch before 2.7")
    case = {"steps": 1, "save": str(tmp_path)}
    with other.meet(case) as gang:
        trainer = create_trainer(case)
        trainer.join(gang)
        expected = play(trainer, case)["weights"]
    assert {"problem": ""} == other.hear()

    saved = find_latest(tmp_path)
    assert not list(saved.path.glob("model.safetensors"))
    found = {name: torch.zeros(tensor.shape) for name, tensor in saved.load("model").items()}
    reader = hf_storage.HuggingFaceStorageReader(str(saved.path / "model"))
    with warnings.catch_warnings(action="ignore"):  # it announces that it reads without a gang
        torch.distributed.checkpoint.load(found, storage_reader=reader, no_dist=True)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_rank_that_cannot_write_is_named(other, tmp_path):
    """All ranks refuse, the older checkpoint stays, and the gang goes on."""
    case = {"steps": 1, "save": str(tmp_path), "largest_file": 1000}
    with other.meet(case) as gang:
        trainer = create_trainer(case)
        PolicyTrainer(create_trainer(case).model).save(tmp_path)
        trainer.join(gang)
        with pytest.raises(CheckpointError, match="step-00000001 could not be written: rank 1 failed"):
            play(trainer, case)
    assert "CheckpointError: Rank 1 could not write its part of" in other.hear()["problem"]
    assert ["step-00000000"] == [path.name for path in tmp_path.iterdir()]


def test_a_loss_that_is_no_number_is_one_verdict(other):
    """All ranks refuse the update, and none waits for another."""
    case = {"poison": 1}
    with other.meet(case) as gang:
        trainer = create_trainer(case)
        trainer.join(gang)
        with pytest.raises(TrainingDiverged, match="step 2"):
            play(trainer, case)
        assert other.hear()["problem"].startswith("TrainingDiverged: The loss of step 2")


def test_ranks_that_differ_are_refused_by_name(other):
    """Ranks with another configuration do not begin; weights need no comparison, as they come from the first rank."""
    with other.meet({"other": {"epochs": 2}}) as gang, pytest.raises(GangError, match="differ in configuration"):
        create_trainer({}).join(gang)
    assert "differ in configuration." in other.hear()["problem"]


def test_a_rank_that_does_nothing_is_given_up(other):
    """Not for ever is waited for a rank that lives and does not come."""
    config = evolve(GANG, timeout_seconds=5)
    case = {"hangs": 1}
    with other.meet(case, config) as gang:
        trainer = create_trainer(case)
        trainer.join(gang)
        with pytest.raises(GangError, match="Rank 0 of 2 has lost the others"):
            play(trainer, case)
        other.tell({})  # it goes on alone

    assert other.hear()["problem"].startswith("GangError: Rank 1 of 2 has lost the others")


def test_an_absent_gang_or_store_is_an_error_after_the_timeout():
    """A gang whose ranks do not come, and an absent store, are errors by name after the timeout."""
    config = GangConfig(num_processes=2, timeout_seconds=0.5, backend=GangBackend.GLOO)
    with pytest.raises(GangError, match="Rank 0 of 2 has lost the others"):
        Gang.form(open_store("127.0.0.1", config), rank=0, config=config)
    with pytest.raises(GangError, match=r"does not answer at 127\.0\.0\.1:1"):
        connect_store("127.0.0.1", 1, config)


def test_a_killed_rank_is_a_named_error_in_bounded_time(other):
    """The others' connections break with it: nothing waits, and what is asked of this gang afterwards is refused."""
    case = {"dies": 1}
    with other.meet(case, evolve(GANG, timeout_seconds=100)) as gang:
        trainer = create_trainer(case)
        trainer.join(gang)
        started = time.monotonic()
        with pytest.raises(GangError, match="Rank 0 of 2 has lost the others"):
            play(trainer, case)
        with pytest.raises(GangError, match="closed; resume"):
            trainer.state_dict()

    assert time.monotonic() - started < 60


def test_a_rank_that_is_killed_while_it_writes_leaves_the_older_checkpoint(tmp_path):
    """The first rank writes no document, removes what was written, and names the loss."""
    other = OtherRank()
    other.hear()
    case = {"steps": 1, "save": str(tmp_path), "largest_file": 1000, "dies_writing": True}
    with other.meet(case) as gang:
        trainer = create_trainer(case)
        PolicyTrainer(create_trainer(case).model).save(tmp_path)
        trainer.join(gang)
        with pytest.raises(GangError, match="Rank 0 of 2 has lost the others"):
            play(trainer, case)

    assert -signal.SIGXFSZ == other.process.wait()
    other.end()
    assert ["step-00000000"] == [path.name for path in tmp_path.iterdir()]
    assert 0 == find_latest(tmp_path).step


def assert_alike(own, one):
    """Statistics of two steps, to rounding."""
    assert asdict(one.data) == pytest.approx(asdict(own.data), rel=1e-5)
    for name, value in asdict(one, recurse=False).items():
        if name not in ("data", "seconds"):
            assert value == pytest.approx(getattr(own, name), rel=1e-5, abs=1e-6, nan_ok=True)


def error_of(own, one):
    """The norm of the difference of some tensors over the norm."""
    assert one.keys() == own.keys()
    difference = sum(float((own[name] - one[name]).square().sum()) for name in one)
    return (difference / sum(float(value.square().sum()) for value in one.values())) ** 0.5


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are asked for as Linux wants it")
def test_interface_to_another_machine_is_found():
    """The one whose address they see; an unknown name has none."""
    names = {name for _, name in socket.if_nameindex()}

    assert interface_to("192.0.2.1") in names | {None}
    assert interface_to("absent.invalid") is None
    assert not is_loopback("192.0.2.1")
