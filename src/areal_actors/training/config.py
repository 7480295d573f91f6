"""The settings of the trainer and of the training plan: number and size of steps, evaluation, checkpoints, early stop.

The code that reads a setting documents its effect; defaults are those of the CPU recipe. Every class is frozen and
validates itself when it is created. ``config/schema.py`` composes them and must report mistakes quickly, so nothing
here imports torch.
"""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Any

from attrs import field, frozen
from attrs.validators import and_, deep_iterable, ge, gt, instance_of, le, lt, optional

from areal_actors.lib.references import FunctionReference, builtin_or_reference
from areal_actors.lib.settings import COMMON, constant

_positive: Any = gt(0)
_finite = and_(gt(-math.inf), lt(math.inf))  # rejects NaN, too
_not_negative: Any = ge(0)
_finite_not_negative = and_(ge(0.0), lt(math.inf))
_finite_positive = and_(gt(0.0), lt(math.inf))
_fraction: Any = and_(ge(0), le(1))
_below_one: Any = and_(ge(0), lt(1))
_positive_or_none: Any = optional(_positive)
_above_one_or_none: Any = optional(gt(1))


class Layout(StrEnum):
    """How rows become a forward pass. Losses and gradients are the same."""

    AUTO = "auto"
    """``tree`` if attention alone mixes the tokens of the model, ``flat`` otherwise; the log says which."""
    FLAT = "flat"
    """Row by row."""
    TREE = "tree"
    """Shared prefixes are computed once."""


class ComputeDtype(StrEnum):
    """The data type of forward and backward passes; the weights that the optimiser keeps are always float32."""

    AUTO = "auto"
    """bfloat16 on CUDA and on CPUs with bfloat16 instructions, float32 elsewhere; or ``$AREAL_AUTO_DTYPE``."""
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Normalisation(StrEnum):
    """How returns become advantages; formulas in ``advantages.py``."""

    RLOO = "rloo"
    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    GROUP_MEAN_BATCH_STD = "group_mean_batch_std"
    NONE = "none"


class StatisticsUnit(StrEnum):
    """The unit that counts as one value in the statistics of a group."""

    TURN_KIND = "turn_kind"
    """One value per episode, the mean return of its turns of the same agent at the same depth of their conversation."""
    EPISODE = "episode"
    """One value per episode, its total reward.

    Biased if returns differ from totals: ``turn_discount`` below 1, or several rewards in an episode.
    """
    ROW = "row"
    """One value per training row, the return of its last turn.

    A long episode weighs more, and is compared with itself.
    """
    TURN_DEPTH = "turn_depth"
    """One value per turn, its return, compared with turns at the same depth of their conversation.

    Biased if episodes reach different depths: a turn that is alone at its depth has the advantage 0.
    """


class Surrogate(StrEnum):
    """The policy loss; formulas in ``surrogates.py``."""

    DPPO = "dppo"
    """The policy gradient with a trust region around the policy that sampled, in differences of probabilities."""
    PPO = "ppo"
    """Clipped ratios of tokens."""
    GSPO = "gspo"
    """Clipped ratios of whole rows."""
    CISPO = "cispo"
    """The policy gradient, weighted by clipped ratios; no token loses its gradient."""
    REINFORCE = "reinforce"
    """The policy gradient without a trust region."""


class Centre(StrEnum):
    """The policy that a surrogate's ratio is taken to."""

    POLICY = "policy"
    """The policy itself, without a gradient: the ratio is 1, and its gradient that of the log-probability."""
    PROXIMAL = "proximal"
    """The policy before the updates of the step."""
    BEHAVIOUR = "behaviour"
    """The policy that sampled."""


class Aggregation(StrEnum):
    """How the losses of tokens are combined into one number; formulas in ``batch.py``."""

    TOKEN_MEAN = "token_mean"  # noqa: S105
    SEQUENCE_MEAN = "sequence_mean"
    EPISODE_MEAN = "episode_mean"
    GROUP_MEAN = "group_mean"
    FIXED_LENGTH = "fixed_length"
    EPISODE_SUM = "episode_sum"


class Level(StrEnum):
    """The unit of an importance weight: one token, or its whole row."""

    TOKEN = "token"  # noqa: S105
    SEQUENCE = "sequence"


class OutOfRange(StrEnum):
    """The treatment of an importance weight outside its bounds."""

    CLAMP = "clamp"
    """It is set to the nearer bound (truncated importance sampling)."""
    MASK = "mask"
    """It becomes 0: the token does not contribute (masked importance sampling)."""


class KlEstimator(StrEnum):
    """Estimators of KL(policy || reference) from one sample; formulas in ``penalties.py``."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class KlPlace(StrEnum):
    """The place where the distance to the reference is penalised."""

    LOSS = "loss"
    REWARD = "reward"


class Decay(StrEnum):
    """The schedule of the learning rate after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class PublishBy(StrEnum):
    """How new weights reach the engines."""

    MEMORY = "memory"
    """By reference: the engine is in the trainer's process."""
    DISK = "disk"
    """As a directory of safetensors that engines elsewhere can read."""


@frozen(kw_only=True)
class AdvantageConfig:
    """How returns become advantages.

    The default compares each turn with turns of its kind in the other episodes of the group, and is unbiased for
    sessions of any shape; ``grpo`` with ``episode`` is GRPO as published. ``std_floor`` is a lower bound on the
    standard deviation that is divided by. ``drop_zero_variance`` is the dynamic sampling of DAPO: groups without
    signal, whose values in ``unit`` are all equal, are replaced by other groups until the batch is full; without it
    they stay in the denominators and contribute 0. ``max_refills`` limits this: a step replaces at most this many times
    the groups of a batch, and then trains without further ones. A custom ``normalisation`` (``file.py:name``) replaces
    the estimator; ``unit`` and ``std_floor`` are ignored in that case.
    """

    normalisation: Normalisation | FunctionReference = field(
        default=Normalisation.RLOO, validator=builtin_or_reference(Normalisation)
    )
    unit: StatisticsUnit = StatisticsUnit.TURN_KIND
    std_floor: float = constant(1e-6)
    drop_zero_variance: bool = False
    max_refills: int = field(default=4, validator=_not_negative)


@frozen(kw_only=True)
class BehaviourConfig:
    """Bounds on the importance weight that corrects for rows sampled by older weights.

    ``out_of_range: mask`` with ``floor`` 0.5 and ``cap`` 5 is IcePop: tokens on which engine and trainer disagree by
    more do not contribute.
    """

    level: Level = Level.TOKEN
    out_of_range: OutOfRange = OutOfRange.CLAMP
    cap: float = field(default=5.0, validator=_positive)
    floor: float = field(default=0.0, validator=_not_negative)

    def __attrs_post_init__(self) -> None:
        # With mask, an empty range excludes every token, so the run would go on without learning.
        if self.floor > self.cap:
            raise ValueError(f"floor ({self.floor:g}) must not exceed cap ({self.cap:g})")


@frozen(kw_only=True)
class KlConfig:
    """A penalty on the distance to the frozen reference model; ``coefficient`` 0 needs no reference.

    ``estimator`` ``None`` means k1 in the reward and k3 in the loss. k2 and k3 in the reward do not pull towards the
    reference. Each token's estimate in the loss is weighted by the bounded ratio policy/behaviour, through which the
    gradient goes, too, so that the expected gradient is that of KL(policy || reference), for stale rows as well
    (DeepSeek-V3.2, arXiv:2512.02556).
    """

    coefficient: float = field(default=0.0, validator=_finite_not_negative)
    estimator: KlEstimator | None = None
    place: KlPlace = KlPlace.LOSS

    def resolve_estimator(self) -> KlEstimator:
        """Return the estimator that is used: the configured one, or the default of the place."""
        if self.estimator is not None:
            return self.estimator
        return KlEstimator.K1 if self.place is KlPlace.REWARD else KlEstimator.K3


@frozen(kw_only=True)
class OverlongConfig:
    """The soft penalty of DAPO on long episodes: 0 up to ``max_tokens - buffer_tokens``, then linear to -``scale``.

    ``max_tokens`` ``None`` switches it off. Lengths count the sampled tokens of an episode that are trained.
    """

    max_tokens: int | None = field(default=None, validator=_positive_or_none)
    buffer_tokens: int = field(default=256, validator=_positive)
    scale: float = constant(1.0)


@frozen(kw_only=True)
class ObjectiveConfig:
    """The loss that training minimises.

    ``clip_low`` and ``clip_high`` bound the trust region in the surrogate's own unit; ``None`` takes its default: 0.2
    and 0.5 of probability for dppo, ratios 1 - 0.2 to 1 + 0.28 for ppo, 1 - 0.0003 to 1 + 0.0004 for gspo, and up to 1
    + 4 for cispo (no lower bound). ``dual_clip`` bounds the loss of tokens with a negative advantage if ppo or gspo
    compare with the behaviour policy: ratios above it have no gradient; ``None`` switches it off.

    ``is_decoupled`` takes the policy before the update as the centre of the clip of ppo, gspo and cispo and corrects
    for the behaviour policy by an importance weight; otherwise the behaviour policy itself is the centre. ``None``
    decouples ppo and gspo if a step makes several updates, and not if it makes one: the policy before the only update
    is the policy itself, and a clip around it has no effect. It also decouples ppo, gspo and cispo if rounding alone
    exceeds the clip, as it does that of gspo where the engine or the trainer computes in bfloat16: ratios to the policy
    that sampled would be clipped before anything was learned. dppo always compares with the behaviour policy. A custom
    ``surrogate`` (``file.py:name``) implements its own clip, and is decoupled unless ``is_decoupled`` is false.

    ``fixed_length`` is the number of tokens by which the aggregations ``episode_sum`` and ``fixed_length`` divide.
    ``masks_truncated`` leaves answers that were cut at their token limit out of the loss (overlong filtering of DAPO);
    their rewards stay in the baselines.
    """

    surrogate: Surrogate | FunctionReference = field(default=Surrogate.DPPO, validator=builtin_or_reference(Surrogate))
    clip_low: float | None = field(default=None, validator=optional(_fraction))
    clip_high: float | None = field(default=None, validator=optional(_not_negative))
    dual_clip: float | None = field(default=3.0, validator=_above_one_or_none)
    is_decoupled: bool | None = None
    behaviour: BehaviourConfig = field(factory=BehaviourConfig)
    aggregation: Aggregation = Aggregation.EPISODE_SUM
    fixed_length: int = field(default=1024, validator=_positive)
    kl: KlConfig = field(factory=KlConfig)
    entropy_coefficient: float = field(default=0.0, validator=_finite)
    overlong: OverlongConfig = field(factory=OverlongConfig)
    masks_truncated: bool = False

    def resolve_clip(self) -> tuple[float, float]:
        """Return ``clip_low`` and ``clip_high``, with the surrogate's default in the place of ``None``."""
        low, high = _CLIPS.get(self.surrogate, (0.0, 0.0))
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high

    def is_below(self, rounding: float) -> bool:
        """Return whether log-probabilities that differ by ``rounding`` nats may be outside the clip."""
        clips = isinstance(self.surrogate, Surrogate) and self.surrogate is not Surrogate.REINFORCE
        return clips and min(self.resolve_clip()) < rounding

    def resolve_centre(self, num_updates: int, *, rounding: float = 0.0) -> Centre:
        """Return the policy that ratios are taken to, in steps of ``num_updates`` updates.

        ``rounding`` is how far the log-probabilities of engine and trainer may differ for the same weights, in nats.
        """
        if self.surrogate in (Surrogate.DPPO, Surrogate.REINFORCE):
            return Centre.POLICY
        is_decoupled = self.is_decoupled
        if is_decoupled is None:
            is_decoupled = self.is_below(rounding) or (
                self.surrogate is not Surrogate.CISPO and (num_updates > 1 or not isinstance(self.surrogate, Surrogate))
            )
        return Centre.PROXIMAL if is_decoupled else Centre.BEHAVIOUR

    def is_weighted(self, num_updates: int, *, rounding: float = 0.0) -> bool:
        """Return whether losses are multiplied by the importance weight that ``behaviour`` bounds."""
        if self.surrogate is Surrogate.REINFORCE:
            return self.is_decoupled is not False
        return self.resolve_centre(num_updates, rounding=rounding) is not Centre.BEHAVIOUR


_CLIPS: dict[str, tuple[float, float]] = {
    Surrogate.DPPO: (0.2, 0.5),
    Surrogate.PPO: (0.2, 0.28),
    Surrogate.GSPO: (3e-4, 4e-4),
    Surrogate.CISPO: (1.0, 4.0),
    Surrogate.REINFORCE: (0.0, 0.0),
}
"""Defaults of ``clip_low`` and ``clip_high``, each in its surrogate's unit; reinforce has no clip."""


ROUNDING_NATS = {"float32": 1e-4, "bfloat16": 0.1}
"""Bounds on the difference of a token's log-probabilities by engine and trainer, in the coarser of their formats.

Measured are 1e-5 and up to 0.07.
"""


class OptimizerName(StrEnum):
    """The algorithm of updates, and the bytes it keeps for each trained weight, besides weight and gradient."""

    ADAMW = "adamw"
    """AdamW with float32 moments: 8 bytes."""
    ADAMW_BF16 = "adamw_bf16"
    """AdamW with bfloat16 moments, rounded at random: 4 bytes."""
    SGD = "sgd"
    """Gradient descent without momentum: nothing."""


class OffloadTo(StrEnum):
    """Where the moments of the optimiser are kept."""

    NONE = "none"
    """On the device of the weights."""
    CPU = "cpu"
    """In the memory of the host, where the update is computed: weights and gradients are copied there and back."""


@frozen(kw_only=True)
class OptimizerConfig:
    """The optimiser, its learning rate schedule and gradient clipping.

    ``name`` is the algorithm and the format of its moments, ``offload`` where they are kept. The rate rises linearly
    over ``num_warmup_steps`` updates to ``learning_rate``, then follows ``decay`` down to ``final_fraction`` of it at
    ``num_decay_steps``. ``max_grad_norm`` ``None`` does not clip.
    """

    name: OptimizerName = OptimizerName.ADAMW
    offload: OffloadTo = OffloadTo.NONE
    learning_rate: float = field(default=2e-5, validator=_finite_positive, metadata=COMMON)
    beta1: float = field(default=0.9, validator=_below_one)
    beta2: float = field(default=0.95, validator=_below_one)
    epsilon: float = field(default=1e-8, validator=_positive)
    weight_decay: float = field(default=0.0, validator=_not_negative)
    num_warmup_steps: int = field(default=3, validator=_not_negative)
    decay: Decay = Decay.CONSTANT
    num_decay_steps: int = field(default=1000, validator=_positive)
    final_fraction: float = field(default=0.1, validator=_fraction)
    max_grad_norm: float | None = field(default=1.0, validator=_positive_or_none)


@frozen(kw_only=True)
class CaptureConfig:
    """The check before each update: rows that cannot be what the engine sampled stop the run.

    Rows that the current weights sampled are compared with what the trainer computes for them. By default the bound
    follows from the data types of engine and trainer and from the entropy of the step. If ``tolerance`` is set, it
    bounds the mean absolute difference of a row in nats instead. At most ``max_bad_fraction`` of the rows, and of their
    different answers, may exceed the bound.
    """

    enabled: bool = True
    tolerance: float | None = field(default=None, validator=_positive_or_none)
    max_bad_fraction: float = constant(0.1)


class GangBackend(StrEnum):
    """The library through which the processes of a gang communicate."""

    AUTO = "auto"
    """``nccl`` where there is a GPU, ``gloo`` elsewhere."""
    GLOO = "gloo"
    """On CPUs."""
    NCCL = "nccl"
    """On GPUs, one for each process."""


@frozen(kw_only=True)
class GangConfig:
    """Training by several processes, each of which holds a part of the weights and computes a part of each step.

    ``num_processes`` includes the first one, the run itself. A process that waits longer than ``timeout_seconds`` for
    the others in the middle of a step considers them lost.
    """

    num_processes: int = field(default=1, validator=[instance_of(int), _positive])
    backend: GangBackend = GangBackend.AUTO
    timeout_seconds: float = constant(300.0)


class Activations(StrEnum):
    """The activations that are kept for the backward pass. Losses and gradients are the same, bit for bit."""

    AUTO = "auto"
    """``keep`` if a pass would surely fit into the device's memory, ``recompute`` otherwise."""
    KEEP = "keep"
    """Everything: fastest."""
    RECOMPUTE = "recompute"
    """The inputs of each layer; the rest is computed again, which makes a step about a third longer."""
    OFFLOAD = "offload"
    """The inputs of each layer, in the memory of the host instead of the GPU's."""


class LoraServing(StrEnum):
    """The form in which inference servers get a trained adapter."""

    ADAPTER = "adapter"
    """The adapter alone, which the server loads next to the base model; it must have been started with LoRA."""
    MERGED = "merged"
    """Whole weights with the adapter merged into them, as full training publishes them; any server can load these."""


@frozen(kw_only=True)
class LoraConfig:
    """Training of a low-rank adapter in place of the weights, which stay frozen. Needs the package peft.

    The update of a weight W is ``alpha / rank * B A`` with A ``[rank, in]`` and B ``[out, rank]``. Adapters want about
    ten times the learning rate of full training.
    """

    rank: int = field(default=16, validator=[instance_of(int), _positive])
    alpha: float = field(default=32.0, validator=_finite_positive)
    target_modules: tuple[str, ...] = ("all-linear",)
    """Names of linear modules, such as q_proj, or all-linear for all but the output head."""
    target_parameters: tuple[str, ...] = ()
    """Names of parameters that no linear module holds, such as mlp.experts.gate_up_proj of a mixture of experts."""
    path: Path | None = None
    """Directory of an adapter to start from, with the same rank, alpha and targets; null starts with no change."""
    serving: LoraServing = LoraServing.ADAPTER
    """What SGLang and vLLM servers get: adapter or merged. The embedded engine always gets merged weights."""
    exports_merged: bool = True
    """Whether the end of a run writes whole weights, merged, in addition to the adapter."""

    def __attrs_post_init__(self) -> None:
        """Raise ``ValueError`` for an adapter of nothing."""
        if not self.target_modules and not self.target_parameters:
            raise ValueError("target_modules and target_parameters are both empty; name a module, or all-linear")


@frozen(kw_only=True)
class TrainerConfig:
    """One training step: how groups become updates.

    ``max_packed_tokens`` bounds the tokens of one forward pass (a longer row gets a pass to itself). ``temperature``
    applies to rows that do not record the one they were sampled at (tensors that a workflow builds itself); all others
    record it for each turn. ``num_epochs`` is the number of passes over a batch and ``num_minibatches`` the number of
    updates per pass. ``device`` "auto" takes CUDA if there is a GPU; the processes of a gang choose theirs by its
    backend. ``activations`` says what a forward pass keeps in memory for the backward pass: ``auto`` keeps everything
    where that surely fits, and on a GPU the last layers as far as memory is free. ``skips_inert_rows`` leaves rows that
    cannot change the gradient out of the forward pass.
    """

    objective: ObjectiveConfig = field(factory=ObjectiveConfig)
    advantages: AdvantageConfig = field(factory=AdvantageConfig)
    optimizer: OptimizerConfig = field(factory=OptimizerConfig)
    capture: CaptureConfig = field(factory=CaptureConfig)
    gang: GangConfig = field(factory=GangConfig)
    lora: LoraConfig | None = None
    """Train an adapter in place of the weights; null trains all weights."""
    layout: Layout = Layout.AUTO
    max_packed_tokens: int = field(default=4096, validator=[instance_of(int), _positive])
    dtype: ComputeDtype = ComputeDtype.AUTO
    device: str = field(default="auto", metadata=COMMON)
    activations: Activations = Activations.AUTO
    compile_layers: bool | None = None
    """Compile decoder layers with torch.compile: the first step of a process takes up to a minute, or with an adapter
    one and a half, and the others a third less time. Null means on GPUs."""
    temperature: float = field(default=1.0, validator=_positive)
    num_epochs: int = field(default=1, validator=_positive)
    num_minibatches: int = field(default=1, validator=_positive)
    skips_inert_rows: bool = constant(True)
    step_timeout_seconds: float | None = field(default=1800.0, validator=_positive_or_none)
    """A step, publication or checkpoint that begins no forward pass for this long counts as hung: a trainer in a
    worker is replaced, and a run in one process ends with an error. Null: it may take forever."""
    router_replay: bool | None = None
    """Compute a mixture of experts with the experts that the engine recorded for each token when it sampled it. Null:
    where the embedded engine samples, and the routers of the model can be replayed."""
    metrics: tuple[FunctionReference, ...] = field(default=(), validator=deep_iterable(builtin_or_reference(())))
    """Your own functions (file.py:name), whose numbers appear in the metrics of each step as custom/<name>."""
    publish: PublishBy = PublishBy.MEMORY
    """How new weights reach the engines. Those in other processes read them from a shared disk."""
    publish_keep: int = constant(2)
    """Number of published versions to keep on disk; a replica that joins reads the latest."""
    seed: int = field(default=0, validator=ge(0))

    def compiles_layers(self, device_type: str) -> bool:
        """Return whether decoder layers are compiled on a device of this type."""
        return device_type == "cuda" if self.compile_layers is None else self.compile_layers


@frozen(kw_only=True)
class CheckpointConfig:
    """Interval of checkpoints and how many are kept. One is always written at the end.

    ``is_async`` copies weights and moments into the memory of the host and writes the copy while training goes on; the
    next checkpoint waits for the write. The copy takes 12 bytes per trained weight with adamw, on each process those of
    its part.
    """

    every_steps: int = field(default=10, validator=ge(1), metadata=COMMON)
    keep: int = field(default=1, validator=ge(1))
    is_async: bool = False


@frozen(kw_only=True)
class EvaluationConfig:
    """How the held-out problems are run: during training, and by areal-actors eval.

    Training evaluates before the first step, after the last one, and every every_steps steps; 0 evaluates only then.
    """

    every_steps: int = field(default=0, validator=ge(0), metadata=COMMON)
    num_samples: int = field(default=1, validator=[ge(1), le(65_536)])
    """Episodes per problem, over which the reward is averaged: the k of avg@k."""
    solved_reward: float = field(default=1.0, validator=and_(gt(-math.inf), lt(math.inf)))  # no NaN
    """An episode with at least this reward has solved its problem, for pass@k."""
    max_concurrent: int = field(default=128, validator=ge(1))
    """Episodes of evaluations that run at the same time."""


@frozen(kw_only=True)
class StopConfig:
    """Condition for stopping early: the moving average of the reward reaches ``reward``.

    The average is exponential with weight ``smoothing`` on the past, corrected for its start (as in Adam, arXiv
    1412.6980).
    """

    reward: float | None = field(
        default=None, validator=optional(and_(gt(-math.inf), lt(math.inf))), metadata=COMMON
    )  # no NaN
    smoothing: float = constant(0.5)
    min_steps: int = constant(1)


@frozen(kw_only=True)
class TrainingPlan:
    """The plan that the trainer actor carries out."""

    total_steps: int = field(validator=ge(1))
    batch_size: int = field(validator=ge(1))
    max_staleness: int = field(default=0, validator=ge(0))
    evaluation: EvaluationConfig = field(factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(factory=CheckpointConfig)
    stop: StopConfig = field(factory=StopConfig)
    num_warm_steps: int = field(default=0, validator=ge(0))
    """The number of steps on given conversations, which come first; no agent's episodes are trained in them."""
    max_step_seconds: float | None = field(default=None, validator=optional(gt(0)))
    """A step that waits longer than this for its groups stops the run with an error. ``None``: no limit."""
    rows_every_steps: int = field(default=0, validator=ge(0))
    """The rows of every n-th step are sent to the reporter; 0 sends none."""
