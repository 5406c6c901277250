"""grouped: y[g, t] += B[g] (A[g] x[g, t]) for groups of as many rows, each with an adapter of its own, of one rank.

This is sgmv where segments are short and adapters alike, as they are while many requests decode: two batched products
in place of two products per adapter, and no row meets an adapter that is not its own. Groups of unequal size are
filled up: `gather` names the row at every place of every group (any row where a group has no more), `scatter` the
place of every row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lora_kernels.checks import Cost

Filling = tuple[Tensor, Tensor]


def grouped_reference(y: Tensor, x: Tensor, a: Tensor, b: Tensor, filling: Filling | None = None) -> Tensor:
    """Return y plus the deltas, float64 if y is, else float32, row by row; the specification of `grouped`."""
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    out = y.to(wide, copy=True)
    places = range(len(x)) if filling is None else filling[1].tolist()
    size = max(1, len(x) // max(1, len(a)) if filling is None else len(filling[0]) // len(a))
    for row, place in enumerate(places):
        group = place // size
        out[row] += (a[group].to(wide) @ x[row].to(wide)) @ b[group].to(wide)
    return out


def grouped(y: Tensor, x: Tensor, a: Tensor, b: Tensor, filling: Filling | None = None) -> Tensor:
    """Add each row's adapter delta to y in place and return y.

    Args:
        y: `[row, out]`, the base layer's output.
        x: `[row, in]`, its input; rows of a group lie together, groups in their order.
        a: `[group, rank, in]`, A factors.
        b: `[group, rank, out]`, B factors, transposed and scaled.
        filling: int64 `gather` `[group * size]` and `scatter` `[row]`; None where all groups are of one size.

    Raises:
        ValueError: operands that do not fit.
    """
    # what torch would not refuse: tensors without data (meta) among those with, and one row for all
    if y.is_cpu == x.is_cpu == a.is_cpu == b.is_cpu and (filling is None or len(filling[1]) == len(x)):
        try:
            return _add(y, x, a, b, filling)
        except (RuntimeError, ValueError):
            # torch refuses before it writes; looking for the reason here costs nothing while operands fit
            _explain(y, x, a, b, filling)
            raise
    _explain(y, x, a, b, filling)
    raise AssertionError("grouped: operands that fit were refused")


def _add(y: Tensor, x: Tensor, a: Tensor, b: Tensor, filling: Filling | None) -> Tensor:
    groups, rank, width = a.shape
    if not rank or not len(x):
        return y
    if filling is None:
        shrunk = torch.bmm(x.view(groups, -1, width), a.mT)  # [group, size, rank]
        y.view(groups, -1, b.shape[-1]).baddbmm_(shrunk, b)
        return y
    gather, scatter = filling
    shrunk = torch.bmm(x.index_select(0, gather).view(groups, -1, width), a.mT)
    return y.add_(torch.bmm(shrunk, b).view(-1, b.shape[-1]).index_select(0, scatter))


def _explain(y: Tensor, x: Tensor, a: Tensor, b: Tensor, filling: Filling | None) -> None:
    of_y, of_x, of_a, of_b = y.shape, x.shape, a.shape, b.shape
    if not (
        len(of_y) == len(of_x) == 2 and len(of_a) == len(of_b) == 3 and of_y[0] == of_x[0] and of_a[:2] == of_b[:2]
        and of_a[2] == of_x[1] and of_b[2] == of_y[1] and y.dtype is x.dtype is a.dtype is b.dtype
        and y.device == x.device == a.device == b.device
    ):  # fmt: skip
        given = zip("yxab", (y, x, a, b), strict=True)
        found = ", ".join(f"{name} {list(tensor.shape)} {tensor.dtype} on {tensor.device}" for name, tensor in given)
        raise ValueError(
            "grouped: y must be [row, out], x [row, in], a [group, rank, in] and b [group, rank, out], of one dtype "
            f"and device; they are {found}"
        )
    if filling is not None and (not of_a[0] or len(filling[0]) % of_a[0] or len(filling[1]) != of_x[0]):
        raise ValueError(
            f"grouped: a filling of {len(filling[0])} places and {len(filling[1])} rows does not fit "
            f"{of_a[0]} groups and {of_x[0]} rows"
        )
    if filling is None and (not of_a[0] or of_x[0] % of_a[0]):
        raise ValueError(f"grouped: {of_x[0]} rows cannot form {of_a[0]} groups of one size; pass a filling")


def cost(num_rows: int, groups: int, rank: int, in_features: int, out_features: int, itemsize: int) -> Cost:
    """Return the work of `num_rows` rows, those that fill groups up included, over `groups` adapters of one rank."""
    width = in_features + out_features
    rows = num_rows * (in_features + 2 * out_features)
    return Cost(2 * num_rows * rank * width, (groups * rank * width + rows) * itemsize)
