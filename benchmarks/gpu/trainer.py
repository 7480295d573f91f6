"""Section trainer: ``PolicyTrainer.train_step`` on branching groups: tokens per second, MFU and peak memory.

Each step trains groups of eight sessions (``groups.py``) with 32k distinct tokens in all: one of 32k, or eight of 4k.
The tree takes one pass, flat rows take passes of about as many tokens, rounded to whole rows. Operations are counted
once for each token that a layout computes: MFU has no benefit from padding or from computing again.
"""

from __future__ import annotations

import importlib.util
import time

from attrs import evolve, frozen
from benchmarks.gpu.ceilings import datasheet_tflops, matmul_tflops
from benchmarks.gpu.cells import Cell, Context, peak_gib, reset_peak, synchronise
from benchmarks.gpu.groups import NUM_BRANCHES, Branching, create_branching
from benchmarks.gpu.models import create_model, train_flops
from benchmarks.gpu.profiling import profiled, sampled
from benchmarks.harness import Skipped

from areal_actors.domain import Group
from areal_actors.training.config import Activations, ComputeDtype, Layout, LoraConfig, TrainerConfig
from areal_actors.training.trainer import PolicyTrainer

__all__ = ["Setting", "choose_cells", "configure", "run"]

STEP_TOKENS = 32768
WORKLOAD = (
    "The trainer makes steps of 32k distinct tokens, in groups of 4k to 32k. The eight sessions of a group share a "
    "prompt of 2,048 tokens, and in pairs their first turns. The tree takes one pass, flat rows take passes of about "
    "as many tokens."
)
"""What a step is, for the pages that show results."""
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
    pass_tokens: int = STEP_TOKENS

    @property
    def is_default(self) -> bool:
        """Whether the trainer decides what a pass keeps."""
        return self.activations is Activations.AUTO

    @property
    def name(self) -> str:
        """For the names of figures."""
        kept = "" if self.is_default else f", {self.activations} in passes of {_format_length(self.pass_tokens)}"
        return f"{'LoRA' if self.has_lora else 'full'}, {self.layout}{kept}"


def choose_cells(*, is_quick: bool) -> list[tuple[Setting, int]]:
    """Return settings with the distinct tokens of a group, the most informative first."""
    tree, flat = Setting(layout=Layout.TREE), Setting(layout=Layout.FLAT)
    lora = [evolve(setting, has_lora=True) for setting in (tree, flat)]
    if is_quick:
        return [(evolve(setting, pass_tokens=512), 256) for setting in (tree, flat, *lora)]
    # Nothing is computed again, in the longest passes of a 1.5B model that 80 GB hold.
    keep = [evolve(setting, activations=Activations.KEEP, pass_tokens=16384) for setting in (tree, flat)]
    more = [
        evolve(tree, activations=activations, pass_tokens=8192)
        for activations in (Activations.RECOMPUTE, Activations.OFFLOAD)
    ]
    rounds = [([tree, flat], 8192), (keep, 8192), ([tree, flat], 32768), ([tree, flat], 16384), ([tree, flat], 4096)]
    rounds += [(lora, 8192), (lora, 32768), (lora, 16384), (lora, 4096), (keep[:1], 4096), (more, 8192)]
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
    context.write(facts={"workload": WORKLOAD})
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


def _create_groups(context: Context, length: int) -> list[Branching]:
    prompt, step_tokens = (128, 512) if context.is_quick else (2048, STEP_TOKENS)
    number = step_tokens // length
    return [create_branching(length, prompt=prompt, vocab_size=context.shape.vocab_size, seed=i) for i in range(number)]


def _bound_passes(setting: Setting, work: Branching) -> int:
    """Return ``max_packed_tokens``: of flat rows as many as come nearest to the tokens of the tree's passes."""
    if setting.layout is Layout.TREE:
        return setting.pass_tokens
    length = work.num_row_tokens // NUM_BRANCHES
    return length * max(1, round(setting.pass_tokens / length))


def _create_trainer(context: Context, setting: Setting, max_packed_tokens: int) -> PolicyTrainer:
    config = configure(setting, max_packed_tokens=max_packed_tokens, device=context.device)
    started = time.perf_counter()
    trainer = PolicyTrainer(create_model(context.shape, context.device), config)
    context.say(f"{setting.name}: trainer created in {time.perf_counter() - started:.1f} s")
    return trainer


def _measure(cell: Cell, setting: Setting, length: int, ceiling: float) -> dict[str, float]:
    context = cell.context
    works = _create_groups(context, length)
    groups, is_tree = [work.group for work in works], setting.layout is Layout.TREE
    bound = _bound_passes(setting, works[0])
    trainer = _create_trainer(context, setting, bound)
    started = time.perf_counter()
    num_tokens = trainer.train_step(groups).num_packed_tokens
    synchronise(context.device)
    cell.add("first step", time.perf_counter() - started, "s")
    reset_peak(context.device)
    seconds = float("inf")
    for _ in range(_NUM_STEPS):
        started = time.perf_counter()
        trainer.train_step(groups)
        synchronise(context.device)
        seconds = min(seconds, time.perf_counter() - started)
        if seconds > _LONG_SECONDS:
            break
    flops = train_flops(
        context.shape,
        num_tokens=num_tokens,
        num_trained=sum(work.num_tree_trained if is_tree else work.num_row_trained for work in works),
        num_pairs=sum(work.num_tree_pairs if is_tree else work.num_row_pairs for work in works),
        is_full=not setting.has_lora,
    )
    cell.add("step", seconds, "s", num_groups=len(groups), packed_tokens=num_tokens, max_packed_tokens=bound)
    cell.add("computed tokens", num_tokens / seconds, "tokens/s", higher_is_better=True)
    row_rate = sum(work.num_row_tokens for work in works) / seconds
    cell.add("row tokens", row_rate, "tokens/s", higher_is_better=True)
    rate = flops / seconds / 1e12
    cell.add("share of the measured ceiling", 100 * rate / ceiling, "%", higher_is_better=True)
    sheet = datasheet_tflops(context.device)
    if sheet is not None:
        gate = None if setting.has_lora else 40.0
        cell.add("MFU by the data sheet", 100 * rate / sheet, "%", gate=gate, higher_is_better=True)
    peak = peak_gib(context.device)
    if peak is not None:
        cell.add("peak memory", peak, "GiB", activations=str(trainer.activations))
    if context.has_profile and not setting.has_lora and setting.is_default and length == PROFILED:
        _profile(cell, trainer, groups)
    return {"seconds": seconds, "tokens": num_tokens} | ({} if peak is None else {"peak": peak})


def _compare(context: Context, setting: Setting, length: int, tree: dict[str, float], flat: dict[str, float]) -> None:
    """Record what the tree gains over flat rows, in time and in tokens."""
    size = _format_length(length)
    cell = Cell(context=context, name=f"{setting.name.replace(', flat', '')}, {size}, tree over flat")
    of = f"{context.model}, {setting.name}, {size}, step"
    tokens, speed = flat["tokens"] / tree["tokens"], flat["seconds"] / tree["seconds"]
    cell.add("tokens that need not be computed", tokens, "ratio", higher_is_better=True)
    cell.add("time", speed, "ratio", higher_is_better=True, baseline=of)
    cell.add("time over tokens", speed / tokens, "ratio", gate=0.9, higher_is_better=True, baseline=of)
    if "peak" in tree and "peak" in flat:
        cell.add("peak memory", tree["peak"] / flat["peak"], "ratio", gate=1.0, baseline=of)


def _profile(cell: Cell, trainer: PolicyTrainer, groups: list[Group]) -> None:
    with profiled(cell.context) as profile:
        trainer.train_step(groups)
    with sampled() as host:
        trainer.train_step(groups)
    text = f"{cell.context.model}, {cell.name}\n{profile.table}\n{host.table}"
    cell.context.profile(text)
