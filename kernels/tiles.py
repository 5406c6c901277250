"""tiles: what sgmv and mix share: products of a tile of rows with factors, and how the work is cut into programs.

    shrink   h[split, t, k] = sum of x[t, i] a[k, i] over the split's i        float32 partial sums
    sum      h[t, k] = h[0, t, k] + h[1, t, k] + ...                           in a fixed order: a replay equals a run
    expand   y[t] += sum over k of h[t, k] b[k]                                rounded to y's dtype once

A shrink has few outputs and long sums: without splits a card of 132 multiprocessors would run a handful of programs.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from lora_kernels.triton_support import PROGRAMS, jit, launch, tl

MAX_SPLITS = 32
# Splits are added up by the expand as it reads them, or by a launch of their own before it. The expand has up to 8
# loads in flight at once, and what one of its programs, and all of them together, read so from the L2 cache takes at
# most about what a launch does: a microsecond, at 64 bytes a clock of a multiprocessor and 4 TB/s of the card.
_SPLITS_IN_FLIGHT, _PROGRAM_SUM_BYTES, _ALL_SUM_BYTES = 8, 64 * 1024, 4 * 1024 * 1024
_IN_FLIGHT_TILE = 1024  # partial sums of a split: 8 of each thread
# loop steps of a shrink that take as long as such a launch: with more, further splits are worth one
_SHORT_LOOP = 8
_SUM_BLOCK = 128  # 32 splits of it are 32 float32 of each of 128 threads, all loaded at once
_ALIGN = 16  # elements; rows of h start where vector loads can


@jit
def shrink_tile(
    x_rows, row_mask, a_rows, rank_mask, first, stop,
    BLOCK_ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """Return float32 [row, rank]: x[:, first:stop] @ a[:, first:stop].T, of rows that pointers name."""
    h = tl.zeros([BLOCK_ROWS, BLOCK_RANK], dtype=tl.float32)
    for start in range(first, stop, BLOCK_IN):
        column = start + tl.arange(0, BLOCK_IN)
        x = tl.load(x_rows[:, None] + column[None, :], row_mask[:, None] & (column < stop)[None, :], 0.0)
        a = tl.load(a_rows[None, :] + column[:, None], rank_mask[None, :] & (column < stop)[:, None], 0.0)
        h = tl.dot(x, a, h, input_precision="ieee")
    return h


@jit
def expand_tile(
    y_rows, row_mask, h_rows, split_stride, num_splits, b_first, b_stride, rank, column, out_features,
    BLOCK_ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_OUT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Add h @ b to the columns of y's rows; b_first points to the first of `rank` rank rows."""
    delta = tl.zeros([BLOCK_ROWS, BLOCK_OUT], dtype=tl.float32)
    for start in range(0, rank, BLOCK_RANK):
        k = start + tl.arange(0, BLOCK_RANK)
        h_mask = row_mask[:, None] & (k < rank)[None, :]
        part = h_rows[:, None] + k[None, :]
        h = tl.load(part, h_mask, 0.0)
        for split in tl.static_range(1, SPLITS):
            part += split_stride
            h += tl.load(part, h_mask & (split < num_splits), 0.0)
        # int64: rank rows times the width of a layer pass 2^31 at 70k rows of 32k
        b_rows = b_first + k.to(tl.int64) * b_stride
        b = tl.load(b_rows[:, None] + column[None, :], (k < rank)[:, None] & (column < out_features)[None, :], 0.0)
        delta = tl.dot(h.to(b.dtype), b, delta, input_precision="ieee")
    y = y_rows[:, None] + column[None, :]
    y_mask = row_mask[:, None] & (column < out_features)[None, :]
    total = tl.load(y, y_mask, 0.0).to(tl.float32) + delta
    tl.store(y, total.to(y_rows.dtype.element_ty), y_mask)


@jit
def _sum_kernel(h_ptr, total_ptr, split_stride, num_splits, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """total[t, k] = h[0, t, k] + h[1, t, k] + ..., over all rows and ranks as one line."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    split = tl.arange(0, SPLITS)
    parts = h_ptr + split.to(tl.int64)[:, None] * split_stride + element[None, :]
    total = tl.sum(tl.load(parts, (split < num_splits)[:, None] & (element < split_stride)[None, :], 0.0), axis=0)
    tl.store(total_ptr + element, total, element < split_stride)


class Cut(NamedTuple):
    """How the two products are cut into programs, made by `cut`.

    Attributes:
        splits, split_width: the shrink's sums are cut into `splits` parts of `split_width` input features.
        rank_tiles: tiles of the rank, programs of the shrink each.
        out_tiles: tiles of the outputs, programs of the expand each.
        sum_first: a launch of its own adds the splits up; else the expand does as it reads them.
        shrink, expand: the kernels' constexprs.
        shrink_options, expand_options: warps and stages.
    """

    splits: int
    split_width: int
    rank_tiles: int
    out_tiles: int
    sum_first: bool
    shrink: dict[str, int]
    expand: dict[str, int]
    shrink_options: dict[str, int]
    expand_options: dict[str, int]


def cut(num_tiles: int, tile_rows: int, rank: int, y: Tensor, x: Tensor) -> Cut:
    """Choose tiles so that the shrink fills a card where the layer is large enough to, and nothing spills.

    Args:
        num_tiles: tiles of rows.
        tile_rows: rows of the largest tile: 16, 32 or 64.
        rank: the largest rank of a tile.
        y, x: `[row, out]` and `[row, in]`.
    """
    in_features, out_features = x.shape[1], y.shape[1]
    is_half = x.element_size() == 2
    in_vectors = is_half and not (in_features | x.stride(0)) % 16
    out_vectors = is_half and not (out_features | y.stride(0)) % 16
    num_sums = min(tile_rows, x.shape[0]) * rank
    return _cut(num_tiles, tile_rows, rank, in_features, out_features, is_half, in_vectors, out_vectors, num_sums)


@functools.lru_cache(4096)  # a step asks the same of every layer
def _cut(
    num_tiles: int, tile_rows: int, rank: int, in_features: int, out_features: int,
    is_half: bool, in_vectors: bool, out_vectors: bool, num_sums: int,
) -> Cut:  # fmt: skip
    # elements that no vector load takes have an address each, which fill the registers; so do float32 operands,
    # which are multiplied outside the tensor cores: smaller tiles, and more warps to a tile, keep them from spilling
    block_in, shrink_warps = (128, 4) if in_vectors else (32, 8)
    # 128 half-precision outputs are two full cache lines; 64 x 128 sums are 64 registers of a thread
    block_out, expand_warps = (128, 4) if out_vectors else (64, 8)
    # 3 stages of 64 rows and 64 ranks by 128 features are 96 KiB, what the smaller cards have
    block_rank = min(64, max(16, power_of_2(rank)))
    expand_rank = block_rank if is_half else min(block_rank, 32)
    num_blocks = div(in_features, block_in)
    # few rows: the factors are the traffic, and more programs read them faster; x comes again from the L2 cache
    while block_rank > 16 and num_tiles * div(rank, block_rank) * num_blocks < PROGRAMS // 2:
        block_rank //= 2
    rank_tiles, out_tiles = div(rank, block_rank), div(out_features, block_out)
    splits, width = split(in_features, block_in, div(PROGRAMS // 2, num_tiles * rank_tiles))
    # larger tiles of partial sums, or an address for each of them, spill
    fits = out_vectors and tile_rows * expand_rank <= _IN_FLIGHT_TILE
    in_place = _splits_in_place(num_tiles * out_tiles, num_sums) if fits else 1
    if splits > in_place and num_blocks <= _SHORT_LOOP * in_place:
        splits, width = split(in_features, block_in, in_place)
    sum_first = splits > in_place
    return Cut(
        splits, width, rank_tiles, out_tiles, sum_first,
        {"BLOCK_ROWS": tile_rows, "BLOCK_RANK": block_rank, "BLOCK_IN": block_in},
        {"BLOCK_ROWS": tile_rows, "BLOCK_RANK": expand_rank, "BLOCK_OUT": block_out,
         "SPLITS": _in_flight(1 if sum_first else splits)},
        {"num_warps": shrink_warps, "num_stages": 3}, {"num_warps": expand_warps, "num_stages": 2},
    )  # fmt: skip


def _splits_in_place(num_programs: int, num_sums: int) -> int:
    """Return how many splits of `num_sums` float32 sums each of the expand's programs may add up by itself."""
    by_bytes = min(_PROGRAM_SUM_BYTES, _ALL_SUM_BYTES // num_programs) // (4 * num_sums)
    return max(1, min(by_bytes, _SPLITS_IN_FLIGHT))


def _in_flight(splits: int) -> int:
    # three kernels to compile instead of eight: a load that is masked off costs an instruction
    return next(count for count in (1, 4, _SPLITS_IN_FLIGHT) if count >= splits)


def split(in_features: int, block_in: int, wanted: int) -> tuple[int, int]:
    """Return the number of splits, at most `wanted`, and the whole blocks of features each of them sums."""
    num_blocks = div(in_features, block_in)
    width = div(num_blocks, max(1, min(wanted, MAX_SPLITS))) * block_in
    return div(in_features, width), width


def buffer_for(splits: int, num_rows: int, max_rank: int, device: torch.device) -> Tensor:
    """Return the float32 buffer of partial sums, `[split, row, rank]`, not initialised."""
    return torch.empty(splits, num_rows, div(max_rank, _ALIGN) * _ALIGN, dtype=torch.float32, device=device)


def sum_splits(op: str, h: Tensor) -> Tensor:
    """Return the sum over splits, `[1, row, rank]`."""
    total, elements = torch.empty_like(h[:1]), h.stride(0)
    grid, blocks = (div(elements, _SUM_BLOCK),), {"BLOCK": _SUM_BLOCK, "SPLITS": power_of_2(len(h))}
    launch(f"{op}.sum", _sum_kernel, grid, (h, total, elements, len(h)), blocks, num_warps=4, num_stages=1)
    return total


def div(count: int, size: int) -> int:
    """Return how many blocks of `size` hold `count`."""
    return -(-count // size)


def power_of_2(count: int) -> int:
    """Return the least power of 2 that is at least `count` (at least 1)."""
    return 1 << max(0, count - 1).bit_length()
