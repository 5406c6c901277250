"""segments: which consecutive rows of a forward belong to one slot.

Built on the host once per step; every op consumes it. Rows of slot -1 (the base model) are in no segment, so no op
ever runs for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

BASE_SLOT = -1


class Segment(NamedTuple):
    """Rows `start:stop` of a forward, all of adapter slot `slot`."""

    start: int
    stop: int
    slot: int


def segments(slots: Sequence[int]) -> tuple[Segment, ...]:
    """Return the runs of equal slots in `slots` (one slot per row, -1 = base), in row order, base rows left out."""
    found: list[Segment] = []
    for row, slot in enumerate(slots):
        if slot < BASE_SLOT:
            raise ValueError(f"segments: row {row} has slot {slot}; slots start at {BASE_SLOT} (the base model)")
        if found and found[-1].stop == row and found[-1].slot == slot:
            found[-1] = found[-1]._replace(stop=row + 1)
        elif slot != BASE_SLOT:
            found.append(Segment(row, row + 1, slot))
    return tuple(found)


def check_segments(op: str, given: Iterable[Segment], num_rows: int) -> None:
    """Check that segments are sorted, disjoint and inside `num_rows` rows.

    Raises:
        ValueError: naming the first segment that is not.
    """
    end = 0
    for segment in given:
        if not end <= segment.start < segment.stop <= num_rows:
            raise ValueError(f"{op}: {segment} overlaps its neighbour, is empty, or leaves the {num_rows} rows")
        end = segment.stop
