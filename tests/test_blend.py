"""One product over stacked rank rows, or one of each group, against float64: `pytest tests/test_blend.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from lora_kernels import blend as blend_op
from lora_kernels.blend import blend, blend_reference

SIZES = [(1,), (7,), (37,), (4, 4, 4), (1, 1, 1, 1, 1), (3, 1, 2), (1, 7)]  # rows of each group
MASKS = ["both", "weights", "outside", "none"]


@dataclass
class Operands:
    """What `blend` takes, in its order."""

    y: Tensor
    x: Tensor
    a: Tensor
    b: Tensor
    weights: Tensor | None = None
    outside: Tensor | None = None
    filling: tuple[Tensor, Tensor] | None = None

    def __iter__(self):
        return iter((self.y, self.x, self.a, self.b, self.weights, self.outside, self.filling))

    def to(self, dtype: torch.dtype) -> Operands:
        return replace(self, **{name: getattr(self, name).to(dtype) for name in "yxab"})


def operands(sizes: tuple[int, ...], rank: int = 5, width_in: int = 33, width_out: int = 18, masks="both") -> Operands:
    """Make operands for groups of these sizes; the rows that fill a group up are its last."""
    generator = torch.Generator().manual_seed(sum(sizes) + rank)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    size, gather, scatter, start = max(sizes), [], [], 0
    for group, count in enumerate(sizes):
        gather += [start + min(place, count - 1) for place in range(size)]
        scatter += [group * size + place for place in range(count)]
        start += count
    shape = (len(sizes), size, rank)
    return Operands(
        randn(start, width_out), randn(start, width_in), (randn(len(sizes), rank, width_in) * width_in**-0.5).mT,
        randn(len(sizes), rank, width_out), randn(*shape) if masks in ("both", "weights") else None,
        randn(*shape) > 0.3 if masks in ("both", "outside") else None,
        None if min(sizes) == size else (torch.tensor(gather), torch.tensor(scatter)),
    )  # fmt: skip


def exact(sizes: tuple[int, ...], o: Operands) -> Tensor:
    """Group by group in float64."""
    out, start = o.y.double(), 0
    for group, count in enumerate(sizes):
        rows = slice(start, start + count)
        shrunk = o.x[rows].double() @ o.a[group].double()
        if o.weights is not None:
            shrunk = shrunk * o.weights[group, :count].double()
        if o.outside is not None:
            shrunk = shrunk.where(~o.outside[group, :count], 0)
        out[rows] += shrunk @ o.b[group].double()
        start += count
    return out


def error_of(found: Tensor, wanted: Tensor) -> float:
    """RMS error relative to the RMS value; NaN anywhere gives NaN."""
    return float((found.double() - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt())


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (16, 100, 33), (130, 515, 130)])
def test_blend_equals_its_reference_and_float64(shape, sizes, masks):
    o = operands(sizes, *shape, masks)
    wanted = exact(sizes, o)
    found = o.y.clone()
    assert error_of(blend_reference(*o), wanted) < 2e-6 and torch.equal(o.y, found), "the reference leaves y alone"
    assert blend(found, *[*o][1:]) is found
    assert error_of(found, wanted) < 2e-6
    for y, x in [(o.y[None].clone(), o.x[None]), (o.y[None].clone(), o.x), (o.y.clone(), o.x[None])]:
        assert error_of(blend(y, x, *[*o][2:]).view_as(wanted), wanted) < 2e-6


@pytest.mark.parametrize("sizes", [(7,), (3, 3), (1, 4)])
def test_the_reference_is_exact_in_float64(sizes):
    o = operands(sizes)
    assert error_of(blend_reference(*o.to(torch.float64)), exact(sizes, o)) < 1e-12


@pytest.mark.parametrize("what", ["a", "b", "weights", "outside"])
@pytest.mark.parametrize("sizes", [(7,), (3, 3), (1, 4)])
def test_blend_with_one_wrong_rank_row_does_not_pass(sizes, what):
    o = operands(sizes)
    wanted = exact(sizes, o)
    if what == "outside":
        o.outside[-1, :, 3] = ~o.outside[-1, :, 3]
    else:
        getattr(o, what)[-1].select(0 if what == "b" else 1, 3).mul_(1.1)
    assert error_of(blend(o.y.clone(), *[*o][1:]), wanted) > 1e-3
    assert error_of(blend_reference(*o), wanted) > 1e-3


@pytest.mark.parametrize("sizes", [(37,), (2, 2), (1, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_blend_is_no_worse_than_one_rank_row_after_the_other(dtype, sizes):
    o = operands(sizes, 24, 128, 96).to(dtype)
    wanted, plain, start = exact(sizes, o), o.y.clone(), 0
    for group, count in enumerate(sizes):
        rows = slice(start, start + count)
        for k in range(24):
            weights = o.weights[group, :count, k].where(~o.outside[group, :count, k], 0)
            plain[rows] += (weights * (o.x[rows] @ o.a[group, :, k])).to(dtype)[:, None] * o.b[group, k]
        start += count
    found = blend(o.y.clone(), *[*o][1:])
    assert found.dtype == dtype and error_of(found, wanted) <= 1.05 * error_of(plain, wanted)


@pytest.mark.parametrize("num_rows", [0, 3])
def test_nothing_to_blend_leaves_y_bitwise(num_rows):
    y, x = torch.randn(num_rows, 6), torch.randn(num_rows, 5)
    assert torch.equal(blend(y.clone(), x, torch.ones(1, 5, 0), torch.ones(1, 0, 6)), y)
    if not num_rows:
        assert blend(y, x, torch.ones(1, 5, 4), torch.ones(1, 4, 6), torch.ones(1, 0, 4)).shape == (0, 6)


@pytest.mark.parametrize("sizes", [(7,), (2, 2, 2), (1, 3)])
def test_blend_writes_through_a_strided_view(sizes):
    o = operands(sizes)
    wide = torch.zeros(len(o.y), 40)
    wide[:, 7:25] = o.y
    o.x = torch.cat([o.x, o.x], dim=1)[:, :33]
    blend(wide[:, 7:25], *[*o][1:])
    assert error_of(wide[:, 7:25], exact(sizes, o)) < 2e-6
    assert not wide[:, :7].any() and not wide[:, 25:].any()


FOUR, FIVE = torch.arange(4), torch.arange(5)
WRONG = [
    ("y", torch.zeros(6), r"y must be \[row, out\].* they are y \[6\]"),
    ("y", torch.zeros(1, 6), r"y must be .* y \[1, 6\] .* x \[4, 5\]"),
    ("y", torch.zeros(1, 3, 6), r"y \[1, 3, 6\]"),
    ("y", torch.zeros(2, 4, 6), r"y \[2, 4, 6\]"),
    ("x", torch.zeros(1, 5), r"x \[1, 5\]"),
    ("x", torch.zeros(2, 5), r"x \[2, 5\]"),
    ("x", torch.zeros(4, 5, device="meta"), "on meta"),
    ("y", torch.zeros(4, 6, device="meta"), "on meta"),
    ("x", torch.zeros(3, 5), "y must be"),
    ("x", torch.zeros(4, 5, dtype=torch.float16), r"x \[4, 5\] torch.float16"),
    ("a", torch.zeros(2, 6, 3), r"a \[2, 6, 3\]"),
    ("a", torch.zeros(5, 3), r"a \[5, 3\]"),
    ("a", torch.zeros(1, 5, 3), r"a \[1, 5, 3\]"),
    ("b", torch.zeros(2, 3, 7), r"b \[2, 3, 7\]"),
    ("b", torch.zeros(2, 4, 6), r"b \[2, 4, 6\]"),
    ("b", torch.zeros(2, 3, 6, device="meta"), "on meta"),
    ("weights", torch.ones(4, 3), r"weights must be floats \[group, size, rank\] \[2, 2, 3\] on cpu, not \[4, 3\]"),
    ("weights", torch.ones(1, 2, 3), "weights must be"),
    ("weights", torch.ones(2, 2, 1), "weights must be"),
    ("weights", torch.ones(2, 2, 3, device="meta"), "weights must be .* on meta"),
    ("outside", torch.zeros(2, 1, 3, dtype=torch.bool), "outside must be bool"),
    ("outside", torch.zeros(2, 2, 3), "outside must be bool, not torch.float32"),
    ("filling", (FIVE, FOUR), "4 rows cannot form 2 groups of one size with a filling of 5 places and 4 rows"),
    ("filling", (FOUR, FIVE), "a filling of 4 places and 5 rows"),
    ("filling", (FOUR, FOUR[:1]), "a filling of 4 places and 1 rows"),
    ("filling", (FOUR + 1, FOUR), "gather must name 4 rows or places, not 1 to 4"),
    ("filling", (FOUR, FOUR - 1), "scatter must name 4 rows or places, not -1 to 2"),
]


@pytest.mark.parametrize(("operand", "value", "message"), WRONG)
def test_operands_that_do_not_fit_are_refused_before_y_is_touched(operand, value, message):
    good = Operands(torch.zeros(4, 6), torch.ones(4, 5), torch.ones(2, 5, 3), torch.ones(2, 3, 6))
    given = replace(good, **{operand: value})
    with pytest.raises(ValueError, match=f"^blend: .*{message}"):
        blend(*given)
    assert operand == "y" or not given.y.any()


@pytest.mark.parametrize("groups", [0, 2, 5])
def test_rows_that_form_no_groups_of_one_size_need_a_filling(groups):
    o = Operands(torch.zeros(3, 6), torch.ones(3, 5), torch.ones(groups, 5, 2), torch.ones(groups, 2, 6))
    with pytest.raises(ValueError, match=f"blend: 3 rows cannot form {groups} groups of one size with no filling"):
        blend(*o)


def test_the_cost_is_that_of_every_row_meeting_every_true_rank():
    one = blend_op.cost(1, (8,), 64, 32, 4)
    assert one.flops == 8 * (2 * (64 + 32) + 1) and one.num_bytes == 4 * (8 * (64 + 32) + 64 + 2 * 32)
    assert blend_op.cost(16, (8, 1, 4), 64, 32, 4).flops == 16 * 13 * (2 * (64 + 32) + 1)
