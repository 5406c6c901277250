"""Partition: which neighbouring segments of a forward share one call per site on a CPU, and how.

Three ways, and what each costs beside the rows' own work:

    alone    a call for each segment
    joint    one call, in which every row meets the rank rows of all: for mixtures, and for adapters of other ranks
    grouped  one call of batched products, for one-hot segments of one rank: only groups of unequal size are filled up

Contract: a choice changes what a forward costs, never what it computes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

from workbench.adapters.columns import Shape

# what a call takes beside its arithmetic, in multiplications of the same time: 16 rows of rank 8 took 24 us a site, of
# which 4 us were arithmetic, at 50 to 60 products per ns (experiments/kernels/README.md)
CALL_MACS = 1 << 19
# rows gathered into groups and scattered again
FILL_MACS = 1 << 19


class Group(NamedTuple):
    """Members `first:last` of the segments, computed together: in groups (`is_grouped`) or with all rank rows."""

    first: int
    last: int
    is_grouped: bool


@functools.lru_cache(maxsize=256)
def partition(bounds: tuple[tuple[int, int, tuple[int, ...] | int], ...], shape: Shape) -> tuple[Group, ...]:
    """Group consecutive segments so that calls and rows that meet rank rows in vain cost little.

    From the first to the last, a segment joins those before it where that costs less than a call of its own.

    Args:
        bounds: start, stop, and slot (one-hot) or slots (a mixture) of each segment, ascending.
        shape: their ranks at a site, and its width.

    Returns:
        groups in row order; segments without a delta at the site may be in none.
    """
    runs: list[_Run] = []
    for place, (start, stop, wanted) in enumerate(bounds):
        slots = wanted if isinstance(wanted, tuple) else (wanted,)
        here = frozenset(slot for slot in slots if slot in shape.ranks)
        if not here:
            continue
        rank = sum(shape.ranks[slot] for slot in here)
        own_rank = 0 if isinstance(wanted, tuple) else rank
        alone = _Run(place, place + 1, start, stop, here, rank, own_rank, stop - start, True)
        joined = runs[-1].joined(alone, shape) if runs else None
        if joined and joined.cost(shape.width) <= runs[-1].cost(shape.width) + alone.cost(shape.width):
            runs[-1] = joined
        else:
            runs.append(alone)
    return tuple(Group(run.first, run.last, run.is_grouped(shape.width)) for run in runs)


@dataclass(frozen=True)
class _Run:
    """Neighbouring segments, and what computing them in one call takes.

    Attributes:
        first, last: members.
        start, stop: rows.
        slots: all slots with a delta here.
        rank: of all of them together.
        own_rank: of each segment's one adapter; 0 where they differ, or rows lie between, or one is a mixture.
        size: rows of the longest segment.
        is_even: all segments are of this size.
    """

    first: int
    last: int
    start: int
    stop: int
    slots: frozenset[int]
    rank: int
    own_rank: int
    size: int
    is_even: bool

    def joined(self, other: _Run, shape: Shape) -> _Run:
        """Return this run with the next segment."""
        slots = self.slots | other.slots
        return replace(
            self,
            last=other.last, stop=other.stop, slots=slots,
            rank=self.rank + sum(shape.ranks[slot] for slot in slots - self.slots),
            own_rank=self.own_rank if self.own_rank == other.own_rank and self.stop == other.start else 0,
            size=max(self.size, other.size),
            is_even=self.is_even and self.size == other.size,
        )  # fmt: skip

    def is_grouped(self, width: int) -> bool:
        """Whether groups are cheaper."""
        return self._grouped(width) < self._joint(width)

    def cost(self, width: int) -> float:
        """Return multiplications, the call's included."""
        return CALL_MACS + min(self._joint(width), self._grouped(width))

    def _joint(self, width: int) -> float:
        return (self.stop - self.start) * self.rank * width

    def _grouped(self, width: int) -> float:
        own = self.size * self.own_rank * width
        # a segment whose own work is worth a call gains nothing by sharing one, and a plain product splits better
        if not self.own_rank or len(self.slots) == 1 or own > CALL_MACS:
            return float("inf")
        return (self.last - self.first) * own + (0 if self.is_even else FILL_MACS)
