"""Groups and tiny models for the training tests: random rows with shared prefixes, as agents make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from tests import moe
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from areal_actors.domain import Episode, Group, GroupId, InteractionId, Problem, SessionId, Trajectory

VOCAB = 61


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiny matrices gain nothing from threads, and sums keep their order."""
    torch.set_num_threads(1)


def _make_row(
    ids: Sequence[int],
    mask: Sequence[int],
    *,
    reward: float = 0.0,
    logprobs: Sequence[float] | None = None,
    returns: Sequence[float] | None = None,
    version: int = 0,
    session: str = "s",
    turns: Sequence[int] | None = None,
) -> Trajectory:
    """A row of one turn by default, all of whose tokens return its reward."""
    trained = np.array(mask)
    turns = np.where(trained == 1, 0, -1) if turns is None else np.array(turns)
    return Trajectory(
        session=SessionId(session),
        interactions=tuple(InteractionId(f"{session}-{turn}") for turn in range(max(int(turns.max()), 0) + 1)),
        input_ids=ids,
        loss_mask=mask,
        logprobs=np.where(trained == 1, -1.0, 0.0) if logprobs is None else logprobs,
        versions=np.where(trained == 1, version, -1),
        returns=trained * reward if returns is None else returns,
        turns=turns,
        reward=reward,
    )


def _make_group(rows: Sequence[Trajectory], *, name: str = "g", rewards: Sequence[float] | None = None) -> Group:
    """A group with one episode for each row."""
    rewards = [row.reward for row in rows] if rewards is None else rewards
    episodes = tuple(
        Episode(session=row.session, member=member, reward=reward, trajectories=(row,))
        for member, (row, reward) in enumerate(zip(rows, rewards, strict=True))
    )
    return Group(id=GroupId(name), problem=Problem(position=0, data={}), episodes=episodes)


def _make_agent_group(seed: int, *, num_members: int = 4, prompt: int = 12, vocab: int = VOCAB) -> Group:
    """Two-turn rows that share a prompt, often their first sampled tokens too, and differ in reward."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, vocab, prompt)
    rows = []
    for member in range(num_members):
        first = rng.integers(0, 3, rng.integers(1, 5))
        tool = np.array([7, 8, 9])
        second = rng.integers(0, vocab, rng.integers(1, 6))
        ids = np.concatenate([shared, first, tool, second])
        turns = np.repeat([-1, 0, -1, 1], [prompt, len(first), 3, len(second)])
        mask = (turns >= 0).astype(int)
        row = _make_row(
            ids,
            mask,
            reward=float(rng.integers(0, 2)) + 0.1 * member,
            logprobs=-rng.uniform(2, 6, len(ids)) * mask,
            session=f"s{seed}-{member}",
            turns=turns,
        )
        rows.append(row)
    return _make_group(rows, name=f"g{seed}")


def _make_tree_row(seed: int, *, reward: float = 0.0) -> Trajectory:
    """A prompt with two answers, the second of which is continued twice: three branches, returns of their own."""
    rng = np.random.default_rng(seed)
    turns = np.array([-1, -1, -1, -1, 0, 0, 1, 1, 1, -1, -1, 2, 2, 3])
    predecessors = np.array([-1, 0, 1, 2, 3, 4, 3, 6, 7, 8, 9, 10, 11, 10])
    mask = (turns >= 0).astype(int)
    return evolve(
        _make_row(
            rng.integers(0, VOCAB, len(turns)),
            mask,
            reward=reward,
            logprobs=-rng.uniform(2, 6, len(turns)) * mask,
            returns=(reward + 0.1 * turns) * mask,
            session=f"tree-{seed}",
            turns=turns,
        ),
        predecessors=predecessors,
    )


def _make_model(kind: str = "llama", *, seed: int = 0, vocab: int = VOCAB) -> Any:
    """A random model of two layers with grouped heads; weights large enough that its distributions are not flat."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
    }
    if kind == "wide":  # layers are most of it
        layers = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6}
        return LlamaForCausalLM(LlamaConfig(**shape | layers))
    if kind in moe.KINDS:
        return moe.create_moe(kind, seed=seed, vocab=vocab)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True))
    return Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=False))


@pytest.fixture(scope="session")
def make_row() -> Callable[..., Trajectory]:
    """See ``_make_row``."""
    return _make_row


@pytest.fixture(scope="session")
def make_group() -> Callable[..., Group]:
    """See ``_make_group``."""
    return _make_group


@pytest.fixture(scope="session")
def make_agent_group() -> Callable[..., Group]:
    """See ``_make_agent_group``."""
    return _make_agent_group


@pytest.fixture(scope="session")
def make_tree_row() -> Callable[..., Trajectory]:
    """See ``_make_tree_row``."""
    return _make_tree_row


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    """See ``_make_model``."""
    return _make_model
