"""What does not fit is a sentence before a launch, on every path: `pytest tests/test_kernels_bad_input.py`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lora_kernels.bgmv import bgmv
from lora_kernels.mix import mix
from lora_kernels.segments import Segment, SpanTable, plan_rows, segments
from lora_kernels.sgmv import sgmv
from lora_kernels.triton_support import recording

OPS = ["bgmv", "sgmv", "mix"]
PATHS = ["torch", "triton"]


def operands(**changed: Tensor) -> dict[str, Tensor]:
    """Return y, x, a and b of 3 rows, rank 4, 5 features in and 6 out."""
    return {"y": torch.zeros(3, 6), "x": torch.ones(3, 5), "a": torch.ones(4, 5), "b": torch.ones(4, 6)} | changed


def call(op: str, path: str, message: str, last: tuple | None = None, **changed: Tensor) -> None:
    """Expect the op to refuse its operands with `message`, before it launches or writes."""
    given = operands(**changed)
    if last is None and op == "mix":
        last = (torch.zeros(4, dtype=torch.int64), torch.ones(3, 2))
    elif last is None:
        last = (plan_rows(segments([0, 0, 1]), 3, "cpu"), SpanTable({0: (0, 3), 1: (3, 4)}))
    before = given["y"].clone()
    with pytest.raises(ValueError, match=f"^{op}: {message}"):
        if path == "torch":
            {"bgmv": bgmv, "sgmv": sgmv, "mix": mix}[op](*given.values(), *last)
        else:
            with recording() as launches:
                {"bgmv": bgmv, "sgmv": sgmv, "mix": mix}[op](*given.values(), *last)
    assert path == "torch" or not launches
    assert given["y"].is_meta or torch.equal(given["y"], before)


# stride 0 as well: a row written twice
OVERLAPPING = torch.zeros(1, 6).expand(3, 6)
WRONG = [
    ("y", torch.zeros(3), "y must have 2 dimensions, but its shape is"),
    ("x", torch.zeros(2, 5), "y has 3 rows, but x has 2"),
    ("x", torch.zeros(3, 5, dtype=torch.float16), "y is torch.float32 on cpu, but x is torch.float16"),
    ("a", torch.zeros(4, 6), "a reads 6 features, but x has 5"),
    ("b", torch.zeros(4, 7), "b writes 7 features, but y has 6"),
    ("b", torch.zeros(3, 6), "a has rank 4, but b has rank 3"),
    ("b", torch.zeros(4, 6, device="meta"), "b is torch.float32 on meta, but x is torch.float32 on cpu"),
    ("y", torch.zeros(6, 3).T, "the features of a row of y are 3 elements apart; .* y.contiguous"),
    ("x", torch.zeros(3, 10)[:, ::2], "the features of a row of x are 2 elements apart"),
    ("a", torch.zeros(5, 4).T, "the features of a row of a are 4 elements apart"),
    ("b", torch.zeros(4, 1).expand(4, 6), "the features of a row of b are 0 elements apart"),
    ("y", OVERLAPPING, "rows of y are 0 elements apart, but 6 long: they share memory"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("operand", "value", "message"), WRONG)
def test_operands_that_do_not_fit(operand, value, message, op, path):
    call(op, path, message, **{operand: value})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64])
def test_a_dtype_that_no_kernel_takes(dtype, op, path):
    call(op, path, f"x is {dtype}; the ops take torch.float32, torch.float16, torch.bfloat16",
         **{key: value.to(dtype) for key, value in operands().items()})  # fmt: skip


def test_rows_of_one_feature_lie_side_by_side_whatever_their_stride_says():
    x, y = torch.ones(1, 3).T, torch.zeros(4, 3).T[:, :1]
    assert x.stride(1) == 3 and y.stride(1) == 3
    plan, spans = plan_rows(segments([0] * 3), 3, "cpu"), SpanTable({0: (0, 2)})
    assert sgmv(y, x, torch.ones(2, 1), torch.ones(2, 1), plan, spans).tolist() == [[2.0]] * 3


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("op", ["bgmv", "sgmv"])
class TestPlans:
    spans = SpanTable({0: (0, 4)})

    def test_of_other_rows(self, op, path):
        call(op, path, "the plan has 2 rows, but x has 3", (plan_rows((), 2, "cpu"), self.spans))

    def test_on_another_device(self, op, path):
        call(op, path, "the plan is on meta, but x is on cpu", (plan_rows((), 3, "meta"), self.spans))

    def test_spans_outside_the_stack(self, op, path):
        """Even of a slot that no row uses: a captured graph would serve it later."""
        plan = plan_rows(segments([0, 0, 0]), 3, "cpu")
        spans = SpanTable({0: (0, 2), 7: (2, 5), 1: (2, 3)})
        call(op, path, "slot 7 spans rank rows 2 to 5, but a has 4", (plan, spans))


@pytest.mark.parametrize("op", [bgmv, sgmv])
def test_a_slot_beyond_the_table_has_no_delta(op):
    plan = plan_rows((Segment(0, 3, 10_000),), 3, "cpu")
    assert op(*operands().values(), plan, SpanTable({0: (0, 4)})).eq(0).all()


OWNER, WEIGHTS = torch.zeros(4, dtype=torch.int64), torch.ones(3, 2)
WRONG_WEIGHTS = [
    (OWNER[:3], WEIGHTS, r"owner must be int64 of shape \[4\], not .* \[3\]"),
    (OWNER.int(), WEIGHTS, "owner must be int64"),
    (OWNER[None], WEIGHTS, "owner must be int64"),
    (OWNER.to("meta"), WEIGHTS, "owner is on meta, but x is on cpu"),
    (OWNER, WEIGHTS[:2], r"weights must be floats of shape \[3 rows, adapters\], not .* \[2, 2\]"),
    (OWNER, WEIGHTS[0], "weights must be floats"),
    (OWNER, WEIGHTS.int(), "weights must be floats"),
    (OWNER, WEIGHTS.to("meta"), "weights is on meta, but x is on cpu"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("owner", "weights", "message"), WRONG_WEIGHTS)
def test_weights_that_do_not_fit(owner, weights, message, path):
    call("mix", path, message, (owner, weights))


@pytest.mark.parametrize("wrong", [2, -1])
def test_an_owner_that_is_no_adapter(wrong):
    owner = OWNER.clone()
    owner[1] = wrong
    call("mix", "torch", f"owner names adapters {min(wrong, 0)} to {max(wrong, 0)}, but the weights are of 2",
         (owner, WEIGHTS))  # fmt: skip
