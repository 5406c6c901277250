"""blend: y[t] += sum_k w[t, k] (a[k] . x[t]) b[k]    over rank rows k, for rows that each weigh them in their own way.

Rank rows of several adapters are stacked: a `[rank, in]`, b `[rank, out]` (B transposed, alpha/r folded in). w is 1 at
the rank rows of a row's one adapter, a constant at those of merged ones, the classifier's output at those of a mixture,
and 0 elsewhere. So every row of a forward, whatever it asked for, is in one shrink, one scale, one expand: this is the
op of a CPU, where a call costs as much as the arithmetic of hundreds of rank rows. What it pays is that every row
meets the rank rows of its neighbours' adapters: `rows x rank` instead of the sum over adapters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lora_kernels.checks import Cost, check_rows


def blend_reference(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, weights: Tensor | None = None, outside: Tensor | None = None
) -> Tensor:
    """Return y plus the deltas, float64 if y is, else float32, one rank row at a time; the specification of `blend`."""
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    out = y.to(wide, copy=True)
    for k in range(a.shape[0]):
        used = torch.ones(len(x), dtype=torch.bool, device=x.device) if outside is None else ~outside[:, k]
        shrunk = x[used].to(wide) @ a[k].to(wide)  # [row]
        if weights is not None:
            shrunk = shrunk * weights[used, k].to(wide)
        out[used] += shrunk[:, None] * b[k].to(wide)
    return out


def blend(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, weights: Tensor | None = None, outside: Tensor | None = None
) -> Tensor:
    """Add the weighted sum of rank rows to y in place and return y.

    Args:
        y: `[row, out]`, the base layer's output.
        x: `[row, in]`, its input.
        a: `[rank, in]`, stacked A factors.
        b: `[rank, out]`, stacked B factors, transposed and scaled; finite, as every row meets all of them.
        weights: `[row, rank]`, any float dtype (the scaling happens in the wider of x's and this); None: all 1.
        outside: bool `[row, rank]`, True at the rank rows that a row has no part in: they add exactly nothing to it,
            whatever a holds there (a weight of 0 would turn another adapter's overflow into NaN). None: there are none.

    Raises:
        ValueError: operands that do not fit.
    """
    try:
        shrunk = torch.mm(x, a.t())  # [row, rank]
        # what torch would not refuse: masks that broadcast, and tensors without data (meta) among those with
        if (
            (weights is None or (weights.shape == shrunk.shape and weights.is_cpu == y.is_cpu))
            and (outside is None or (outside.shape == shrunk.shape and outside.is_cpu == y.is_cpu))
            and shrunk.is_cpu == b.is_cpu == y.is_cpu
        ):
            return y.addmm_(weigh(shrunk, weights, outside), b)
    except RuntimeError:
        # torch refuses before it writes; looking for the reason here costs nothing while operands fit
        _check(y, x, a, b, weights, outside)
        raise
    _check(y, x, a, b, weights, outside)
    raise AssertionError("blend: operands that fit were refused")


def weigh(shrunk: Tensor, weights: Tensor | None, outside: Tensor | None) -> Tensor:
    """Scale `shrunk` `[row, rank]` in place by `weights`, set it to 0 where `outside`, and return it."""
    if weights is not None:
        shrunk.mul_(weights)
    if outside is not None:
        shrunk.masked_fill_(outside, 0.0)
    return shrunk


def _check(y: Tensor, x: Tensor, a: Tensor, b: Tensor, weights: Tensor | None, outside: Tensor | None) -> None:
    check_rows("blend", y, x, a, b)
    expected = (x.shape[0], a.shape[0])
    for name, tensor in (("weights", weights), ("outside", outside)):
        if tensor is None:
            continue
        if tensor.shape != expected:
            raise ValueError(
                f"blend: {name} must be [{expected[0]} rows, {expected[1]} rank rows], not of shape "
                f"{list(tensor.shape)}"
            )
        if tensor.device != x.device:
            raise ValueError(f"blend: {name} is on {tensor.device}, but x is on {x.device}")
    if outside is not None and outside.dtype != torch.bool:
        raise ValueError(f"blend: outside must be bool, not {outside.dtype}")


def cost(num_rows: int, ranks: tuple[int, ...], in_features: int, out_features: int, itemsize: int) -> Cost:
    """Return the work of `num_rows` rows that meet adapters of these true ranks: each row meets them all."""
    rank, width = sum(ranks), in_features + out_features
    flops = num_rows * rank * (2 * width + 1)
    return Cost(flops, (rank * width + num_rows * (in_features + 2 * out_features)) * itemsize)
