"""The capture contract over whole runs: each fault stops one within a step by its name, and honest engines never do."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from areal_actors import Trainer, create_config
from areal_actors.dashboard import RunDirectory
from areal_actors.errors import CaptureViolation
from areal_actors.generation import Engine
from areal_actors.models import resolve_model
from areal_actors.run import openers
from areal_actors.training.stored_checkpoints import find_checkpoints
from areal_actors_testing.faults import Fault, FaultyEngine

HERE = Path(__file__)
_SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2, 3]}}, "required": ["a"], "additionalProperties": False}


def problems(num: int, seed: int) -> Any:
    """Prompts that differ by a number."""
    return ({"text": f"say {seed + index}"} for index in range(num))


class Asker:
    """One question with the options of a request; every second answer is good, whatever it says."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.num = 0

    async def run(self, data: dict[str, Any], base_url: str, http_client: Any, **extra_kwargs: Any) -> float:
        body = {"model": "policy", "messages": [{"role": "user", "content": data["text"]}], "max_tokens": 8}
        response = await http_client.post(f"{base_url}/chat/completions", json=body | self.options)
        response.raise_for_status()
        self.num += 1
        return float(self.num % 2)


def train(tmp_path: Path, agent: Any = None, *, steps: int = 1, eta: int = 0, **trainer: Any) -> RunDirectory:
    """Steps of the tiny job."""
    settings = {
        "experiment_name": "capture",
        "model": "tiny",
        "total_steps": steps,
        "batch_size": 2,
        "fileroot": str(tmp_path),
        "dataset": {"python": f"{HERE}:problems", "size": 64},
        "rollout": {"workflow": f"{HERE}:Asker", "group_size": 4, "max_head_offpolicyness": eta},
        "engine": {"num_threads": 1, "max_length": 256},
        "trainer": {"optimizer": {"learning_rate": 0.01}} | trainer,
        "logging": {"trackers": [], "display": "none"},
    }
    config = create_config(settings)
    Trainer(config).train(agent or Asker())
    return config.run_directory


def retokeniser() -> Callable[[Any], Any]:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny").path)
    return lambda ids: tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) or [5]


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the next runs have an engine with a fault."""
    honest = openers.open_engine

    def use(fault: Fault, *, num_honest: int) -> None:
        @asynccontextmanager
        async def open_faulty(*args: Any, **kwargs: Any) -> AsyncIterator[Engine]:
            retokenise = retokeniser() if fault is Fault.RETOKENISED_IDS else None
            async with honest(*args, **kwargs) as engine:
                yield FaultyEngine(engine, fault, seed=3, num_honest=num_honest, retokenise=retokenise)

        monkeypatch.setattr(openers, "open_engine", open_faulty)

    return use


def violation_of(run: Callable[[], Any]) -> CaptureViolation:
    """What stopped the run, alone."""
    with pytest.raises((CaptureViolation, ExceptionGroup)) as raised:
        run()
    error: BaseException = raised.value
    while isinstance(error, ExceptionGroup):
        assert len(error.exceptions) == 1, error
        error = error.exceptions[0]
    assert isinstance(error, CaptureViolation), repr(error)
    return error


KINDS = {
    Fault.DROPPED_TOKEN: "unexplained_logprobs",
    Fault.DUPLICATED_TOKEN: "unexplained_logprobs",
    Fault.SHIFTED_LOGPROBS: "unexplained_logprobs",
    Fault.ZERO_LOGPROBS: "constant_logprobs",
    Fault.NAN_LOGPROB: "impossible_logprobs",
    Fault.RETOKENISED_IDS: "unexplained_logprobs",
    Fault.WRONG_VERSION: "wrong_version",
    Fault.EMPTY_CAPTURE: "empty_capture",
}


@pytest.mark.parametrize("fault", list(Fault))
def test_capture_gate_stops_run_within_a_step(tmp_path: Path, spoil: Any, fault: Fault):
    """An engine that turns wrong after the self-test: no step was taken, a checkpoint and the rows are there."""
    spoil(fault, num_honest=1)
    violation = violation_of(lambda: train(tmp_path, steps=3))
    directory = RunDirectory(path=tmp_path / "capture" / "trial")
    path = directory.captures / "step-1.jsonl"
    rows = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]

    assert KINDS[fault] == violation.kind
    assert str(violation).startswith(f"{KINDS[fault]}: Step 1 cannot be taken. ")
    assert str(violation).endswith(f"The rows are in {path}.")
    assert [0] == [checkpoint.step for checkpoint in find_checkpoints(directory.checkpoints)]
    assert all(row["kind"] == violation.kind for row in rows)
    assert rows or fault is Fault.EMPTY_CAPTURE


@pytest.mark.parametrize(
    "fault", [Fault.DROPPED_TOKEN, Fault.SHIFTED_LOGPROBS, Fault.WRONG_VERSION, Fault.EMPTY_CAPTURE]
)
def test_engine_self_test_finds_faults_before_first_agent_runs(tmp_path: Path, spoil: Any, fault: Fault):
    """An engine that is wrong from the beginning does not pass its self-test."""
    spoil(fault, num_honest=0)
    violation = violation_of(lambda: train(tmp_path))

    assert "The self-test of engine torch failed" in str(violation)
    assert violation.kind


@pytest.mark.parametrize(
    ("auto_dtype", "options", "settings"),
    [
        ("float32", {}, {"eta": 0}),
        ("bfloat16", {}, {"eta": 2, "num_minibatches": 2, "num_epochs": 2}),
        ("float32", {"n": 3}, {"eta": 0}),
        ("bfloat16", {"temperature": 0}, {"eta": 0}),
        ("bfloat16", {"top_p": 0.3, "temperature": 0.7, "logit_bias": {"65": 3}}, {"eta": 0, "temperature": 0.7}),
        (
            "float32",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}},
            {"eta": 0},
        ),
    ],
    ids=["eta 0", "eta 2, several updates", "n", "greedy", "truncated", "grammar"],
    indirect=["auto_dtype"],
)
def test_capture_gate_accepts_exact_engines(
    tmp_path: Path, auto_dtype: str, options: dict[str, Any], settings: dict[str, Any]
):
    """However tokens were sampled, and however old they are."""
    directory = train(tmp_path, Asker(**options), steps=3, **settings)

    assert not directory.captures.exists()
