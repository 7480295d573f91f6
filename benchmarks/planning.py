"""Predicted against measured memory: peaks of training steps on the CPU, for models of four shapes.

Each case is a process that trains a random model for two steps on groups of eight rows, and samples the memory that it
has allocated and its resident memory, less what it had before the model. ``value`` is the error of the prediction of
``training/memory.py``, against the peak of resident memory. In the cases of two ranks each is a process that reads its
rows of the model's files, and the larger peak of allocated memory counts.

What glibc has freed and keeps is resident, too. For ranks it differs from run to run by a sixth: they allocate and free
a gathered layer again and again, and glibc takes blocks below 32 MiB from a heap with holes. Layers of models of
billions of weights are larger, and their memory goes back to the system at once. Both peaks are in the details.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import benchmarks.trainer as groups
import torch
from attrs import asdict, evolve, frozen
from benchmarks.harness import Result
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, not declared
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen2Config, Qwen3Config

from areal_actors.lib.checkpoint_tensors import StoredModel
from areal_actors.models import create_empty_policy
from areal_actors.training.config import Activations, ComputeDtype, GangBackend, GangConfig, Layout, TrainerConfig
from areal_actors.training.gang import Gang, connect_store
from areal_actors.training.loading import attach_source
from areal_actors.training.memory import plan_trainer, sketch_model
from areal_actors.training.trainer import PolicyTrainer

_MAX_ERROR = 0.15
_NUM_STEPS = 2
# Fields of glibc's ``struct mallinfo2``, in their order.
_MALLINFO = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
_SHAPES: dict[str, Any] = {
    "Qwen2 47M": lambda: Qwen2Config(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "Llama 88M": lambda: LlamaConfig(
        vocab_size=8192,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    ),
    "Qwen3 69M": lambda: Qwen3Config(
        vocab_size=64000,
        hidden_size=640,
        intermediate_size=1920,
        num_hidden_layers=6,
        num_attention_heads=10,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    "Mixtral 57M": lambda: MixtralConfig(
        vocab_size=16000,
        hidden_size=384,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    ),
}


@frozen(kw_only=True)
class Case:
    """A shape, the settings of its trainer, and the tokens of each of eight rows, half of them a shared prompt."""

    shape: str
    dtype: str = "float32"
    activations: str = "keep"
    row_tokens: int = 800
    num_ranks: int = 1

    @property
    def name(self) -> str:
        """For the table."""
        ranks = f", {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        return f"{self.shape}, {self.dtype}, {self.activations}{ranks}"

    @property
    def num_tokens(self) -> int:
        """Tokens of the one pass of the group: the prompt once, and the rest of each row but its last token."""
        half = self.row_tokens // 2
        return half + groups.MEMBERS * (half - 1)


CASES = (
    Case(shape="Qwen2 47M"),
    Case(shape="Llama 88M", dtype="bfloat16"),
    Case(shape="Llama 88M", dtype="bfloat16", activations="recompute"),
    Case(shape="Qwen3 69M", activations="recompute"),
    Case(shape="Mixtral 57M", row_tokens=400),
    Case(shape="Qwen2 47M", num_ranks=2),
    Case(shape="Llama 88M", activations="recompute", row_tokens=120, num_ranks=2),
    Case(shape="Llama 88M", dtype="bfloat16", activations="recompute", num_ranks=2),
    Case(shape="Qwen3 69M", activations="recompute", num_ranks=2),
    Case(shape="Mixtral 57M", row_tokens=400, num_ranks=2),
)


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the protocol of all benchmarks
    """Relative errors of predictions, by case."""
    return [_compare(case) for case in (CASES[-1:] if quick else CASES)]


def _compare(case: Case) -> Result:
    command = [sys.executable, "-m", "benchmarks.planning", json.dumps(asdict(case))]
    start = partial(subprocess.Popen, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    with TemporaryDirectory() as directory, ExitStack() as stack:
        store, more = None, [[] for _ in range(case.num_ranks)]
        if case.num_ranks > 1:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(_SHAPES[case.shape]()).save_pretrained(directory)
            store = TCPStore("127.0.0.1", 0, case.num_ranks, is_master=True, wait_for_workers=False)
            more = [[directory, str(store.port), str(rank)] for rank in range(case.num_ranks)]
        processes = [stack.enter_context(start([*command, *found])) for found in more]
        printed = [process.communicate()[0].split()[-2:] for process in processes]
    allocated, resident = (max(map(int, found)) for found in zip(*printed, strict=True))
    measured = allocated if case.num_ranks > 1 else resident
    predicted = predict(case)
    return Result(
        benchmark="planning",
        name=f"{case.name}, error of the prediction",
        value=abs(predicted / measured - 1),
        unit="of the peak",
        gate=_MAX_ERROR,
        detail={"predicted_bytes": predicted, "allocated_bytes": allocated, "resident_bytes": resident},
    )


def predict(case: Case) -> int:
    """Return the predicted peak in bytes."""
    plan = plan_trainer(
        sketch_model(_SHAPES[case.shape]()),
        _settings(case),
        device_type="cpu",
        memory_bytes=2**60,
        max_length=1,
    )
    return plan.total


def _settings(case: Case) -> TrainerConfig:
    return TrainerConfig(
        layout=Layout.TREE,
        dtype=ComputeDtype(case.dtype),
        activations=Activations(case.activations),
        max_packed_tokens=case.num_tokens,
        gang=GangConfig(num_processes=case.num_ranks, backend=GangBackend.GLOO),
    )


def measure(case: Case, directory: str = "", port: str = "", rank: str = "") -> tuple[int, int]:
    """Train in this process, and return by how much its allocated and its resident memory grew at most, in bytes.

    It is a ``rank`` of a gang, whose store listens at ``port`` and whose model is in ``directory``, if they are given.
    """
    torch.manual_seed(0)
    half = case.row_tokens // 2
    groups.PROMPT, groups.FIRST, groups.TOOL, groups.SECOND = half, half // 2, half // 4, half // 4
    tiny = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    # What importing and the first step allocate once is not the model's.
    warm = PolicyTrainer(AutoModelForCausalLM.from_config(tiny), _settings(evolve(case, num_ranks=1)))
    warm.train_step([groups.create_group(vocab_size=64)])
    before, is_over = used_bytes(), threading.Event()
    peaks = before

    def watch() -> None:
        nonlocal peaks
        while not is_over.wait(0.004):
            peaks = max(peaks[0], (now := used_bytes())[0]), max(peaks[1], now[1])

    watcher = threading.Thread(target=watch)
    watcher.start()
    config = _SHAPES[case.shape]()
    if directory:
        empty = create_empty_policy(Path(directory))
        attach_source(empty, StoredModel(Path(directory), empty))
        trainer = PolicyTrainer(empty, _settings(case))
        gang = trainer.config.gang
        trainer.join(Gang.form(connect_store("127.0.0.1", int(port), gang), rank=int(rank), config=gang))
    else:
        trainer = PolicyTrainer(AutoModelForCausalLM.from_config(config), _settings(case))
    for _ in range(_NUM_STEPS):
        trainer.train_step([groups.create_group(vocab_size=config.vocab_size) for _ in range(case.num_ranks)])
    is_over.set()
    watcher.join()
    return peaks[0] - before[0], peaks[1] - before[1]


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO]


def used_bytes() -> tuple[int, int]:
    """Return the bytes that are allocated, by glibc, and those that are resident and of no file."""
    count = ctypes.CDLL("libc.so.6").mallinfo2
    count.restype = _Mallinfo
    found = count()
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    resident = dict(line.split(":", 1) for line in lines)["RssAnon"].split()[0]
    return found.uordblks + found.hblkhd, int(resident) * 1024


if __name__ == "__main__":
    print(*measure(Case(**json.loads(sys.argv[1])), *sys.argv[2:]))
