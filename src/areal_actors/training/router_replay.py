"""Router replay: a mixture of experts computes with the experts that the engine chose when it sampled.

A router takes the best k of its experts for each token. Engine and trainer round differently, so that near ties are
decided differently, and a token that takes another expert has another hidden state, by far more than rounding. The
trainer therefore takes the experts that the engine recorded (Rollout Routing Replay, arXiv:2510.11370). Their weights
are recomputed from the router's own logits, so that gradients reach the router as they do without replay.

The routers of transformers (Mixtral, Qwen MoE, OLMoE) return logits, weights and indices. A hook replaces the last two.
``explain_unreplayable`` finds routers that choose or weigh in another way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from areal_actors.domain import Ints
from areal_actors.errors import ConfigError
from areal_actors.lib.routers import find_routers
from areal_actors.models import model_shape
from areal_actors.training.layers import decoder_of

_TOLERANCE = 1e-4

# By module instead of as an attribute of it: a copy of a model, such as the engine's, must not replay.
_replayed: WeakKeyDictionary[torch.nn.Module, Tensor] = WeakKeyDictionary()
_hooked: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()


def replay_experts(model: Any, experts: Ints | None) -> None:
    """Make ``model`` compute the next pass with ``experts`` int32 [N, layers, k] at its first N positions.

    This holds until the next call, since activation checkpointing calls the routers again in the backward pass.
    ``None`` lets the routers choose, as they do at positions whose entries are -1.
    """
    if experts is None:
        if _replayed:
            for router in find_routers(model):
                _replayed.pop(router, None)
        return
    routers = find_routers(model)
    if len(routers) != experts.shape[1]:
        raise ConfigError(
            f"The engine recorded the experts of {experts.shape[1]} layers, and {type(model).__name__} has "
            f"{len(routers)} routers: engine and trainer do not hold the same model."
        )
    given = torch.from_numpy(experts.astype(np.int64))
    for index, router in enumerate(routers):
        _replayed[router] = given[:, index].to(next(router.parameters()).device)
        if router not in _hooked:
            _hooked[router] = router.register_forward_hook(_replay)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch has no types for it
def _replay(router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    experts = _replayed.get(router)
    if experts is None:
        return output
    logits, weights, own = output
    # Padding behind the positions has no experts.
    known = torch.cat([experts, own.new_full((len(own) - len(experts), own.shape[1]), -1)])
    chosen = torch.where(known < 0, own, known)
    values = logits.float().softmax(-1).gather(-1, chosen)
    if getattr(router, "norm_topk_prob", True):
        values = values / values.sum(-1, keepdim=True)
    return logits, values.to(weights.dtype), chosen


@contextmanager
def record_experts(model: Any) -> Iterator[list[Tensor]]:
    """Record the experts of the passes in the block: one tensor int64 [N, k] for each call of a router."""
    found: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _router, _args, output: found.append(output[2].detach()))
        for router in find_routers(model)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def explain_unreplayable(model: Any) -> str | None:
    """Return why ``model`` does not compute the same if the experts that it chose are replayed; ``None`` if it does."""
    name, routers = type(model).__name__, find_routers(model)
    if not routers:
        return f"{name} has no routers"
    ids = torch.arange(16, device=model.device)[None] % model_shape(model.config).vocab_size
    with record_experts(model) as chosen:
        expected = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    if len(chosen) == len(routers) and all(indices.dtype is torch.int64 for indices in chosen):
        try:
            replay_experts(model, torch.stack(chosen, 1).to(torch.int32).cpu().numpy())
            found = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state
        finally:
            replay_experts(model, None)
        if torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
            return None
    return f"the routers of {name} do not take the k largest of a softmax, so that their choice cannot be replayed"
