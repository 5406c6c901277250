"""mix: y[t] += sum_a w[t, a] * B[a] (A[a] x[t]) for rows that share one mixture of n adapters.

The n adapters' factors are stacked along the rank: a `[rank, in]`, b `[rank, out]` (B transposed, alpha/r folded
in); `owner[k]` says which adapter rank row k belongs to. One shrink, one scale, one expand: no loop over adapters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lora_kernels.checks import Cost, check_rows


def mix_reference(y: Tensor, x: Tensor, a: Tensor, b: Tensor, owner: Tensor, weights: Tensor) -> Tensor:
    """Return y plus the mixed deltas in float32, one adapter at a time; the specification of `mix`."""
    out = y.float()
    for adapter in range(weights.shape[1]):
        mine = owner == adapter
        delta = (x.float() @ a[mine].float().T) @ b[mine].float()
        out += weights[:, adapter, None].float() * delta
    return out


def mix(y: Tensor, x: Tensor, a: Tensor, b: Tensor, owner: Tensor, weights: Tensor) -> Tensor:
    """Add the weighted sum of the adapters' deltas to y in place and return y.

    Args:
        y: `[row, out]`, the base layer's output.
        x: `[row, in]`, its input.
        a: `[rank, in]`, stacked A factors of the mixture's adapters at this site.
        b: `[rank, out]`, stacked B factors, transposed and scaled.
        owner: int64 `[rank]`, index of the adapter (below n) each rank row belongs to.
        weights: `[row, n]`, any float dtype; the scaling happens in float32.

    Raises:
        ValueError: operands that do not fit.
    """
    check_rows("mix", y, x, a, b)
    if weights.dim() != 2 or weights.shape[0] != x.shape[0]:
        raise ValueError(f"mix: weights must be [{x.shape[0]} rows, adapters], not of shape {list(weights.shape)}")
    if owner.shape != (a.shape[0],) or owner.dtype != torch.int64:
        raise ValueError(f"mix: owner must be int64 of shape [{a.shape[0]}], not {owner.dtype} {list(owner.shape)}")
    if a.shape[0]:
        per_rank = weights.float().index_select(1, owner)  # [row, rank]
        shrunk = (x @ a.T).float().mul_(per_rank).to(x.dtype)
        y.addmm_(shrunk, b)
    return y


def cost(num_rows: int, rank: int, in_features: int, out_features: int, itemsize: int) -> Cost:
    """Return the least work of `num_rows` rows over a mixture whose ranks sum to `rank`."""
    factors = rank * (in_features + out_features)
    rows = num_rows * (in_features + 2 * out_features)
    return Cost(num_rows * rank * (2 * in_features + 1 + 2 * out_features), (factors + rows) * itemsize)
