"""sgmv: y[t] += B[s(t)] (A[s(t)] x[t]) for rows that each use one adapter, in segments of many rows: prefill.

s(t) is the slot of row t, given as segments of consecutive rows. An adapter is rows `first:last` of the stacked
factors: a `[rank, in]` holds A, b `[rank, out]` holds B transposed with alpha/r folded in, so adapters of any rank
lie side by side and each costs its own rank. A program is a tile of one segment's rows, so a tile reads its
adapter's factors once. The op is punica's segmented gather matrix-vector product (SGMV).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lora_kernels.checks import Cost, check_no_gradient, check_plan, check_rows, one_hot_cost
from lora_kernels.segments import RowPlan, Segment, SpanTable
from lora_kernels.tiles import buffer_for, cut, expand_tile, shrink_tile, sum_splits
from lora_kernels.triton_support import jit, launch, runs_triton, tl

Spans = Mapping[int, tuple[int, int]]


def sgmv_reference(y: Tensor, x: Tensor, a: Tensor, b: Tensor, plan: RowPlan, spans: SpanTable) -> Tensor:
    """Return y plus the deltas in float32, segment by segment; the specification of `sgmv`."""
    out = y.float().clone()
    for start, stop, slot in plan.segments:
        first, last = spans.get(slot, (0, 0))
        out[start:stop] += (x[start:stop].float() @ a[first:last].float().T) @ b[first:last].float()
    return out


@jit
def _tile_of(tile, tiles_ptr, spans_ptr, num_slots):
    """Return a tile's first row, the row after its last, and its adapter's first rank row and rank."""
    start = tl.load(tiles_ptr + 3 * tile)
    stop = tl.load(tiles_ptr + 3 * tile + 1)
    slot = tl.load(tiles_ptr + 3 * tile + 2)
    is_known = (slot >= 0) & (slot < num_slots)
    first = tl.load(spans_ptr + 2 * slot, is_known, 0)
    return start, stop, first, tl.load(spans_ptr + 2 * slot + 1, is_known, 0) - first


@jit
def _shrink_kernel(
    x_ptr, a_ptr, tiles_ptr, spans_ptr, h_ptr,
    x_stride, a_stride, h_stride, split_stride, num_slots, in_features, split_width,
    BLOCK_ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """h[split, t, k] = A[k] x[t] over one split of the features, for one tile of rows and one of ranks."""
    start, stop, first, rank = _tile_of(tl.program_id(0), tiles_ptr, spans_ptr, num_slots)
    k = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    if tl.program_id(1) * BLOCK_RANK >= rank:
        return
    rows = start + tl.arange(0, BLOCK_ROWS)
    row = rows.to(tl.int64)
    begin = tl.program_id(2) * split_width
    a_rows = a_ptr + (first + k).to(tl.int64) * a_stride
    h = shrink_tile(
        x_ptr + row * x_stride, rows < stop, a_rows, k < rank, begin, tl.minimum(begin + split_width, in_features),
        BLOCK_ROWS, BLOCK_RANK, BLOCK_IN,
    )  # fmt: skip
    h_rows = h_ptr + tl.program_id(2).to(tl.int64) * split_stride + row * h_stride
    tl.store(h_rows[:, None] + k[None, :], h, (rows < stop)[:, None] & (k < rank)[None, :])


@jit
def _expand_kernel(
    y_ptr, b_ptr, tiles_ptr, spans_ptr, h_ptr,
    y_stride, b_stride, h_stride, split_stride, num_slots, num_splits, out_features,
    BLOCK_ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_OUT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """y[t] += sum over k of h[t, k] B[k], for one tile of rows and one of outputs."""
    start, stop, first, rank = _tile_of(tl.program_id(0), tiles_ptr, spans_ptr, num_slots)
    if rank == 0:
        return
    rows = start + tl.arange(0, BLOCK_ROWS)
    row = rows.to(tl.int64)
    expand_tile(
        y_ptr + row * y_stride, rows < stop, h_ptr + row * h_stride, split_stride, num_splits,
        b_ptr + first.to(tl.int64) * b_stride, b_stride, rank,
        tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), out_features, BLOCK_ROWS, BLOCK_RANK, BLOCK_OUT,
        SPLITS,
    )  # fmt: skip


def sgmv(y: Tensor, x: Tensor, a: Tensor, b: Tensor, plan: RowPlan, spans: SpanTable) -> Tensor:
    """Add each row's adapter delta to y in place and return y.

    Args:
        y: `[row, out]`, the base layer's output; float32, float16 or bfloat16, as are x, a and b.
        x: `[row, in]`, its input.
        a: `[rank, in]`, stacked A factors of the site's adapters.
        b: `[rank, out]`, stacked B factors, transposed and scaled.
        plan: the segments of the rows; base rows are left alone, bitwise.
        spans: rank rows of each slot. A slot without a span has no delta at this site.

    Raises:
        ValueError: operands, plan or spans that do not fit, or a gradient that would be lost.
    """
    check_rows("sgmv", y, x, a, b)
    check_plan("sgmv", plan, spans, x, a)
    if not runs_triton(x):
        return add_by_segment(y, x, a, b, plan.segments, spans)
    check_no_gradient("sgmv", y, x, a, b)
    if plan.segments and y.shape[1] and x.shape[1]:
        _launch(y, x, a, b, plan, spans)
    return y


def _launch(y: Tensor, x: Tensor, a: Tensor, b: Tensor, plan: RowPlan, spans: SpanTable) -> None:
    # of the adapters in use, not of all that are loaded
    rank = max(last - first for first, last in (spans.get(slot, (0, 0)) for slot in plan.slots))
    if not rank:
        return
    cuts = cut(len(plan.tiles), plan.tile_rows, rank, y, x)
    h = buffer_for(cuts.splits, x.shape[0], rank, x.device)
    table = spans.device_table(x.device)
    launch(
        "sgmv.shrink", _shrink_kernel, (len(plan.tiles), cuts.rank_tiles, cuts.splits),
        (x, a, plan.tiles, table, h, x.stride(0), a.stride(0), h.stride(1), h.stride(0), len(table), x.shape[1],
         cuts.split_width),
        cuts.shrink, **cuts.shrink_options,
    )  # fmt: skip
    if cuts.sum_first:
        h = sum_splits("sgmv", h)
    launch(
        "sgmv.expand", _expand_kernel, (len(plan.tiles), cuts.out_tiles),
        (y, b, plan.tiles, table, h, y.stride(0), b.stride(0), h.stride(1), h.stride(0), len(table),
         len(h), y.shape[1]),
        cuts.expand, **cuts.expand_options,
    )  # fmt: skip


def add_by_segment(y: Tensor, x: Tensor, a: Tensor, b: Tensor, segments: tuple[Segment, ...], spans: Spans) -> Tensor:
    """Add the deltas by torch's products, one segment after the other: the path without Triton, of bgmv too."""
    for start, stop, slot in segments:
        first, last = spans.get(slot, (0, 0))
        if first < last:
            shrunk = x[start:stop] @ a[first:last].T  # [row, rank]
            y[start:stop].addmm_(shrunk, b[first:last])
    return y


def cost(plan: RowPlan, spans: Spans, in_features: int, out_features: int, itemsize: int) -> Cost:
    """Return the least work of a plan at one site: true ranks, each adapter's factors read once."""
    return one_hot_cost(plan, spans, (in_features, out_features), itemsize)
