"""bgmv, sgmv and mix on a GPU: bfloat16, graphs, no waiting: `pytest -m gpu tests/test_kernels_gpu.py`.

The same mathematics runs in test_kernels_triton.py, on a GPU too where there is one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lora_kernels import triton_support
from lora_kernels.bgmv import bgmv
from lora_kernels.mix import mix
from lora_kernels.problems import RowsProblem, error_ratio, make_problem
from lora_kernels.segments import SpanTable, plan_rows, segments
from lora_kernels.sgmv import sgmv

pytestmark = pytest.mark.gpu
OPS = {"bgmv": bgmv, "sgmv": sgmv, "mix": mix}


def problem(op: str, num_rows: int = 32, rank=(16, 64, 8), popularity: str = "uniform") -> RowsProblem:
    return make_problem(op, num_rows, rank, 4096, 1024, popularity, torch.bfloat16, "cuda")


def arguments(p: RowsProblem) -> tuple:
    if p.op == "mix":
        return p.a, p.b, p.owner, p.weights
    return p.a, p.b, plan_rows(p.segments, len(p.slots), "cuda"), SpanTable(p.spans)


def run(p: RowsProblem) -> Tensor:
    return OPS[p.op](p.y.clone(), p.x, *arguments(p))


@pytest.mark.parametrize("op", list(OPS))
@pytest.mark.parametrize("num_rows", [1, 17, 32, 300])
@pytest.mark.parametrize("rank", [16, (256, 3, 64)])
def test_bfloat16_is_no_worse_than_torch(op, num_rows, rank, monkeypatch):
    p = problem(op, num_rows, rank)
    found = run(p)
    monkeypatch.setattr(triton_support, "runs_triton", lambda x: False)
    for module in ("bgmv", "sgmv", "mix"):
        monkeypatch.setattr(f"lora_kernels.{module}.runs_triton", lambda x: False)
    assert not found.isnan().any()
    assert error_ratio(found, p.exact()) <= 1.05 * error_ratio(run(p), p.exact())


@pytest.mark.parametrize("op", list(OPS))
def test_a_replay_equals_a_run(op):
    p = problem(op)
    expected, given = run(p), arguments(p)
    y = p.y.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        OPS[op](y, p.x, *given)
    for _ in range(3):
        y.copy_(p.y)
        graph.replay()
        assert torch.equal(y, expected)


def test_a_captured_bgmv_serves_another_plan_and_other_spans():
    p = problem("bgmv", rank=16)
    plan, spans = plan_rows(p.segments, 32, "cuda"), SpanTable(p.spans)
    bgmv(p.y.clone(), p.x, p.a, p.b, plan, spans)
    y, generation = p.y.clone(), spans.generation
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bgmv(y, p.x, p.a, p.b, plan, spans)
    other = replace(p, slots=tuple(reversed(p.slots[:20])) + (-1,) * 12, spans=p.spans | {0: p.spans[1]})
    plan.slot_of_row.copy_(plan_rows(segments(other.slots), 32, "cuda").slot_of_row)
    spans.set(0, *other.spans[0])
    assert spans.generation == generation
    y.copy_(p.y)
    graph.replay()
    assert torch.equal(y, run(other))


@pytest.mark.parametrize("op", list(OPS))
def test_a_step_waits_for_nothing(op):
    p = problem(op)
    run(p)
    given, y = arguments(p), p.y.clone()
    OPS[op](y, p.x, *given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        if op == "mix":
            mix(y, p.x, *given)
        else:
            plan = plan_rows(p.segments, len(p.slots), "cuda")
            given[3].set(2, *p.spans[2])
            OPS[op](y, p.x, p.a, p.b, plan, given[3])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not y.isnan().any()


@pytest.mark.parametrize("op", list(OPS))
def test_a_large_step_equals_float64(op):
    p = make_problem(op, 5000, (16, 200), 1000, 777, "zipf:1.5", torch.bfloat16, "cuda", num_adapters=9)
    assert error_ratio(run(p), p.exact()) < 4e-3
