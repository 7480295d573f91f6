"""Readable warnings about settings that have no effect, and settings that bias what is learned.

A setting that is silently ignored makes a wrong experiment. Only settings that differ from their defaults are reported,
because those were set on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from areal_actors.training.config import (
    ROUNDING_NATS,
    Activations,
    AdvantageConfig,
    Aggregation,
    BehaviourConfig,
    CaptureConfig,
    Centre,
    ComputeDtype,
    Decay,
    GangConfig,
    KlConfig,
    KlEstimator,
    KlPlace,
    LoraConfig,
    Normalisation,
    ObjectiveConfig,
    OffloadTo,
    OptimizerConfig,
    OptimizerName,
    OverlongConfig,
    StatisticsUnit,
    Surrogate,
    TrainerConfig,
)

__all__ = ["compares_members", "doubtful_settings", "inert_settings"]


_UNDIVIDED = (Normalisation.DR_GRPO, Normalisation.RLOO, Normalisation.NONE)


_GROUP_RELATIVE = (
    Normalisation.GRPO,
    Normalisation.DR_GRPO,
    Normalisation.RLOO,
    Normalisation.GROUP_MEAN_BATCH_STD,
)


def compares_members(config: AdvantageConfig) -> bool:
    """Return whether advantages compare an episode with others of its group; in a group of one, they are all zero.

    The units row and turn_depth compare rows and turns of one episode with one another, too.
    """
    is_across = config.unit in (StatisticsUnit.TURN_KIND, StatisticsUnit.EPISODE)
    return is_across and config.normalisation in _GROUP_RELATIVE


def inert_settings(config: TrainerConfig, *, has_servers: bool = True) -> list[str]:
    """Return a sentence for each setting below ``trainer`` that has no effect: its name, the reason, and what to do.

    ``has_servers`` is false for a run whose engine is the embedded one.
    """
    num_updates = config.num_epochs * config.num_minibatches
    rounding = ROUNDING_NATS["bfloat16"] if config.dtype is ComputeDtype.BFLOAT16 else 0.0
    return [
        *_clips(config.objective, num_updates, rounding),
        *_corrections(config.objective, num_updates, rounding),
        *_switched_off(config),
        *_others(config, has_servers=has_servers),
    ]


def doubtful_settings(config: TrainerConfig) -> list[str]:
    """Return a sentence for each setting below ``trainer`` whose effect is known to be biased or too small."""
    rate, full, objective = config.optimizer.learning_rate, OptimizerConfig().learning_rate, config.objective
    found: list[str] = []
    kl = objective.kl
    if kl.coefficient and kl.place is KlPlace.REWARD and kl.resolve_estimator() is not KlEstimator.K1:
        found.append(
            f"objective.kl.estimator {kl.estimator} in the reward does not pull towards the reference: near it, the "
            "expected gradient is 0; use k1, or place loss."
        )
    if objective.surrogate is Surrogate.GSPO and objective.aggregation in (
        Aggregation.EPISODE_SUM,
        Aggregation.TOKEN_MEAN,
        Aggregation.FIXED_LENGTH,
    ):
        found.append(
            f"objective.aggregation {objective.aggregation} counts the one ratio of a row as often as it has tokens; "
            "gspo was published with sequence_mean."
        )
    is_fixed = objective.is_decoupled is False or objective.surrogate is Surrogate.DPPO
    if is_fixed and config.dtype is not ComputeDtype.FLOAT32 and objective.is_below(ROUNDING_NATS["bfloat16"]):
        low, high = objective.resolve_clip()
        found.append(
            f"objective.clip_low {low:g} and clip_high {high:g} are narrower than rounding in bfloat16, so that fresh "
            "rows are clipped; widen both to 0.1, set dtype float32, or with another surrogate than dppo leave "
            "is_decoupled out."
        )
    if config.lora is not None and rate <= full:
        found.append(
            f"optimizer.learning_rate {rate:g} is one for all weights; an adapter learns as fast with about ten times "
            f"as much, such as {10 * full:g}."
        )
    return found


def _clips(objective: ObjectiveConfig, num_updates: int, rounding: float) -> Iterator[str]:
    centre = objective.resolve_centre(num_updates, rounding=rounding)
    is_centred_on_itself = centre is Centre.PROXIMAL and num_updates == 1
    for name in ("clip_low", "clip_high"):
        if getattr(objective, name) is None:
            continue
        if not isinstance(objective.surrogate, Surrogate):
            yield f"objective.{name} has no effect: the custom surrogate {objective.surrogate} has its clip within."
        elif objective.surrogate is Surrogate.REINFORCE:
            yield f"objective.{name} has no effect: surrogate reinforce has no clip; use dppo, ppo, gspo or cispo."
        elif is_centred_on_itself:
            yield (
                f"objective.{name} has no effect: is_decoupled clips around the weights before the update, and with "
                "one update per step those are the policy itself; leave is_decoupled out, or raise num_minibatches."
            )
    # ``dual_clip`` has a default, so only another value shows that it was set.
    has_dual_clip = objective.surrogate in (Surrogate.PPO, Surrogate.GSPO) and centre is Centre.BEHAVIOUR
    if objective.dual_clip not in (ObjectiveConfig().dual_clip, None) and not has_dual_clip:
        yield (
            "objective.dual_clip has no effect: it bounds ppo and gspo where they compare with the policy that "
            "sampled; here behaviour.cap or the clip bounds a token's weight."
        )


def _corrections(objective: ObjectiveConfig, num_updates: int, rounding: float) -> Iterator[str]:
    if objective.is_decoupled is not None and objective.surrogate is Surrogate.DPPO:
        yield (
            "objective.is_decoupled has no effect: surrogate dppo always compares with the policy that sampled; use "
            "surrogate ppo for decoupled PPO."
        )
    if objective.behaviour == BehaviourConfig() or objective.is_weighted(num_updates, rounding=rounding):
        return
    changed = [
        name
        for name in ("level", "out_of_range", "cap", "floor")
        if getattr(objective.behaviour, name) != getattr(BehaviourConfig(), name)
    ]
    for name in changed:
        if name == "cap" and objective.kl.coefficient and objective.kl.place is KlPlace.LOSS:
            # The setting bounds the weights of the distance.
            continue
        yield (
            f"objective.behaviour.{name} has no effect: surrogate {objective.surrogate} compares with the policy that "
            "sampled and has no importance weight; use dppo, or is_decoupled true."
        )


def _switched_off(config: TrainerConfig) -> Iterator[str]:
    """Name the settings of penalties and of the optimiser that need a switch that is off."""
    objective, optimizer = config.objective, config.optimizer
    kl, overlong = objective.kl, objective.overlong
    if not kl.coefficient:
        yield from _changed(kl, KlConfig(), "objective.kl", ("estimator", "place"), "coefficient")
    if overlong.max_tokens is None:
        yield from _changed(overlong, OverlongConfig(), "objective.overlong", ("buffer_tokens", "scale"), "max_tokens")
    if objective.aggregation not in (Aggregation.EPISODE_SUM, Aggregation.FIXED_LENGTH):
        yield from _changed(objective, ObjectiveConfig(), "objective", ("fixed_length",), "aggregation")
    if optimizer.offload is OffloadTo.CPU and config.device == "cpu":
        yield "optimizer.offload has no effect: device is cpu, and the moments are in the memory of the host already."
    if optimizer.name is OptimizerName.SGD:
        yield from _changed(optimizer, OptimizerConfig(), "optimizer", ("beta1", "beta2"), "name")
    if optimizer.decay is Decay.CONSTANT:
        yield from _changed(optimizer, OptimizerConfig(), "optimizer", ("num_decay_steps", "final_fraction"), "decay")


def _others(config: TrainerConfig, *, has_servers: bool) -> Iterator[str]:
    if config.activations is Activations.OFFLOAD and config.device == "cpu":
        yield "activations offload has no effect: device is cpu, whose memory is that of the host; use recompute."
    if not config.capture.enabled:
        yield from _changed(config.capture, CaptureConfig(), "capture", ("tolerance",), "enabled")
    if config.gang.num_processes == 1:
        yield from _changed(config.gang, GangConfig(), "gang", ("backend", "timeout_seconds"), "num_processes")
    if config.lora is not None and config.lora.serving is not LoraConfig().serving and not has_servers:
        yield f"lora.serving {config.lora.serving} has no effect: the embedded engine always gets merged weights."


def _changed(section: Any, default: Any, path: str, names: tuple[str, ...], switch: str) -> Iterator[str]:
    """Name those of ``names`` that differ from ``default`` and need another value of ``switch``."""
    for name in names:
        if getattr(section, name) != getattr(default, name):
            value = getattr(section, switch)
            shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            yield f"{path}.{name} has no effect: {path}.{switch} is {shown}."
