"""Each op against its reference and float64: `pytest tests/test_kernels.py`.

`torch.empty` is full of NaN here, so memory that an op forgot to write shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lora_kernels import bgmv as bgmv_op
from lora_kernels import mix as mix_op
from lora_kernels import sgmv as sgmv_op
from lora_kernels.bgmv import bgmv, bgmv_reference
from lora_kernels.mix import mix, mix_reference
from lora_kernels.scalings import keep_top_k, scalings
from lora_kernels.segments import Segment, SpanTable, check_segments, plan_rows, segments
from lora_kernels.sgmv import sgmv, sgmv_reference

POPULARITY = ["identical", "distinct", "uniform", "zipf:1.5", "skewed", "all_base", "half_base"]
SHAPES = [(1, 8, 64, 64), (7, 16, 100, 33), (37, 48, 515, 130), (64, 1, 3, 1)]  # rows, rank, in, out
NUM_SLOTS = 5


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fill every new uninitialised float tensor with NaN."""
    for name in ("empty", "empty_like"):
        inner = getattr(torch, name)

        def poisoned(*args, inner=inner, **kwargs):
            tensor = inner(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        monkeypatch.setattr(torch, name, poisoned)


def row_slots(popularity: str, num_rows: int, generator: torch.Generator) -> list[int]:
    """Return a slot per row, sorted so that rows of one slot lie together, as the scheduler places them."""
    if popularity == "identical":
        return [2] * num_rows
    if popularity == "distinct":
        return sorted(row % NUM_SLOTS for row in range(num_rows))
    if popularity == "all_base":
        return [-1] * num_rows
    if popularity == "half_base":
        return sorted(-1 if row % 2 else row % NUM_SLOTS for row in range(num_rows))
    powers = {"uniform": 0.0, "zipf:1.5": 1.5, "skewed": 6.0}
    weights = torch.arange(1, NUM_SLOTS + 1, dtype=torch.float64) ** -powers[popularity]
    return sorted(torch.multinomial(weights, num_rows, replacement=True, generator=generator).tolist())


@dataclass
class Problem:
    """Operands of one site: y and x of every row, and the factors of all slots with ranks from 1 to `rank`."""

    y: Tensor
    x: Tensor
    a: Tensor
    b: Tensor
    slots: list[int]
    spans: dict[int, tuple[int, int]]
    owner: Tensor
    weights: Tensor

    def to(self, dtype: torch.dtype) -> Problem:
        moved = {name: getattr(self, name).to(dtype) for name in ("y", "x", "a", "b", "weights")}
        return Problem(**moved, slots=self.slots, spans=self.spans, owner=self.owner)

    @property
    def one_hot(self) -> tuple:
        return self.a, self.b, plan_rows(segments(self.slots), len(self.slots), "cpu"), SpanTable(self.spans)

    @property
    def mixed(self) -> tuple:
        return self.a, self.b, self.owner, self.weights


def make_problem(num_rows: int, rank: int, width_in: int, width_out: int, popularity: str = "uniform") -> Problem:
    generator = torch.Generator().manual_seed(num_rows)
    ranks = [max(1, rank * (slot + 1) // NUM_SLOTS) for slot in range(NUM_SLOTS)]
    stops = torch.tensor(ranks).cumsum(0).tolist()
    spans = {slot: (stop - size, stop) for slot, (stop, size) in enumerate(zip(stops, ranks, strict=True))}
    del spans[1]  # a slot without weights at this site

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return Problem(
        randn(num_rows, width_out), randn(num_rows, width_in), randn(sum(ranks), width_in) * width_in**-0.5,
        randn(sum(ranks), width_out) * rank**-0.5, row_slots(popularity, num_rows, generator), spans,
        torch.repeat_interleave(torch.arange(NUM_SLOTS), torch.tensor(ranks)),
        torch.softmax(2 * randn(num_rows, NUM_SLOTS), dim=-1),
    )  # fmt: skip


def error_of(found: Tensor, exact: Tensor) -> float:
    """Return the RMS error relative to the RMS value; NaN anywhere gives NaN."""
    return float((found.double() - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())


def sgmv_exact(p: Problem) -> Tensor:
    """Row by row in float64, without segments."""
    q = p.to(torch.float64)
    out = q.y.clone()
    for row, slot in enumerate(p.slots):
        for k in range(*p.spans.get(slot, (0, 0))):
            out[row] += (q.x[row] @ q.a[k]) * q.b[k]
    return out


def mix_exact(p: Problem) -> Tensor:
    q = p.to(torch.float64)
    return q.y + torch.einsum("ti,ri,tr,ro->to", q.x, q.a, q.weights[:, q.owner], q.b)


@pytest.mark.parametrize("popularity", POPULARITY)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("op", "reference"), [(sgmv, sgmv_reference), (bgmv, bgmv_reference)])
def test_one_hot_ops_equal_their_references_and_float64(shape, popularity, op, reference):
    p = make_problem(*shape, popularity)
    exact = sgmv_exact(p)
    found = p.y.clone()
    assert op(found, p.x, *p.one_hot) is found
    assert error_of(reference(p.y, p.x, *p.one_hot), exact) < 1e-6
    assert error_of(found, exact) < 1e-6
    untouched = [row for row, slot in enumerate(p.slots) if slot not in p.spans]
    assert torch.equal(found[untouched], p.y[untouched])


@pytest.mark.parametrize("shape", SHAPES)
def test_mix_equals_its_reference_and_float64(shape):
    p = make_problem(*shape)
    exact = mix_exact(p)
    found = p.y.clone()
    assert mix(found, p.x, *p.mixed) is found
    assert error_of(mix_reference(p.y, p.x, *p.mixed), exact) < 1e-6
    assert error_of(found, exact) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["sgmv", "mix"])
def test_in_half_precision_an_op_is_no_worse_than_torch_one_product_after_the_other(op, dtype):
    p = make_problem(37, 16, 128, 96, "distinct").to(dtype)
    exact = sgmv_exact(p) if op == "sgmv" else mix_exact(p)
    found, plain = p.y.clone(), p.y.clone()
    if op == "sgmv":
        sgmv(found, p.x, *p.one_hot)
        for start, stop, slot in segments(p.slots):
            first, last = p.spans.get(slot, (0, 0))
            plain[start:stop] += (p.x[start:stop] @ p.a[first:last].T) @ p.b[first:last]
    else:
        mix(found, p.x, *p.mixed)
        for adapter in range(NUM_SLOTS):
            mine = p.owner == adapter
            plain += p.weights[:, adapter, None] * ((p.x @ p.a[mine].T) @ p.b[mine])
    assert found.dtype == dtype
    assert error_of(found, exact) <= 1.05 * error_of(plain, exact)


def test_an_op_whose_adapter_is_wrong_does_not_pass():
    """The twin of the tests above: one rank row of one adapter is off by a tenth."""
    p = make_problem(37, 48, 515, 130, "uniform")
    exact, exact_mix = sgmv_exact(p), mix_exact(p)
    p.b[p.spans[2][0]] *= 1.1
    assert error_of(sgmv(p.y.clone(), p.x, *p.one_hot), exact) > 1e-4
    assert error_of(mix(p.y.clone(), p.x, *p.mixed), exact_mix) > 1e-4


def test_mix_adds_in_the_order_of_owner_not_of_adapter():
    p = make_problem(7, 16, 100, 33)
    order = torch.randperm(len(p.owner), generator=torch.Generator().manual_seed(0))
    found = mix(p.y.clone(), p.x, p.a[order], p.b[order], p.owner[order], p.weights)
    assert error_of(found, mix_exact(p)) < 1e-6


def test_mix_with_one_hot_weights_equals_sgmv():
    p = make_problem(37, 16, 100, 33, "distinct")
    p.weights = torch.nn.functional.one_hot(torch.tensor(p.slots), NUM_SLOTS).float()
    p.weights[:, 1] = 0  # slot 1 has no span
    assert error_of(mix(p.y.clone(), p.x, *p.mixed), sgmv_exact(p)) < 1e-6


@pytest.mark.parametrize("num_rows", [0, 3])
def test_nothing_to_add_leaves_y_bitwise(num_rows):
    y, x = torch.randn(num_rows, 6), torch.randn(num_rows, 5)
    empty_a, empty_b = torch.zeros(0, 5), torch.zeros(0, 6)
    owner = torch.zeros(0, dtype=torch.int64)
    assert torch.equal(mix(y.clone(), x, empty_a, empty_b, owner, torch.ones(num_rows, 2)), y)
    for found in ((), segments([4] * num_rows)):
        plan = plan_rows(found, num_rows, "cpu")
        for op in (sgmv, bgmv):
            assert torch.equal(op(y.clone(), x, empty_a, empty_b, plan, SpanTable()), y)


def test_an_op_writes_through_a_strided_view():
    p = make_problem(7, 4, 10, 6, "identical")
    wide = torch.zeros(7, 20)
    wide[:, 3:9] = p.y
    sgmv(wide[:, 3:9], p.x, *p.one_hot)
    assert error_of(wide[:, 3:9], sgmv_exact(p)) < 1e-6
    assert not wide[:, :3].any() and not wide[:, 9:].any()


@pytest.mark.parametrize(
    "given",
    [
        (Segment(0, 2, 1), Segment(1, 3, 2)),
        (Segment(2, 3, 1), Segment(0, 1, 2)),
        (Segment(1, 1, 0),),
        (Segment(0, 5, 0),),
        (Segment(-1, 2, 0),),
    ],
    ids=["overlapping", "unsorted", "empty", "past the rows", "before the rows"],
)
def test_segments_that_do_not_fit_are_refused(given):
    with pytest.raises(ValueError, match=r"op: Segment\(.*4 rows"):
        check_segments("op", given, 4)


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([], []),
        ([-1, -1], []),
        ([0], [(0, 1, 0)]),
        ([3, 3, -1, 3], [(0, 2, 3), (3, 4, 3)]),
        ([1, 2, 2, -1, -1, 1], [(0, 1, 1), (1, 3, 2), (5, 6, 1)]),
    ],
)
def test_segments_are_the_runs_of_equal_slots(slots, expected):
    assert [tuple(segment) for segment in segments(slots)] == expected
    check_segments("op", segments(slots), len(slots))


def test_a_slot_below_the_base_is_refused():
    with pytest.raises(ValueError, match="row 1 has slot -2; slots start at -1"):
        segments([0, -2])


# scalings


def scalings_exact(logits: Tensor, softmax: bool, temperature: float, top_k: int | None, softmax_topk: bool) -> Tensor:
    """One token and site at a time, in Python's floats."""
    out = torch.zeros(logits.shape, dtype=torch.float64)
    for index, row in enumerate(logits.double().reshape(-1, logits.shape[-1])):
        values = row.tolist()
        if softmax:
            peak = max(values)
            powers = [2.718281828459045 ** ((v - peak) / temperature) for v in values]
            values = [power / sum(powers) for power in powers]
        kept = sorted(range(len(values)), key=lambda i: -values[i])[: top_k or len(values)]
        if softmax_topk:
            powers = {i: 2.718281828459045 ** values[i] for i in kept}
            values = [powers.get(i, 0.0) / sum(powers.values()) for i in range(len(values))]
        out.reshape(-1, logits.shape[-1])[index, kept] = torch.tensor([values[i] for i in kept], dtype=torch.float64)
    return out


@pytest.mark.parametrize("softmax_topk", [False, True])
@pytest.mark.parametrize("top_k", [None, 1, 2, 9])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 4), (2, 5, 3)])
def test_scalings_equal_the_formula(shape, softmax, temperature, top_k, softmax_topk):
    logits = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = scalings(logits, softmax=softmax, temperature=temperature, top_k=top_k, softmax_topk=softmax_topk)
    assert found.dtype == torch.float32 and found.shape == logits.shape
    assert (found - scalings_exact(logits, softmax, temperature, top_k, softmax_topk)).abs().max() < 1e-6


def test_scalings_are_float32_whatever_the_classifier_ran_in():
    logits = torch.randn(4, 2, 3)
    assert torch.equal(scalings(logits.bfloat16()), scalings(logits.bfloat16().float()))


def test_top_k_keeps_k_even_of_equal_weights():
    assert (keep_top_k(torch.full((2, 3, 4), 0.25), 2) > 0).sum(-1).eq(2).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "temperature must be above 0, not 0.0"),
        ({"temperature": -1.0}, "temperature must be above 0"),
        ({"temperature": float("nan")}, "temperature must be above 0"),
        ({"top_k": 0}, "top_k must be at least 1, not 0"),
    ],
)
def test_scalings_refuse_settings_that_mean_nothing(settings, message):
    with pytest.raises(ValueError, match=f"scalings: {message}"):
        scalings(torch.zeros(1, 1, 3), **settings)


def test_costs_grow_with_rows_and_true_rank_and_count_what_is_there():
    spans = {0: (0, 8), 1: (8, 16), 2: (16, 17), 5: (17, 273)}

    def cost(slots):
        return sgmv_op.cost(plan_rows(segments(slots), len(slots), "cpu"), spans, 64, 32, 4)

    one = cost([0])
    assert one.flops == 2 * 8 * (64 + 32) and one.num_bytes == 4 * (8 * (64 + 32) + 64 + 2 * 32)
    assert cost([0, 0, 0]).flops == 3 * one.flops
    assert cost([0, 1]).num_bytes == 2 * one.num_bytes
    assert cost([0, 1, 0]).num_bytes == 2 * one.num_bytes + 4 * (64 + 2 * 32)
    assert cost([2]).flops == one.flops / 8
    assert cost([-1, 0, 3, -1]) == one  # base rows and rows without a delta here cost nothing
    assert bgmv_op.cost(plan_rows(segments([0, 1]), 2, "cpu"), spans, 64, 32, 4) == cost([0, 1])
    mixed = mix_op.cost(1, 8, 64, 32, 4)
    assert mixed.num_bytes == one.num_bytes and mixed.flops == one.flops + 8
