"""mix: y[t] += sum_a w[t, a] * B[a] (A[a] x[t]) for rows that share one mixture of n adapters.

The n adapters' factors are stacked along the rank: a `[rank, in]`, b `[rank, out]` (B transposed, alpha/r folded
in); `owner[k]` says which adapter rank row k belongs to. One shrink, one scale, one expand: no loop over adapters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lora_kernels.checks import Cost, check_no_gradient, check_rows
from lora_kernels.segments import MIN_TILE_ROWS, TILE_ROWS
from lora_kernels.tiles import buffer_for, cut, div, expand_tile, shrink_tile, sum_splits
from lora_kernels.triton_support import jit, launch, runs_triton, tl

FEW_ROWS = 64


def mix_reference(y: Tensor, x: Tensor, a: Tensor, b: Tensor, owner: Tensor, weights: Tensor) -> Tensor:
    """Return y plus the mixed deltas in float32, one adapter at a time; the specification of `mix`."""
    out = y.float().clone()
    for adapter in range(weights.shape[1]):
        mine = owner == adapter
        delta = (x.float() @ a[mine].float().T) @ b[mine].float()
        out += weights[:, adapter, None].float() * delta
    return out


@jit
def _shrink_kernel(
    x_ptr, a_ptr, owner_ptr, weights_ptr, h_ptr,
    x_stride, a_stride, weights_row, weights_adapter, h_stride, split_stride,
    num_rows, num_adapters, rank, in_features, split_width,
    BLOCK_ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """h[split, t, k] = w[t, owner[k]] * A[k] x[t] over one split of the features."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    k = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    # int64: a row times its stride passes 2^31 at 70k rows of 32k
    row = rows.to(tl.int64)
    begin = tl.program_id(2) * split_width
    h = shrink_tile(
        x_ptr + row * x_stride, rows < num_rows, a_ptr + k.to(tl.int64) * a_stride, k < rank,
        begin, tl.minimum(begin + split_width, in_features), BLOCK_ROWS, BLOCK_RANK, BLOCK_IN,
    )  # fmt: skip
    inside = (rows < num_rows)[:, None] & (k < rank)[None, :]
    # an owner that is no adapter of the weights makes its rows NaN: seen, and no access outside of them
    owner = tl.load(owner_ptr + k, k < rank, 0).to(tl.int64)
    is_adapter = ((owner >= 0) & (owner < num_adapters))[None, :]
    weight = weights_ptr + row[:, None] * weights_row + owner[None, :] * weights_adapter
    # scaled here: once per split of a tile, not once per tile of outputs
    h *= tl.load(weight, inside & is_adapter, float("nan")).to(tl.float32)
    h_rows = h_ptr + tl.program_id(2).to(tl.int64) * split_stride + row * h_stride
    tl.store(h_rows[:, None] + k[None, :], h, inside)


@jit
def _expand_kernel(
    y_ptr, b_ptr, h_ptr, y_stride, b_stride, h_stride, split_stride, num_rows, rank, num_splits, out_features,
    BLOCK_ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_OUT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """y[t] += sum over k of h[t, k] B[k], for one tile of rows and one of outputs."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = rows.to(tl.int64)
    expand_tile(
        y_ptr + row * y_stride, rows < num_rows, h_ptr + row * h_stride, split_stride, num_splits,
        b_ptr, b_stride, rank, tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), out_features,
        BLOCK_ROWS, BLOCK_RANK, BLOCK_OUT, SPLITS,
    )  # fmt: skip


def mix(y: Tensor, x: Tensor, a: Tensor, b: Tensor, owner: Tensor, weights: Tensor) -> Tensor:
    """Add the weighted sum of the adapters' deltas to y in place and return y.

    Args:
        y: `[row, out]`, the base layer's output; float32, float16 or bfloat16, as are x, a and b.
        x: `[row, in]`, its input.
        a: `[rank, in]`, stacked A factors of the mixture's adapters at this site.
        b: `[rank, out]`, stacked B factors, transposed and scaled.
        owner: int64 `[rank]`, index of the adapter (below n) each rank row belongs to. On a GPU it is not looked
            at before the launch, which would wait for it: an index that is no adapter's makes the rows NaN there.
        weights: `[row, n]`, any float dtype and strides (a stride of 0 is one row for all); the scaling happens in
            float32.

    Raises:
        ValueError: operands that do not fit, or a gradient that would be lost.
    """
    check_rows("mix", y, x, a, b)
    if (
        weights.dim() != 2 or weights.size(0) != x.size(0) or owner.dim() != 1 or owner.size(0) != a.size(0)
        or owner.dtype != torch.int64 or weights.device != x.device or owner.device != x.device
        or not weights.dtype.is_floating_point
    ):  # fmt: skip
        _explain(x, a, owner, weights)
    if not (a.numel() and x.numel() and y.numel()):
        return y
    if not runs_triton(x):
        shrunk = (x @ a.T).float().mul_(_per_rank(weights, owner)).to(x.dtype)
        return y.addmm_(shrunk, b)
    if x.is_cpu:
        _check_owner(owner, weights.size(1))
    check_no_gradient("mix", y, x, a, b, weights)
    _launch(y, x, a, b, owner, weights)
    return y


def _launch(y: Tensor, x: Tensor, a: Tensor, b: Tensor, owner: Tensor, weights: Tensor) -> None:
    num_rows, rank = x.shape[0], a.shape[0]
    # few rows: more programs, which read the factors again from the L2 cache
    tile_rows = MIN_TILE_ROWS if num_rows <= FEW_ROWS else TILE_ROWS
    num_tiles = div(num_rows, tile_rows)
    cuts = cut(num_tiles, tile_rows, rank, y, x)
    h = buffer_for(cuts.splits, num_rows, rank, x.device)
    launch(
        "mix.shrink", _shrink_kernel, (num_tiles, cuts.rank_tiles, cuts.splits),
        (x, a, owner, weights, h, x.stride(0), a.stride(0), *weights.stride(), h.stride(1), h.stride(0), num_rows,
         weights.shape[1], rank, x.shape[1], cuts.split_width),
        cuts.shrink, **cuts.shrink_options,
    )  # fmt: skip
    if cuts.sum_first:
        h = sum_splits("mix", h)
    launch(
        "mix.expand", _expand_kernel, (num_tiles, cuts.out_tiles),
        (y, b, h, y.stride(0), b.stride(0), h.stride(1), h.stride(0), num_rows, rank,
         len(h), y.shape[1]),
        cuts.expand, **cuts.expand_options,
    )  # fmt: skip


def _per_rank(weights: Tensor, owner: Tensor) -> Tensor:
    """Return float32 `[row, rank]`: the weight of each rank row's adapter."""
    num_adapters = weights.size(1)
    if owner.is_cpu:
        try:
            return weights.float().index_select(1, owner)
        except (IndexError, RuntimeError):  # which of them depends on torch's build
            _check_owner(owner, num_adapters)
            raise
    # torch would stop the whole device at an index out of range
    is_adapter = (owner >= 0) & (owner < num_adapters)
    return weights.float().index_select(1, owner.where(is_adapter, 0)).where(is_adapter, float("nan"))


def _check_owner(owner: Tensor, num_adapters: int) -> None:
    low, high = owner.aminmax()
    if low < 0 or high >= num_adapters:
        raise ValueError(f"mix: owner names adapters {int(low)} to {int(high)}, but the weights are of {num_adapters}")


def _explain(x: Tensor, a: Tensor, owner: Tensor, weights: Tensor) -> None:
    if weights.dim() != 2 or weights.shape[0] != x.shape[0] or not weights.dtype.is_floating_point:
        found = f"{weights.dtype} of shape {list(weights.shape)}"
        raise ValueError(f"mix: weights must be floats of shape [{x.shape[0]} rows, adapters], not {found}")
    if owner.shape != (a.shape[0],) or owner.dtype != torch.int64:
        raise ValueError(f"mix: owner must be int64 of shape [{a.shape[0]}], not {owner.dtype} {list(owner.shape)}")
    for name, tensor in (("weights", weights), ("owner", owner)):
        if tensor.device != x.device:
            raise ValueError(f"mix: {name} is on {tensor.device}, but x is on {x.device}")


def cost(num_rows: int, rank: int, in_features: int, out_features: int, itemsize: int) -> Cost:
    """Return the least work of `num_rows` rows over a mixture whose ranks sum to `rank`."""
    factors = rank * (in_features + out_features)
    rows = num_rows * (in_features + 2 * out_features)
    return Cost(num_rows * rank * (2 * in_features + 1 + 2 * out_features), (factors + rows) * itemsize)
