"""New weights are timed to a token that they sampled, on every way that they take."""

from __future__ import annotations

import pytest
from benchmarks.updates import Policy, create_model, create_routes, measure_routes


@pytest.fixture
def model(tmp_path):
    """The directory of a small model."""
    create_model(num_layers=1, vocab_size=384).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.anyio
async def test_each_way_has_its_figures_and_a_baseline_of_this_run(model, tmp_path):
    """The token comes after the load, and what it is a multiple of was measured as well."""
    routes = create_routes(model, tmp_path)[:1]
    results = {result.name: result for result in await measure_routes("", model, routes, 2)}
    loaded, sampled, ratio = (
        results[f"{routes[0].name}, {what}"] for what in ("until loaded", "until the first token", "ratio")
    )

    assert 0 < loaded.value < sampled.value
    assert ratio.value == pytest.approx(sampled.value / results[ratio.baseline].value)


def test_every_version_has_other_weights_under_each_name_once():
    """What is tied is there once, and a step changes it."""
    policy = Policy(create_model(num_layers=1, vocab_size=384))
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    policy.step()

    assert 1 == policy.version
    assert len({tensor.data_ptr() for tensor in policy.state_dict().values()}) == len(before)
    assert all((tensor != before[name]).any() for name, tensor in policy.state_dict().items())
