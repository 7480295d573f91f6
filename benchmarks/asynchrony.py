"""Asynchronous against synchronous training: seconds until both have learned the same, while tools are slow.

Everything is real: the proxy, the SDK, the engine, the trainer; only the tool is an ``anyio.sleep``. Its times are
drawn from a long tail, the same for each problem and member in both runs, because a synchronous step waits for the
slowest of its episodes and an asynchronous one does not. Both runs stop when the moving average of the reward reaches
one threshold, so that what is compared is equal; what staleness costs in steps is in the figure.

This is wall-clock time, the one thing that sleeping agents cost. On a machine that does other work, look at the ratio.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import anyio
from attrs import field, frozen
from benchmarks.harness import Result
from benchmarks.machine import ROOT
from examples.tiny_agent import TinyAgent
from openai import AsyncOpenAI

from areal_actors.config import load_config
from areal_actors.dashboard.records import read_records
from areal_actors.run import Trainer
from areal_actors.workflows import context as workflow_context

EXAMPLES = ROOT / "examples"
_NUM_LAST = 3
"""Steps over which the final reward is a mean."""


@frozen(kw_only=True)
class SlowTool:
    """How long a tool takes: log-normal around ``median`` seconds, never beyond ``slowest``.

    With a sigma of 0.8 one call in ten takes three times the median, and the slowest of 32 five times.
    """

    median: float = 0.4
    sigma: float = 0.8
    slowest: float = 2.0

    async def wait(self, question: str) -> None:
        """As long for an episode in one run as for the same episode in another."""
        rng = random.Random(f"{question} {workflow_context.get().member}")
        await anyio.sleep(min(self.median * rng.lognormvariate(0.0, self.sigma), self.slowest))


class SlowTinyAgent(TinyAgent):
    """Two turns with a slow tool between them; the reward is the share of digits in both answers."""

    def __init__(self, tool: SlowTool, max_tokens: int = 12) -> None:
        super().__init__(max_tokens)
        self.tool = tool

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Ask, wait, ask again."""
        client = AsyncOpenAI(**{name: extra_kwargs[name] for name in ("base_url", "api_key", "http_client")})
        messages: list[Any] = [{"role": "user", "content": data["question"]}]
        first = await self._ask(client, messages)
        await self.tool.wait(data["question"])
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "again"}]
        text = first + await self._ask(client, messages)
        return sum(character.isdigit() for character in text) / max(len(text), 1)

    async def _ask(self, client: AsyncOpenAI, messages: list[Any]) -> str:
        completion = await client.chat.completions.create(model="policy", messages=messages, max_tokens=self.max_tokens)
        return completion.choices[0].message.content or ""


@frozen(kw_only=True)
class Job:
    """A job that is trained more than once: until the reward's moving average is ``threshold``, or ``max_steps``."""

    name: str
    config: str
    create_agent: Callable[[SlowTool], Any]
    tool: SlowTool
    threshold: float
    max_steps: int
    staleness: tuple[int, ...]
    """How many versions the asynchronous runs may lag behind."""
    settings: Mapping[str, Any] = field(factory=dict)
    """What is set otherwise than in the configuration."""


@frozen(kw_only=True)
class Outcome:
    """What one run came to. ``seconds`` until the threshold, from when the model was loaded."""

    seconds: float
    steps: int
    reward: float
    staleness_mean: float
    staleness_max: float
    has_reached: bool


TINY = Job(
    name="tiny",
    config="tiny.yaml",
    create_agent=SlowTinyAgent,
    tool=SlowTool(),
    # Below the plateau of a policy that says " 42" for ever, which is two digits in three characters.
    threshold=0.55,
    max_steps=60,
    staleness=(1, 2),
    # Gentler than the example, which is over in a dozen steps: staleness would decide by luck alone.
    settings={"trainer.optimizer.learning_rate": 0.004},
)


def _create_slow_tool_agent(tool: SlowTool) -> Any:
    """The default job's agent, whose multiplication is slow."""
    from examples.tool_agent import ToolAgent

    class SlowToolAgent(ToolAgent):
        async def ask(self, client: AsyncOpenAI, messages: list[Any], *, max_tokens: int) -> Any:
            if messages[-1]["role"] == "tool":
                await tool.wait(str(messages))
            return await super().ask(client, messages, max_tokens=max_tokens)

    return SlowToolAgent()


DEFAULT = Job(
    name="default job",
    config="tool_agent.yaml",
    create_agent=_create_slow_tool_agent,
    tool=SlowTool(median=2.0, slowest=15.0),
    threshold=0.9,
    max_steps=40,
    staleness=(1,),
)


def measure(job: Job, *, seed: int) -> list[Result]:
    """Train synchronously and then asynchronously; the figures of all runs, and what each is of the first."""
    baseline = f"{job.name}, seed {seed}, synchronous"
    synchronous = _train(job, staleness=0, seed=seed)
    results = _results(baseline, synchronous)
    for staleness in job.staleness:
        name = f"{job.name}, seed {seed}, {staleness} behind"
        outcome = _train(job, staleness=staleness, seed=seed)
        results += [*_results(name, outcome), _ratio(name, outcome.seconds / synchronous.seconds, baseline)]
    return results


def _ratio(name: str, value: float, baseline: str) -> Result:
    ratio = f"{name}, ratio"
    return Result(benchmark="asynchrony", name=ratio, value=value, unit="ratio", gate=1.0, baseline=baseline)


def _results(name: str, outcome: Outcome) -> list[Result]:
    detail = {
        "steps": outcome.steps,
        "has_reached_threshold": outcome.has_reached,
        "staleness_mean": outcome.staleness_mean,
        "staleness_max": outcome.staleness_max,
    }
    reward = f"{name}, final reward"
    return [
        Result(benchmark="asynchrony", name=name, value=outcome.seconds, unit="s", detail=detail),
        Result(benchmark="asynchrony", name=reward, value=outcome.reward, unit="reward", higher_is_better=True),
    ]


def _train(job: Job, *, staleness: int, seed: int) -> Outcome:
    settings = {
        "seed": seed,
        "total_steps": job.max_steps,
        "eval_dataset": "null",
        "rollout.max_head_offpolicyness": staleness,
        "rollout.max_concurrent_rollouts": 64,
        "stop.reward": job.threshold,
        "logging.display": "none",
        "logging.trackers": "[]",
        **job.settings,
    }
    config = load_config(EXAMPLES / job.config, [f"{key}={value}" for key, value in settings.items()])
    with tempfile.TemporaryDirectory() as directory:
        summary = Trainer(config).train(workflow=job.create_agent(job.tool), run_dir=Path(directory) / "run")
        steps = [record for record in read_records(summary.run_dir / "metrics.jsonl") if record["step"] > 0]
    return _summarize(steps, max_steps=job.max_steps)


def _summarize(steps: list[dict[str, Any]], *, max_steps: int) -> Outcome:
    return Outcome(
        seconds=steps[-1]["elapsed_seconds"],
        steps=len(steps),
        reward=mean(step["reward"] for step in steps[-_NUM_LAST:]),
        staleness_mean=mean(step["staleness_mean"] for step in steps),
        staleness_max=max(step["staleness_max"] for step in steps),
        has_reached=len(steps) < max_steps,
    )


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the signature of every benchmark
    """The tiny job; unless ``quick``, on three seeds, and then the default job, which takes minutes."""
    if quick:
        return measure(TINY, seed=1)
    return [*(result for seed in (1, 2, 3) for result in measure(TINY, seed=seed)), *measure(DEFAULT, seed=1)]
