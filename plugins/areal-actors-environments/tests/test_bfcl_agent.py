"""The agent for problems in BFCL's format."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from areal_actors.config import load_config
from areal_actors.datasets import DatasetConfig, load_problems
from areal_actors.domain import TextDelta, ToolArgumentsDelta, ToolCallStarted
from areal_actors.lib.references import import_reference
from areal_actors.workflows import resolve_agent
from areal_actors_environments.bfcl import BfclFile, FunctionCaller
from areal_actors_testing.serving import open_scripted_proxy

pytestmark = pytest.mark.anyio

EXAMPLES = Path(__file__).parents[3] / "examples" / "bfcl"
AREAS = ['{"base": 5, "height": 12.0}', '{"base": 3, "height": 4}']


@pytest.mark.parametrize(
    ("arguments", "reward"),
    [
        (AREAS, 1.0),
        (AREAS[:1], 0.0),
        (["{", "[]"], 0.0),
        ([], 0.0),
    ],
)
async def test_function_caller_rewards_right_calls(arguments, reward):
    """The functions are offered as tools; calls that cannot be parsed are wrong, and no failure of the episode."""
    config = DatasetConfig(plugins={"bfcl": BfclFile(path="parallel.json")}, start=1, size=1)
    (problem,) = load_problems(config, import_reference=lambda _: None, directory=EXAMPLES).all()

    async def model(request):
        assert [tool.name for tool in request.tools] == ["triangle_area"]
        yield TextDelta(text="Let me see.")
        for index, text in enumerate(arguments):
            yield ToolCallStarted(index=index, id=f"call_{index}", name="triangle_area")
            yield ToolArgumentsDelta(index=index, text=text)

    async with (
        open_scripted_proxy(model) as proxy,
        proxy.open_session() as session,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        found = await FunctionCaller(system_prompt="Call.").run(
            problem.data, base_url=session.base_url, api_key=session.completion_key, http_client=client
        )

    assert found == reward


def test_bfcl_example_has_problems_with_answers_and_its_agent():
    """To evaluate takes the pretrained model."""
    config = load_config(EXAMPLES.parent / "bfcl.yaml")
    sets = {
        name: load_problems(dataset, import_reference=import_reference)
        for name, dataset in config.eval_datasets.items()
    }

    assert {"simple": 4, "multiple": 2, "parallel": 2, "irrelevance": 2} == {name: len(sets[name]) for name in sets}
    agent = resolve_agent(config.rollout.workflow, workflow_kwargs=config.rollout.workflow_kwargs)
    assert FunctionCaller(max_tokens=128) == agent
