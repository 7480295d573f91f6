"""Predict the peak memory of a run's trainer and embedded engine, for the doctor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from areal_actors.config import RunConfig
from areal_actors.domain import Role
from areal_actors.generation.servers.config import Backend
from areal_actors.models import resolve_model
from areal_actors.run.job import local_teacher
from areal_actors.training.config import Activations, GangBackend

BASE_BYTES = 10**9
"""Python, torch and its libraries, in the memory of the host."""


@frozen(kw_only=True)
class Part:
    """A part of a run: its description, its bytes, its device, and whether it runs on this machine."""

    text: str
    num_bytes: int
    device: str
    is_here: bool


def predict_memory(config: RunConfig, memory: Mapping[str, int]) -> list[Part]:
    """Return the parts of trainer and embedded engine. ``memory`` is that of the devices of this machine, by type.

    A device that this machine does not have is that of another machine. Raises ``ValueError`` for an architecture that
    transformers does not know.
    """
    from areal_actors.generation.torch.engine import plan_engine
    from areal_actors.training.memory import plan_trainer

    policy = _sketch(config.model, has_tokenizer=config.tokenizer is None)
    teacher = None if (name := local_teacher(config)) is None else _sketch(name, has_tokenizer=False)
    placed, gang = config.scheduler.roles.placed, config.trainer.gang
    first = next(iter(memory))  # the GPU, if there is one
    trainer_device, engine_device = (
        first if asked == "auto" else asked.partition(":")[0] for asked in (config.trainer.device, config.engine.device)
    )
    if gang.num_processes > 1:  # whose backend decides
        trainer_device = "cpu" if gang.backend is GangBackend.GLOO else first
    available = memory.get(trainer_device, memory[first])
    is_embedded, found = config.rollout.backend is Backend.TORCH, []
    if is_embedded:
        engine = plan_engine(policy, config.engine, device_type=engine_device)
        is_here = Role.GENERATION not in placed and engine_device in memory
        split = f"weights {format_size(engine.weights)}, keys and values up to {format_size(engine.cache)}"
        text = f"engine {format_size(engine.total)} ({split})"
        found.append(Part(text=text, num_bytes=engine.total, device=engine_device, is_here=is_here))
        if engine_device == trainer_device == "cuda":  # which it shares
            available -= engine.total
    trainer = plan_trainer(
        policy,
        config.trainer,
        device_type=trainer_device,
        memory_bytes=available,
        teacher=teacher,
        # The limit of a server is not known here, nor to the trainer.
        num_tokens=max(config.trainer.max_packed_tokens, config.engine.max_length if is_embedded else 0),
    )
    names = ", ".join(f"{name} {format_size(value)}" for name, value in trainer.parts().items() if value)
    each = f" for each of {gang.num_processes} processes" if gang.num_processes > 1 else ""
    kept = str(trainer.kept)
    if trainer.kept is Activations.AUTO:
        kept = f"recompute, and kept by {trainer.num_kept_layers} layers in memory that is free otherwise"
    own = Part(
        text=f"trainer {format_size(trainer.total)}{each} ({names}; activations {kept})",
        num_bytes=trainer.total * (gang.num_processes if trainer_device == "cpu" else 1),
        device=trainer_device,
        is_here=Role.TRAINER not in placed and trainer_device in memory,
    )
    return [own, *found]


def _sketch(name: str, *, has_tokenizer: bool) -> Any:
    """Return the model as shapes without numbers."""
    from transformers import AutoConfig

    from areal_actors.training.memory import sketch_model

    path = resolve_model(name, has_tokenizer=has_tokenizer).path
    return sketch_model(AutoConfig.from_pretrained(path, local_files_only=True))


def format_size(num_bytes: float) -> str:
    """Return a number of bytes for people, in SI units."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:  # noqa: PLR2004 - SI
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"
