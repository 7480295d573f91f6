"""Which problem a group runs: the source by the weights, and the next problem of that source.

A draw goes to the source that is furthest behind its share. So after n draws the number of a source differs from its
share of n by less than the number of sources. Each source has its own position, so that a run which resumes with other
weights, or with other sources next to it, goes on in the epochs of each source where it was. Shares are counted anew
when the weights change: a source that has a larger weight now is not owed the draws of before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import count

from attrs import evolve, field, frozen
from attrs.validators import gt

from areal_actors.datasets.difficulty import DifficultyConfig, ProblemPools
from areal_actors.domain import DataPosition, Group, PoolSizes, Problem, SourcePosition


@frozen(kw_only=True)
class DrawConfig:
    """How the problems of a source are drawn: how often in relation to other sources, and in which order."""

    weight: float = field(default=1.0, validator=gt(0.0))
    difficulty: DifficultyConfig = field(factory=DifficultyConfig)


class ProblemDraws:
    """The problems that were drawn and consumed, by source; a plain object with a single owner.

    ``sources`` has the empty name for a dataset without a source. With ``is_external``, positions are labels that
    clients chose. ``start`` is the position in the checkpoint that a run continues from: problems that were drawn but
    not consumed there are drawn first. Sources that the run no longer has keep their positions.
    """

    def __init__(
        self,
        sources: Mapping[str, DrawConfig],
        *,
        seed: int = 0,
        start: DataPosition | None = None,
        is_external: bool = False,
    ) -> None:
        self._start = start or DataPosition()
        total = math.fsum(source.weight for source in sources.values())
        known = self._start.sources
        weights = {name: source.weight for name, source in sources.items()}
        has_same_weights = weights == {name: found.weight for name, found in known.items() if found.weight}
        plain = SourcePosition(next=self._start.next, pending=self._start.pending, pools=self._start.pools)
        self._sources = {
            name: _Source(
                config,
                share=config.weight / total,
                seed=seed,
                start=known.get(name, SourcePosition()) if name else plain,
                num_counted=known[name].num_counted if has_same_weights else 0,
                is_external=is_external,
            )
            for name, config in sources.items()
        }

    def draw(
        self, num_problems: Mapping[str, int], *, begun: tuple[str, int] | None = None
    ) -> tuple[str, int, int | None]:
        """Return the source, the position and, if it was drawn by difficulty, the row of the next problem to run.

        ``begun`` is the place of one that an earlier process began and did not finish. Otherwise, problems that were
        queued again come first. ``num_problems`` are the sizes of the sources.
        """
        name = next((name for name, source in self._sources.items() if source.requeued), None)
        if begun is not None:
            name, position = begun
            source = self._sources[name]
            source.restored.add(position)
            source.num_drawn += 1
        elif name is not None:
            source = self._sources[name]
            position = min(source.requeued)
            source.requeued.remove(position)
        else:
            num = 1 + sum(source.num_drawn for source in self._sources.values())
            behind = {name: source.share * num - source.num_drawn for name, source in self._sources.items()}
            name = max(behind, key=behind.__getitem__)
            source = self._sources[name]
            position = next(source.positions)
            source.num_drawn += 1
        if source.config.difficulty.enabled and name in num_problems:
            source.open_pools(num_problems[name])
        return name, position, self.row_of(name, position)

    def restore(self, problem: Problem, row: int | None, num_problems: int | None, *, is_drawn: bool) -> None:
        """Record that an earlier process drew the problem; if ``is_drawn``, its group is not run again."""
        source = self._sources[problem.source]
        if is_drawn:
            source.restored.add(problem.position)
            source.num_drawn += 1
        if row is not None:
            source.open_pools(num_problems).assign(problem.position, row)

    def requeue(self, problem: Problem) -> None:
        """Draw the problem again, before all others."""
        self._sources[problem.source].requeued.add(problem.position)

    def consume(self, group: Group) -> None:
        """Count the problem of the group as done: trained, rejected or dropped. A second time changes nothing."""
        problem, source = group.problem, self._sources[group.problem.source]
        source.num_consumed += problem.position not in source.consumed
        source.consumed.add(problem.position)
        if source.pools is not None:
            source.pools.learn(problem.position, group)

    def is_consumed(self, problem: Problem) -> bool:
        """Return whether the problem need not be run again; problems of unknown sources need not."""
        source = self._sources.get(problem.source)
        return source is None or problem.position in source.consumed

    def row_of(self, name: str, position: int) -> int | None:
        """Return the row that was drawn by difficulty for a position; ``None`` if the source is run in order."""
        pools = self._sources[name].pools
        return None if pools is None else pools.draw(position)

    def num_problems(self, name: str) -> int | None:
        """Return the number of problems of a source that is drawn by difficulty, as far as it is known."""
        return self._sources[name].num_problems

    def order(self, problem: Problem) -> tuple[float, int]:
        """Return a key that sorts problems by when the weights made them due, in every process of a run alike."""
        source = self._sources[problem.source]
        return (problem.position - source.base) / source.share, [*self._sources].index(problem.source)

    def pool_sizes(self) -> dict[str, PoolSizes]:
        """Return the sizes of the pools of the sources that are drawn by difficulty."""
        return {name: source.pools.sizes() for name, source in self._sources.items() if source.pools is not None}

    def summary(self) -> DataPosition:
        """Return the position to store in a checkpoint."""
        found = {name: source.summary() for name, source in self._sources.items()}
        plain = found.pop("", None)
        if plain is not None:
            return evolve(self._start, next=plain.next, pending=plain.pending, pools=plain.pools)
        # A source that is not in this run has no weight, which tells a later process that the weights changed.
        absent = {name: evolve(position, weight=0.0) for name, position in self._start.sources.items()}
        return evolve(self._start, sources=absent | found)


class _Source:
    """The state of one source."""

    def __init__(
        self,
        config: DrawConfig,
        *,
        share: float,
        seed: int,
        start: SourcePosition,
        num_counted: int,
        is_external: bool,
    ) -> None:
        self.config = config
        self.share = share
        self.consumed = HighestPosition(start) if is_external else ConsumedPositions(start)
        self.restored: set[int] = set()
        self.requeued: set[int] = set()
        self.positions = (position for position in positions_from(start) if position not in self.restored)
        self.num_drawn = self.num_consumed = num_counted
        """Draws, and consumed problems, since the weights of the sources are what they are."""
        self.base = start.next - len(start.pending) - num_counted
        """The number of problems that had been consumed when the weights became what they are."""
        self.pools: ProblemPools | None = None
        self.num_problems: int | None = None
        self._start = start
        self._seed = seed

    def open_pools(self, num_problems: int | None) -> ProblemPools:
        """Return the pools, created with the first group, because only the runner knows the number of problems."""
        if self.pools is None:
            assert num_problems is not None, "a group with a row is stored with the number of rows"
            self.num_problems = num_problems
            self.pools = ProblemPools(
                self.config.difficulty, num_problems=num_problems, seed=self._seed, start=self._start.pools
            )
        return self.pools

    def summary(self) -> SourcePosition:
        """Return the position of the source in a checkpoint."""
        return evolve(
            self.consumed.summary(),
            pools=self._start.pools if self.pools is None else self.pools.summary(),
            weight=self.config.weight,
            num_counted=self.num_consumed,
        )


# --------------------------------------------------------------------------------------------------- positions


class ConsumedPositions:
    """The positions that need not be run again. Its memory is bounded by how far problems overtake one another."""

    def __init__(self, start: SourcePosition | None = None) -> None:
        start = start or SourcePosition()
        self._floor = min(start.pending, default=start.next)
        self._above = set(range(self._floor, start.next)) - set(start.pending)

    def add(self, position: int) -> None:
        """Count ``position`` as consumed: trained, rejected or dropped. Adding it twice is harmless."""
        if position >= self._floor:
            self._above.add(position)
        # Positions below the floor need no entry, which bounds the set.
        while self._floor in self._above:
            self._above.remove(self._floor)
            self._floor += 1

    def __contains__(self, position: int) -> bool:
        """Return whether ``position`` is consumed."""
        return position < self._floor or position in self._above

    def summary(self) -> SourcePosition:
        """Return the position to store in a checkpoint."""
        end = max(self._above, default=self._floor - 1) + 1
        return SourcePosition(next=end, pending=tuple(p for p in range(self._floor, end) if p not in self._above))


class HighestPosition:
    """The counterpart of ``ConsumedPositions`` for external problems: only the highest position is kept.

    External problems are never run again. Their positions are labels, and several groups may have the same one.
    """

    def __init__(self, start: SourcePosition | None = None) -> None:
        self._next = (start or SourcePosition()).next

    def add(self, position: int) -> None:
        """Count ``position`` as consumed."""
        self._next = max(self._next, position + 1)

    def __contains__(self, position: int) -> bool:
        """Return ``False``: a position that was seen before may be used again."""
        return False

    def summary(self) -> SourcePosition:
        """Return the position to store in a checkpoint."""
        return SourcePosition(next=self._next)


def positions_from(start: SourcePosition) -> Iterator[int]:
    """Yield the positions to run: the pending ones first, then all following ones without end."""
    yield from start.pending
    yield from count(start.next)
