"""Settings that cannot act are named at the start of a run, with the reason and a way out."""

from __future__ import annotations

import pytest

from areal_actors.run.advice import doubtful_settings, inert_settings
from areal_actors.training.config import (
    Activations,
    Aggregation,
    BehaviourConfig,
    CaptureConfig,
    GangBackend,
    GangConfig,
    KlConfig,
    KlEstimator,
    KlPlace,
    LoraConfig,
    LoraServing,
    ObjectiveConfig,
    OffloadTo,
    OptimizerConfig,
    OptimizerName,
    OverlongConfig,
    Surrogate,
    TrainerConfig,
)

PPO = Surrogate.PPO
IN_REWARD = KlConfig(coefficient=0.1, place=KlPlace.REWARD)


def test_default_settings_give_no_advice():
    """A run with default settings gets no advice."""
    assert inert_settings(TrainerConfig()) == doubtful_settings(TrainerConfig()) == []


@pytest.mark.parametrize(
    ("objective", "setting"),
    [
        (ObjectiveConfig(surrogate=PPO, is_decoupled=True, clip_low=0.1), "clip_low"),
        (ObjectiveConfig(surrogate=Surrogate.REINFORCE, clip_high=0.1), "clip_high"),
        (ObjectiveConfig(surrogate=Surrogate.CISPO, dual_clip=4.0), "dual_clip"),
        (ObjectiveConfig(dual_clip=4.0), "dual_clip"),
        (ObjectiveConfig(is_decoupled=False), "is_decoupled"),
        (ObjectiveConfig(surrogate=PPO, behaviour=BehaviourConfig(cap=2.0)), "behaviour.cap"),
        (ObjectiveConfig(kl=KlConfig(estimator=KlEstimator.K2)), "kl.estimator"),
        (ObjectiveConfig(kl=KlConfig(place=KlPlace.REWARD)), "kl.place"),
        (ObjectiveConfig(overlong=OverlongConfig(buffer_tokens=7)), "overlong.buffer_tokens"),
        (ObjectiveConfig(aggregation=Aggregation.TOKEN_MEAN, fixed_length=7), "fixed_length"),
    ],
)
def test_advice_names_objective_settings_without_effect(objective, setting):
    """Each sentence begins with the name of the setting."""
    (sentence,) = inert_settings(TrainerConfig(objective=objective))

    assert sentence.startswith(f"objective.{setting} has no effect: ")


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (TrainerConfig(optimizer=OptimizerConfig(num_decay_steps=7)), "optimizer.num_decay_steps"),
        (TrainerConfig(capture=CaptureConfig(enabled=False, tolerance=0.2)), "capture.tolerance"),
        (TrainerConfig(gang=GangConfig(backend=GangBackend.GLOO)), "gang.backend"),
        (TrainerConfig(device="cpu", optimizer=OptimizerConfig(offload=OffloadTo.CPU)), "optimizer.offload"),
        (TrainerConfig(optimizer=OptimizerConfig(name=OptimizerName.SGD, beta1=0.5)), "optimizer.beta1"),
        (TrainerConfig(device="cpu", activations=Activations.OFFLOAD), "activations"),
    ],
)
def test_advice_names_other_settings_without_effect(config, setting):
    """They need another setting to have an effect."""
    (sentence,) = inert_settings(config)

    assert sentence.startswith(f"{setting} has no effect: ")


@pytest.mark.parametrize(
    "config",
    [
        TrainerConfig(objective=ObjectiveConfig(clip_low=0.1, clip_high=0.1)),
        TrainerConfig(objective=ObjectiveConfig(surrogate=PPO, clip_low=0.1, dual_clip=4.0)),
        TrainerConfig(objective=ObjectiveConfig(surrogate=PPO, is_decoupled=True, clip_low=0.1), num_minibatches=4),
        TrainerConfig(objective=ObjectiveConfig(behaviour=BehaviourConfig(cap=2.0), kl=IN_REWARD)),
        TrainerConfig(objective=ObjectiveConfig(aggregation=Aggregation.FIXED_LENGTH, fixed_length=7)),
    ],
)
def test_advice_ignores_settings_with_effect(config):
    """The list of advice is empty."""
    assert inert_settings(config) == []


def test_lora_serving_has_no_effect_without_servers():
    """The embedded engine always gets merged weights."""
    merged = TrainerConfig(lora=LoraConfig(serving=LoraServing.MERGED))
    (sentence,) = inert_settings(merged, has_servers=False)

    assert sentence.startswith("lora.serving has no effect: the embedded engine")
    assert inert_settings(merged) == inert_settings(TrainerConfig(lora=LoraConfig()), has_servers=False) == []


def test_advice_names_low_learning_rate_of_adapter():
    """An adapter hardly learns with the rate of full training."""
    (sentence,) = doubtful_settings(TrainerConfig(lora=LoraConfig()))
    assert sentence.startswith("optimizer.learning_rate 2e-05 ")
    assert not doubtful_settings(TrainerConfig(lora=LoraConfig(), optimizer=OptimizerConfig(learning_rate=2e-4)))


@pytest.mark.parametrize(
    ("objective", "setting"),
    [
        (
            ObjectiveConfig(kl=KlConfig(coefficient=1, place=KlPlace.REWARD, estimator=KlEstimator.K3)),
            "kl.estimator k3",
        ),
        (ObjectiveConfig(surrogate=Surrogate.GSPO), "aggregation episode_sum"),
    ],
)
def test_advice_names_biased_settings(objective, setting):
    """They have an effect, but not the one that users expect."""
    (sentence,) = doubtful_settings(TrainerConfig(objective=objective))

    assert sentence.startswith(f"objective.{setting} ")
