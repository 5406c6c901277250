"""Slabs: a part of a trace as bytes for the explore view, in the order in which it is drawn, `[adapter, row, column]`.

A row is a site, or the mean of the sites of a layer or of several; a column is a token, or the mean of a block of
neighbouring ones. Means are taken of the values and then rounded to codes, never of codes. The mean, not the maximum:
a pooled cell shows what its sites and tokens do together, and shares stay shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.display.payload import ABOVE, BELOW, MISSING, STEPS
from workbench.instrument.trace import nan_mean

MIN_COLUMNS = 600  # a screen has about twice as many; with fewer, rows are pooled before tokens are
CHUNK_CELLS = 1 << 20  # the floats of one step stay in a processor's cache


@dataclass(frozen=True)
class Scale:
    """How a value becomes a code from 0 to STEPS.

    Args:
        low: the value at code 0; on a log scale smaller ones are drawn as it.
        high: the value at code STEPS; what is larger is marked.
        is_log: whether equal steps are equal factors.
    """

    low: float = 0.0
    high: float = 1.0
    is_log: bool = False

    def codes(self, cells: np.ndarray) -> np.ndarray:
        """Return `cells` (float32) as uint8 of the same shape: steps, or BELOW, ABOVE, MISSING."""
        least, most = cells.min(initial=self.high), cells.max(initial=self.low)
        if np.isnan(least) or least < self.low or most > self.high:
            return self._marked(cells)
        return self._steps(cells)

    def _steps(self, cells: np.ndarray) -> np.ndarray:
        if self.is_log:
            low, high = np.log10(self.low), np.log10(self.high)
            cells = (np.log10(cells) - low) / (high - low)
        return np.rint(cells * np.float32(STEPS)).astype(np.uint8)

    def _marked(self, cells: np.ndarray) -> np.ndarray:
        missing = np.isnan(cells)
        codes = self._steps(np.where(missing, self.low, cells).clip(self.low, self.high))
        if not self.is_log:
            codes[cells < self.low] = BELOW
        codes[cells > self.high] = ABOVE
        codes[missing] = MISSING
        return codes

    def facts(self) -> dict[str, float | bool]:
        """Return the scale as the page reads it."""
        return {"low": self.low, "high": self.high, "log": self.is_log}


@dataclass(frozen=True)
class Slab:
    """Codes of the tokens from `start` to `stop`, `block` tokens to a column (the last may have fewer).

    Attributes:
        row_of: `[site]` uint16: the row that has the site.
        codes: `[adapter, row, column]` uint8.
        leaders: `[row, column]` uint8, or uint16 for more than 254 adapters: the adapter with the largest value; the
            largest number where there is no value. Sent beside the codes, because values that round to one code tie.
    """

    start: int
    stop: int
    block: int
    row_of: np.ndarray
    codes: np.ndarray
    leaders: np.ndarray

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.leaders.nbytes + self.row_of.nbytes

    @property
    def is_exact(self) -> bool:
        """Whether every cell is one value of the trace."""
        return self.block == 1 and self.codes.shape[1] == len(self.row_of)


def leader_dtype(num_adapters: int) -> np.dtype:
    """Return the dtype of leaders; its largest number stands for none."""
    return np.dtype(np.uint8 if num_adapters < 255 else "<u2")


def pooling(
    num_tokens: int, layers: Sequence[int | None], num_adapters: int, max_bytes: int, block: int = 1
) -> tuple[np.ndarray, int]:
    """Return `(row_of, block)`: as fine as `max_bytes` allow, with at least MIN_COLUMNS columns if there are tokens.

    Rows are sites if that leaves enough columns, else layers, else two, four, … neighbouring layers. A block is a power
    of two, and no smaller than asked.
    """
    per_cell = num_adapters + leader_dtype(num_adapters).itemsize
    order = list(dict.fromkeys(layers))
    number = np.array([order.index(layer) for layer in layers])
    merged, row_of, fitting = 0, np.arange(len(layers)), block
    while True:
        columns = max(1, max_bytes // (per_cell * (int(row_of.max()) + 1)))
        fitting = block
        while -(-num_tokens // fitting) > columns:
            fitting *= 2
        if -(-num_tokens // fitting) >= min(-(-num_tokens // block), MIN_COLUMNS) or merged >= len(order):
            return row_of.astype("<u2"), fitting
        merged = max(1, merged * 2)
        row_of = number // merged


def slab(values: np.ndarray, start: int, stop: int, row_of: np.ndarray, block: int, scale: Scale) -> Slab:
    """Return the slab of `values[start:stop]`, read and pooled a few tokens at a time."""
    num_tokens, num_sites, num_adapters = stop - start, *values.shape[1:]
    shape = (num_adapters, int(row_of.max()) + 1, -(-num_tokens // block))
    codes = np.empty(shape, np.uint8)
    leaders = np.empty(shape[1:], leader_dtype(num_adapters))
    tokens = max(1, CHUNK_CELLS // max(1, num_sites * num_adapters * block)) * block
    for first in range(start, stop, tokens):
        last = min(first + tokens, stop)
        cells = pooled(np.asarray(values[first:last], np.float32), row_of, block)
        # [adapter, row, column], as it is sent: every further step runs along memory
        cells = np.ascontiguousarray(cells.transpose(2, 1, 0))
        at = slice((first - start) // block, -(-(last - start) // block))
        codes[:, :, at] = scale.codes(cells)
        leaders[:, at] = leading(cells)
    return Slab(start, stop, block, row_of, codes, leaders)


def pooled(values: np.ndarray, row_of: np.ndarray, block: int) -> np.ndarray:
    """Return the means of float32 `values[token, site, adapter]` over rows of sites and blocks of tokens, without NaN.

    NaN remains where a cell has no value at all.
    """
    num_rows = int(row_of.max()) + 1
    whole = len(values) // block * block
    parts = [values[:whole].reshape(-1, block, *values.shape[1:])] if whole else []
    if whole < len(values):
        parts.append(values[None, whole:])
    if num_rows == len(row_of) and block == 1:
        return values
    # one NaN in a chunk shows in its minimum
    if not np.isnan(values.min()):
        return np.concatenate([_rows_mean(part.mean(1), row_of, num_rows) for part in parts])
    return np.concatenate([_nan_pooled(part, row_of, num_rows) for part in parts])


def _rows_mean(values: np.ndarray, row_of: np.ndarray, num_rows: int) -> np.ndarray:
    if num_rows == len(row_of):
        return values
    order = np.argsort(row_of, kind="stable")
    starts = np.searchsorted(row_of[order], np.arange(num_rows))
    counts = np.bincount(row_of, minlength=num_rows)
    return np.add.reduceat(values[:, order], starts, axis=1) / counts[:, None].astype(np.float32)


def _nan_pooled(values: np.ndarray, row_of: np.ndarray, num_rows: int) -> np.ndarray:
    rows = [nan_mean(values[:, :, row_of == row], (1, 2)) for row in range(num_rows)]
    return np.stack(rows, 1).astype(np.float32)


def leading(cells: np.ndarray) -> np.ndarray:
    """Return which adapter has the largest of `cells[adapter, row, column]`; the first of equal ones."""
    dtype = leader_dtype(len(cells))
    best, leader = cells[0].copy(), np.zeros(cells.shape[1:], dtype)
    missing = np.isnan(best)
    best[missing] = -np.inf
    for adapter in range(1, len(cells)):
        # False for NaN
        ahead = cells[adapter] > best
        np.copyto(best, cells[adapter], where=ahead)
        leader[ahead] = adapter
    leader[np.isneginf(best)] = np.iinfo(dtype).max
    return leader
