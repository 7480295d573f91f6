"""What the ranks of a gang do in tests: the same function in each process, told by one line of JSON.

``python -m tests.training.gangs`` is a rank that plays what its standard input says, one case a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve
from tests.training.conftest import _make_agent_group, _make_model
from tests.training.live import LiveBytes, bytes_of

from areal_actors.errors import ArealError
from areal_actors.training.config import (
    Activations,
    ComputeDtype,
    GangBackend,
    GangConfig,
    KlConfig,
    KlPlace,
    Layout,
    LoraConfig,
    ObjectiveConfig,
    OffloadTo,
    OptimizerConfig,
    OptimizerName,
    TrainerConfig,
)
from areal_actors.training.gang import Gang, connect_store, open_store
from areal_actors.training.packing import Pack
from areal_actors.training.publication import DiskPublisher
from areal_actors.training.sharding import gather
from areal_actors.training.trainer import PolicyTrainer

ROOT = Path(__file__).parents[2]
GANG = GangConfig(num_processes=2, backend=GangBackend.GLOO, timeout_seconds=60)


class OtherRank:
    """A process that plays rank 1 of each case."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.training.gangs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"},
        )

    @contextlib.contextmanager
    def meet(self, case: Mapping[str, Any], config: GangConfig = GANG) -> Iterator[Gang]:
        """Rank 0 of a gang whose rank 1 plays ``case``."""
        store = open_store("127.0.0.1", config)
        self.tell({"port": store.port, "timeout": config.timeout_seconds, **case})
        gang = Gang.form(store, rank=0, config=config)
        try:
            yield gang
        finally:
            gang.close()

    def tell(self, case: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """What rank 1 says at the end of a case."""
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def config_of(case: Mapping[str, Any]) -> TrainerConfig:
    place = case.get("kl")
    kl = KlConfig() if place is None else KlConfig(coefficient=0.1, place=KlPlace(place))
    return TrainerConfig(
        dtype=ComputeDtype(case.get("dtype", "float32")),
        optimizer=OptimizerConfig(
            name=OptimizerName(case.get("optimizer", "adamw")),
            offload=OffloadTo(case.get("offload", "none")),
            learning_rate=1e-3,
            weight_decay=0.01,
        ),
        objective=evolve(ObjectiveConfig(), kl=kl),
        layout=Layout(case.get("layout", "tree")),
        max_packed_tokens=case.get("max_packed_tokens", 40),
        activations=Activations(case.get("activations", "keep")),
        num_epochs=case.get("epochs", 1),
        num_minibatches=case.get("minibatches", 1),
        gang=GANG,
        lora=_lora_of(case),
    )


def _lora_of(case: Mapping[str, Any]) -> LoraConfig | None:
    experts = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj") if "experts" in case else ()
    path = Path(case["start"]) if "start" in case else None
    return LoraConfig(rank=case["lora"], target_parameters=experts, path=path) if "lora" in case else None


def emptied(model: Any) -> Any:
    """The model with its weights on the meta device, tied as they were."""
    empty: dict[torch.Tensor, torch.nn.Parameter] = {}
    for part in model.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                part._parameters[name] = empty.setdefault(weight, torch.nn.Parameter(weight.to("meta")))
    return model


def create_model(case: Mapping[str, Any], *, seed: int, is_empty: bool) -> Any:
    """The model of a case, or one without weights, which get those of the first rank."""
    model = _make_model(case.get("model", "llama"), seed=seed)
    return emptied(model) if is_empty else model


def create_trainer(case: Mapping[str, Any], *, is_empty: bool = False) -> PolicyTrainer:
    """The trainer of a case; one without weights gets those of the first rank."""
    model = create_model(case, seed=case.get("seed", 0), is_empty=is_empty)
    has_reference = "kl" in case and "lora" not in case
    reference = create_model(case, seed=1, is_empty=is_empty) if has_reference else None
    trainer = PolicyTrainer(model, config_of(case), reference=reference)
    trainer.expect_engine(dtype=case.get("engine", "float32"))
    if "checkpoint" in case:
        trainer.restore(Path(case["checkpoint"]))
    return trainer


def play(trainer: PolicyTrainer, case: Mapping[str, Any]) -> dict[str, Any]:
    """Some steps; what they reported, the gradients of each update, and the log-probabilities and weights after it."""
    if case.get("is_measured"):
        return kept_bytes(trainer)
    if case.get("decides_by_rank"):  # as on GPUs, of which one has less free memory
        trainer._scorer.activations = Activations.AUTO
        trainer._scorer.count_kept = lambda _: trainer.gang.rank
    gradients: list[dict[str, torch.Tensor]] = []
    update = trainer._optimizer.step

    def step() -> float:
        found = trainer._optimizer._parameters.items()
        gradients.append({name: gather(p.grad).clone() for name, p in found if p.grad is not None})
        return update()

    trainer._optimizer.step = step  # type: ignore[method-assign]
    num_groups = case.get("groups", 3)
    steps = []
    for number in range(case.get("steps", 2)):
        if (case.get("dies"), trainer.gang.rank) == (number, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if (case.get("hangs"), trainer.gang.rank) == (number, 1):
            sys.stdin.readline()
        groups = [_make_agent_group(10 * number + index) for index in range(num_groups)]
        if case.get("poison") == number:
            with torch.no_grad():
                next(trainer.model.parameters()).fill_(float("inf"))
        steps.append(trainer.train_step(groups))
    groups = [_make_agent_group(seed) for seed in range(num_groups)]
    rows = [row for group in groups for episode in group.episodes for row in episode.trajectories]
    logprobs = trainer.logprobs(rows)
    with LiveBytes() as live:
        if "save" in case:
            save(trainer, case)
    return {
        "steps": steps,
        "gradients": gradients,
        "logprobs": logprobs,
        "weights": trainer.state_dict(),
        "saving": live.peak,
        **(publish(trainer, Path(case["publish"])) if "publish" in case else {}),
    }


def publish(trainer: PolicyTrainer, directory: Path) -> dict[str, Any]:
    """Publish the weights as a directory; return the peak of memory."""
    if trainer.gang.rank > 0:
        trainer.state_dict()
        return {}
    with LiveBytes() as writing:
        DiskPublisher(root=directory, dtype=torch.bfloat16).publish(trainer)
    return {"writing": writing.peak}


def save(trainer: PolicyTrainer, case: Mapping[str, Any]) -> None:
    """Write a checkpoint; the other rank may have no room for its files, or be killed while it writes the first one."""
    directory = Path(case["save"])
    if case.get("is_async"):
        write = trainer.begin_save(directory)
        trainer.state_dict()  # the ranks talk to each other while they write
        write.result()
        return
    if trainer.gang.rank == 0:
        trainer.save(directory)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.getsignal(signal.SIGXFSZ)
    resource.setrlimit(resource.RLIMIT_FSIZE, (case.get("largest_file", soft), hard))
    if case.get("dies_writing"):
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        trainer.save(directory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def kept_bytes(trainer: PolicyTrainer) -> dict[str, int]:
    """Bytes held between a forward and a backward pass of four tokens, at most in both, and by own weights."""
    pack = Pack(
        input_ids=np.arange(4)[None],
        position_ids=np.arange(4)[None],
        segments=None,
        rows=(0,),
        sources=np.array([2]),
        targets=np.array([3]),
        num_tokens=4,
    )
    with LiveBytes() as live:
        scores = trainer._passes._score(trainer._scorer, pack)
        kept = live.now()
        torch.autograd.backward(scores.logprobs.sum())
    return {"kept": kept, "peak": live.peak, "own": bytes_of(list(trainer.model.parameters()))}


def main() -> None:
    torch.set_num_threads(1)
    print("{}", flush=True)  # noqa: T201 - ready
    for line in sys.stdin:
        case = {"steps": 2} | json.loads(line)
        config = evolve(GANG, timeout_seconds=case["timeout"])
        problem, measured = "", {}
        gang = Gang.alone()
        try:
            gang = Gang.form(connect_store("127.0.0.1", case["port"], config), rank=1, config=config)
            trainer = create_trainer(case | case.get("other", {}), is_empty=True)
            with LiveBytes() if case.get("is_measured") else contextlib.nullcontext() as live:
                trainer.join(gang)
            if live is not None:
                measured = {"peak": live.peak, "own": bytes_of(list(trainer.model.parameters()))}
            if case.get("restores_again"):
                trainer.restore(Path(case["checkpoint"]))
            play(trainer, case)
        except ArealError as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            gang.close()
        print(json.dumps({"problem": problem, **measured}), flush=True)  # noqa: T201 - what the first rank hears


if __name__ == "__main__":
    main()
