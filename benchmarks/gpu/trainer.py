"""Section trainer: ``PolicyTrainer.train_step`` on branching groups: tokens per second, MFU and peak memory.

Each step trains one group of eight sessions (``groups.py``): the tree in one pass, flat rows in passes of about as many
tokens, rounded to whole rows. Operations are counted once for each token that a layout computes: MFU has no benefit
from padding or from computing again.
"""

from __future__ import annotations

import importlib.util
import time

from attrs import evolve, frozen
from benchmarks.gpu.ceilings import datasheet_tflops, matmul_tflops
from benchmarks.gpu.cells import Cell, Context, peak_gib, reset_peak, synchronise
from benchmarks.gpu.groups import Branching, create_branching
from benchmarks.gpu.models import create_model, train_flops
from benchmarks.gpu.profiling import profiled, sampled
from benchmarks.harness import Skipped

from areal_actors.domain import Group
from areal_actors.training.config import Activations, ComputeDtype, Layout, LoraConfig, TrainerConfig
from areal_actors.training.trainer import PolicyTrainer

__all__ = ["Setting", "choose_cells", "configure", "run"]

_NUM_STEPS = 2
_LONG_SECONDS = 3.0
"""A step that takes longer is not repeated."""
PROFILED = 8192
"""Length of the groups of which ``--profile`` writes tables."""


@frozen(kw_only=True)
class Setting:
    """A way to train: what is trained, the layout, and what a pass keeps (``trainer.activations``)."""

    layout: Layout
    has_lora: bool = False
    activations: Activations = Activations.AUTO

    @property
    def is_default(self) -> bool:
        """Whether the trainer decides what a pass keeps."""
        return self.activations is Activations.AUTO

    @property
    def name(self) -> str:
        """For the names of figures."""
        kept = "" if self.is_default else f", {self.activations}"
        return f"{'LoRA' if self.has_lora else 'full'}, {self.layout}{kept}"


def choose_cells(*, is_quick: bool) -> list[tuple[Setting, int]]:
    """Return settings with the distinct tokens of a group, the most informative first."""
    tree, flat = Setting(layout=Layout.TREE), Setting(layout=Layout.FLAT)
    lora = [evolve(setting, has_lora=True) for setting in (tree, flat)]
    kept = [evolve(tree, activations=activations) for activations in (Activations.RECOMPUTE, Activations.KEEP)]
    if is_quick:
        return [(setting, 256) for setting in (tree, flat, *lora)]
    rounds = [([tree, flat], 8192), ([tree, flat], 32768), (lora, 8192), (lora, 32768), (kept, 8192)]
    rounds += [([tree, flat], 16384), ([tree, flat], 4096), (lora, 16384), (lora, 4096), (kept, 32768)]
    return [(setting, length) for chosen, length in rounds for setting in chosen]


def configure(setting: Setting, *, max_packed_tokens: int, device: str) -> TrainerConfig:
    """Return the trainer's configuration. Raises ``Skipped`` if a package is missing."""
    config = TrainerConfig(
        layout=setting.layout,
        max_packed_tokens=max_packed_tokens,
        dtype=ComputeDtype.BFLOAT16,
        device=device,
        activations=setting.activations,
    )
    if setting.has_lora:
        if importlib.util.find_spec("peft") is None:
            raise Skipped("peft is not installed")
        config = evolve(config, lora=LoraConfig(rank=16))
    return config


def run(context: Context) -> None:
    """Measure each setting at each length; then compare the layouts."""
    measured: dict[tuple[Setting, int], dict[str, float]] = {}
    ceiling = matmul_tflops(context.device)
    for setting, length in choose_cells(is_quick=context.is_quick):
        name = f"{setting.name}, {_format_length(length)}"
        if context.may_begin(name):
            with context.cell(name) as cell:
                measured[setting, length] = _measure(cell, setting, length, ceiling)
        tree = evolve(setting, layout=Layout.TREE)
        if setting != tree and (setting, length) in measured and (tree, length) in measured:
            _compare(context, setting, length, measured[tree, length], measured[setting, length])


def _format_length(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 else str(length)


def _branching(context: Context, length: int) -> Branching:
    prompt = 128 if context.is_quick else 2048
    return create_branching(length, prompt=prompt, vocab_size=context.shape.vocab_size)


def _create_trainer(context: Context, setting: Setting, max_packed_tokens: int) -> PolicyTrainer:
    config = configure(setting, max_packed_tokens=max_packed_tokens, device=context.device)
    started = time.perf_counter()
    trainer = PolicyTrainer(create_model(context.shape, context.device), config)
    context.say(f"{setting.name}: trainer created in {time.perf_counter() - started:.1f} s")
    return trainer


def _measure(cell: Cell, setting: Setting, length: int, ceiling: float) -> dict[str, float]:
    context = cell.context
    work = _branching(context, length)
    is_tree = setting.layout is Layout.TREE
    trainer = _create_trainer(context, setting, work.num_tree_tokens if is_tree else work.num_pass_tokens)
    started = time.perf_counter()
    statistics = trainer.train_step([work.group])
    synchronise(context.device)
    cell.add("first step", time.perf_counter() - started, "s")
    reset_peak(context.device)
    seconds = float("inf")
    for _ in range(_NUM_STEPS):
        started = time.perf_counter()
        trainer.train_step([work.group])
        synchronise(context.device)
        seconds = min(seconds, time.perf_counter() - started)
        if seconds > _LONG_SECONDS:
            break
    num_tokens = work.num_tree_tokens if is_tree else work.num_row_tokens
    flops = train_flops(
        context.shape,
        num_tokens=num_tokens,
        num_trained=work.num_tree_trained if is_tree else work.num_row_trained,
        num_pairs=work.num_tree_pairs if is_tree else work.num_row_pairs,
        is_full=not setting.has_lora,
    )
    cell.add("step", seconds, "s", row_tokens=work.num_row_tokens, packed_tokens=statistics.num_packed_tokens)
    cell.add("computed tokens", num_tokens / seconds, "tokens/s", higher_is_better=True)
    cell.add("row tokens", work.num_row_tokens / seconds, "tokens/s", higher_is_better=True)
    rate = flops / seconds / 1e12
    cell.add("share of the measured ceiling", 100 * rate / ceiling, "%", higher_is_better=True)
    sheet = datasheet_tflops(context.device)
    if sheet is not None:
        gate = None if setting.has_lora else 40.0
        cell.add("MFU by the data sheet", 100 * rate / sheet, "%", gate=gate, higher_is_better=True)
    peak = peak_gib(context.device)
    if peak is not None:
        bound = work.num_tree_tokens if is_tree else work.num_pass_tokens
        cell.add("peak memory", peak, "GiB", pass_tokens=bound, activations=str(trainer.activations))
    if context.has_profile and setting.is_default and length == PROFILED:
        _profile(cell, trainer, work.group)
    return {"seconds": seconds, "tokens": num_tokens} | ({} if peak is None else {"peak": peak})


def _compare(context: Context, setting: Setting, length: int, tree: dict[str, float], flat: dict[str, float]) -> None:
    """Record what the tree gains over flat rows, in time and in tokens."""
    size = _format_length(length)
    cell = Cell(context=context, name=f"{'LoRA' if setting.has_lora else 'full'}, {size}, tree over flat")
    of = f"{context.model}, {setting.name}, {size}, step"
    tokens, speed = flat["tokens"] / tree["tokens"], flat["seconds"] / tree["seconds"]
    cell.add("tokens that need not be computed", tokens, "ratio", higher_is_better=True)
    cell.add("time", speed, "ratio", higher_is_better=True, baseline=of)
    cell.add("time over tokens", speed / tokens, "ratio", gate=0.9, higher_is_better=True, baseline=of)
    if "peak" in tree and "peak" in flat:
        cell.add("peak memory", tree["peak"] / flat["peak"], "ratio", gate=1.0, baseline=of)


def _profile(cell: Cell, trainer: PolicyTrainer, group: Group) -> None:
    with profiled(cell.context) as profile:
        trainer.train_step([group])
    with sampled() as host:
        trainer.train_step([group])
    text = f"{cell.context.model}, {cell.name}\n{profile.table}\n{host.table}"
    cell.context.profile(text)
