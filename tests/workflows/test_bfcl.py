"""The agent for problems in BFCL's format."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from areal_actors.datasets import DatasetConfig, load_problems
from areal_actors.domain import TextDelta, ToolArgumentsDelta, ToolCallStarted
from areal_actors.workflows.bfcl import FunctionCaller
from areal_actors_testing.serving import open_scripted_proxy

pytestmark = pytest.mark.anyio

EXAMPLES = Path(__file__).parents[2] / "examples" / "bfcl"
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
async def test_right_calls_are_rewarded(arguments, reward):
    """The functions are offered as tools; calls that cannot be parsed are wrong, and no failure of the episode."""
    config = DatasetConfig(bfcl="parallel.json", start=1, size=1)
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
