"""segments: which rows of a forward use which slot, and where each slot's factors lie.

Everything here is made on the host: a `RowPlan` once per step, a `SpanTable` when an adapter comes or goes. The ops
read both on the device, so a step waits for nothing. Rows of slot -1 (the base model) are in no segment, so no op
ever runs for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BASE_SLOT = -1

# rows of the largest tile sgmv works on: factors are read once per tile, and a 64 x 128 tile of y fills 64 registers
TILE_ROWS = 64
# tensor cores multiply 16 rows at once; below that a smaller tile saves nothing
MIN_TILE_ROWS = 16
# up to here an adapter's factors, read once per row by bgmv, come from the L2 cache after the first row, and bgmv has
# more programs to spread over the card than sgmv
DECODE_ROWS = 4
_MIN_TABLE_SLOTS = 16


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


@dataclass(frozen=True, eq=False)
class RowPlan:
    """Which rows of one forward use which slot, for every site of the model; made by `plan_rows`.

    Attributes:
        num_rows: rows of the forward, base rows included.
        segments: sorted and disjoint; base rows are in none.
        slots: the slots in use, each once.
        max_slot: the largest of them, -1 when all rows are base rows.
        slot_of_row: int32 `[row]` on the device, -1 for base rows.
        tiles: int32 `[tile, 3]` on the device: start, stop and slot of at most `tile_rows` rows of one segment.
        tile_rows: 16, 32 or 64: no tile has more rows.
        is_decode: every segment is short, so bgmv is the better path; sgmv otherwise.
    """

    num_rows: int
    segments: tuple[Segment, ...]
    slots: tuple[int, ...]
    max_slot: int
    slot_of_row: Tensor
    tiles: Tensor
    tile_rows: int
    is_decode: bool

    @property
    def device(self) -> torch.device:
        """Where the two tensors are."""
        return self.slot_of_row.device


def plan_rows(segments: Sequence[Segment], num_rows: int, device: torch.device | str) -> RowPlan:
    """Return the plan of one forward; on CUDA its tensors arrive by one asynchronous copy.

    Raises:
        ValueError: segments that overlap, are unsorted or empty, leave the rows, or name a slot below 0.
    """
    check_segments("plan_rows", segments, num_rows)
    longest = max((stop - start for start, stop, _ in segments), default=0)
    tile_rows = next(rows for rows in (MIN_TILE_ROWS, 2 * MIN_TILE_ROWS, TILE_ROWS) if rows >= min(longest, TILE_ROWS))
    slot_of_row, tiles, used = [BASE_SLOT] * num_rows, [], {}
    for segment in segments:
        start, stop, slot = segment
        if slot < 0:
            raise ValueError(f"plan_rows: {segment} names no slot: slots start at 0, and base rows are in no segment")
        slot_of_row[start:stop] = [slot] * (stop - start)
        for first in range(start, stop, tile_rows):
            tiles += (first, min(first + tile_rows, stop), slot)
        used[slot] = True
    on_device = _sent(slot_of_row + tiles, torch.device(device))
    return RowPlan(
        num_rows=num_rows,
        segments=tuple(segments),
        slots=tuple(used),
        max_slot=max(used, default=BASE_SLOT),
        slot_of_row=on_device[:num_rows],
        tiles=on_device[num_rows:].view(-1, 3),
        tile_rows=tile_rows,
        is_decode=longest <= DECODE_ROWS,
    )


def _sent(values: list[int], device: torch.device) -> Tensor:
    """Return int32 values on `device`; to a GPU from page-locked memory, so that the host does not wait."""
    host = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


class SpanTable(Mapping[int, tuple[int, int]]):
    """slot -> `(first, last)`: which rank rows of a site's stacked factors are the slot's adapter.

    `set` and `drop` change it; what lies on a device follows at once and in place, in the order of the current stream,
    so that a captured CUDA graph reads the new spans.

    Attributes:
        max_rank: the largest rank of the spans present, 0 without any.
        total_rank: the sum of their ranks.
        stop: the largest `last`: the factors must have at least as many rank rows.
        generation: changes when launches captured earlier no longer fit: `max_rank` changed or a device table moved.
    """

    def __init__(self, spans: Mapping[int, tuple[int, int]] | None = None):
        self._spans: dict[int, tuple[int, int]] = {}
        self._tables: dict[torch.device, Tensor] = {}
        self.max_rank = self.total_rank = self.stop = self.generation = 0
        for slot, (first, last) in (spans or {}).items():
            self.set(slot, first, last)

    def __getitem__(self, slot: int) -> tuple[int, int]:
        return self._spans[slot]

    def __iter__(self) -> Iterator[int]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)

    def __repr__(self) -> str:
        return f"SpanTable({self._spans})"

    def set(self, slot: int, first: int, last: int) -> None:
        """Say that `slot` owns rank rows `first:last`.

        Raises:
            ValueError: a negative slot, or a span that starts below 0 or ends before it starts.
        """
        if slot < 0 or not 0 <= first <= last:
            raise ValueError(f"spans: slot {slot} cannot have rank rows {first} to {last}; both count up from 0")
        self._spans[slot] = (first, last)
        self._changed()

    def drop(self, slot: int) -> None:
        """Forget a slot; an unknown one is no error (it had no delta at the site)."""
        if self._spans.pop(slot, None) is not None:
            self._changed()

    def device_table(self, device: torch.device) -> Tensor:
        """Return int32 `[num_slots, 2]` on `device`; slots without a span are `(0, 0)`.

        Made at the first call for a device, which must therefore come before a CUDA graph is captured.
        """
        table = self._tables.get(device)
        return self._write(device) if table is None else table

    def _changed(self) -> None:
        ranks = [last - first for first, last in self._spans.values()]
        max_rank = max(ranks, default=0)
        self.generation += max_rank != self.max_rank
        self.max_rank, self.total_rank = max_rank, sum(ranks)
        self.stop = max((last for _, last in self._spans.values()), default=0)
        for device in self._tables:
            self._write(device)

    @torch.inference_mode(False)  # a table made inside a step could not be written outside of one
    def _write(self, device: torch.device) -> Tensor:
        table = self._tables.get(device)
        num_slots = max(self._spans, default=0) + 1
        if table is None or len(table) < num_slots:
            capacity = max(_MIN_TABLE_SLOTS, 1 << (num_slots - 1).bit_length())
            table = self._tables[device] = torch.zeros(capacity, 2, dtype=torch.int32, device=device)
            self.generation += 1
        values = [bound for slot in range(len(table)) for bound in self._spans.get(slot, (0, 0))]
        host = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
        table.copy_(host.view(-1, 2), non_blocking=True)
        return table
