"""Synthetic groups: branching sessions shaped like multi-turn tool use, and rows that an engine sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import field, frozen

from areal_actors.domain import Episode, Group, GroupId, InteractionId, Ints, Problem, SessionId, Trajectory, as_ints
from areal_actors.domain.rows import TurnInfo
from areal_actors.domain.sampling import SamplingDistribution

__all__ = ["Branching", "create_branching", "create_group", "create_sampled_row"]

NUM_BRANCHES = 8


@frozen(kw_only=True)
class Branching:
    """A group of eight rows that share a prompt, and in pairs also their first turns.

    ``num_row_tokens`` counts the tokens of all rows, ``num_tree_tokens`` each shared one once; ``num_row_pairs`` and
    ``num_tree_pairs`` count the pairs of a query and a visible key, and ``num_row_trained`` and ``num_tree_trained``
    the trained tokens, in the same ways.
    """

    group: Group = field(eq=False, repr=False)
    num_row_tokens: int
    num_tree_tokens: int
    num_row_pairs: int
    num_tree_pairs: int
    num_row_trained: int
    num_tree_trained: int


def create_branching(num_tokens: int, *, prompt: int, vocab_size: int, seed: int = 0) -> Branching:
    """Return a group with ``num_tokens`` distinct tokens, ``prompt`` of them in the prompt that all rows share.

    Each pair of rows shares as many tokens as each row has alone. A turn samples 96 tokens and reads the 160 of a
    tool's result, so that about two fifths of what follows the prompt is trained. The last turn of a row is sampled.
    """
    rng = np.random.default_rng(seed)
    part = (num_tokens - prompt) // (NUM_BRANCHES + NUM_BRANCHES // 2)
    if part < 1:
        raise ValueError(f"a group of {num_tokens} tokens has no room for branches behind {prompt} shared tokens")
    head = rng.integers(0, vocab_size, prompt)
    pairs = [rng.integers(0, vocab_size, part) for _ in range(NUM_BRANCHES // 2)]
    rows = [
        _create_row(
            np.concatenate([head, pairs[member // 2], rng.integers(0, vocab_size, part)]), prompt, f"s{seed}-{member}"
        )
        for member in range(NUM_BRANCHES)
    ]
    length = rows[0].num_tokens
    spans = [(0, prompt, 1), (prompt, prompt + part, NUM_BRANCHES // 2), (prompt + part, length, NUM_BRANCHES)]
    return Branching(
        group=create_group(rows, name=f"g{seed}"),
        num_row_tokens=NUM_BRANCHES * length,
        num_tree_tokens=sum(count * (stop - start) for start, stop, count in spans),
        num_row_pairs=NUM_BRANCHES * _pairs(0, length),
        num_tree_pairs=sum(count * _pairs(start, stop) for start, stop, count in spans),
        num_row_trained=sum(row.num_trained_tokens for row in rows),
        num_tree_trained=sum(
            int(row.loss_mask[start:stop].sum())
            for start, stop, count in spans
            for row in rows[:: NUM_BRANCHES // count]
        ),
    )


def _pairs(start: int, stop: int) -> int:
    """Return the number of pairs of queries at depths ``start`` to ``stop`` with all keys up to their own."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


def _create_row(ids: Any, prompt: int, name: str, *, sampled: int = 96, read: int = 160) -> Trajectory:
    left = len(ids) - 1 - np.arange(len(ids))  # the row ends with what was sampled, and all of it is computed
    is_sampled = (left < len(ids) - prompt) & (left % (sampled + read) < sampled)
    turns = np.where(is_sampled, left[prompt] // (sampled + read) - left // (sampled + read), -1)
    member = int(name.rpartition("-")[2])
    return Trajectory(
        session=SessionId(name),
        interactions=tuple(InteractionId(f"{name}-{turn}") for turn in range(int(turns.max()) + 1)),
        input_ids=ids,
        loss_mask=is_sampled,
        logprobs=np.where(is_sampled, -5.0, 0.0),
        versions=np.where(is_sampled, 0, -1),
        returns=is_sampled * float(member % 2),
        turns=turns,
        reward=float(member % 2),
    )


def create_sampled_row(
    prompt: Ints, sampled: Ints, logprobs: Sequence[float], raw: Sequence[float], *, member: int
) -> Trajectory:
    """Return the row of one answer that an engine sampled at temperature 1 under version 0."""
    is_sampled = np.repeat([False, True], [len(prompt), len(sampled)])
    nothing = np.zeros(len(prompt))
    return Trajectory(
        session=SessionId(f"s{member}"),
        interactions=(InteractionId(f"{member}-0"),),
        input_ids=np.concatenate([prompt, sampled]),
        loss_mask=is_sampled,
        logprobs=np.concatenate([nothing, logprobs]),
        raw_logprobs=np.concatenate([nothing, raw]),
        versions=np.where(is_sampled, 0, -1),
        returns=is_sampled * float(member % 2),
        turns=np.where(is_sampled, 0, -1),
        reward=float(member % 2),
        turn_infos=(TurnInfo(sampling=SamplingDistribution()),),
    )


def create_group(rows: Sequence[Trajectory], *, name: str = "g") -> Group:
    """Return the group of episodes of one row each."""
    episodes = tuple(
        Episode(session=row.session, member=member, reward=row.reward, trajectories=(row,))
        for member, row in enumerate(rows)
    )
    return Group(id=GroupId(name), problem=Problem(position=0, data={}), episodes=episodes)


def create_prompts(number: int, lengths: tuple[int, int], *, vocab_size: int, seed: int) -> list[Ints]:
    """Return random prompts, with lengths spread evenly over the range ``lengths``."""
    rng = np.random.default_rng(seed)
    sizes = np.linspace(*lengths, number).astype(int) if number > 1 else [sum(lengths) // 2]
    return [as_ints(rng.integers(0, vocab_size, size)) for size in sizes]
