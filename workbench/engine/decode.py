"""Attention of decoded rows, many at once: by a kernel on a GPU; on a CPU on copies, or where their KV lies.

Copies cost the memory they move, calls the time of a call; the first is less for short sequences, the second for long
ones (`experiments/engine/README.md`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lora_kernels.paged_attention import paged_attention
from workbench.engine.attend import explicit, fused
from workbench.engine.blocks import BLOCK_TOKENS

_PAD_RATIO = 2  # rows share a padded copy if none is longer than so many times the shortest


@dataclass(frozen=True, slots=True)
class SeenRow:
    """A row of a forward, at `position` of its stream, which sees from `start` on."""

    row: int
    stream: Any
    start: int
    position: int

    @property
    def length(self) -> int:
        """Tokens it sees."""
        return self.position + 1 - self.start

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The slots it sees, in token order."""
        return tuple(self.stream.extents(self.start, self.position + 1))


class KernelRows:
    """Rows that attend in one call of the paged kernel."""

    def __init__(self, rows: Sequence[SeenRow], window: int | None, device: torch.device):
        tables = [row.stream.blocks[: row.position // BLOCK_TOKENS + 1] for row in rows]
        widest = max(map(len, tables))
        padded = [[*table, *[-1] * (widest - len(table))] for table in tables]
        self._blocks = torch.tensor(padded, dtype=torch.int32, device=device)
        self._longest = max(row.position for row in rows) + 1
        self._lengths = torch.tensor([row.position + 1 for row in rows], dtype=torch.int32, device=device)
        self._rows, self._window = _Rows([row.row for row in rows], device), window

    def attend(
        self, out: Tensor, query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None
    ) -> None:
        """Write the rows of `out` `[row, head, width]`."""
        picked = self._rows.of(query, len(keys)).flatten(0, 1).transpose(0, 1)
        picked = picked if picked.stride(2) == 1 else picked.contiguous()
        attended = paged_attention(
            picked, keys, values, self._blocks, self._lengths, self._longest, scale=scale, window=self._window,
            softcap=softcap,
        )
        self._rows.put(out, attended)


class PaddedRows:
    """Rows that attend in one call, to a padded copy of what each sees."""

    def __init__(self, rows: Sequence[SeenRow], dtype: torch.dtype, device: torch.device):
        longest = max(row.length for row in rows)
        slots: list[Tensor] = []
        for row in rows:
            ranges = row.ranges
            slots += [torch.arange(start, end) for start, end in ranges]
            # padding repeats the row's own first slot: what nobody wrote may be NaN, which no mask takes away
            slots.append(torch.full((longest - row.length,), ranges[0][0]))
        self._index = torch.cat(slots).to(device)
        self._rows = _Rows([row.row for row in rows], device)
        lengths = torch.tensor([row.length for row in rows], device=device)
        seen = (torch.arange(longest, device=device) < lengths[:, None])[:, None, None]  # [row, 1, 1, token]
        self._seen = None if bool((lengths == longest).all()) else seen
        self._bias = None if self._seen is None else torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)
        self._buffers: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    @classmethod
    def of_all(
        cls, rows: Sequence[SeenRow], dtype: torch.dtype, device: torch.device, free: int
    ) -> list[PaddedRows]:
        """Split rows into copies of like lengths; up to `free` tokens, padding does not count."""
        copies: list[list[SeenRow]] = []
        for row in sorted(rows, key=lambda each: each.length):
            if copies and row.length <= max(free, _PAD_RATIO * copies[-1][0].length):
                copies[-1].append(row)
            else:
                copies.append([row])
        return [cls(each, dtype, device) for each in copies]

    def attend(
        self, out: Tensor, query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None
    ) -> None:
        """Write the rows of `out` `[row, head, width]`."""
        k, v = (self._copy(side, buffer) for side, buffer in zip((keys, values), self._room(keys, values), strict=True))
        # the heads of a group as rows of their KV head
        picked = self._rows.of(query, keys.shape[0]).permute(2, 0, 1, 3)
        if softcap:
            attended = explicit(picked, k, v, scale, softcap, self._seen)
        else:
            attended = fused(picked, k, v, scale, False, self._bias)
        self._rows.put(out, attended.flatten(1, 2))

    def _room(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        shape = (keys.shape[0], keys.shape[2], values.shape[2])
        if shape not in self._buffers:
            count = len(self._index)
            self._buffers[shape] = tuple(side.new_empty(side.shape[0], count, side.shape[2]) for side in (keys, values))
        return self._buffers[shape]

    def _copy(self, side: Tensor, buffer: Tensor) -> Tensor:
        """Return `[row, kv_head, token, width]`."""
        torch.index_select(side, 1, self._index, out=buffer)
        return buffer.view(buffer.shape[0], len(self._rows), -1, buffer.shape[2]).transpose(0, 1)


class ExtentRows:
    """Rows that attend in place: a product per range of slots, one softmax, another product per range.

    A range that several rows see, such as a common prompt, is read once for all of them.
    """

    def __init__(self, rows: Sequence[SeenRow], device: torch.device):
        self._units, order = _shared_ranges([row.ranges for row in rows])
        self._lengths = [rows[index].length for index in order]
        self._rows = _Rows([rows[index].row for index in order], device)
        self._buffers: dict[tuple[int, ...], _Buffers] = {}

    def attend(
        self, out: Tensor, query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None
    ) -> None:
        """Write the rows of `out` `[row, head, width]`."""
        kv_heads, groups = keys.shape[0], query.shape[0] // keys.shape[0]
        shape = (kv_heads, groups, keys.shape[2], values.shape[2])
        if shape not in self._buffers:
            self._buffers[shape] = _Buffers(shape, self._units, self._lengths, query)
        room = self._buffers[shape]
        torch.mul(self._rows.of(query, kv_heads).transpose(1, 2), scale, out=room.query)
        columns = keys.transpose(1, 2)
        for unit, rows, scores in zip(self._units, room.unit_queries, room.unit_scores, strict=True):
            torch.bmm(rows, columns.narrow(2, unit.first, unit.num_slots), out=scores)
        scores = room.scores if not softcap else room.capped(softcap)
        torch.softmax(scores, -1, out=room.weights)
        for unit, weights, sums in zip(self._units, room.unit_weights, room.unit_sums, strict=True):
            seen = values.narrow(1, unit.first, unit.num_slots)
            torch.baddbmm(sums, weights, seen, beta=int(unit.column > 0), out=sums)
        self._rows.put(out, room.sums.transpose(0, 1).flatten(1, 2))


_Left = tuple[int, tuple[tuple[int, int], ...]]  # a row and its ranges that no unit covers yet


@dataclass(frozen=True, slots=True)
class _Unit:
    """A range of slots that the rows `start:stop` see, as their columns from `column` on."""

    start: int
    stop: int
    first: int
    num_slots: int
    column: int


def _shared_ranges(ranges: Sequence[tuple[tuple[int, int], ...]]) -> tuple[list[_Unit], list[int]]:
    """Return units that cover every row's ranges, those of a row in token order, and the order of the rows in them."""
    units: list[_Unit] = []
    order: list[int] = []

    def walk(rows: list[_Left], column: int) -> None:
        while rows:
            groups: dict[int, list[_Left]] = {}
            for row, left in rows:
                if left:
                    groups.setdefault(left[0][0], []).append((row, left))
                else:
                    order.append(row)
            rows, start_column = [], column
            for first, group in groups.items():
                end = min(left[0][1] for _, left in group)
                units.append(_Unit(len(order), len(order) + len(group), first, end - first, start_column))
                rows, column = [(row, _after(left, end)) for row, left in group], start_column + end - first
                if len(groups) > 1:
                    walk(rows, column)
                    rows = []

    walk(list(enumerate(ranges)), 0)
    return units, order


def _after(ranges: tuple[tuple[int, int], ...], end: int) -> tuple[tuple[int, int], ...]:
    return ranges[1:] if ranges[0][1] == end else ((end, ranges[0][1]), *ranges[1:])


class _Buffers:
    """Scratch of one step, used again by every layer of one shape, and the units' views of it."""

    def __init__(self, shape: tuple[int, ...], units: Sequence[_Unit], lengths: Sequence[int], like: Tensor):
        kv_heads, groups, key, value = shape
        num_rows, longest = len(lengths), max(lengths)
        self.query = like.new_empty(kv_heads, num_rows, groups, key)
        self.scores = like.new_full((kv_heads, num_rows, groups, longest), -torch.inf)
        self.weights = torch.empty_like(self.scores)
        self.sums = like.new_empty(kv_heads, num_rows, groups, value)
        self._unseen = torch.arange(longest) >= torch.tensor(lengths)[:, None, None]  # [row, 1, token]
        self.unit_queries, self.unit_scores, self.unit_weights, self.unit_sums = [], [], [], []
        for unit in units:
            rows = slice(unit.start, unit.stop)
            columns = slice(unit.column, unit.column + unit.num_slots)
            self.unit_queries.append(self.query[:, rows].flatten(1, 2))
            self.unit_sums.append(self.sums[:, rows].view(kv_heads, -1, value))
            for views, side in ((self.unit_scores, self.scores), (self.unit_weights, self.weights)):
                views.append(side.view(kv_heads, num_rows * groups, longest)[
                    :, unit.start * groups : unit.stop * groups, columns
                ])  # fmt: skip

    def capped(self, softcap: float) -> Tensor:
        """Return the scores, capped; unseen ones stay -inf."""
        return torch.tanh(self.scores / softcap).mul_(softcap).masked_fill_(self._unseen, -torch.inf)


class _Rows:
    """Rows of a forward, picked and put back: a range of them needs no copy."""

    def __init__(self, rows: Sequence[int], device: torch.device):
        self._rows = list(rows)
        one_range = self._rows == list(range(rows[0], rows[0] + len(rows)))
        self._index = None if one_range else torch.tensor(rows, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, query: Tensor, kv_heads: int) -> Tensor:
        """Return the rows, `[kv_head, group, row, width]`: the heads that read one KV head are a group."""
        if self._index is None:
            picked = query.narrow(1, self._rows[0], len(self._rows))
        else:
            picked = query.index_select(1, self._index)
        return picked.view(kv_heads, -1, *picked.shape[1:])

    def put(self, out: Tensor, attended: Tensor) -> None:
        """Write `attended` `[row, head, width]`."""
        if self._index is None:
            out[self._rows[0] : self._rows[0] + len(self._rows)] = attended
        else:
            out.index_copy_(0, self._index, attended)
