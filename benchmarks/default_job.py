"""The default job against the loop that one would write first: ``transformers.generate`` and a loss on padded rows.

The job of ``nox -s train`` trains for some steps. Then a loop over nothing but transformers and torch samples and
trains the same episodes, from the token ids that the run has dumped: the prompts of a turn in one padded batch, as many
new tokens as the longest answer had, and a loss over padded rows, with the same number format and the same optimizer.
The loop answers no requests, so that only the job pays for the proxy, the agents and the records. Of the job,
everything counts from its first request to its end, with the final checkpoint and the exported weights.

Needs the weights of the default job (``nox -s bench`` installs them).
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from benchmarks.harness import Result, Skipped
from benchmarks.machine import ROOT
from examples.tool_agent import ToolAgent
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from areal_actors.config import load_config
from areal_actors.errors import ConfigError
from areal_actors.lib.precision import choose_dtype
from areal_actors.models import resolve_model
from areal_actors.run.training import Trainer

_MAX_ROWS = 8
"""Rows of a forward and backward pass of the loop: the logits of 32 would take 3 GB."""


@frozen(kw_only=True)
class Call:
    """One request of an episode: its prompt and its answer in ``ids``, from ``prompt_length`` on."""

    episode: tuple[int, int]
    ids: tuple[int, ...]
    prompt_length: int
    reward: float


class _TimedAgent(ToolAgent):
    """Notes the CPU time of the process when its first episode begins."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: float | None = None

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        if self.begun is None:
            self.begun = time.process_time()
        return await super().run(data, **extra_kwargs)


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the protocol of all benchmarks
    """CPU seconds of the job and of the loop, and their ratio."""
    num_steps = 1 if quick else 3
    settings = [f"total_steps={num_steps}", "eval_dataset=null", "logging.display=none", "logging.trackers=[]"]
    try:
        config = load_config(ROOT / "examples/tool_agent.yaml", settings)
        model = resolve_model(config.model).path
    except ConfigError as error:
        raise Skipped(str(error)) from error
    with tempfile.TemporaryDirectory() as directory:
        agent = _TimedAgent()
        summary = Trainer(config).train(workflow=agent, run_dir=Path(directory) / "run")
        assert agent.begun is not None
        ours = time.process_time() - agent.begun
        steps = [list(read_calls(path)) for path in sorted((summary.run_dir / "rollout").iterdir())]
    begun = time.process_time()
    loop = PlainLoop(model)
    for calls in steps:
        loop.step(calls)
    plain = time.process_time() - begun
    return [
        _figure("plain loop", plain / num_steps),
        _figure("job", ours / num_steps),
        Result(
            benchmark="default_job",
            name="plain loop over job",
            value=plain / ours,
            unit="ratio",
            gate=4.0,
            higher_is_better=True,
            baseline="plain loop",
            detail={"steps": num_steps, "dtype": choose_dtype("auto", "cpu"), "tokens": _num_tokens(steps)},
        ),
    ]


def _figure(name: str, value: float) -> Result:
    return Result(benchmark="default_job", name=name, value=value, unit="CPU s per step")


def _num_tokens(steps: Sequence[Sequence[Call]]) -> int:
    return sum(len(call.ids) for calls in steps for call in calls)


def read_calls(directory: Path) -> Iterator[Call]:
    """Give the requests that a run has dumped for one version, those of an episode behind each other."""
    for path in sorted(directory.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            dumped = json.loads(line)
            yield Call(
                episode=(dumped["task_id"], dumped["sample_idx"]),
                ids=tuple(dumped["token_ids"]),
                prompt_length=dumped["prompt_len"],
                reward=dumped["reward"],
            )


class PlainLoop:
    """Sampling and REINFORCE with nothing but transformers and torch. Float32 weights, as the job has them."""

    def __init__(self, model: Path) -> None:
        self.dtype = getattr(torch, choose_dtype("auto", "cpu"))
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.sampler = AutoModelForCausalLM.from_pretrained(model, dtype=self.dtype).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-5)

    def step(self, calls: Sequence[Call]) -> None:
        """Sample ``calls`` again, one turn after the other, and train on their episodes."""
        episodes = [list(group) for _, group in groupby(calls, key=lambda call: call.episode)]
        self.sampler.load_state_dict(self.model.state_dict())
        for turn in range(max(map(len, episodes))):
            self._generate([episode[turn] for episode in episodes if len(episode) > turn])
        mean = sum(episode[-1].reward for episode in episodes) / len(episodes)
        num_sampled = sum(len(call.ids) - call.prompt_length for call in calls)
        self.optimizer.zero_grad()
        for start in range(0, len(episodes), _MAX_ROWS):
            self._backward(episodes[start : start + _MAX_ROWS], baseline=mean, num_sampled=num_sampled)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    @torch.no_grad()
    def _generate(self, calls: Sequence[Call]) -> None:
        prompts = [torch.tensor(call.ids[: call.prompt_length]) for call in calls]
        present = [torch.ones_like(prompt) for prompt in prompts]
        num_new = max(len(call.ids) - call.prompt_length for call in calls)
        self.sampler.generate(
            pad_sequence(prompts, batch_first=True, padding_side="left"),
            attention_mask=pad_sequence(present, batch_first=True, padding_side="left"),
            do_sample=True,
            top_k=0,
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            pad_token_id=0,
        )

    def _backward(self, episodes: Sequence[Sequence[Call]], *, baseline: float, num_sampled: int) -> None:
        """Add the gradient of the last request's row, which holds the turns before, for each of ``episodes``."""
        rows = pad_sequence([torch.tensor(episode[-1].ids) for episode in episodes], batch_first=True)
        weights = torch.zeros(rows.shape)
        for row, episode in enumerate(episodes):
            for call in episode:
                weights[row, call.prompt_length : len(call.ids)] = call.reward - baseline
        present = pad_sequence([torch.ones(len(episode[-1].ids)) for episode in episodes], batch_first=True)
        with torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
            logits = self.model(input_ids=rows, attention_mask=present).logits
        logprobs = logits[:, :-1].float().log_softmax(-1).gather(-1, rows[:, 1:, None]).squeeze(-1)
        (-(logprobs * weights[:, 1:]).sum() / num_sampled).backward()
