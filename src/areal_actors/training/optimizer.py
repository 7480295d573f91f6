"""AdamW with a learning rate schedule and gradient clipping. Its weights are float32, whole or sharded over ranks.

An update is atomic: a gradient that is not finite raises ``TrainingDiverged`` before anything changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from areal_actors.errors import CheckpointError, TrainingDiverged
from areal_actors.training.config import Decay, OptimizerConfig
from areal_actors.training.sharding import gather, scatter

__all__ = ["Optimizer", "learning_rate"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


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
    """AdamW over named parameters; counts its updates."""

    def __init__(self, parameters: Mapping[str, Tensor], config: OptimizerConfig) -> None:
        self._parameters = dict(parameters)
        self._config = config
        self._adam = torch.optim.AdamW(
            self._groups(),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,  # one pass over the weights: twice as fast on two cores as the loop over tensors
        )
        self.num_updates = 0

    def zero_grad(self) -> None:
        """Reset the gradients to ``None``."""
        self._adam.zero_grad(set_to_none=True)

    def step(self) -> float:
        """Clip the gradient and update once; return the norm before clipping. An absent gradient counts as 0.

        A gradient that is 0 everywhere makes no update: the moments of earlier steps and weight decay would move the
        weights although nothing was learned. Weights, moments, count and schedule stay unchanged.

        Raises ``TrainingDiverged`` if the norm is not finite; weights and moments are then unchanged.
        """
        norm = gather(torch.nn.utils.get_total_norm(self._gradients()))
        if not torch.isfinite(norm):
            raise TrainingDiverged(
                f"The gradient of update {self.num_updates + 1} has the norm {float(norm)}; the weights were not "
                "changed. Lower the learning rate, or resume from a checkpoint before the rewards or ratios went wrong."
            )
        if norm == 0:
            return 0.0
        if self._config.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._config.max_grad_norm, norm)
        for group in self._adam.param_groups:
            group["lr"] = self.learning_rate
        self._adam.step()
        self.num_updates += 1
        return float(norm)

    @property
    def learning_rate(self) -> float:
        """The rate of the next update."""
        return learning_rate(self.num_updates, self._config)

    def state_dict(self) -> dict[str, Tensor]:
        """Return moments and counts by ``<what>/<parameter>``, shared with the optimiser; empty before an update."""
        return {
            f"{what}/{name}": state[what]
            for name, parameter in self._parameters.items()
            if (state := self._adam.state.get(parameter))
            for what in (*_MOMENTS, "step")
        }

    def load_state_dict(self, state: Mapping[str, Tensor], *, num_updates: int) -> None:
        """Load moments from ``state`` (copied).

        Raises ``CheckpointError`` for moments of tensors that the model does not have in that shape.
        """
        moments: dict[Tensor, dict[str, Any]] = {}
        for key, value in state.items():
            what, name = key.split("/", 1)
            parameter = self._parameters.get(name)
            if parameter is None or (what in _MOMENTS and parameter.shape != value.shape):
                raise CheckpointError(f"The checkpoint's optimiser state {key} does not fit the model.")
            owned = value.clone()
            if what in _MOMENTS:
                owned = scatter(owned, parameter)
            moments.setdefault(parameter, {})[what] = owned.to(parameter.device)
        self._adam.state.clear()
        self._adam.state.update(moments)
        self.num_updates = num_updates

    def _gradients(self) -> list[Tensor]:
        """Return all gradients; an absent one is set to 0, so that skipping passes without effect changes no update."""
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [p.grad for p in self._parameters.values() if p.grad is not None]

    def _groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups: matrices decay, biases and norms do not, as decay has no use there."""
        matrices = [p for p in self._parameters.values() if p.ndim > 1]
        vectors = [p for p in self._parameters.values() if p.ndim <= 1]
        return [
            {"params": params, "weight_decay": decay}
            for params, decay in ((matrices, self._config.weight_decay), (vectors, 0.0))
            if params
        ]
