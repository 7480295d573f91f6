"""What a training step costs in memory and time, computed in each of the ways that promise equal gradients.

Two groups of eight rows, half of each row a prompt that its group shares, are trained by a random Llama of ten million
parameters in float32. Each way is a process of its own that takes two steps. ``peak`` is the most memory that glibc has
allocated during the second one, weights, gradients and moments included, less what it had before the model; ``CPU`` is
that of the second step, of all ranks; ``error`` is the largest distance of a weight's gradient from that of the
baseline, in units of its norm there.

The baseline is what transformers does by itself: rows padded to one length, eager attention over a dense mask, all
activations kept. On a CPU, FlexAttention computes the blocks of a GPU without being compiled, so that its time and
memory mean nothing, and only the gradients of one step are compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import benchmarks.trainer as groups
import torch
from attrs import asdict, evolve, frozen
from benchmarks.harness import Result
from benchmarks.planning import used_bytes
from safetensors.torch import load_file, save_file
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, not declared
from torch.nn.attention import flex_attention

from areal_actors.lib.checkpoint_tensors import StoredModel
from areal_actors.models import create_empty_policy
from areal_actors.training.config import Activations, ComputeDtype, GangBackend, GangConfig, Layout, TrainerConfig
from areal_actors.training.gang import Gang, connect_store
from areal_actors.training.loading import attach_source
from areal_actors.training.sharding import gather
from areal_actors.training.trainer import PolicyTrainer
from areal_actors.training.tree_attention import BLOCK_ATTENTION

_MAX_ERROR = 1e-5
_NUM_STEPS = 2
_NUM_GROUPS = 2
_MIB = 1 << 20


@frozen(kw_only=True)
class Way:
    """How a step is computed. Rows have ``row_tokens``."""

    name: str
    row_tokens: int
    layout: str = "tree"
    attention: str | None = None
    """Instead of the trainer's choice."""
    activations: str = "keep"
    chunk_tokens: int | None = None
    num_ranks: int = 1


def ways(row_tokens: int) -> tuple[Way, ...]:
    """Return the ways, the baseline first."""
    create = partial(Way, row_tokens=row_tokens)
    chunks = partial(create, chunk_tokens=row_tokens)
    return (
        create(name="flat, dense mask", layout="flat", attention="eager"),
        create(name="flat", layout="flat"),
        create(name="tree"),
        create(name="tree, FlexAttention", attention=BLOCK_ATTENTION),
        create(name="tree, recompute", activations="recompute"),
        chunks(name="tree, chunks"),
        chunks(name="tree, chunks, recompute", activations="recompute"),
        create(name="tree, recompute, each of two ranks", activations="recompute", num_ranks=2),
    )


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the protocol of all benchmarks
    """Peaks, CPU times and errors, by way."""
    found = ways(128 if quick else 256)
    results: list[Result] = []
    with TemporaryDirectory() as directory:
        groups.create_model().save_pretrained(Path(directory, "model"))
        expected: dict[str, torch.Tensor] | None = None
        for way in found:
            peak, cpu = _play(way, Path(directory))
            gradients = load_file(Path(directory, "gradients.safetensors"))
            figure = partial(Result, benchmark="passes")
            if way.attention != BLOCK_ATTENTION:
                results.append(figure(name=f"{way.name}, peak", value=peak / _MIB, unit="MiB"))
                results.append(figure(name=f"{way.name}, CPU", value=cpu, unit="s CPU"))
            if expected is None:
                expected = gradients
                continue
            error = max(float((gradients[name] - each).norm() / each.norm()) for name, each in expected.items())
            results.append(
                figure(name=f"{way.name}, error of the gradient", value=error, unit="of the norm", gate=_MAX_ERROR)
            )
    return results


def _play(way: Way, directory: Path) -> tuple[int, float]:
    """Return the largest peak of a rank in bytes, and the CPU seconds of all; the first one writes its gradients."""
    start = partial(subprocess.Popen, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    command = [sys.executable, "-m", "benchmarks.passes", json.dumps(asdict(way)), str(directory)]
    with ExitStack() as stack:
        ranks: list[list[str]] = [[]]
        if way.num_ranks > 1:
            store = TCPStore("127.0.0.1", 0, way.num_ranks, is_master=True, wait_for_workers=False)
            ranks = [[str(store.port), str(rank)] for rank in range(way.num_ranks)]
        processes = [stack.enter_context(start([*command, *rank])) for rank in ranks]
        printed = [process.communicate()[0].split()[-2:] for process in processes]
    return max(int(peak) for peak, _ in printed), sum(float(cpu) for _, cpu in printed)


def create_trainer(way: Way, directory: Path, *, port: str = "", rank: str = "") -> PolicyTrainer:
    """Create the trainer of a way; a ``rank`` reads its part of the model and meets the others at ``port``."""
    tokens = _NUM_GROUPS * groups.MEMBERS * way.row_tokens
    config = TrainerConfig(
        layout=Layout(way.layout),
        dtype=ComputeDtype.FLOAT32,
        activations=Activations(way.activations),
        chunk_tokens=way.chunk_tokens,
        # The rows of one group in each pass.
        max_packed_tokens=tokens // _NUM_GROUPS,
        gang=GangConfig(num_processes=way.num_ranks, backend=GangBackend.GLOO),
    )
    if way.num_ranks > 1:
        model = create_empty_policy(directory / "model")
        attach_source(model, StoredModel(directory / "model", model))
        trainer = PolicyTrainer(model, config)
        store = connect_store("127.0.0.1", int(port), config.gang)
        trainer.join(Gang.form(store, rank=int(rank), config=config.gang))
        return trainer
    model = groups.create_model()
    if way.attention == "eager":
        model.set_attn_implementation("eager")
    trainer = PolicyTrainer(model, config)
    if way.attention == BLOCK_ATTENTION:
        trainer.model.set_attn_implementation(way.attention)
        # The operator has a backward pass on CPUs, which torch refuses because its compiled kernel has none.
        flex_attention._validate_device = lambda *_: None  # noqa: SLF001
    return trainer


def measure(way: Way, directory: Path, port: str = "", rank: str = "") -> tuple[int, float]:
    """Take the steps in this process; return the peak of allocated bytes and the CPU seconds of the last step."""
    half = way.row_tokens // 2
    groups.PROMPT, groups.FIRST, groups.TOOL, groups.SECOND = half, half // 2, half // 4, half // 4
    # What importing and the first step allocate once is not the model's.
    small = evolve(way, attention=None, num_ranks=1, chunk_tokens=None)
    create_trainer(small, directory).train_step([groups.create_group(vocab_size=64)])
    before = used_bytes()[0]
    trainer = create_trainer(way, directory, port=port, rank=rank)
    update: Any = trainer._optimizer.step  # noqa: SLF001 - gradients are gone after an update
    gradients: dict[str, torch.Tensor] = {}

    def step() -> float:
        if not gradients:
            weights = trainer.model.named_parameters()
            gradients.update({name: gather(weight.grad).clone() for name, weight in weights if weight.grad is not None})
        return float(update())

    trainer._optimizer.step = step  # type: ignore[method-assign]  # noqa: SLF001
    num_steps = 1 if way.attention == BLOCK_ATTENTION else _NUM_STEPS
    for number in range(num_steps):
        peak, is_over = 0, threading.Event()

        def watch(is_over: threading.Event = is_over) -> None:
            nonlocal peak
            while not is_over.wait(0.004):
                peak = max(peak, used_bytes()[0])

        watcher = threading.Thread(target=watch, daemon=True)  # a step that fails ends the process
        watcher.start()
        begun = time.process_time()
        trainer.train_step([groups.create_group(vocab_size=8192, seed=seed) for seed in range(_NUM_GROUPS)])
        cpu = time.process_time() - begun
        is_over.set()
        watcher.join()
        if number == 0 and rank in {"", "0"}:
            save_file(gradients, directory / "gradients.safetensors")
        # They are no part of a step.
        for name in gradients:
            gradients[name] = torch.empty(0)
    return peak - before, cpu


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(*measure(Way(**json.loads(sys.argv[1])), Path(sys.argv[2]), *sys.argv[3:]))
