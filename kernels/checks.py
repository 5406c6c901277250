"""Checks every op makes before it launches: a wrong shape, dtype or device is a sentence, never a wrong number."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Cost:
    """What one call of an op must do at least: `flops` (multiply and add counted apart) and `num_bytes` moved."""

    flops: int
    num_bytes: int


def check_rows(op: str, y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> None:
    """Check the operands that all LoRA ops share.

    y `[row, out]`, x `[row, in]`, a `[rank, in]`, b `[rank, out]`; one dtype, one device.

    Raises:
        ValueError: naming the op, the operand and the shapes.
    """
    for name, tensor in (("y", y), ("x", x), ("a", a), ("b", b)):
        if tensor.dim() != 2:
            raise ValueError(f"{op}: {name} must have 2 dimensions, but its shape is {list(tensor.shape)}")
        if tensor.device != x.device or tensor.dtype != x.dtype:
            raise ValueError(
                f"{op}: {name} is {tensor.dtype} on {tensor.device}, but x is {x.dtype} on {x.device}; "
                "move them to one dtype and device"
            )
    if y.shape[0] != x.shape[0]:
        raise ValueError(f"{op}: y has {y.shape[0]} rows, but x has {x.shape[0]}")
    if a.shape[1] != x.shape[1]:
        raise ValueError(f"{op}: a reads {a.shape[1]} features, but x has {x.shape[1]}")
    if b.shape[1] != y.shape[1]:
        raise ValueError(f"{op}: b writes {b.shape[1]} features, but y has {y.shape[1]}")
    if a.shape[0] != b.shape[0]:
        raise ValueError(f"{op}: a has rank {a.shape[0]}, but b has rank {b.shape[0]}")
