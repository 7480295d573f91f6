"""The loss functions of Tinker's API, from the log-probabilities of a datum's targets to a number.

Each is the sum over the tokens of a datum, as Tinker documents it; a batch is the sum over its data. ``p`` are the
log-probabilities under the weights that are trained, ``q`` those under which the tokens were sampled, ``A`` the
advantages, ``r = exp(p - q)``, and ``sg`` stops gradients::

    cross_entropy         -Σ w p
    importance_sampling   -Σ r A
    ppo                   -Σ min(r A, clip(r, low, high) A)                     arXiv:1707.06347
    cispo                 -Σ sg(clip(r, low, high)) A p                         arXiv:2506.13585
    dro                   -Σ (p A - beta/2 (p - q)²)                            arXiv:2405.19107
    gspo                  -Σ min(s A, clip(s, low, high) A)                     arXiv:2507.18071
                          s_t = exp(sg(mean of p - q over the mask) + p_t - sg(p_t))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from attrs import field, frozen
from torch import Tensor

from areal_actors.errors import InvalidRequest

Inputs = Mapping[str, Tensor]
Settings = Mapping[str, float]
Formula = Callable[[Tensor, Inputs, Settings], Tensor]

TARGETS = "target_tokens"
"""The input of every loss: the tokens that are scored, int64 [N], or [N, K] for K alternatives at each position."""


@frozen(kw_only=True)
class Loss:
    """A loss function: the inputs that a datum must have next to its targets, and the settings with their defaults."""

    formula: Formula
    inputs: tuple[str, ...]
    settings: Settings = field(factory=dict)


def _cross_entropy(p: Tensor, given: Inputs, settings: Settings) -> Tensor:  # noqa: ARG001 - it has no settings
    return -(given["weights"] * p).sum()


def _importance_sampling(p: Tensor, given: Inputs, settings: Settings) -> Tensor:  # noqa: ARG001 - as above
    return -((p - given["logprobs"]).exp() * given["advantages"]).sum()


def _clipped(ratio: Tensor, given: Inputs, settings: Settings) -> Tensor:
    clipped = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -torch.minimum(ratio * given["advantages"], clipped * given["advantages"]).sum()


def _ppo(p: Tensor, given: Inputs, settings: Settings) -> Tensor:
    return _clipped((p - given["logprobs"]).exp(), given, settings)


def _cispo(p: Tensor, given: Inputs, settings: Settings) -> Tensor:
    ratio = (p - given["logprobs"]).exp().detach()
    weights = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -(weights * given["advantages"] * p).sum()


def _dro(p: Tensor, given: Inputs, settings: Settings) -> Tensor:
    return -(p * given["advantages"] - settings["beta"] / 2 * (p - given["logprobs"]).square()).sum()


def _gspo(p: Tensor, given: Inputs, settings: Settings) -> Tensor:
    is_sampled = given["sequence_ratio_mask"] != 0
    if not bool(is_sampled.any()):
        raise InvalidRequest("sequence_ratio_mask marks no token; mark those that were sampled.", param="data")
    log_ratio = (p.detach() - given["logprobs"])[is_sampled].mean()
    return _clipped((log_ratio + p - p.detach()).exp(), given, settings)


_SAMPLED = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(formula=_cross_entropy, inputs=("weights",)),
    "importance_sampling": Loss(formula=_importance_sampling, inputs=_SAMPLED),
    "ppo": Loss(formula=_ppo, inputs=_SAMPLED, settings=_CLIP),
    "cispo": Loss(formula=_cispo, inputs=_SAMPLED, settings=_CLIP),
    "dro": Loss(formula=_dro, inputs=_SAMPLED, settings={"beta": 0.05}),
    "gspo": Loss(
        formula=_gspo,
        inputs=(*_SAMPLED, "sequence_ratio_mask"),
        # The paper's widths: the ratio of a sequence is a mean, and so much closer to 1 than that of a token.
        settings={"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
    ),
}


def find_loss(name: str, config: Mapping[str, float | str]) -> tuple[Loss, dict[str, float]]:
    """Return the loss function ``name``, and its settings with those of ``config``.

    Raises ``InvalidRequest`` for an unknown name or setting, and for a setting that is not a finite number.
    """
    loss = LOSSES.get(name)
    if loss is None:
        raise InvalidRequest(f"There is no loss function {name!r}; choose from {', '.join(LOSSES)}.", param="loss_fn")
    settings = dict(loss.settings)
    for key, value in config.items():
        if key not in settings:
            known = ", ".join(settings) or "none"
            raise InvalidRequest(f"{name} has no setting {key!r}; it has {known}.", param="loss_fn_config")
        if isinstance(value, str) or not math.isfinite(value):
            raise InvalidRequest(f"{key} = {value!r} is not a finite number.", param="loss_fn_config")
        settings[key] = float(value)
    return loss, settings


def require_inputs(name: str, inputs: Sequence[str], given: Mapping[str, object], index: int) -> None:
    """Raise ``InvalidRequest`` unless datum ``index`` has all ``inputs`` of the loss function ``name``."""
    missing = [key for key in inputs if key not in given]
    if missing:
        raise InvalidRequest(
            f"Datum {index} lacks loss_fn_inputs {', '.join(missing)}, which {name} needs.", param="data"
        )
