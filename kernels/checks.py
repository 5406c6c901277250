"""Checks every op makes before it launches: a wrong shape, dtype or device is a sentence, never a wrong number.

Contract: a call that fits costs one condition; what does not fit is looked for only when that condition fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_kernels.segments import RowPlan, SpanTable

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Cost:
    """What one call of an op must do at least: `flops` (multiply and add counted apart) and `num_bytes` moved."""

    flops: int
    num_bytes: int


def one_hot_cost(plan: RowPlan, spans: Mapping[int, tuple[int, int]], widths: tuple[int, int], itemsize: int) -> Cost:
    """Return the least work of a plan's rows at one site of `widths` (in, out): an adapter's factors are read once."""
    flops = rows = factors = 0
    used: set[int] = set()
    for start, stop, slot in plan.segments:
        first, last = spans.get(slot, (0, 0))
        if first < last:
            flops += 2 * (stop - start) * (last - first) * sum(widths)
            rows += stop - start
            factors += 0 if slot in used else last - first
            used.add(slot)
    # a row of x is read, a row of y is read and written
    return Cost(flops, (factors * sum(widths) + rows * (widths[0] + 2 * widths[1])) * itemsize)


def check_rows(op: str, y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> None:
    """Check the operands that all LoRA ops share.

    y `[row, out]`, x `[row, in]`, a `[rank, in]`, b `[rank, out]`; one dtype (float32, float16 or bfloat16), one
    device; a row's features lie side by side, and rows of y share no memory.

    Raises:
        ValueError: naming the op, the operand and the shapes.
    """
    dtype, device = x.dtype, x.device
    # whole shapes and strides: an engine asks 200 times a step, and each call into torch counts
    of_y, of_x, of_a, of_b = y.shape, x.shape, a.shape, b.shape
    apart_y, apart_x, apart_a, apart_b = y.stride(), x.stride(), a.stride(), b.stride()
    if (
        len(of_y) == len(of_x) == len(of_a) == len(of_b) == 2
        and dtype in DTYPES
        and y.dtype is dtype and a.dtype is dtype and b.dtype is dtype
        and y.device == device and a.device == device and b.device == device
        and of_y[0] == of_x[0] and of_a[1] == of_x[1] and of_b[1] == of_y[1] and of_a[0] == of_b[0]
        and apart_y[1] == apart_x[1] == apart_a[1] == apart_b[1] == 1
        and (apart_y[0] >= of_y[1] or of_y[0] <= 1)
    ):  # fmt: skip
        return
    _explain(op, y, x, a, b)


def _explain(op: str, y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(f"{op}: x is {x.dtype}; the ops take {', '.join(str(dtype) for dtype in DTYPES)}")
    for name, tensor in (("y", y), ("x", x), ("a", a), ("b", b)):
        if tensor.dim() != 2:
            raise ValueError(f"{op}: {name} must have 2 dimensions, but its shape is {list(tensor.shape)}")
        if tensor.device != x.device or tensor.dtype != x.dtype:
            raise ValueError(
                f"{op}: {name} is {tensor.dtype} on {tensor.device}, but x is {x.dtype} on {x.device}; "
                "move them to one dtype and device"
            )
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise ValueError(
                f"{op}: the features of a row of {name} are {tensor.stride(1)} elements apart; "
                f"they must lie side by side (pass {name}.contiguous())"
            )
    if y.shape[0] != x.shape[0]:
        raise ValueError(f"{op}: y has {y.shape[0]} rows, but x has {x.shape[0]}")
    if a.shape[1] != x.shape[1]:
        raise ValueError(f"{op}: a reads {a.shape[1]} features, but x has {x.shape[1]}")
    if b.shape[1] != y.shape[1]:
        raise ValueError(f"{op}: b writes {b.shape[1]} features, but y has {y.shape[1]}")
    if a.shape[0] != b.shape[0]:
        raise ValueError(f"{op}: a has rank {a.shape[0]}, but b has rank {b.shape[0]}")
    if y.shape[0] > 1 and y.stride(0) < y.shape[1]:
        raise ValueError(f"{op}: rows of y are {y.stride(0)} elements apart, but {y.shape[1]} long: they share memory")


def check_plan(op: str, plan: RowPlan, spans: SpanTable, x: Tensor, a: Tensor) -> None:
    """Check that a plan is one of these rows, and that every span lies in the stacked factors.

    Raises:
        ValueError: naming the op and what does not fit.
    """
    if plan.num_rows == x.shape[0] and plan.slot_of_row.device == x.device and spans.stop <= a.shape[0]:
        return
    if plan.num_rows != x.shape[0]:
        raise ValueError(f"{op}: the plan has {plan.num_rows} rows, but x has {x.shape[0]}")
    if plan.device != x.device:
        raise ValueError(f"{op}: the plan is on {plan.device}, but x is on {x.device}; make the plan for that device")
    slot, (first, last) = next(item for item in spans.items() if item[1][1] == spans.stop)
    raise ValueError(f"{op}: slot {slot} spans rank rows {first} to {last}, but a has {a.shape[0]}")


def check_no_gradient(op: str, *operands: Tensor) -> None:
    """Refuse to launch where autograd would have to follow: a kernel leaves no trace in its graph.

    Raises:
        ValueError: naming the op.
    """
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        raise ValueError(f"{op}: kernels have no gradient; call it under torch.no_grad() or torch.inference_mode()")
