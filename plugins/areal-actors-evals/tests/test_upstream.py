"""Evaluations of a model behind a URL: keys, seeds, both protocols, and bad input."""

from __future__ import annotations

from functools import partial

import pytest
from anyio import to_thread
from attrs import evolve
from tests.run.test_evaluation import AGENTS, SETTINGS, read, run_eval, write_config
from tests.run.trained import ENGINE

from areal_actors.config import create_config
from areal_actors.run.evaluation import evaluate
from areal_actors.run.inference import InferenceConfig, open_inference


@pytest.mark.parametrize("agent", ["Noting", "Anthropic"])
async def test_evaluation_of_url_sends_key_and_seeds(tmp_path, agent, anyio_backend_name, monkeypatch):
    """Both protocols; the same code counts turns and failures, and the results say that tokens are unknown."""
    config = create_config(
        SETTINGS | {"fileroot": str(tmp_path), "rollout": {"workflow": f"{AGENTS}:{agent}"}}, directory=tmp_path
    )
    engine = evolve(ENGINE, deterministic=True)
    async with open_inference("tiny", InferenceConfig(engine=engine)) as inference, inference.session() as session:
        monkeypatch.setenv("OPENAI_API_KEY", session.api_key)
        monkeypatch.setenv("ANTHROPIC_API_KEY", session.api_key)
        options = {"model": inference.endpoint.url, "served_name": "policy", "backend": anyio_backend_name}
        summary = await to_thread.run_sync(partial(evaluate, config, **options))
        again = await to_thread.run_sync(partial(evaluate, config, output=tmp_path / "again", **options))
    records = read(summary.directory.episodes)

    assert (3, 0) == (summary.sets[0].num_episodes, summary.sets[0].num_failed)
    assert {2 if agent == "Noting" else 1} == {one["turns"] for one in records}
    assert {None} == {one["tokens"] for one in records}
    rewards = [{one["task_id"]: one["reward"] for one in read(found.directory.episodes)} for found in (summary, again)]
    assert rewards[0] == rewards[1]
    assert "not available" in summary.to_json()["tokens"]
    assert all(one["turns"][0]["messages"] for one in read(summary.directory.sessions))


@pytest.mark.parametrize(
    ("agent", "arguments", "complaint"),
    [
        ("Noting", (), "cannot be reached"),
        ("Noting", (), "measured: asking the model at http://127.0.0.1:9\n"),
        ("Sampling", ("--served-name", "x"), "samples tokens itself"),
    ],
)
def test_evaluation_of_url_reports_mistakes_before_sampling(tmp_path, agent, arguments, complaint):
    """They leave no directory behind."""
    config = write_config(tmp_path, rollout={"workflow": f"{AGENTS}:{agent}"})
    result = run_eval(config, "--model", "http://127.0.0.1:9", *arguments, "--output", tmp_path / "out")

    assert 2 == result.exit_code, result.output
    assert complaint in result.stderr
    assert not (tmp_path / "out").exists()
