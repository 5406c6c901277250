"""Batched products for groups of rows, against float64: `pytest tests/test_grouped.py`."""

import pytest
import torch
from torch import Tensor

from lora_kernels import grouped as grouped_op
from lora_kernels.grouped import grouped, grouped_reference

SIZES = [(1,), (4, 4, 4), (1, 1, 1, 1, 1), (3, 1, 2), (1, 7)]  # rows of each group


def operands(sizes: tuple[int, ...], rank: int = 5, width_in: int = 33, width_out: int = 18) -> tuple:
    """Return y, x, a, b and filling for groups of these sizes."""
    generator = torch.Generator().manual_seed(sum(sizes))

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    size, gather, scatter, start = max(sizes), [], [], 0
    for group, count in enumerate(sizes):
        gather += [start + min(place, count - 1) for place in range(size)]
        scatter += [group * size + place for place in range(count)]
        start += count
    filling = None if min(sizes) == size else (torch.tensor(gather), torch.tensor(scatter))
    y, x = randn(start, width_out), randn(start, width_in)
    return y, x, randn(len(sizes), rank, width_in), randn(len(sizes), rank, width_out), filling


def exact(sizes: tuple[int, ...], y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Group by group in float64."""
    out, start = y.double(), 0
    for group, count in enumerate(sizes):
        rows = slice(start, start + count)
        out[rows] += x[rows].double() @ a[group].double().T @ b[group].double()
        start += count
    return out


@pytest.mark.parametrize("sizes", SIZES)
def test_grouped_equals_its_reference_and_float64(sizes):
    y, x, a, b, filling = operands(sizes)
    wanted = exact(sizes, y, x, a, b)
    found = y.clone()
    assert grouped(found, x, a, b, filling) is found
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert (grouped_reference(y, x, a, b, filling) - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert (grouped_reference(y.double(), x, a, b, filling) - wanted).abs().max() < 1e-12 * wanted.abs().max()
    b[-1, 2] *= 1.1
    for corrupted in (grouped(y.clone(), x, a, b, filling), grouped_reference(y, x, a, b, filling)):
        assert (corrupted - wanted).abs().max() > 1e-3 * wanted.abs().max(), "one wrong rank row passes"


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_grouped_is_no_worse_than_group_after_group(dtype, sizes):
    y, x, a, b, filling = operands(sizes, 24, 128, 96)
    y, x, a, b = (each.to(dtype) for each in (y, x * 128**-0.5, a, b))
    wanted, plain, start = exact(sizes, y, x, a, b), y.clone(), 0
    for group, count in enumerate(sizes):
        plain[start : start + count] += x[start : start + count] @ a[group].T @ b[group]
        start += count
    found = grouped(y.clone(), x, a, b, filling)
    assert found.dtype == dtype
    assert (found - wanted).pow(2).mean() <= 1.1 * (plain - wanted).pow(2).mean()


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 3)])
def test_grouped_writes_through_a_strided_view(sizes):
    y, x, a, b, filling = operands(sizes)
    wide = torch.zeros(len(y), 40)
    wide[:, 7:25] = y
    grouped(wide[:, 7:25], x, a, b, filling)
    wanted = exact(sizes, y, x, a, b)
    assert (wide[:, 7:25] - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert not wide[:, :7].any() and not wide[:, 25:].any()


def test_no_rows_and_no_ranks_leave_y_bitwise():
    y, x, a, b, _ = operands((2, 2))
    assert torch.equal(grouped(y.clone(), x, a[:, :0], b[:, :0]), y)
    assert grouped(y[:0], x[:0], a, b).shape == (0, 18)
    assert grouped(y[:0], x[:0], a[:0], b[:0]).shape == (0, 18)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("y", lambda y: y[:3], r"y must be \[row, out\].* y \[3, 18\]"),
        ("y", lambda y: y[0], "they are y"),
        ("x", lambda x: x[:, :-1], "they are"),
        ("a", lambda a: a[:, :-1], "they are"),
        ("a", lambda a: a[0], "they are"),
        ("b", lambda b: b[..., :-1], "they are"),
        ("b", lambda b: b.half(), "torch.float16"),
        ("b", lambda b: b.to("meta"), "they are"),
        ("filling", lambda _: (torch.zeros(3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)), "of 3 places"),
        ("filling", lambda _: (torch.zeros(4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)), "and 3 rows"),
    ],
)
def test_operands_that_do_not_fit_are_refused_before_y_is_touched(name, change, message):
    names = ("y", "x", "a", "b", "filling")
    given = dict(zip(names, operands((2, 2)), strict=True))
    before = given["y"].clone()
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=f"^grouped: .*{message}"):
        grouped(*given.values())
    assert name == "y" or torch.equal(given["y"], before)


@pytest.mark.parametrize("rows", [3, 5])
def test_rows_that_form_no_groups_of_one_size_need_a_filling(rows):
    y, x, a, b, _ = operands((rows, rows))
    with pytest.raises(ValueError, match=f"{rows} rows cannot form 2 groups of one size"):
        grouped(y[:rows], x[:rows], a, b)
    with pytest.raises(ValueError, match=f"{rows} rows cannot form 0 groups"):
        grouped(y[:rows], x[:rows], a[:0], b[:0])


def test_the_cost_is_that_of_each_row_and_its_own_adapter():
    one = grouped_op.cost(4, 2, 8, 64, 32, 4)
    assert one.flops == 2 * 4 * 8 * (64 + 32) and one.num_bytes == 4 * (2 * 8 * (64 + 32) + 4 * (64 + 2 * 32))
