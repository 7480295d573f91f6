"""Which process of a gang computes which forward pass. Pure, so that all of them know without asking.

Passes that run at the same time wait for the slowest of them, layer by layer; so they are dealt out by size, in rounds
of one pass for each process. In the last round some may have none.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["deal"]


def deal(sizes: Sequence[int], *, num_ranks: int) -> tuple[tuple[int | None, ...], ...]:
    """For each rank which of the passes of these ``sizes`` it computes, round by round; ``None`` where it has none.

    Every pass is in one share, once, and all shares are of one length.
    """
    by_size = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    order = [*by_size, *[None] * (-len(by_size) % num_ranks)]
    return tuple(tuple(order[rank::num_ranks]) for rank in range(num_ranks))
