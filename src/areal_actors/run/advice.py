"""Warnings about settings that have no effect, and about settings that bias what is learned.

A setting that is silently ignored makes a wrong experiment. Only settings that differ from their defaults are reported,
because those were set on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from attrs import Factory, fields_dict

from areal_actors.config import RunConfig
from areal_actors.generation.servers.config import Backend
from areal_actors.generation.torch.config import TorchEngineConfig
from areal_actors.lib.telemetry import get_logger
from areal_actors.training.advantages import formula_of
from areal_actors.training.config import (
    ROUNDING_NATS,
    Activations,
    AdvantageConfig,
    Aggregation,
    Centre,
    ComputeDtype,
    Decay,
    KlEstimator,
    KlPlace,
    Normalisation,
    OptimizerConfig,
    OptimizerName,
    StatisticsUnit,
    Surrogate,
    TrainerConfig,
)
from areal_actors.training.phases import PhaseName

_log = get_logger(__name__)

_DESTRUCTIVE_RATE = 0.1
"""Weights are about 0.02 in size. The smallest model of the examples learns with 0.01, larger ones with far less."""


def compares_members(config: AdvantageConfig) -> bool:
    """Return whether advantages compare an episode with others of its group; in a group of one, they are all zero.

    The units row and turn_depth compare rows and turns of one episode with one another, too.
    """
    is_across = config.unit in (StatisticsUnit.TURN_KIND, StatisticsUnit.EPISODE)
    return is_across and isinstance(config.normalisation, Normalisation) and formula_of(config).has_group_baseline


def advise(config: RunConfig) -> list[str]:
    """Return a sentence for each setting that has no effect, or that is likely to be a mistake."""
    has_servers = config.rollout.backend is not Backend.TORCH
    training = (*inert_settings(config.trainer, has_servers=has_servers), *doubtful_settings(config.trainer))
    phases = [
        f"{name} has no effect: phases is [{', '.join(config.phases)}]."
        for name in (PhaseName.SFT, PhaseName.DISTILLATION)
        if getattr(config, name) is not None and name not in config.phases
    ]
    return [*(f"trainer.{sentence}" for sentence in training), *phases]


def log_advice(config: RunConfig) -> None:
    """Log a warning for each setting that has no effect, or that is likely to be a mistake."""
    for sentence in advise(config):
        _log.warning("setting", detail=sentence)


def inert_settings(config: TrainerConfig, *, has_servers: bool = True) -> list[str]:
    """Return a sentence for each setting below ``trainer`` that has no effect: its name, the reason, and what to do.

    ``has_servers`` is false for a run whose engine is the embedded one.
    """
    found = []
    training = _of_training(config, has_servers=has_servers)
    for reason, *names in (*_of_the_surrogate(config), *_of_penalties(config), *training):
        for name in names:
            path, _, setting = name.rpartition(".")
            if _is_changed(attrgetter(path)(config) if path else config, setting):
                found.append(f"{name} has no effect: {reason}.")
    return found


Inert = tuple[str, ...]
"""A reason, and the names of the settings that have no effect because of it."""


def _of_the_surrogate(config: TrainerConfig) -> Iterator[Inert]:
    objective, surrogate = config.objective, config.objective.surrogate
    num_updates = config.num_epochs * config.num_minibatches
    rounding = ROUNDING_NATS["bfloat16"] if config.dtype is ComputeDtype.BFLOAT16 else 0.0
    centre = objective.resolve_centre(num_updates, rounding=rounding)
    clips = ("objective.clip_low", "objective.clip_high")
    if not isinstance(surrogate, Surrogate):
        yield f"the custom surrogate {surrogate} has its clip within", *clips
    elif surrogate is Surrogate.REINFORCE:
        yield "surrogate reinforce has no clip; use dppo, ppo, gspo or cispo", *clips
    elif centre is Centre.PROXIMAL and num_updates == 1:
        reason = (
            "is_decoupled clips around the weights before the update, and with one update per step those are the "
            "policy itself; leave is_decoupled out, or raise num_minibatches"
        )
        yield reason, *clips
    has_dual_clip = surrogate in (Surrogate.PPO, Surrogate.GSPO) and centre is Centre.BEHAVIOUR
    if objective.dual_clip is not None and not has_dual_clip:
        reason = (
            "it bounds ppo and gspo where they compare with the policy that sampled; here behaviour.cap or the clip "
            "bounds a token's weight"
        )
        yield reason, "objective.dual_clip"
    if surrogate is Surrogate.DPPO:
        reason = "surrogate dppo always compares with the policy that sampled; use surrogate ppo for decoupled PPO"
        yield reason, "objective.is_decoupled"
    if not objective.is_weighted(num_updates, rounding=rounding):
        # With a penalty in the loss, the cap bounds the weights of the distance.
        has_distance = objective.kl.coefficient and objective.kl.place is KlPlace.LOSS
        unused = ("level", "out_of_range", "floor") if has_distance else ("level", "out_of_range", "cap", "floor")
        reason = (
            f"surrogate {surrogate} compares with the policy that sampled and has no importance weight; use dppo, or "
            "is_decoupled true"
        )
        yield reason, *(f"objective.behaviour.{name}" for name in unused)


def _of_penalties(config: TrainerConfig) -> Iterator[Inert]:
    objective, kl = config.objective, config.objective.kl
    if not kl.coefficient:
        yield f"objective.kl.coefficient is {kl.coefficient}", "objective.kl.estimator", "objective.kl.place"
    if objective.overlong.max_tokens is None:
        reason = "objective.overlong.max_tokens is null"
        yield reason, "objective.overlong.buffer_tokens"
    if objective.aggregation not in (Aggregation.EPISODE_SUM, Aggregation.FIXED_LENGTH):
        yield f"objective.aggregation is {objective.aggregation}", "objective.fixed_length"


def _of_training(config: TrainerConfig, *, has_servers: bool) -> Iterator[Inert]:
    if config.device == "cpu":
        yield "device is cpu, and the moments are in the memory of the host already", "optimizer.offload"
        if config.activations is Activations.OFFLOAD:
            yield "device is cpu, whose memory is that of the host; use recompute", "activations"
    if config.optimizer.name is OptimizerName.SGD:
        yield "optimizer.name is sgd", "optimizer.beta1", "optimizer.beta2", "optimizer.epsilon"
    if config.optimizer.decay is Decay.CONSTANT:
        yield "optimizer.decay is constant", "optimizer.num_decay_steps", "optimizer.final_fraction"
    if not config.capture.enabled:
        yield "capture.enabled is false", "capture.tolerance"
    if config.gang.num_processes == 1:
        yield "gang.num_processes is 1", "gang.backend"
    if config.lora is not None and not has_servers:
        yield "the embedded engine always gets merged weights", "lora.serving"


def _is_changed(section: Any, name: str) -> bool:
    """Return whether a setting differs from its default."""
    default: Any = fields_dict(type(section))[name].default
    if isinstance(default, Factory):  # type: ignore[arg-type]  # a class at run time, a function for type checkers
        default = default.factory()
    return bool(getattr(section, name) != default)


# -------------------------------------------------------------------------------------------- doubtful settings


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
    if rate > _DESTRUCTIVE_RATE and config.optimizer.name is not OptimizerName.SGD:
        found.append(
            f"optimizer.learning_rate {rate:g} moves each weight by about as much in every update, which destroys the "
            f"model; usual are 1e-6 to 1e-4, and the default is {full:g}."
        )
    if config.lora is not None and rate <= full:
        found.append(
            f"optimizer.learning_rate {rate:g} is one for all weights; an adapter learns as fast with about ten times "
            f"as much, such as {10 * full:g}."
        )
    return found


def warn_of_length(config: RunConfig, context_length: int) -> None:
    """Log a warning if ``engine.max_length`` was set to more than the engine's ``context_length``."""
    wanted = config.engine.max_length
    # The default suits most models, and was not chosen by the user.
    if config.rollout.backend is Backend.TORCH and context_length < wanted != TorchEngineConfig().max_length:
        limit = f"the model has {context_length:,} positions, which limit prompt plus answer"
        _log.warning("setting", detail=f"engine.max_length is {wanted:,}, and {limit}.")


def find_singletons(config: RunConfig, sizes: Mapping[str, int]) -> list[str]:
    """Return a sentence for each group of one episode whose advantage compares it with others; ``sizes`` by setting."""
    if PhaseName.RL not in config.phases or not compares_members(config.trainer.advantages):
        return []
    return [
        f"{setting} is 1, and {config.trainer.advantages.normalisation} compares episodes of one group: all advantages "
        f"are 0. Set it to 2 or more, or trainer.advantages.normalisation to reinforce_plus_plus."
        for setting, size in sizes.items()
        if size == 1
    ]


def warn_of_singletons(config: RunConfig, sizes: Mapping[str, int]) -> None:
    """Log a warning for each sentence of ``find_singletons``."""
    for sentence in find_singletons(config, sizes):
        _log.warning("advantages_will_be_zero", detail=sentence)


def size_setting(source: str) -> str:
    """Return the setting that is the size of groups of a source; the only source has no name."""
    return f"sources.{source}.group_size" if source else "rollout.group_size"
