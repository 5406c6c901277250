"""bgmv: y[t] += B[s(t)] (A[s(t)] x[t]) for rows that each use one adapter, a row or a few each: decode.

s(t) is the slot of row t. An adapter is rows `first:last` of the stacked factors: a `[rank, in]` holds A, b
`[rank, out]` holds B transposed with alpha/r folded in. Every row reads its own adapter's factors, so a program is a
row and a part of its products; its loops end at the row's own rank. The op is punica's batched gather
matrix-vector product (BGMV).

The launches depend on the number of rows and the span table alone, not on which row uses which slot: a captured CUDA
graph serves another plan of as many rows once its `slot_of_row` is copied over the captured one's.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lora_kernels.checks import Cost, check_no_gradient, check_plan, check_rows, one_hot_cost
from lora_kernels.segments import RowPlan, SpanTable
from lora_kernels.sgmv import add_by_segment
from lora_kernels.tiles import buffer_for, div, power_of_2, split
from lora_kernels.triton_support import PROGRAMS, jit, launch, runs_triton, tl

# 16 x 256 half-precision values are 4 independent 16-byte loads of each of 128 threads, and 32 float32 sums
_BLOCKS = {"BLOCK_RANK": 16, "BLOCK_IN": 256}


def bgmv_reference(y: Tensor, x: Tensor, a: Tensor, b: Tensor, plan: RowPlan, spans: SpanTable) -> Tensor:
    """Return y plus the deltas in float32, row by row; the specification of `bgmv`."""
    out = y.float().clone()
    for row, slot in enumerate(plan.slot_of_row.tolist()):
        first, last = spans.get(slot, (0, 0))
        out[row] += (a[first:last].float() @ x[row].float()) @ b[first:last].float()
    return out


@jit
def _span_of(row, slots_ptr, spans_ptr, num_slots):
    """Return the first rank row and the rank of a row's adapter; rank 0 for base rows and slots without a span."""
    slot = tl.load(slots_ptr + row)
    is_known = (slot >= 0) & (slot < num_slots)
    first = tl.load(spans_ptr + 2 * slot, is_known, 0)
    return first, tl.load(spans_ptr + 2 * slot + 1, is_known, 0) - first


@jit
def _shrink_kernel(
    x_ptr, a_ptr, slots_ptr, spans_ptr, h_ptr,
    x_stride, a_stride, h_stride, split_stride, num_slots, in_features, split_width, rank_step,
    BLOCK_RANK: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """h[split, t, k] = A[k] x[t] over one split of the features."""
    # int64: a row times its stride passes 2^31 at 70k rows of 32k
    row = tl.program_id(0).to(tl.int64)
    first, rank = _span_of(row, slots_ptr, spans_ptr, num_slots)
    begin = tl.program_id(1) * split_width
    end = tl.minimum(begin + split_width, in_features)
    x_row = x_ptr + row * x_stride
    h_row = h_ptr + tl.program_id(1).to(tl.int64) * split_stride + row * h_stride
    for start in range(tl.program_id(2) * BLOCK_RANK, rank, rank_step):
        k = start + tl.arange(0, BLOCK_RANK)
        a_rows = a_ptr + (first + k).to(tl.int64) * a_stride
        products = tl.zeros([BLOCK_RANK, BLOCK_IN], dtype=tl.float32)
        for feature in range(begin, end, BLOCK_IN):
            column = feature + tl.arange(0, BLOCK_IN)
            x = tl.load(x_row + column, column < end, 0.0).to(tl.float32)
            a = tl.load(a_rows[:, None] + column[None, :], (k < rank)[:, None] & (column < end)[None, :], 0.0)
            products += a.to(tl.float32) * x[None, :]
        tl.store(h_row + k, tl.sum(products, axis=1), k < rank)


@jit
def _expand_kernel(
    y_ptr, b_ptr, slots_ptr, spans_ptr, h_ptr,
    y_stride, b_stride, h_stride, split_stride, num_slots, num_splits, out_features,
    BLOCK_RANK: tl.constexpr, BLOCK_OUT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """y[t] += sum over k of h[t, k] B[k]; the splits of h are added in one fixed order."""
    row = tl.program_id(0).to(tl.int64)
    first, rank = _span_of(row, slots_ptr, spans_ptr, num_slots)
    if rank == 0:
        return
    column = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    part = tl.arange(0, SPLITS)
    h_parts = h_ptr + row * h_stride + part.to(tl.int64) * split_stride
    products = tl.zeros([BLOCK_RANK, BLOCK_OUT], dtype=tl.float32)
    for start in range(0, rank, BLOCK_RANK):
        k = start + tl.arange(0, BLOCK_RANK)
        h_mask = (part < num_splits)[:, None] & (k < rank)[None, :]
        h = tl.sum(tl.load(h_parts[:, None] + k[None, :], h_mask, 0.0), axis=0)
        b_rows = b_ptr + (first + k).to(tl.int64) * b_stride
        b = tl.load(b_rows[:, None] + column[None, :], (k < rank)[:, None] & (column < out_features)[None, :], 0.0)
        products += h[:, None] * b.to(tl.float32)
    y = y_ptr + row * y_stride + column
    total = tl.load(y, column < out_features, 0.0).to(tl.float32) + tl.sum(products, axis=0)
    tl.store(y, total.to(y_ptr.dtype.element_ty), column < out_features)


def bgmv(y: Tensor, x: Tensor, a: Tensor, b: Tensor, plan: RowPlan, spans: SpanTable) -> Tensor:
    """Add each row's adapter delta to y in place and return y.

    Args:
        y: `[row, out]`, the base layer's output; float32, float16 or bfloat16, as are x, a and b.
        x: `[row, in]`, its input.
        a: `[rank, in]`, stacked A factors of the site's adapters.
        b: `[rank, out]`, stacked B factors, transposed and scaled.
        plan: the slot of every row; base rows are left alone, bitwise.
        spans: rank rows of each slot. A slot without a span has no delta at this site.

    Raises:
        ValueError: operands, plan or spans that do not fit, or a gradient that would be lost.
    """
    check_rows("bgmv", y, x, a, b)
    check_plan("bgmv", plan, spans, x, a)
    if not runs_triton(x):
        return add_by_segment(y, x, a, b, plan.segments, spans)
    check_no_gradient("bgmv", y, x, a, b)
    if plan.segments and spans.max_rank and y.shape[1] and x.shape[1]:
        _launch(y, x, a, b, plan, spans)
    return y


def _launch(y: Tensor, x: Tensor, a: Tensor, b: Tensor, plan: RowPlan, spans: SpanTable) -> None:
    (num_rows, in_features), out_features, max_rank = x.shape, y.shape[1], spans.max_rank
    splits, width = split(in_features, _BLOCKS["BLOCK_IN"], div(PROGRAMS, num_rows))
    # with few rows the rank is spread too; else one program walks it, and x stays in its L1 cache
    rank_programs = max(1, min(div(max_rank, _BLOCKS["BLOCK_RANK"]), PROGRAMS // (num_rows * splits)))
    h = buffer_for(splits, num_rows, max_rank, x.device)
    table = spans.device_table(x.device)
    launch(
        "bgmv.shrink", _shrink_kernel, (num_rows, splits, rank_programs),
        (x, a, plan.slot_of_row, table, h, x.stride(0), a.stride(0), h.stride(1), h.stride(0), len(table),
         in_features, width, rank_programs * _BLOCKS["BLOCK_RANK"]),
        _BLOCKS, num_warps=4, num_stages=2,
    )  # fmt: skip
    # few rows: half as many outputs a program, twice the programs
    block_out = 256 if num_rows * out_features >= 256 * PROGRAMS else 128
    launch(
        "bgmv.expand", _expand_kernel, (num_rows, div(out_features, block_out)),
        (y, b, plan.slot_of_row, table, h, y.stride(0), b.stride(0), h.stride(1), h.stride(0), len(table), splits,
         out_features),
        {"BLOCK_RANK": 16, "BLOCK_OUT": block_out, "SPLITS": power_of_2(splits)}, num_warps=4, num_stages=2,
    )  # fmt: skip


def cost(
    plan: RowPlan, spans: Mapping[int, tuple[int, int]], in_features: int, out_features: int, itemsize: int
) -> Cost:
    """Return the least work of a plan at one site: true ranks, each adapter's factors read once."""
    return one_hot_cost(plan, spans, (in_features, out_features), itemsize)
