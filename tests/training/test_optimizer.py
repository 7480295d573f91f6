"""AdamW, its schedule, and the refusal of gradients that are no numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.errors import CheckpointError, TrainingDiverged
from areal_actors.training.config import Decay, OptimizerConfig
from areal_actors.training.optimizer import Optimizer, learning_rate


def create_parameters(seed=0):
    """A matrix and a vector."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "matrix": torch.randn(3, 2, generator=generator, requires_grad=True),
        "vector": torch.randn(2, generator=generator, requires_grad=True),
    }


def set_gradients(parameters, value):
    """The same gradient everywhere."""
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, value)


def slow_adamw(weight, gradients, config, *, decays):
    """The published update (arXiv:1711.05101), element by element in float64."""
    first = second = 0.0
    for step, gradient in enumerate(gradients):
        rate = learning_rate(step, config)
        first = config.beta1 * first + (1 - config.beta1) * gradient
        second = config.beta2 * second + (1 - config.beta2) * gradient**2
        mean, square = first / (1 - config.beta1 ** (step + 1)), second / (1 - config.beta2 ** (step + 1))
        weight -= rate * (config.weight_decay * weight if decays else 0.0)
        weight -= rate * mean / (square**0.5 + config.epsilon)
    return weight


def test_updates_equal_the_slow_reference():
    """Moments, bias correction, decoupled decay of matrices only, and the schedule."""
    config = OptimizerConfig(
        learning_rate=0.1, weight_decay=0.2, max_grad_norm=None, decay=Decay.LINEAR, num_decay_steps=4
    )
    parameters = create_parameters()
    start = {name: float(p.detach().flatten()[0]) for name, p in parameters.items()}
    optimizer = Optimizer(parameters, config)
    gradients = [0.5, -1.0, 2.0, 0.25, 1.0]

    for gradient in gradients:
        set_gradients(parameters, gradient)
        optimizer.step()

    for name, parameter in parameters.items():
        expected = slow_adamw(start[name], gradients, config, decays=name == "matrix")
        assert float(parameter.detach().flatten()[0]) == pytest.approx(expected, rel=1e-4)


@given(step=st.integers(0, 500), decay=st.sampled_from(Decay), warmup=st.integers(0, 50))
def test_the_rate_is_bounded(step, decay, warmup):
    """It never exceeds the configured rate, is never 0 in the warm-up and never below its final fraction after it."""
    config = OptimizerConfig(learning_rate=1.0, num_warmup_steps=warmup, decay=decay, num_decay_steps=100)

    rate = learning_rate(step, config)

    assert 0 < rate <= 1
    assert step < warmup or rate >= 0.1 - 1e-9


@pytest.mark.parametrize("decay", list(Decay))
def test_the_rate_rises_then_falls(decay):
    """Linear rise to the full rate, then the decay to its end."""
    config = OptimizerConfig(learning_rate=1.0, num_warmup_steps=4, decay=decay, num_decay_steps=10, final_fraction=0.2)

    assert [learning_rate(step, config) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert learning_rate(1000, config) == pytest.approx(1.0 if decay is Decay.CONSTANT else 0.2)


def test_the_gradient_is_clipped_to_its_norm():
    """A gradient twice as large gives the same update; the norm that is reported is the one before."""
    results = []
    for scale in (10.0, 20.0):
        parameters = create_parameters()
        optimizer = Optimizer(parameters, OptimizerConfig(max_grad_norm=0.5))
        set_gradients(parameters, scale)
        norm = optimizer.step()
        assert norm == pytest.approx(scale * 8**0.5)
        results.append(parameters["matrix"].grad.clone())

    assert torch.allclose(results[0], results[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_moves_nothing(value):
    """Weights, moments and the count stay, and the error says so."""
    parameters = create_parameters()
    optimizer = Optimizer(parameters, OptimizerConfig())
    set_gradients(parameters, 1.0)
    optimizer.step()
    before = {name: p.detach().clone() for name, p in parameters.items()}
    moments = {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}

    set_gradients(parameters, value)
    with pytest.raises(TrainingDiverged, match="update 2"):
        optimizer.step()

    assert optimizer.num_updates == 1
    assert all(torch.equal(before[name], p) for name, p in parameters.items())
    assert all(torch.equal(moments[name], tensor) for name, tensor in optimizer.state_dict().items())


def test_state_of_another_model_is_refused():
    """Unknown names and other shapes are named."""
    optimizer = Optimizer(create_parameters(), OptimizerConfig())

    for key, shape in (("exp_avg/stranger", (2,)), ("exp_avg/matrix", (9, 9))):
        with pytest.raises(CheckpointError, match=key):
            optimizer.load_state_dict({key: torch.zeros(shape)}, num_updates=1)
