"""Where rows and factors lie, what a launch is, and what runs without Triton: `pytest tests/test_kernels_plans.py`."""

from __future__ import annotations

import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_kernels import triton_support
from lora_kernels.bgmv import bgmv
from lora_kernels.mix import mix
from lora_kernels.segments import TILE_ROWS, Segment, SpanTable, plan_rows, segments
from lora_kernels.sgmv import sgmv
from lora_kernels.triton_support import Launch, interpreting, recording, runs_triton

META = torch.device("meta")


@given(st.lists(st.tuples(st.integers(-1, 4), st.integers(1, 90)), max_size=6))
def test_a_plan_says_the_same_in_rows_segments_and_tiles(runs):
    slots = [slot for slot, count in runs for _ in range(count)]
    plan = plan_rows(segments(slots), len(slots), "cpu")
    assert plan.slot_of_row.tolist() == slots and plan.slot_of_row.dtype == plan.tiles.dtype == torch.int32
    assert plan.num_rows == len(slots) and plan.segments == segments(slots)
    assert plan.slots == tuple(dict.fromkeys(slot for slot in slots if slot >= 0))
    assert plan.max_slot == max(slots, default=-1)
    longest = max((stop - start for start, stop, _ in plan.segments), default=0)
    assert plan.is_decode == (longest <= 4)
    assert plan.tile_rows in (16, 32, TILE_ROWS) and plan.tile_rows >= min(longest, TILE_ROWS)
    covered = [-1] * len(slots)
    for start, stop, slot in plan.tiles.tolist():
        assert 0 < stop - start <= plan.tile_rows and set(covered[start:stop]) == {-1}
        assert any(s.start <= start and stop <= s.stop and s.slot == slot for s in plan.segments)
        covered[start:stop] = [slot] * (stop - start)
    assert covered == slots


def test_a_plan_of_no_rows_has_no_tiles():
    plan = plan_rows((), 0, "cpu")
    assert plan.slot_of_row.shape == (0,) and plan.tiles.shape == (0, 3) and plan.slots == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((Segment(0, 2, 1), Segment(1, 3, 2)), r"plan_rows: Segment\(start=1, .*4 rows"),
        ((Segment(0, 5, 1),), "leaves the 4 rows"),
        ((Segment(2, 3, 0), Segment(0, 1, 0)), "overlaps its neighbour"),
        ((Segment(0, 1, -1),), r"slot=-1\) names no slot: slots start at 0"),
        ((Segment(0, 1, -2),), "names no slot"),
    ],
)
def test_segments_that_make_no_plan_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        plan_rows(given, 4, "cpu")


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=20))
def test_a_device_table_follows_its_spans(changes):
    table, expected = SpanTable(), {}
    cpu = torch.device("cpu")
    for slot, first, rank, is_drop in changes:
        before = (table.generation, table.device_table(cpu).data_ptr(), table.max_rank)
        if is_drop:
            table.drop(slot)
            expected.pop(slot, None)
        else:
            table.set(slot, first, first + rank)
            expected[slot] = (first, first + rank)
        rows = table.device_table(cpu)
        assert rows.dtype == torch.int32 and len(rows) > max(expected, default=0)
        assert [tuple(row) for row in rows.tolist()] == [expected.get(i, (0, 0)) for i in range(len(rows))]
        is_same = (rows.data_ptr(), table.max_rank) == before[1:]
        assert is_same or table.generation != before[0]
    assert dict(table) == expected and len(table) == len(expected)
    ranks = [last - first for first, last in expected.values()]
    assert (table.max_rank, table.total_rank) == (max(ranks, default=0), sum(ranks))
    assert table.stop == max((last for _, last in expected.values()), default=0)


def test_a_captured_table_stays_where_it_is():
    spans = SpanTable({0: (0, 4)})
    table, generation = spans.device_table(torch.device("cpu")), spans.generation
    spans.set(3, 4, 8)
    spans.drop(0)
    assert table[3].tolist() == [4, 8] and table[0].tolist() == [0, 0] and spans.generation == generation
    spans.set(1, 8, 13)
    assert spans.generation != generation  # the rank that launches were cut for has grown


@pytest.mark.parametrize(("slot", "first", "last"), [(-1, 0, 1), (0, -1, 1), (0, 3, 2)])
def test_a_span_that_is_none_is_refused(slot, first, last):
    spans = SpanTable()
    with pytest.raises(ValueError, match=f"spans: slot {slot} cannot have rank rows {first} to {last}"):
        spans.set(slot, first, last)
    assert not spans


def test_a_table_made_in_inference_mode_can_be_written_outside():
    spans = SpanTable({0: (0, 4)})
    with torch.inference_mode():
        table = spans.device_table(torch.device("cpu"))
    spans.set(1, 4, 5)
    assert table[1].tolist() == [4, 5]


# launches


def launches_of(op: str, num_rows: int, rank: int, in_features: int, out_features: int, dtype=torch.bfloat16):
    """Return what an op launches for rows of one adapter each (bgmv), of one for all (sgmv), of 4 mixed (mix)."""

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=META)

    count = num_rows if op == "bgmv" else 4
    y, x = tensor(num_rows, out_features), tensor(num_rows, in_features)
    a, b = tensor(count * rank, in_features), tensor(count * rank, out_features)
    with recording() as launches:
        if op == "mix":
            mix(y, x, a, b, tensor(len(a), dtype=torch.int64), tensor(num_rows, 4, dtype=torch.float32))
        else:
            slots = list(range(num_rows)) if op == "bgmv" else [1] * num_rows
            spans = SpanTable({slot: (slot * rank, (slot + 1) * rank) for slot in range(count)})
            {"bgmv": bgmv, "sgmv": sgmv}[op](y, x, a, b, plan_rows(segments(slots), num_rows, META), spans)
    return launches


@pytest.mark.parametrize("op", ["bgmv", "sgmv", "mix"])
@pytest.mark.parametrize("num_rows", [1, 32, 512, 4096])
def test_a_recorded_launch_is_what_the_compiler_needs(op, num_rows):
    for launch in launches_of(op, num_rows, 24, 515, 4096):
        assert list(launch.signature) == launch.kernel.arg_names
        assert set(launch.constexprs) == {name for name, kind in launch.signature.items() if kind == "constexpr"}
        names = list(launch.signature)
        aligned = {names[index] for (index,) in launch.attrs}
        assert {name for name in names if launch.signature[name].startswith("*")} <= aligned
        assert "in_features" not in aligned and ("out_features" in aligned) == ("out_features" in names)
        assert all(0 < extent < 2**16 for extent in launch.grid[1:])  # what CUDA allows of the later axes


def test_a_number_of_one_is_a_constant_as_in_triton():
    launch = Launch("x", None, (1,), {"n": 1, "m": 16, "big": 2**40, "f": 0.5}, {"BLOCK": 2}, {})
    assert launch.signature == {"n": "constexpr", "m": "i32", "big": "i64", "f": "fp32", "BLOCK": "constexpr"}
    assert launch.constexprs == {"n": 1, "BLOCK": 2}
    assert launch.attrs == {(1,): [["tt.divisibility", 16]], (2,): [["tt.divisibility", 16]]}


@pytest.mark.parametrize("widths", [(4096, 4096), (4096, 14336), (14336, 4096), (8192, 28672)])
def test_decode_of_a_large_layer_fills_a_card(widths):
    """132 multiprocessors of an H100; a mixture's factors are a megabyte or two, which fewer programs read as fast."""
    for launch in launches_of("bgmv", 32, 16, *widths):
        assert launch.num_programs >= 2 * 132
    for launch in launches_of("mix", 32, 16, *widths):
        assert launch.num_programs >= 32 or launch.label == "mix.sum"


def test_an_adapter_that_is_only_loaded_widens_no_partial_sums():
    y, x = torch.empty(40, 64, device=META), torch.empty(40, 64, device=META)
    a, b = torch.empty(264, 64, device=META), torch.empty(264, 64, device=META)
    with recording() as launches:
        sgmv(y, x, a, b, plan_rows(segments([0] * 40), 40, META), SpanTable({0: (0, 8), 1: (8, 264)}))
    assert {launch.args["h_stride"] for launch in launches if "h_stride" in launch.args} == {16}


# paths


def cuda_tensor(index: int) -> SimpleNamespace:
    return SimpleNamespace(is_cuda=True, device=torch.device("cuda", index))


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(triton_support, "_state", triton_support._State())
    triton_support._works_on.cache_clear()
    yield
    triton_support._works_on.cache_clear()


def test_without_triton_a_gpu_runs_torch_and_says_so_once(fresh, monkeypatch):
    monkeypatch.setattr(triton_support, "triton", None)
    with pytest.warns(UserWarning, match=r"Triton is not installed .* plain torch operations") as seen:
        assert not runs_triton(cuda_tensor(0)) and not runs_triton(cuda_tensor(1)) and not runs_triton(cuda_tensor(0))
    assert len(seen) == 1


def test_a_triton_that_cannot_launch_runs_torch_and_names_the_reason(fresh, monkeypatch):
    class Broken:
        def __getitem__(self, grid):
            raise RuntimeError("no C compiler was found\nand more")

    monkeypatch.setattr(triton_support, "_probe_kernel", Broken())
    monkeypatch.setattr(torch.cuda, "device", lambda device: warnings.catch_warnings())
    monkeypatch.setattr(torch, "zeros", lambda *shape, **kwargs: None)
    sentence = r"Triton cannot run on cuda:0 \(RuntimeError: no C compiler was found\): adapters"
    with pytest.warns(UserWarning, match=sentence) as seen:
        assert not runs_triton(cuda_tensor(0)) and not runs_triton(cuda_tensor(0))
    assert len(seen) == 1


def test_a_cpu_runs_torch_without_a_word_unless_interpreting(fresh):
    x = torch.zeros(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not runs_triton(x)
        if not torch.cuda.is_available():
            with interpreting():
                assert runs_triton(x)
            assert not runs_triton(x)


def test_ops_import_and_run_where_triton_is_missing(tmp_path):
    code = """
import sys, warnings
warnings.simplefilter("error")
sys.modules["triton"] = None
import torch
from lora_kernels import bgmv, mix, segments, sgmv, triton_support
x, a, b = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4, 5)
plan, spans = segments.plan_rows(segments.segments([0, -1]), 2, "cpu"), segments.SpanTable({0: (0, 4)})
for op in (bgmv.bgmv, sgmv.sgmv):
    print(op(torch.zeros(2, 5), x, a, b, plan, spans).sum().item())
print(mix.mix(torch.zeros(2, 5), x, a, b, torch.zeros(4, dtype=torch.int64), torch.ones(2, 1)).sum().item())
for guard in (triton_support.interpreting, triton_support.recording):
    try:
        guard().__enter__()
    except RuntimeError as error:
        print("Triton" in str(error))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["60.0", "60.0", "120.0", "True", "True"], done.stderr
