"""bgmv, sgmv and mix in Triton against float64: `pytest tests/test_kernels_triton.py`.

On a CPU they run in Triton's interpreter, at about 10 ms a program; where there is a GPU they run on it. `torch.empty`
is full of NaN here, so memory that a kernel reads and nobody wrote shows, and so are the factors of adapters that no
row uses.
"""

from __future__ import annotations

import itertools
import math
import random
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lora_kernels import bgmv as bgmv_op
from lora_kernels import tiles
from lora_kernels.bgmv import bgmv
from lora_kernels.mix import mix
from lora_kernels.problems import POPULARITY, RowsProblem, error_ratio, make_problem
from lora_kernels.segments import Segment, SpanTable, plan_rows
from lora_kernels.sgmv import sgmv
from lora_kernels.triton_support import Launch, interpreting, recording

pytestmark = pytest.mark.interpret
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_PROGRAMS = 40
# float16: x, a, b are exact, h is rounded on its way to the tensor cores, and y once
LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3}
ONE_HOT = {"bgmv": bgmv, "sgmv": sgmv}
ABSENT = 3  # a slot without rank rows at this site

RANKS = [1, 4, 7, 8, 16, 48, 64, 96, 128, 256, (256, 1, 17, 64)]
ONE_HOT_FACTORS = {
    "op": list(ONE_HOT),
    "dtype": list(LIMITS),
    "popularity": POPULARITY,
    "rank": RANKS,
    # rows, in, out: an odd number of rows, one row, one feature; several tiles of every axis
    "shape": [(1, 515, 130), (7, 100, 33), (3, 576, 192), (13, 1, 64), (9, 300, 1), (37, 64, 96)],
}
MIX_FACTORS = {
    "dtype": list(LIMITS),
    "ranks": [(1,), (7, 4), (8, 16, 48), (64,), (96, 128), (256,), (256, 1, 17, 64), (3,) * 9],
    "shape": [(1, 515, 130), (7, 100, 33), (3, 576, 192), (17, 300, 1), (67, 64, 96), (131, 33, 64)],
    "weights": ["dense", "constant", "strided", "float16"],
}


def pairwise(factors: dict[str, list]) -> list[dict]:
    """Return cases in which every two values of two factors meet at least once."""
    rng = random.Random(0)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(factors, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    cases = []
    while missing:
        wanted = dict(min(missing))
        drafts = [{k: wanted.get(k, rng.randrange(len(v))) for k, v in factors.items()} for _ in range(100)]
        cases.append(max(drafts, key=lambda case: len(missing.intersection(itertools.combinations(case.items(), 2)))))
        missing.difference_update(itertools.combinations(cases[-1].items(), 2))
    return [{k: factors[k][index] for k, index in case.items()} for case in cases]


def product(factors: dict[str, list]) -> list[dict]:
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]


def name(case: dict) -> str:
    return "-".join(str(value).replace(" ", "").removeprefix("torch.") for value in case.values())


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fill every new uninitialised float tensor with NaN."""
    for name in ("empty", "empty_like"):
        inner = getattr(torch, name)

        def poisoned(*args, inner=inner, **kwargs):
            tensor = inner(*args, **kwargs)
            return tensor.fill_(math.nan) if tensor.is_floating_point() and not tensor.is_meta else tensor

        monkeypatch.setattr(torch, name, poisoned)


@pytest.fixture(autouse=True)
def small_card(monkeypatch):
    """Cut the work for a card that a few programs fill, else the interpreter would take minutes."""
    if DEVICE == "cpu":
        monkeypatch.setattr(tiles, "PROGRAMS", 24)
        monkeypatch.setattr(bgmv_op, "PROGRAMS", 24)
        monkeypatch.setattr(tiles, "_SUM_BLOCK", 2048)
        monkeypatch.setattr(tiles, "_cut", tiles._cut.__wrapped__)  # it remembers how large cards are cut


def launching():
    """On a GPU ops launch as they are; on a CPU they are interpreted."""
    return nullcontext() if DEVICE == "cuda" else interpreting()


def one_hot_problem(op: str, dtype: torch.dtype, popularity: str, rank, shape, **options) -> RowsProblem:
    problem = make_problem(op, shape[0], rank, *shape[1:], popularity, dtype, DEVICE, absent=(ABSENT,), **options)
    for slot, (first, last) in problem.spans.items():
        if slot not in problem.slots:
            problem.a[first:last] = problem.b[first:last] = math.nan
    return problem


def arguments(p: RowsProblem) -> tuple:
    if p.op == "mix":
        return p.a, p.b, p.owner, p.weights
    return p.a, p.b, plan_rows(p.segments, len(p.slots), DEVICE), SpanTable(p.spans)


def launched(p: RowsProblem) -> Tensor:
    """Return y after the op, which must have written to it in place."""
    op, y = {**ONE_HOT, "mix": mix}[p.op], p.y.clone()
    with launching():
        assert op(y, p.x, *arguments(p)) is y
    return y


def recorded(p: RowsProblem) -> list[Launch]:
    with recording() as launches:
        {**ONE_HOT, "mix": mix}[p.op](p.y, p.x, *arguments(p))
    return launches


def assert_right(p: RowsProblem, found: Tensor | None = None) -> None:
    found, exact = launched(p) if found is None else found, p.exact()
    assert found.dtype == p.y.dtype and not found.isnan().any()
    limit, scale = LIMITS[found.dtype], float(exact.abs().max())
    worst = float((found.double() - exact).abs().max())
    assert error_ratio(found, exact) < limit, f"RMS ratio {error_ratio(found, exact):.1e}, worst {worst:.1e}"
    assert worst < 4 * limit * scale, f"worst {worst:.1e} of {scale:.1f}"


def assert_small(launches: list[Launch], max_programs: int = MAX_PROGRAMS) -> None:
    """In the interpreter a large grid would take minutes."""
    assert all(launch.num_programs <= max_programs for launch in launches), [(x.label, x.grid) for x in launches]


def check_one_hot(case: dict, max_programs: int = MAX_PROGRAMS) -> None:
    p = one_hot_problem(**case)
    launches = recorded(p)
    assert_small(launches, max_programs)
    used = [slot for slot in p.slots if slot in p.spans]
    assert bool(launches) == bool(used) or p.op == "bgmv"  # which does not look at the slots on the host
    found = launched(p)
    assert_right(p, found)
    untouched = [row for row, slot in enumerate(p.slots) if slot not in p.spans]
    assert torch.equal(found[untouched], p.y[untouched])


def mix_problem(dtype: torch.dtype, ranks: tuple[int, ...], shape, weights: str) -> RowsProblem:
    num_adapters = len(ranks)
    p = make_problem("mix", shape[0], ranks, *shape[1:], "identical", dtype, DEVICE, num_adapters=num_adapters)
    if weights == "constant":
        return replace(p, weights=p.weights[:1].expand(shape[0], -1))
    if weights == "strided":
        sites = p.weights.new_full((shape[0], 3, num_adapters), math.nan)
        sites[:, 1] = p.weights
        return replace(p, weights=sites[:, 1])
    return replace(p, weights=p.weights.half()) if weights == "float16" else p


def check_mix(case: dict) -> None:
    p = mix_problem(**case)
    assert_small(recorded(p))
    assert_right(p)


@pytest.mark.parametrize("case", pairwise(ONE_HOT_FACTORS), ids=name)
def test_one_hot_rows_equal_float64(case):
    check_one_hot(case)


@pytest.mark.parametrize("case", pairwise(MIX_FACTORS), ids=name)
def test_mixture_rows_equal_float64(case):
    check_mix(case)


@pytest.mark.full
@pytest.mark.parametrize("case", product(ONE_HOT_FACTORS), ids=name)
def test_one_hot_rows_equal_float64_in_every_combination(case):
    check_one_hot(case, 4 * MAX_PROGRAMS)


@pytest.mark.full
@pytest.mark.parametrize("case", product(MIX_FACTORS), ids=name)
def test_mixture_rows_equal_float64_in_every_combination(case):
    check_mix(case)


@pytest.mark.parametrize("factors", [ONE_HOT_FACTORS, MIX_FACTORS], ids=["one-hot", "mix"])
def test_the_cases_cover_every_pair(factors):
    cases = pairwise(factors)
    for a, b in itertools.combinations(factors, 2):
        assert {(str(case[a]), str(case[b])) for case in cases} == {
            (str(x), str(y)) for x, y in itertools.product(factors[a], factors[b])
        }


@pytest.mark.parametrize("op", list(ONE_HOT))
def test_very_uneven_segments_and_neighbours_of_every_kind(op):
    """One row beside 70, base rows between, a slot twice, a slot without a span, ranks 1 and 256."""
    slots = (0,) + (1,) * 70 + (-1,) * 3 + (0, 3) + (2,) * 5
    p = make_problem(op, 81, (256, 1, 40), 40, 60, "identical", torch.float32, DEVICE, num_adapters=3)
    p = replace(p, slots=slots, op=op)
    with recording() as launches:
        ONE_HOT[op](p.y, p.x, *arguments(p))
    assert [launch.grid[0] for launch in launches if launch.label == "sgmv.expand"] in ([], [6])
    assert_right(p)
    found = launched(p)
    assert torch.equal(found[71:74], p.y[71:74]) and torch.equal(found[75], p.y[75])


# twins: what must not pass


@pytest.mark.parametrize("op", ["bgmv", "sgmv", "mix"])
@pytest.mark.parametrize("dtype", list(LIMITS))
def test_a_wrong_factor_does_not_pass(op, dtype):
    p = make_problem(op, 7, (8, 3, 40), 100, 33, "uniform", dtype, DEVICE)
    found = launched(p.corrupted())
    with pytest.raises(AssertionError, match="RMS ratio"):
        assert_right(p, found)


@pytest.mark.parametrize("op", list(ONE_HOT))
def test_a_row_with_the_wrong_slot_does_not_pass(op):
    p = make_problem(op, 7, 8, 100, 33, "distinct", torch.float16, DEVICE)
    found = launched(replace(p, slots=(p.slots[1], *p.slots[1:])))
    with pytest.raises(AssertionError, match="RMS ratio"):
        assert_right(p, found)


def test_a_wrong_weight_does_not_pass():
    p = mix_problem(torch.float16, (8,) * 4, (7, 100, 33), "dense")
    wrong = p.weights.clone()
    wrong[5, 2] += 0.2
    with pytest.raises(AssertionError, match="RMS ratio"):
        assert_right(p, launched(replace(p, weights=wrong)))


# what the ops promise


@pytest.mark.parametrize("op", ["bgmv", "sgmv", "mix"])
def test_a_second_run_gives_the_same_bits(op):
    p = make_problem(op, 5, (48, 5), 2304, 100, "uniform", torch.float16, DEVICE)
    assert any(max(launch.grid[1:]) > 1 for launch in recorded(p) if launch.label.endswith("shrink"))  # splits
    assert torch.equal(launched(p), launched(p))


@pytest.mark.parametrize("op", ["bgmv", "sgmv", "mix"])
def test_permuting_rows_permutes_outputs(op):
    p = make_problem(op, 9, (8, 48, 5), 300, 70, "half_base", torch.float32, DEVICE)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1)).tolist()
    slots = tuple(p.slots[row] for row in order)
    moved = replace(p, y=p.y[order], x=p.x[order], slots=slots, weights=p.weights[order])
    assert_right(moved)
    torch.testing.assert_close(launched(moved), launched(p)[order], rtol=0, atol=1e-6)


def test_bgmv_rows_do_not_know_their_neighbours():
    p = make_problem("bgmv", 6, (8, 48, 5), 300, 70, "distinct", torch.float16, DEVICE)
    together = launched(p)
    for row in (0, 3, 5):
        slots = tuple(slot if index == row else -1 for index, slot in enumerate(p.slots))
        assert torch.equal(launched(replace(p, slots=slots))[row], together[row])


def test_a_base_row_reads_nothing_before_the_table_of_spans():
    p = make_problem("bgmv", 3, 4, 40, 33, "identical", torch.float32, DEVICE)
    spans = SpanTable(p.spans)
    table = spans.device_table(p.x.device)
    around = torch.tensor([[0, 4]] * (len(table) + 2), dtype=torch.int32, device=DEVICE)
    around[1:-1] = table
    spans._tables[p.x.device] = around[1:-1]
    y, plan = p.y.clone(), plan_rows((Segment(1, 2, 0), Segment(2, 3, len(table))), 3, DEVICE)
    with launching():
        bgmv(y, p.x, p.a, p.b, plan, spans)
    assert torch.equal(y[[0, 2]], p.y[[0, 2]]) and not torch.equal(y[1], p.y[1])


@pytest.mark.parametrize("op", ["bgmv", "sgmv", "mix"])
def test_rows_may_lie_apart(op):
    p = make_problem(op, 7, (8, 17), 40, 33, "half_base", torch.float32, DEVICE)
    wide_x, wide_y = p.x.new_full((7, 100), math.nan), p.y.new_full((7, 100), 7.0)
    wide_x[:, 3:43], wide_y[:, 5:38] = p.x, p.y
    factors = [factor.new_full((len(factor), 64), math.nan) for factor in (p.a, p.b)]
    factors[0][:, 1:41], factors[1][:, 2:35] = p.a, p.b
    apart = replace(p, x=wide_x[:, 3:43], a=factors[0][:, 1:41], b=factors[1][:, 2:35])
    y = wide_y[:, 5:38]
    with launching():
        {**ONE_HOT, "mix": mix}[op](y, apart.x, *arguments(apart))
    assert_right(p, y)
    assert (wide_y[:, :5] == 7).all() and (wide_y[:, 38:] == 7).all()


@pytest.mark.parametrize("op", ["bgmv", "sgmv", "mix"])
def test_offsets_beyond_int32_reach_the_right_row(op, tmp_path):
    """Rows 2^30 elements apart: the third is 2^31 elements in, and only the pages that are touched exist."""
    size = 2**31 + 4096
    if DEVICE == "cuda":
        memory = torch.zeros(size, dtype=torch.float16, device=DEVICE)
    else:
        memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=size, dtype=torch.float16)

    def apart(value: Tensor, column: int) -> Tensor:
        far = memory.as_strided(value.shape, (2**30, 1), column)
        return far.copy_(value)

    p = make_problem(op, 3, 1, 40, 33, "distinct", torch.float16, DEVICE, num_adapters=3)
    far = replace(p, y=apart(p.y, 0), x=apart(p.x, 64), a=apart(p.a, 128), b=apart(p.b, 192))
    with launching():
        {**ONE_HOT, "mix": mix}[op](far.y, far.x, *arguments(far))
    assert_right(p, far.y.clone())


@pytest.mark.parametrize("op", ["bgmv", "sgmv", "mix"])
def test_nothing_to_add_launches_nothing(op):
    def launches_of(num_rows: int, rank: int, popularity: str, out_features: int = 6) -> int:
        return len(recorded(make_problem(op, num_rows, rank, 5, out_features, popularity, torch.float32, DEVICE)))

    assert launches_of(3, 2, "uniform") >= 2
    assert launches_of(0, 2, "uniform") == launches_of(3, 0, "uniform") == launches_of(3, 2, "uniform", 0) == 0
    assert op == "mix" or launches_of(3, 2, "all_base") == 0


@pytest.mark.parametrize("op", ["bgmv", "sgmv", "mix"])
def test_no_input_features_add_nothing(op):
    p = make_problem(op, 3, 2, 1, 6, "uniform", torch.float32, DEVICE)
    assert torch.equal(launched(replace(p, x=p.x[:, :0], a=p.a[:, :0])), p.y)


@pytest.mark.parametrize("wrong", [2, -1])
def test_an_owner_that_is_no_adapter_is_refused_or_on_a_gpu_seen_in_its_rows(wrong):
    p = mix_problem(torch.float32, (2, 2), (3, 5, 6), "dense")
    owner = p.owner.clone()
    owner[1] = wrong
    if DEVICE == "cuda":
        assert launched(replace(p, owner=owner)).isnan().all()
    else:
        with pytest.raises(ValueError, match="mix: owner names adapters"):
            launched(replace(p, owner=owner))


def test_a_gradient_that_would_be_lost_is_refused():
    p = make_problem("bgmv", 3, 2, 5, 6, "uniform", torch.float32, DEVICE)
    with pytest.raises(ValueError, match="bgmv: kernels have no gradient"):
        launched(replace(p, a=p.a.clone().requires_grad_()))
