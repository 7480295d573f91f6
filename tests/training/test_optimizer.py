"""Optimisers by name, their schedule, and the refusal of gradients that are not numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.errors import CheckpointError, TrainingDiverged
from areal_actors.training.config import Decay, OffloadTo, OptimizerConfig, OptimizerName
from areal_actors.training.optimizer import Optimizer, _round_randomly, learning_rate, state_bytes


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


@pytest.mark.parametrize("decay", list(Decay))
def test_rate_rises_then_falls(decay):
    """Linear rise to the full rate, then the decay to its end."""
    config = OptimizerConfig(learning_rate=1.0, num_warmup_steps=4, decay=decay, num_decay_steps=10, final_fraction=0.2)

    assert [learning_rate(step, config) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert learning_rate(1000, config) == pytest.approx(1.0 if decay is Decay.CONSTANT else 0.2)


def test_gradient_is_clipped_to_its_norm():
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
def test_gradient_that_is_no_number_moves_nothing(value):
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


# -------------------------------------------------------------------------------------------------- by name

NAMES = list(OptimizerName)
LARGE = 64


def create_optimizer(name, *, offload=OffloadTo.NONE, seed=0, **settings):
    """Return an optimiser of a matrix and a vector."""
    generator = torch.Generator().manual_seed(seed)
    parameters = {
        "matrix": torch.randn(LARGE, LARGE, generator=generator, requires_grad=True),
        "vector": torch.randn(LARGE, generator=generator, requires_grad=True),
    }
    return Optimizer(parameters, OptimizerConfig(name=name, offload=offload, **settings))


def take_steps(optimizer, numbers):
    """Updates with gradients that follow from their numbers."""
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for parameter in optimizer._parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def copy_of(optimizer):
    """Its weights."""
    return {name: weight.detach().clone() for name, weight in optimizer._parameters.items()}


@pytest.mark.parametrize(
    ("name", "offload"), [*((name, OffloadTo.NONE) for name in NAMES), (OptimizerName.ADAMW_BF16, OffloadTo.CPU)]
)
def test_restored_optimiser_continues_bit_for_bit(name, offload):
    """Two updates, a copy of the state, two more: as four."""
    optimizer, restored = (create_optimizer(name, offload=offload, learning_rate=0.01) for _ in range(2))
    take_steps(optimizer, [1, 2])
    state = {key: value.clone() for key, value in optimizer.state_dict().items()}
    with torch.no_grad():
        for key, weight in copy_of(optimizer).items():
            restored._parameters[key].copy_(weight)

    restored.load_state_dict(state, num_updates=2)
    take_steps(optimizer, [3, 4])
    take_steps(restored, [3, 4])

    expected = copy_of(optimizer)
    assert all(torch.equal(weight, expected[key]) for key, weight in copy_of(restored).items())
    assert restored.num_updates == 4


@pytest.mark.parametrize("name", NAMES)
def test_moments_on_the_host_give_the_same_updates(name):
    """Where they are kept changes no bit, and the empty stand-ins hold no weights afterwards."""
    here, offloaded = (create_optimizer(name, offload=where, weight_decay=0.1) for where in OffloadTo)
    take_steps(here, [1, 2, 3])
    take_steps(offloaded, [1, 2, 3])

    expected = copy_of(here)
    assert all(torch.equal(weight, expected[key]) for key, weight in copy_of(offloaded).items())
    assert all(held.numel() == 0 and held.grad is None for held in offloaded._held.values())


@pytest.mark.parametrize("name", NAMES)
def test_states_have_the_bytes_that_are_predicted(name):
    """Counted in the state of a large matrix; the planner and ``activations: auto`` use the prediction."""
    optimizer = create_optimizer(name)
    take_steps(optimizer, [1])

    held = [value for key, value in optimizer.state_dict().items() if key.endswith("/matrix") and value.ndim]

    assert sum(value.nbytes for value in held) / LARGE**2 == pytest.approx(state_bytes(OptimizerConfig(name=name)))
    assert state_bytes(OptimizerConfig(offload=OffloadTo.CPU)) == 0


def test_bfloat16_moments_update_nearly_as_float32():
    """Over 40 updates with noisy gradients, the weights end within 5 % of the way of AdamW."""
    exact, coarse = create_optimizer(OptimizerName.ADAMW), create_optimizer(OptimizerName.ADAMW_BF16)
    start = copy_of(exact)["matrix"]
    for optimizer in (exact, coarse):
        take_steps(optimizer, range(40))

    ends = [copy_of(optimizer)["matrix"] for optimizer in (exact, coarse)]
    assert float((ends[0] - ends[1]).norm() / (ends[0] - start).norm()) <= 0.05


@given(st.floats(0.5, 100), st.integers(0, 99))
def test_rounding_at_random_keeps_the_mean(value, seed):
    """Neighbours of a number in bfloat16, in proportion: nothing that is small is lost for ever."""
    exact = torch.full((20_000,), value)
    rounded = torch.empty(20_000, dtype=torch.bfloat16)

    _round_randomly(exact, rounded, torch.Generator().manual_seed(seed))

    gap = 2.0**-7 * value
    assert float((rounded.float() - exact).abs().max()) <= gap
    assert float(rounded.double().mean() - exact.double().mean()) == pytest.approx(0, abs=6 * gap / 2 / 20_000**0.5)


@pytest.mark.parametrize("name", NAMES)
def test_states_of_another_optimiser_are_refused(name):
    """A checkpoint names its format by its tensors; a run that continues with another one is told which setting."""
    saved = create_optimizer(name)
    take_steps(saved, [1])
    state = dict(saved.state_dict())

    for other in NAMES:
        if other is not name:
            with pytest.raises(CheckpointError, match=rf"was not made by {other}.*trainer\.optimizer\.name"):
                create_optimizer(other).load_state_dict(state, num_updates=1)
