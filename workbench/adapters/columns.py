"""Columns: the rank rows of several slots at one site as one pair of stacked factors, for products over all of them.

Contract: slots whose rank rows lie side by side, or nearly, are a view, which costs nothing to make; others are a copy.
Rank rows of the view that belong to none of the slots are holes: whoever multiplies by it must hide them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

# a hole costs as much work as a rank row in use, in every product; a copy costs memory, and is made anew whenever the
# set of slots changes, which in a running batch it does every few steps
MOST_HOLES = 0.5  # per rank row in use
MOST_SETS = 32  # remembered at each site
_T = TypeVar("_T")


class Remembered(dict[tuple[int, ...], _T]):
    """What was made for sets of slots at one site: few sets, and copies that together stay below a limit.

    Sets of slots are as many as the batches that requests happen to form, so the oldest go.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_bytes: dict[tuple[int, ...], int] = {}

    def keep(self, slots: tuple[int, ...], made: _T, num_bytes: int = 0, most_bytes: int = 0) -> _T:
        """Remember and return what was made; `num_bytes` are those of its copies, `most_bytes` of all copies."""
        while self and (len(self) >= MOST_SETS or sum(self._num_bytes.values()) + num_bytes > most_bytes):
            self._drop(next(iter(self)))
        self[slots], self._num_bytes[slots] = made, num_bytes
        return made

    def forget(self, slot: int) -> None:
        """Drop what was made for sets with this slot."""
        for slots in [slots for slots in self if slot in slots]:
            self._drop(slots)

    def clear(self) -> None:
        """Drop everything."""
        super().clear()
        self._num_bytes.clear()

    def _drop(self, slots: tuple[int, ...]) -> None:
        del self[slots], self._num_bytes[slots]


@dataclass(frozen=True, eq=False)
class Shape:
    """What the products of one site cost; one object for all sites alike, so that it is found by identity.

    Attributes:
        ranks: slot -> its rank here, slots without a delta left out.
        width: input and output features together.
    """

    ranks: dict[int, int]
    width: int


@dataclass(frozen=True, eq=False)
class Layout:
    """Where each slot's rank rows lie in stacked columns; one object for all sites alike.

    Attributes:
        spans: `(slot, first, last)`, ascending.
        rank: all rank rows, holes included.
    """

    spans: tuple[tuple[int, int, int], ...]
    rank: int

    @functools.cached_property
    def has_holes(self) -> bool:
        """Whether some rank rows are no slot's."""
        return sum(last - first for _, first, last in self.spans) < self.rank

    def owner(self, slots: tuple[int, ...]) -> Tensor:
        """Return int64 `[rank]`: place in `slots` of the slot that each rank row is of, `len(slots)` for a hole."""
        found = [len(slots)] * self.rank
        for slot, first, last in self.spans:
            found[first:last] = [slots.index(slot)] * (last - first)
        return torch.tensor(found, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Columns:
    """Stacked factors of several slots: a `[1, in, rank]`, b `[1, rank, out]`, and the layout of their rank rows."""

    a: Tensor
    b: Tensor
    layout: Layout
    is_copy: bool

    @property
    def num_bytes(self) -> int:
        """Bytes that a copy takes of its own; 0 for a view."""
        return (self.a.nbytes + self.b.nbytes) if self.is_copy else 0


@functools.lru_cache(maxsize=4096)
def shape_of(ranks: tuple[tuple[int, int], ...], width: int) -> Shape:
    """Return the one `Shape` of `(slot, rank)` pairs and a width."""
    return Shape(dict(ranks), width)


@functools.lru_cache(maxsize=4096)
def layout_of(spans: tuple[tuple[int, int, int], ...], rank: int) -> Layout:
    """Return the one `Layout` of these spans."""
    return Layout(spans, rank)


def columns_of(a: Tensor, b: Tensor, spans: Iterable[tuple[int, tuple[int, int]]]) -> Columns:
    """Return the rank rows of `(slot, (first, last))` out of the stacks a `[capacity, in]` and b `[capacity, out]`."""
    ascending = sorted(spans, key=lambda each: each[1])
    if not ascending:
        return _columns(a[:0], b[:0], layout_of((), 0), False)
    base, stop = ascending[0][1][0], ascending[-1][1][1]
    used = sum(last - first for _, (first, last) in ascending)
    if stop - base - used <= MOST_HOLES * used:
        layout = layout_of(tuple((slot, first - base, last - base) for slot, (first, last) in ascending), stop - base)
        return _columns(a[base:stop], b[base:stop], layout, False)
    parts, at = [], 0
    for slot, (first, last) in ascending:
        parts.append((slot, at, at + last - first))
        at += last - first
    a, b = (torch.cat([stack[first:last] for _, (first, last) in ascending]) for stack in (a, b))
    return _columns(a, b, layout_of(tuple(parts), at), True)


def _columns(a: Tensor, b: Tensor, layout: Layout, is_copy: bool) -> Columns:
    return Columns(a.T[None], b[None], layout, is_copy)
