"""The experts that an inference server reports for each token of a mixture of experts."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Any, Self

import numpy as np
from attrs import frozen

from areal_actors.domain import Experts, as_experts
from areal_actors.errors import ConfigError

__all__ = ["RoutedLayers"]


@frozen(kw_only=True)
class RoutedLayers:
    """Each token takes ``num_chosen`` experts in each of the layers ``sparse``, of ``num_layers``; others are dense."""

    num_chosen: int
    num_layers: int
    sparse: tuple[int, ...]

    @classmethod
    def of(cls, directory: Path) -> Self:
        """Read them from the configuration of the model in ``directory``.

        Raises ``ConfigError`` if it is not a mixture of experts.
        """
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config", config)
        num_chosen = text.get("num_experts_per_tok")
        if not num_chosen:
            raise ConfigError(f"trainer.router_replay: {directory} is not a mixture of experts; leave it out.")
        # Qwen's names; other models that can be replayed have experts in each layer.
        dense, step = text.get("mlp_only_layers") or (), text.get("decoder_sparse_step") or 1
        num_layers = int(text["num_hidden_layers"])
        sparse = tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
        return cls(num_chosen=int(num_chosen), num_layers=num_layers, sparse=sparse)

    def decode(self, encoded: Any, *, num_tokens: int) -> Experts:
        """Return the experts [``num_tokens``, sparse layers, chosen] of base64-encoded int32 of all layers.

        Raises ``ValueError`` for another number of them.
        """
        flat = np.frombuffer(b64decode(encoded), dtype=np.int32)
        if flat.size != num_tokens * self.num_layers * self.num_chosen:
            raise ValueError(
                f"{flat.size} experts for {num_tokens} tokens of {self.num_layers} layers with {self.num_chosen} each"
            )
        return as_experts(flat.reshape(num_tokens, self.num_layers, self.num_chosen)[:, list(self.sparse)])
