"""One product over the rank rows of several adapters, and when it is the cheaper one: `pytest tests/test_blend.py`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lora_kernels import blend as blend_op
from lora_kernels.blend import blend, blend_reference

# the op


@dataclass
class Operands:
    """y `[row, out]`, x `[row, in]`, a `[rank, in]`, b `[rank, out]`, weights and outside `[row, rank]`."""

    y: Tensor
    x: Tensor
    a: Tensor
    b: Tensor
    weights: Tensor | None
    outside: Tensor | None

    def __iter__(self):
        return iter((self.y, self.x, self.a, self.b, self.weights, self.outside))

    def to(self, dtype: torch.dtype) -> Operands:
        return Operands(*(t.to(dtype) for t in (self.y, self.x, self.a, self.b)), self.weights, self.outside)


def operands(num_rows: int, rank: int, width_in: int, width_out: int, masks: str = "both") -> Operands:
    generator = torch.Generator().manual_seed(num_rows + rank)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return Operands(
        randn(num_rows, width_out), randn(num_rows, width_in), randn(rank, width_in) * width_in**-0.5,
        randn(rank, width_out), randn(num_rows, rank) if masks in ("both", "weights") else None,
        randn(num_rows, rank) > 0.3 if masks in ("both", "outside") else None,
    )  # fmt: skip


def exact(o: Operands) -> Tensor:
    y, x, a, b = (t.double() for t in (o.y, o.x, o.a, o.b))
    shrunk = x @ a.T
    shrunk = shrunk if o.weights is None else shrunk * o.weights.double()
    return y + (shrunk if o.outside is None else shrunk.where(~o.outside, 0)) @ b


def error_of(found: Tensor, wanted: Tensor) -> float:
    """RMS error relative to the RMS value."""
    return float((found.double() - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt())


@pytest.mark.parametrize("masks", ["both", "weights", "outside", "none"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (7, 16, 100, 33), (37, 130, 515, 130)])
def test_blend_equals_its_reference_and_float64(shape, masks):
    o = operands(*shape, masks)
    wanted = exact(o)
    found = o.y.clone()
    assert error_of(blend_reference(*o), wanted) < 2e-6 and torch.equal(o.y, found), "the reference leaves y alone"
    assert blend(found, *[*o][1:]) is found
    assert error_of(found, wanted) < 2e-6
    assert error_of(blend_reference(*o.to(torch.float64)), wanted) < 1e-12


@pytest.mark.parametrize("what", ["a", "b", "weights", "outside"])
def test_blend_with_one_wrong_rank_row_does_not_pass(what):
    o = operands(7, 16, 100, 33)
    wanted = exact(o)
    if what == "outside":
        o.outside[:, 3] = ~o.outside[:, 3]
    else:
        getattr(o, what).select(1 if what == "weights" else 0, 3).mul_(1.1)
    assert error_of(blend(o.y.clone(), *[*o][1:]), wanted) > 1e-3
    assert error_of(blend_reference(*o), wanted) > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_blend_is_no_worse_than_one_product_after_the_other(dtype):
    o = operands(37, 24, 128, 96).to(dtype)
    wanted = exact(o)
    plain = o.y.clone()
    for k in range(24):
        weights = o.weights[:, k].where(~o.outside[:, k], 0)
        plain += (weights * (o.x @ o.a[k])).to(dtype)[:, None] * o.b[k]
    found = blend(o.y.clone(), *[*o][1:])
    assert found.dtype == dtype and error_of(found, wanted) <= 1.05 * error_of(plain, wanted)


@pytest.mark.parametrize(("num_rows", "rank"), [(0, 4), (3, 0), (0, 0)])
def test_nothing_to_blend_leaves_y_bitwise(num_rows, rank):
    o = operands(num_rows, rank, 5, 6)
    assert torch.equal(blend(o.y.clone(), *[*o][1:]), o.y)


def test_blend_writes_through_a_strided_view():
    o = operands(7, 4, 10, 6)
    wide = torch.zeros(7, 20)
    wide[:, 3:9] = o.y
    blend(wide[:, 3:9], *[*o][1:])
    assert error_of(wide[:, 3:9], exact(o)) < 2e-6
    assert not wide[:, :3].any() and not wide[:, 9:].any()


@pytest.mark.parametrize(
    ("operand", "value", "message"),
    [
        ("y", torch.zeros(3), "y must have 2 dimensions"),
        ("y", torch.zeros(1, 6), "y has 1 rows, but x has 3"),
        ("x", torch.zeros(2, 5), "y has 3 rows, but x has 2"),
        ("x", torch.zeros(3, 5, dtype=torch.float16), "y is torch.float32 on cpu, but x is torch.float16"),
        ("a", torch.zeros(4, 6), "a reads 6 features, but x has 5"),
        ("b", torch.zeros(4, 7), "b writes 7 features, but y has 6"),
        ("b", torch.zeros(3, 6), "a has rank 4, but b has rank 3"),
        ("b", torch.zeros(4, 6, device="meta"), "b is torch.float32 on meta"),
        ("weights", torch.ones(1, 4), r"weights must be \[3 rows, 4 rank rows\], not of shape \[1, 4\]"),
        ("weights", torch.ones(3, 1), "weights must be"),
        ("weights", torch.ones(4), "weights must be"),
        ("weights", torch.ones(3, 4, device="meta"), "weights is on meta, but x is on cpu"),
        ("outside", torch.zeros(3, 1, dtype=torch.bool), r"outside must be \[3 rows"),
        ("outside", torch.zeros(3, 4), "outside must be bool, not torch.float32"),
    ],
)
def test_operands_that_do_not_fit_are_refused_before_y_is_touched(operand, value, message):
    good = Operands(torch.zeros(3, 6), torch.ones(3, 5), torch.ones(4, 5), torch.ones(4, 6), None, None)
    setattr(good, operand, value)
    before = good.y.clone()
    with pytest.raises(ValueError, match=f"^blend: {message}"):
        blend(*good)
    assert torch.equal(good.y, before)


def test_the_cost_is_that_of_every_row_meeting_every_true_rank():
    one = blend_op.cost(1, (8,), 64, 32, 4)
    assert one.flops == 8 * (2 * (64 + 32) + 1) and one.num_bytes == 4 * (8 * (64 + 32) + 64 + 2 * 32)
    assert blend_op.cost(16, (8, 1, 4), 64, 32, 4).flops == 16 * 13 * (2 * (64 + 32) + 1)
