"""Optimisers by name, with a learning rate schedule, gradient clipping, and states that may be in the host's memory.

The weights that an optimiser changes are float32, whole or sharded over ranks. What it keeps for each weight depends on
its name: 8 bytes for two float32 moments, 4 in bfloat16.

An update is atomic: a gradient that is not finite raises ``TrainingDiverged`` before anything changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal_actors.errors import CheckpointError, TrainingDiverged
from areal_actors.training.config import Decay, OffloadTo, OptimizerConfig, OptimizerName
from areal_actors.training.sharding import Rows, gather, local_part, scatter, scatter_from_first, with_local_part

_CLIP_EPSILON = 1e-6
"""torch divides the largest norm by the norm plus this."""
_STATE_BYTES = {
    OptimizerName.ADAMW: 8.0,
    OptimizerName.ADAMW_BF16: 4.0,
    OptimizerName.SGD: 0.0,
}


def state_bytes(config: OptimizerConfig) -> float:
    """Return how many bytes the optimiser keeps on the device for each trained weight.

    The 4 bytes of the weight and those of its gradient come on top.
    """
    return 0.0 if config.offload is OffloadTo.CPU else _STATE_BYTES[config.name]


def learning_rate(step: int, config: OptimizerConfig) -> float:
    """Return the rate of update ``step``, counted from 0.

    Warm-up does not start at a rate of 0, so every update moves the weights.
    """
    if step < config.num_warmup_steps:
        return config.learning_rate * (step + 1) / config.num_warmup_steps
    progress = min((step - config.num_warmup_steps) / config.num_decay_steps, 1.0)
    match config.decay:
        case Decay.CONSTANT:
            remaining = 1.0
        case Decay.LINEAR:
            remaining = 1.0 - progress
        case Decay.COSINE:
            remaining = (1.0 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * remaining)


class Optimizer:
    """The optimiser that ``config`` names, over named parameters that have gradients; counts its updates."""

    def __init__(self, parameters: Mapping[str, Tensor], config: OptimizerConfig) -> None:
        self._parameters = dict(parameters)
        self._config = config
        self._is_offloaded = config.offload is OffloadTo.CPU
        # What torch's optimiser holds: with offload, an empty parameter in place of each; see ``_step_on_host``.
        self._held = {
            name: torch.nn.Parameter(torch.empty(0)) if self._is_offloaded else parameter
            for name, parameter in self._parameters.items()
        }
        # Matrices decay; biases and norms do not, as decay has no use there.
        matrices = [self._held[name] for name, p in self._parameters.items() if p.ndim > 1]
        vectors = [self._held[name] for name, p in self._parameters.items() if p.ndim <= 1]
        groups = [
            {"params": params, "weight_decay": decay}
            for params, decay in ((matrices, config.weight_decay), (vectors, 0.0))
            if params
        ]
        self._torch = _create(groups, config)
        self.num_updates = 0

    def zero_grad(self) -> None:
        """Reset the gradients to ``None``."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self) -> float:
        """Clip the gradient and update once; return the norm before clipping. An absent gradient counts as 0.

        A gradient that is 0 everywhere makes no update: the moments of earlier steps and weight decay would move the
        weights although nothing was learned. Weights, moments, count and schedule stay unchanged.

        Raises ``TrainingDiverged`` if the norm is not finite; weights and moments are then unchanged.
        """
        for parameter in self._parameters.values():
            if parameter.grad is None:  # so that skipping passes without effect changes no update
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = gather(torch.nn.utils.get_total_norm(gradients))
        if not torch.isfinite(norm):
            raise TrainingDiverged(
                f"The gradient of update {self.num_updates + 1} has the norm {float(norm)}; the weights were not "
                "changed."
            )
        if norm == 0:
            return 0.0
        # A factor of 1 would read and write all gradients: 12 GB at 1.5 billion weights.
        if self._config.max_grad_norm is not None and float(norm) + _CLIP_EPSILON > self._config.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._config.max_grad_norm, norm)
        for group in self._torch.param_groups:
            group["lr"] = self.learning_rate
        if self._is_offloaded:
            self._step_on_host()
        else:
            self._torch.step()
        self.num_updates += 1
        return float(norm)

    @property
    def learning_rate(self) -> float:
        """The rate of the next update."""
        return learning_rate(self.num_updates, self._config)

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return moments and counts by ``<what>/<parameter>``, shared with the optimiser; empty before an update.

        Moments in the host's memory stay there, unless their parameter is sharded.
        """
        found = {}
        for key, (name, value) in self._entries().items():
            parameter = self._parameters[name]
            is_part = value.ndim > 0 and isinstance(parameter, DTensor)
            found[key] = with_local_part(value, parameter) if is_part else value
        return found

    def rows(self) -> dict[str, Rows]:
        """Return this rank's rows of what ``state_dict`` returns, each where it is kept."""
        return {key: Rows.create(value, self._parameters[name]) for key, (name, value) in self._entries().items()}

    def _entries(self) -> dict[str, tuple[str, Tensor]]:
        """Return the name of the parameter and the state, whole or this rank's part, by ``<what>/<parameter>``."""
        return {
            f"{what}/{name}": (name, value)
            for name, held in self._held.items()
            for what, value in self._torch.state.get(held, {}).items()
            if value is not None
        }

    def load_state_dict(self, state: Mapping[str, Tensor], *, num_updates: int) -> None:
        """Load moments from ``state`` (copied).

        Raises ``CheckpointError`` for moments of tensors that the model does not have in that shape, and for those of
        another optimiser.
        """
        loaded: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            what, name = key.split("/", 1)
            parameter = self._parameters.get(name)
            if parameter is None or (value.ndim > 0 and parameter.shape != value.shape):
                raise CheckpointError(f"The checkpoint's optimiser state {key} does not fit the model.")
            if what != "step" and value.dtype is not self._moment_dtype:
                raise CheckpointError(_of_another_optimiser(key, self._config))
            owned = scatter(value.clone(), parameter) if value.ndim > 0 else value.clone()
            if self._is_offloaded:
                owned = local_part(owned)
            loaded.setdefault(name, {})[what] = owned.to(self._held[name].device)
        if bool(loaded) != (num_updates > 0 and self._config.name is not OptimizerName.SGD):
            raise CheckpointError(_of_another_optimiser(next(iter(state), "(none)"), self._config))
        self._torch.state.clear()
        self._torch.state.update({self._held[name]: moments for name, moments in loaded.items()})
        self.num_updates = num_updates

    def load_from_first(self, state: Mapping[str, Tensor] | None, *, num_updates: int) -> None:
        """Load moments that the first rank of a gang has whole; the others pass ``None``. All ranks call this."""
        self.num_updates = num_updates
        if num_updates == 0 or self._config.name is OptimizerName.SGD:
            return
        for name, parameter in self._parameters.items():
            held = self._held[name]
            # A parameter takes part in each update, as an absent gradient counts as 0.
            moments = {"step": torch.tensor(float(num_updates), device=held.device)}
            for what in ("exp_avg", "exp_avg_sq"):
                whole = None if state is None else state[f"{what}/{name}"]
                owned = scatter_from_first(whole, parameter.detach(), self._moment_dtype)
                moments[what] = local_part(owned).to(held.device) if self._is_offloaded else owned
            self._torch.state[held] = moments

    @property
    def _moment_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self._config.name is OptimizerName.ADAMW_BF16 else torch.float32

    def _step_on_host(self) -> None:
        """Update one parameter after the other with its moments in the memory of the host.

        torchao's CPUOffloadOptimizer is not used: it copies gradients while the backward pass runs, before they can be
        clipped.

        The device keeps weights and gradients; the host keeps the moments, and one weight and gradient at a time. A
        parameter without a gradient is skipped by torch's optimisers, so that each call updates the one that has it.
        """
        for name, parameter in self._parameters.items():
            held, weight = self._held[name], local_part(parameter.detach())
            assert parameter.grad is not None
            held.data = _to_host(weight)
            held.grad = _to_host(local_part(parameter.grad))
            self._torch.step()
            weight.copy_(held.data)
            held.data, held.grad = torch.empty(0), None


class AdamWBfloat16(torch.optim.Optimizer):
    """AdamW whose moments are bfloat16, rounded up or down at random so that their expected value is exact.

    Rounding to the nearest number would lose what is below 0.4 % of a moment: with a beta of 0.999, all of it. The
    random bits follow from the count of updates, so that a resumed run draws the same.
    """

    def __init__(self, groups: list[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002 - the signature of the base class
        """Update the parameters that have gradients."""
        for group in self.param_groups:
            (beta1, beta2), rate = group["betas"], group["lr"]
            for parameter in (given for given in group["params"] if given.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    for what in ("exp_avg", "exp_avg_sq"):
                        state[what] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                state["step"] += 1
                step = int(state["step"])
                weight, gradient = local_part(parameter.detach()), local_part(parameter.grad)
                first, second = (local_part(state[what]) for what in ("exp_avg", "exp_avg_sq"))
                mean = first.float().lerp_(gradient, 1 - beta1)
                square = second.float().lerp_(gradient.square(), 1 - beta2)
                # Seeded by the count of updates, so that a resumed run rounds as the uninterrupted one does.
                generator = torch.Generator(weight.device).manual_seed(step)
                _round_randomly(mean, first, generator)
                _round_randomly(square, second, generator)
                denominator = square.sqrt_().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
                weight.mul_(1 - rate * group["weight_decay"])
                weight.addcdiv_(mean, denominator, value=-rate / (1 - beta1**step))


def _round_randomly(exact: Tensor, rounded: Tensor, generator: torch.Generator) -> None:
    """Set ``rounded`` (bfloat16) to ``exact`` (float32), up with the probability of the part that is cut off."""
    bits = torch.randint(0, 1 << 16, exact.shape, dtype=torch.int32, device=exact.device, generator=generator)
    bits.add_(exact.view(torch.int32)).bitwise_and_(-(1 << 16))  # carries into the upper half as often as it should
    rounded.copy_(bits.view(torch.float32))


def _create(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    betas, rate = (config.beta1, config.beta2), config.learning_rate
    match config.name:
        case OptimizerName.ADAMW:
            # Fused: one pass over the weights, twice as fast on two cores as the loop over tensors.
            return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=config.epsilon, fused=True)
        case OptimizerName.ADAMW_BF16:
            return AdamWBfloat16(groups, lr=rate, betas=betas, eps=config.epsilon)
        case OptimizerName.SGD:
            return torch.optim.SGD(groups, lr=rate, fused=True)


def _of_another_optimiser(key: str, config: OptimizerConfig) -> str:
    return (
        f"The checkpoint's optimiser state {key} was not made by {config.name}. Set trainer.optimizer.name to the one "
        "that the run had."
    )


def _to_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host, in memory from which a GPU copies at the full rate of its bus."""
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copied.copy_(tensor)
