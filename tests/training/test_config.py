"""Settings refuse what cannot be meant, and loading them costs no torch."""

from __future__ import annotations

import pytest

from areal_actors.datasets.difficulty import DifficultyConfig
from areal_actors.training.config import (
    BehaviourConfig,
    KlConfig,
    LoraConfig,
    ObjectiveConfig,
    OptimizerConfig,
    OverlongConfig,
    StopConfig,
    TrainerConfig,
)


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        (BehaviourConfig, {"cap": -1}),
        (BehaviourConfig, {"floor": 6.0}),
        (KlConfig, {"coefficient": -0.1}),
        (OverlongConfig, {"max_tokens": 0}),
        (ObjectiveConfig, {"clip_low": 1.5}),
        (ObjectiveConfig, {"entropy_coefficient": float("nan")}),
        (ObjectiveConfig, {"entropy_coefficient": float("inf")}),
        (KlConfig, {"coefficient": float("inf")}),
        (StopConfig, {"reward": float("nan")}),
        (DifficultyConfig, {"solved_reward": float("nan")}),
        (OptimizerConfig, {"learning_rate": 0}),
        (OptimizerConfig, {"learning_rate": float("inf")}),
        (LoraConfig, {"alpha": float("inf")}),
        (LoraConfig, {"target_modules": ()}),
        (OptimizerConfig, {"beta2": 1.0}),
        (OptimizerConfig, {"max_grad_norm": -1.0}),
        (TrainerConfig, {"max_packed_tokens": 0}),
        (TrainerConfig, {"temperature": 0.0}),
        (TrainerConfig, {"num_epochs": 0}),
    ],
)
def test_values_out_of_range_are_refused(kind, setting):
    """The error names the field."""
    with pytest.raises(ValueError, match=next(iter(setting))):
        kind(**setting)
