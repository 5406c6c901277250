"""blend: y[g, t] += sum_k w[g, t, k] (a[g, k] . x[g, t]) b[g, k]    over rank rows k, in groups g of as many rows.

The deltas of all rows of a forward in one shrink, one scale, one expand: the op of a CPU, where a call costs as much as
the arithmetic of hundreds of rank rows. Two uses:

    one group       a stack of the rank rows of several adapters, for rows of any sort: w is 1 at the rank rows of a
                    row's one adapter, constant at those of merged ones, the classifier's output at a mixture's. What
                    it pays: every row meets the rank rows of all, `rows x rank` instead of the sum over adapters.
    several groups  each group's rows have an adapter of their own, all of one rank: no row meets another's. What it
                    pays: groups of unequal size are filled up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lora_kernels.checks import Cost

Filling = tuple[Tensor, Tensor]


def blend_reference(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor,
    weights: Tensor | None = None, outside: Tensor | None = None, filling: Filling | None = None,
) -> Tensor:  # fmt: skip
    """Return y plus the deltas, float64 if y is, else float32, row by row; the specification of `blend`."""
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    out, rows = y.to(wide, copy=True), x.reshape(-1, x.shape[-1]).to(wide)
    size = max(1, (len(rows) if filling is None else len(filling[0])) // max(1, len(a)))
    for row, place in enumerate(range(len(rows)) if filling is None else filling[1].tolist()):
        group, within = divmod(place, size)
        shrunk = rows[row] @ a[group].to(wide)  # [rank]
        if weights is not None:
            shrunk = shrunk * weights[group, within].to(wide)
        if outside is not None:
            shrunk = shrunk.where(~outside[group, within], 0)
        out.view(-1, out.shape[-1])[row] += shrunk @ b[group].to(wide)
    return out


def blend(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor,
    weights: Tensor | None = None, outside: Tensor | None = None, filling: Filling | None = None,
) -> Tensor:  # fmt: skip
    """Add the weighted sum of rank rows to y in place and return y.

    Args:
        y: `[row, out]`, the base layer's output; dimensions of 1 before the rows, here and in x, are no matter.
        x: `[row, in]`, its input; a group's rows lie together, groups in their order.
        a: `[group, in, rank]`, A factors, transposed (a view serves).
        b: `[group, rank, out]`, B factors, transposed and scaled; finite, as every row of a group meets all of them.
        weights: `[group, size, rank]`, any float dtype (the scaling happens in the wider of x's and this); None: all 1.
        outside: bool `[group, size, rank]`, True at the rank rows that a row has no part in: they add exactly nothing
            to it, whatever a holds there (a weight of 0 would turn another adapter's overflow into NaN). None: none.
        filling: for groups of unequal size, int64 `gather` `[group * size]`, the row at every place of every group (any
            row where a group has no more), and `scatter` `[row]`, the place of every row.

    Raises:
        ValueError: operands that do not fit.
    """
    groups, width = a.shape[0], x.shape[-1]
    try:
        own = x if filling is None else x.reshape(-1, width).index_select(0, filling[0])
        shrunk = torch.bmm(own if groups == 1 and own.dim() == 3 else own.reshape(groups, -1, width), a)
        # what torch would not refuse: tensors without data (meta) among those with, and masks that broadcast
        if x.is_cpu == shrunk.is_cpu == b.is_cpu == y.is_cpu and _fits(weights, shrunk) and _fits(outside, shrunk):
            weigh(shrunk, weights, outside)
            if filling is not None:
                deltas = torch.bmm(shrunk, b).view(-1, y.shape[-1]).index_select(0, filling[1])
                return y.add_(deltas.view(y.shape))
            (y if groups == 1 and y.dim() == 3 else y.view(groups, -1, y.shape[-1])).baddbmm_(shrunk, b)
            return y
    except (RuntimeError, ValueError, IndexError):
        # torch refuses before it writes; looking for the reason here costs nothing while operands fit
        _explain(y, x, a, b, weights, outside, filling)
        raise
    _explain(y, x, a, b, weights, outside, filling)
    raise AssertionError("blend: operands that fit were refused")


def _fits(mask: Tensor | None, shrunk: Tensor) -> bool:
    return mask is None or (mask.shape == shrunk.shape and mask.is_cpu == shrunk.is_cpu)


def weigh(shrunk: Tensor, weights: Tensor | None, outside: Tensor | None) -> Tensor:
    """Scale `shrunk` in place by `weights`, set it to 0 where `outside`, and return it."""
    if weights is not None:
        shrunk.mul_(weights)
    if outside is not None:
        shrunk.masked_fill_(outside, 0.0)
    return shrunk


def _explain(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, weights: Tensor | None, outside: Tensor | None, filling: Filling | None
) -> None:
    rows, groups = x.shape[-2:-1].numel(), a.shape[:1].numel()
    fits = y.shape[:-2].numel() == x.shape[:-2].numel() == 1 and len(y.shape[-2:]) == len(x.shape[-2:]) == 2
    fits = fits and a.dim() == b.dim() == 3 and y.shape[-2] == x.shape[-2] and a.shape[::2] == b.shape[:2]
    fits = fits and a.shape[1] == x.shape[-1] and b.shape[2] == y.shape[-1]
    if not (fits and y.dtype is x.dtype is a.dtype is b.dtype and y.device == x.device == a.device == b.device):
        given = zip("yxab", (y, x, a, b), strict=True)
        found = ", ".join(f"{name} {list(tensor.shape)} {tensor.dtype} on {tensor.device}" for name, tensor in given)
        raise ValueError(
            "blend: y must be [row, out], x [row, in], a [group, in, rank] and b [group, rank, out], of one dtype and "
            f"device; they are {found}"
        )
    places = rows if filling is None else len(filling[0])
    if not groups or places % groups or (filling is not None and len(filling[1]) != rows):
        what = f"a filling of {places} places and {len(filling[1])} rows" if filling is not None else "no filling"
        raise ValueError(f"blend: {rows} rows cannot form {groups} groups of one size with {what}")
    for name, named, most in zip(("gather", "scatter"), filling or (), (rows, places), strict=False):
        if len(named) and not 0 <= int(named.min()) <= int(named.max()) < most:
            raise ValueError(f"blend: {name} must name {most} rows or places, not {named.min()} to {named.max()}")
    expected = [groups, places // groups, a.shape[2]]
    for name, mask, wanted in (("weights", weights, "floats"), ("outside", outside, "bool")):
        if mask is not None and (list(mask.shape) != expected or mask.device != x.device):
            raise ValueError(
                f"blend: {name} must be {wanted} [group, size, rank] {expected} on {x.device}, not "
                f"{list(mask.shape)} on {mask.device}"
            )
    if outside is not None and outside.dtype != torch.bool:
        raise ValueError(f"blend: outside must be bool, not {outside.dtype}")


def cost(num_rows: int, ranks: tuple[int, ...], in_features: int, out_features: int, itemsize: int) -> Cost:
    """Return the work of `num_rows` rows that meet adapters of these true ranks: each row meets them all.

    For several groups it is the sum of each group's, fillers included.
    """
    rank, width = sum(ranks), in_features + out_features
    flops = num_rows * rank * (2 * width + 1)
    return Cost(flops, (rank * width + num_rows * (in_features + 2 * out_features)) * itemsize)
