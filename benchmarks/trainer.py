"""Training throughput: tokens of rows per CPU second, flat and tree-packed, against a plain loss on full logits.

The rows are those of an agent that calls a tool once: 8 members share a prompt of 250 tokens, sample 40, read 20,
sample 20. Nothing that they sample is shared, which is the hard case for the tree; real groups share the start of
their answers, too. The baseline is what one would write first: pad the rows, ask the model for all logits, take the
log-softmax and pick. All three do the same work, forward, backward and AdamW, on the same rows.

``AREAL_MODEL_PATH`` names a directory with a pretrained model to measure as well; otherwise a random Llama of ten
million parameters is used alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from benchmarks.harness import Result, cpu_us_per_operation
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from areal_actors.domain import Episode, Group, GroupId, InteractionId, Problem, SessionId, Trajectory
from areal_actors.training.config import ComputeDtype, Layout, TrainerConfig
from areal_actors.training.trainer import PolicyTrainer

MEMBERS, PROMPT, FIRST, TOOL, SECOND = 8, 250, 40, 20, 20


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the protocol of all benchmarks
    """Figures of the random model and, where a path is given, of a pretrained one."""
    results = _measure("random-10M", create_model, rounds=2 if quick else 5)
    path = os.environ.get("AREAL_MODEL_PATH")
    if path:
        results += _measure("pretrained", partial(AutoModelForCausalLM.from_pretrained, path), rounds=1 if quick else 3)
    return results


def _measure(name: str, create_model: Callable[[], Any], *, rounds: int) -> list[Result]:
    group = create_group(vocab_size=create_model().config.vocab_size)
    num_tokens = sum(episode.trajectories[0].num_tokens for episode in group.episodes)
    costs = {
        "plain": _cost(_plain_step(create_model(), group), num_tokens, rounds),
        "flat": _cost(_trainer_step(create_model(), Layout.FLAT, group), num_tokens, rounds),
        "tree": _cost(_trainer_step(create_model(), Layout.TREE, group), num_tokens, rounds),
    }
    speeds = [
        Result(
            benchmark="trainer",
            name=f"{name} {layout}",
            value=1e6 / cost,
            unit="row tokens/cpu-s",
            higher_is_better=True,
        )
        for layout, cost in costs.items()
    ]
    ratio = Result(
        benchmark="trainer",
        name=f"{name} tree over plain",
        value=costs["plain"] / costs["tree"],
        unit="ratio",
        gate=2.0,
        higher_is_better=True,
        baseline=f"{name} plain",
    )
    return [*speeds, ratio]


def _cost(step: Callable[[], object], num_tokens: int, rounds: int) -> float:
    step()
    return cpu_us_per_operation(step, num_operations=num_tokens, rounds=rounds)


def _trainer_step(model: Any, layout: Layout, group: Group) -> Callable[[], object]:
    trainer = PolicyTrainer(model, TrainerConfig(layout=layout, dtype=ComputeDtype.FLOAT32))
    return partial(trainer.train_step, [group])


def _plain_step(model: Any, group: Group) -> Callable[[], object]:
    """One update of REINFORCE as a loop over nothing but transformers and torch."""
    model = model.float().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    rows = [episode.trajectories[0] for episode in group.episodes]
    ids = torch.tensor(np.stack([row.input_ids for row in rows]), dtype=torch.long)
    mask = torch.tensor(np.stack([row.loss_mask for row in rows]))[:, 1:].float()
    advantages = torch.tensor([row.reward for row in rows]) - 0.5

    def step() -> None:
        logprobs = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        taken = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)
        loss = -(taken * mask * advantages[:, None]).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def create_group(*, vocab_size: int, seed: int = 0) -> Group:
    """One group of two-turn rows; half of its members succeed."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, vocab_size, PROMPT)
    rows = [
        _create_row(prompt, rng.integers(0, vocab_size, FIRST + TOOL + SECOND), member) for member in range(MEMBERS)
    ]
    return Group(id=GroupId("g"), problem=Problem(position=0, data={}), episodes=_create_episodes(rows))


def _create_row(prompt: Any, rest: Any, member: int) -> Trajectory:
    turns = np.repeat([-1, 0, -1, 1], [PROMPT, FIRST, TOOL, SECOND])
    is_sampled = turns >= 0
    return Trajectory(
        session=SessionId(f"s{member}"),
        interactions=(InteractionId(f"{member}-0"), InteractionId(f"{member}-1")),
        input_ids=np.concatenate([prompt, rest]),
        loss_mask=is_sampled,
        logprobs=np.where(is_sampled, -5.0, 0.0),
        versions=np.where(is_sampled, 0, -1),
        returns=is_sampled * float(member % 2),
        turns=turns,
        reward=float(member % 2),
    )


def _create_episodes(rows: Sequence[Trajectory]) -> tuple[Episode, ...]:
    return tuple(
        Episode(session=row.session, member=member, reward=row.reward, trajectories=(row,))
        for member, row in enumerate(rows)
    )


def create_model() -> LlamaForCausalLM:
    """A random Llama of ten million parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)
