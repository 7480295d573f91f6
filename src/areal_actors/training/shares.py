"""Assignment of forward passes to the processes of a gang.

A pure function, so all ranks compute it without communication.

Passes that run at the same time wait for the slowest of them, layer by layer. They are therefore assigned by size, in
rounds of one pass for each process. In the last round some processes may have none.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["deal"]


def deal(sizes: Sequence[int], *, num_ranks: int) -> tuple[tuple[int | None, ...], ...]:
    """Return for each rank the indices of the passes that it computes, round by round.

    ``sizes`` are the sizes of the passes; ``None`` stands for a round in which the rank has no pass. Every pass is in
    exactly one share, and all shares have the same length.
    """
    by_size = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    # Pad the last round, so that all ranks make the same number of collective calls.
    order = [*by_size, *[None] * (-len(by_size) % num_ranks)]
    return tuple(tuple(order[rank::num_ranks]) for rank in range(num_ranks))
