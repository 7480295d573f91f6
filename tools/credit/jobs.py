"""Training jobs on the tiny model, one for each shape of agent, and how far each of them comes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, field, frozen

from areal_actors import Trainer, create_config
from tools.credit.agents import AGENTS

__all__ = ["CONTRAST", "JOBS", "REFERENCE", "RESULTS", "Job", "Outcome", "read_results", "run_job", "write_results"]

RESULTS = Path(__file__).with_name("results.json")
"""What the last run of all jobs came to."""

STEPS = 20
"""Steps of the reference; every other job has one and a half times as many."""


@frozen(kw_only=True)
class Job:
    """One training job. ``total`` is the largest reward of an episode."""

    agent: str
    steps: int = STEPS * 3 // 2
    total: float = 1.0
    settings: Mapping[str, Any] = field(factory=dict)


@frozen(kw_only=True)
class Outcome:
    """The mean reward on held-out problems before and after, as a share of the largest.

    ``seconds`` are the processor's: the machine may have other work.
    """

    before: float
    after: float
    seconds: float


REFERENCE = "one conversation"
_ONE_ROW = {"rollout.openai.export_style": "concat"}  # 21 rows of up to 300 tokens each would take minutes
_DISCOUNTED = {**_ONE_ROW, "rollout.openai.turn_discount": 0.9}

JOBS: Mapping[str, Job] = {
    REFERENCE: Job(agent=REFERENCE, steps=STEPS),
    "sub-agent decides": Job(agent="sub-agent"),
    "first turn decides, 20 follow": Job(agent="first turn", settings=_ONE_ROW),
    "first turn decides, turn_discount 0.9": Job(agent="first turn", settings=_DISCOUNTED),
    "compaction": Job(agent="compaction"),
    "four attempts": Job(agent="four attempts"),
    "dense rewards": Job(agent="dense rewards", total=4.0),
    "side call that is noise": Job(agent="side call"),
}
"""All jobs by name."""

CONTRAST: Mapping[str, Any] = {
    "trainer.advantages.normalisation": "grpo",
    "trainer.advantages.unit": "episode",
    "rollout.openai.unrewarded": "zero",
}
"""Settings under which the episode's reward stays in the conversation of the last answer."""


def run_job(job: Job, root: Path, *, seed: int, **settings: Any) -> Outcome:
    """Train from random weights and return how far it came. ``settings`` are dotted names of the configuration."""
    document: dict[str, Any] = {
        "experiment_name": "credit",
        "trial_name": f"{job.agent.replace(' ', '-')}-{seed}",
        "fileroot": str(root),
        "model": "tiny",
        "seed": seed,
        "total_steps": job.steps,
        "batch_size": 2,
        "dataset": {"python": "tools.credit.agents:problems", "size": 64, "seed": 0},
        "eval_dataset": {"python": "tools.credit.agents:problems", "size": 8, "seed": 1000},
        "rollout": {"group_size": 8, "max_head_offpolicyness": 0, "dump_to_file": False},
        "engine": {
            "max_concurrent": 64,
            "max_length": 512,
            "num_threads": 1,
            "deterministic": True,
            "dtype": "float32",
        },
        "trainer": {"dtype": "float32", "optimizer": {"learning_rate": 0.01, "num_warmup_steps": 1}},
        "logging": {"display": "none", "trackers": []},
        "checkpoint": {"every_steps": 1000},
    }
    for name, value in {**job.settings, **settings}.items():
        _put(document, name.split("."), value)
    started = time.process_time()
    summary = Trainer(create_config(document)).train(workflow=AGENTS[job.agent]())
    assert summary.steps == job.steps, "the run was interrupted"
    assert summary.eval_first is not None
    assert summary.eval_last is not None
    return Outcome(
        before=summary.eval_first / job.total,
        after=summary.eval_last / job.total,
        seconds=time.process_time() - started,
    )


def _put(document: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        document = document.setdefault(name, {})
    document[path[-1]] = value


def write_results(results: Mapping[str, Sequence[Outcome]], contrasts: Mapping[str, Outcome]) -> None:
    """Keep what the jobs came to, on each seed, and on the first one under ``CONTRAST``."""
    document = {
        name: {
            "seeds": [_rounded(outcome) for outcome in outcomes],
            "contrast": _rounded(contrasts[name]),
        }
        for name, outcomes in results.items()
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _rounded(outcome: Outcome) -> dict[str, float]:
    rounded = evolve(outcome, before=round(outcome.before, 3), after=round(outcome.after, 3))
    return asdict(evolve(rounded, seconds=round(outcome.seconds)))


def read_results() -> Mapping[str, tuple[tuple[Outcome, ...], Outcome]]:
    """By job: its outcomes on all seeds, and the one under ``CONTRAST``."""
    return {
        name: (tuple(Outcome(**outcome) for outcome in found["seeds"]), Outcome(**found["contrast"]))
        for name, found in json.loads(RESULTS.read_text(encoding="utf-8")).items()
    }
