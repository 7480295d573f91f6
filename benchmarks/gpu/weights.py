"""Section weights: how far engine and trainer are apart in bfloat16, and how long new weights take to reach the engine.

The engine samples, the trainer scores the same tokens in each layout, and the capture gate judges them in a step. The
head is untied and the logits spread like those of a trained model, because with weights as they are initialised all ids
are equally probable, whatever the rounding.
"""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import anyio
import numpy as np
from benchmarks.gpu.cells import Cell, Context, synchronise
from benchmarks.gpu.engine import generate_all
from benchmarks.gpu.groups import create_group, create_prompts, create_sampled_row
from benchmarks.gpu.models import create_model, set_logit_spread
from benchmarks.harness import Skipped

from areal_actors.domain import Snapshot, Trajectory
from areal_actors.errors import CaptureViolation
from areal_actors.generation.torch import TorchEngine, TorchEngineConfig
from areal_actors.training.config import ComputeDtype, Layout, LoraConfig, OptimizerConfig, TrainerConfig
from areal_actors.training.trainer import PolicyTrainer

__all__ = ["run"]

_EXACT = Layout.FLAT, ComputeDtype.FLOAT32
"""What the engine alone is off by, except for TF32."""
_SPREAD = 3.0
"""Standard deviation of the logits."""


def run(context: Context) -> None:
    """Sample, score, judge and load."""
    anyio.run(_run, context)


async def _run(context: Context) -> None:
    model = create_model(context.shape, context.device, is_tied=False)
    set_logit_spread(model, _SPREAD)
    number, num_new = (4, 8) if context.is_quick else (32, 384)
    lengths = (8, 24) if context.is_quick else (128, 512)
    config = TorchEngineConfig(dtype="bfloat16", device=context.device, max_concurrent=number, max_length=1024)
    async with TorchEngine.open(config, model=model) as engine:
        rows: list[Trajectory] = []
        with context.cell("sampling") as cell:
            prompts = create_prompts(number, lengths, vocab_size=context.shape.vocab_size, seed=5)
            found: dict[int, Any] = {}
            await generate_all(engine, prompts, num_new=num_new, found=found)
            rows = [
                create_sampled_row(prompt, np.array(found[i][0]), found[i][1], found[i][2], member=i)
                for i, prompt in enumerate(prompts)
            ]
            cell.add("mean log-probability", np.concatenate([found[i][2] for i in found]).mean(), "nats")
        for layout, dtype in [*((layout, ComputeDtype.BFLOAT16) for layout in Layout), _EXACT]:
            name = f"gap, {layout}" if dtype is ComputeDtype.BFLOAT16 else "gap, float32 trainer"
            if rows and context.may_begin(name):
                with context.cell(name) as cell:
                    _measure_gap(cell, _create_trainer(context, model, layout, dtype=dtype), rows)
        for name, lora in (("update", None), ("update, LoRA", LoraConfig())):
            if context.may_begin(name):
                with context.cell(name) as cell:
                    if lora is not None and importlib.util.find_spec("peft") is None:
                        raise Skipped("peft is not installed")
                    await _measure_updates(cell, engine, _create_trainer(context, model, Layout.FLAT, lora=lora))


def _measure_gap(cell: Cell, trainer: PolicyTrainer, rows: list[Trajectory]) -> None:
    """Record the differences of log-probabilities of the sampled tokens, and the verdict of the capture gate."""
    pairs = zip(trainer.logprobs(rows, is_raw=True), rows, strict=True)
    gap = np.concatenate([np.abs(own - row.raw_logprobs)[row.loss_mask == 1] for own, row in pairs])
    cell.add("mean difference", gap.mean(), "nats", num_tokens=len(gap))
    cell.add("99th percentile of differences", np.percentile(gap, 99), "nats")
    cell.add("largest difference", gap.max(), "nats")
    has_passed = float(_passes_gate(cell.context, trainer, rows))
    cell.add("capture gate", has_passed, "passed", gate=1.0, higher_is_better=True)


async def _measure_updates(cell: Cell, engine: TorchEngine, trainer: PolicyTrainer) -> None:
    """Record the time from the trainer's weights to the engine's: the best of several."""
    state = trainer.state_dict()
    num_bytes = 2 * sum({tensor.data_ptr(): tensor.numel() for tensor in state.values()}.values())
    best = float("inf")
    for _ in range(4):
        synchronise(cell.context.device)
        started = time.perf_counter()
        await engine.load(Snapshot(version=engine.version + 1, state=trainer.state_dict()))
        synchronise(cell.context.device)
        best = min(best, time.perf_counter() - started)
    cell.add("trainer to engine", best, "s", gate=1.0)
    cell.add("engine's bytes", num_bytes / best / 1e9, "GB/s", higher_is_better=True, num_bytes=num_bytes)


def _create_trainer(
    context: Context,
    model: Any,
    layout: Layout,
    *,
    dtype: ComputeDtype = ComputeDtype.BFLOAT16,
    lora: LoraConfig | None = None,
) -> PolicyTrainer:
    """Return a trainer of a copy of ``model``, whose step is too small to matter."""
    own = create_model(context.shape, context.device, is_tied=False)
    own.load_state_dict(model.state_dict())
    config = TrainerConfig(
        layout=layout,
        max_packed_tokens=8192,
        dtype=dtype,
        device=context.device,
        optimizer=OptimizerConfig(learning_rate=1e-12),
        lora=lora,
    )
    trainer = PolicyTrainer(own, config)
    trainer.expect_engine(dtype="bfloat16")
    return trainer


def _passes_gate(context: Context, trainer: PolicyTrainer, rows: list[Trajectory]) -> bool:
    try:
        trainer.train_step([create_group(rows)])
    except CaptureViolation as violation:
        context.say(str(violation))
        return False
    return True
