"""The ops by name: how to make a problem of one, run it, know its exact result, and count its cost.

Checks, benches and the ahead-of-time compilation go through these tables, so an op that joins `OPS` has all three.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lora_kernels import bgmv, blend, mix, paged_attention, scalings, sgmv
from lora_kernels.attention_problem import AttentionProblem, attention_problem
from lora_kernels.checks import Cost
from lora_kernels.op import LAYERS, LIMITS, SHAPES, Case, Checked, ModelShape, Op, cases_of, check, known, path_of
from lora_kernels.problems import HeadProblem, RowsProblem, make_problem
from lora_kernels.segments import SpanTable, plan_rows

__all__ = [
    "ALL_OPS", "LAYERS", "LIMITS", "OPS", "SHAPES", "TORCH_OPS", "Case", "Checked", "ModelShape", "Op", "cases_of",
    "check", "known", "ops_on", "path_of",
]  # fmt: skip
HEAD_ADAPTERS = 9


def _rows_case(name: str) -> Callable[[Case], RowsProblem]:
    def make(case: Case) -> RowsProblem:
        # the rows of a mixture share it
        popularity = "identical" if name == "mix" else case.popularity
        operands = case.rank, *case.widths, popularity, case.dtype, case.device, case.seed
        return make_problem(name, case.num_rows, *operands)

    return make


def _small_rows(name: str) -> Callable[[torch.dtype, str], list[RowsProblem]]:
    def make(dtype: torch.dtype, device: str) -> list[RowsProblem]:
        sizes = [(7, (8, 1, 17), 100, 33, "half_base"), (18, (48, 16), 72, 130, "skewed"), (3, 7, 33, 64, "distinct")]
        return [make_problem(name, *size, dtype, device) for size in sizes]

    return make


def _run_one_hot(op: Callable) -> Callable[[RowsProblem], Callable[[], Tensor]]:
    def run(p: RowsProblem) -> Callable[[], Tensor]:
        plan, spans = plan_rows(p.segments, len(p.slots), p.y.device), SpanTable(p.spans)
        return lambda: op(p.y, p.x, p.a, p.b, plan, spans)

    return run


def _one_hot_cost(p: RowsProblem) -> Cost:
    plan = plan_rows(p.segments, len(p.slots), p.y.device)
    return sgmv.cost(plan, p.spans, p.x.shape[1], p.y.shape[1], p.x.element_size())


def _one_hot(name: str, op: Callable, reference: Callable, num_rows: tuple[int, ...]) -> Op:
    return Op(
        name, _rows_case(name), _run_one_hot(op), lambda p: _run_one_hot(reference)(p)(), _one_hot_cost,
        ("rank", "layer", "popularity"), _small_rows(name), {"num_rows": num_rows},
    )  # fmt: skip


def _mix_cost(p: RowsProblem) -> Cost:
    return mix.cost(len(p.x), len(p.a), p.x.shape[1], p.y.shape[1], p.x.element_size())


def _head_case(case: Case) -> HeadProblem:
    settings = {} if case.top_k is None else {"top_k": case.top_k, "softmax_topk": True}
    operands = case.model.hidden, case.model.num_sites, HEAD_ADAPTERS, case.dtype, case.device, case.seed
    return make_problem("scalings", case.num_rows, *operands, **settings)


def _small_heads(dtype: torch.dtype, device: str) -> list[HeadProblem]:
    problems = [make_problem("scalings", *size, dtype, device) for size in ((5, 100, 7, 9), (17, 33, 3, 4))]
    if dtype == torch.float32:
        # torch rounds half-precision logits, and two near the edge of top-k can then change places
        problems.append(make_problem("scalings", 3, 40, 5, 9, dtype, device, top_k=3, softmax_topk=True))
    return problems


def _run_head(p: HeadProblem) -> Callable[[], Tensor]:
    return lambda: scalings.head_scalings(p.hidden, p.weight, p.bias, p.num_adapters, **p.settings)


def _head_cost(p: HeadProblem) -> Cost:
    return scalings.cost(*p.hidden.shape, p.num_sites, p.num_adapters, p.hidden.element_size())


def _attention_case(case: Case) -> AttentionProblem:
    heads = case.model.num_heads, case.model.num_kv_heads, case.model.head_dim
    lengths = [case.context] * case.num_rows
    return attention_problem("paged_attention", lengths, *heads, case.dtype, case.device, case.seed)


def _small_attention(dtype: torch.dtype, device: str) -> list[AttentionProblem]:
    return [
        attention_problem("paged_attention", (33, 0, 1, 300, 16), 6, 2, 20, dtype, device),
        attention_problem("paged_attention", (70, 9), 4, 4, 64, dtype, device, window=21, softcap=5.0),
    ]


def _attention(op: Callable, p: AttentionProblem) -> Callable[[], Tensor]:
    lengths, longest = p.lengths_there, max(p.lengths, default=0)
    return lambda: op(p.x, p.keys, p.values, p.blocks, lengths, longest, **p.settings)


def _attention_cost(p: AttentionProblem) -> Cost:
    (_, num_heads, key), (kv_heads, _, value) = p.x.shape, p.values.shape
    window = p.settings.get("window")
    return paged_attention.cost(list(p.lengths), num_heads, kv_heads, key, value, p.x.element_size(), window)


def _in_one(p: RowsProblem) -> tuple:
    """Return blend's operands of one-hot rows: which rank rows each row has no part in."""
    slots = torch.tensor(p.slots, dtype=torch.int64, device=p.y.device)
    return p.y, p.x, p.a.T[None], p.b[None], None, (slots[:, None] != p.owner)[None]


def _run_blend(p: RowsProblem) -> Callable[[], Tensor]:
    operands = _in_one(p)
    return lambda: blend.blend(*operands)


def _blend_cost(p: RowsProblem) -> Cost:
    return blend.cost(len(p.x), (len(p.a),), p.x.shape[1], p.y.shape[1], p.x.element_size())


def _groups_case(case: Case) -> RowsProblem:
    # groups are of rows with an adapter
    popularity = "uniform" if "base" in case.popularity else case.popularity
    operands = case.rank, *case.widths, popularity, case.dtype, case.device, case.seed
    return make_problem("blend_groups", case.num_rows, *operands)


def _small_groups(dtype: torch.dtype, device: str) -> list[RowsProblem]:
    sizes = [(16, 8, 100, 33, "uniform"), (18, 5, 72, 130, "skewed"), (3, 7, 33, 64, "distinct")]
    return [make_problem("blend_groups", *size, dtype, device) for size in sizes]


def _in_groups(p: RowsProblem) -> tuple:
    """Return blend's operands in groups: a group is a segment, filled up to the largest with its first row."""
    parts = p.segments
    a, b = (torch.stack([side[slice(*p.spans[slot])] for _, _, slot in parts]) for side in (p.a, p.b))
    a = a.transpose(1, 2)
    size = max(stop - start for start, stop, _ in parts)
    gather = [start + i if start + i < stop else start for start, stop, _ in parts for i in range(size)]
    scatter = [group * size + i for group, (start, stop, _) in enumerate(parts) for i in range(stop - start)]
    is_even = len(gather) == len(scatter)
    filling = None if is_even else tuple(torch.tensor(rows, device=p.y.device) for rows in (gather, scatter))
    return p.y, p.x, a, b, None, None, filling


def _run_groups(p: RowsProblem) -> Callable[[], Tensor]:
    operands = _in_groups(p)
    return lambda: blend.blend(*operands)


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        _one_hot("bgmv", bgmv.bgmv, bgmv.bgmv_reference, (1, 16, 64)),
        _one_hot("sgmv", sgmv.sgmv, sgmv.sgmv_reference, (16, 128, 2048)),
        Op(
            "mix", _rows_case("mix"), lambda p: lambda: mix.mix(p.y, p.x, p.a, p.b, p.owner, p.weights),
            lambda p: mix.mix_reference(p.y, p.x, p.a, p.b, p.owner, p.weights), _mix_cost, ("rank", "layer"),
            _small_rows("mix"), {"num_rows": (1, 16, 2048)},
        ),
        Op(
            "scalings", _head_case, _run_head,
            lambda p: scalings.head_scalings_reference(p.hidden, p.weight, p.bias, p.num_adapters, **p.settings),
            _head_cost, ("top_k",), _small_heads, {"num_rows": (1, 16, 2048), "top_k": (None, 2)},
            # logits of half precision, which torch's path rounds, are a rounding of exponents
            LIMITS | {torch.float16: 2e-3, torch.bfloat16: 2e-2},
        ),
        Op(
            "paged_attention", _attention_case, lambda p: _attention(paged_attention.paged_attention, p),
            lambda p: _attention(paged_attention.paged_attention_reference, p)(), _attention_cost, ("context",),
            _small_attention, {"num_rows": (1, 32), "context": (256, 4096)},
        ),
    )
}  # fmt: skip

# a CPU's, where a call costs as much as much arithmetic; a GPU's kernels find each row's adapter by themselves
TORCH_OPS: dict[str, Op] = {
    "blend": Op(
        "blend", _rows_case("blend"), _run_blend, lambda p: blend.blend_reference(*_in_one(p)), _blend_cost,
        ("rank", "layer", "popularity"), _small_rows("blend"), {},
    ),
    "blend_groups": Op(
        "blend_groups", _groups_case, _run_groups, lambda p: blend.blend_reference(*_in_groups(p)), _one_hot_cost,
        ("rank", "layer", "popularity"), _small_groups, {},
    ),
}  # fmt: skip
ALL_OPS = OPS | TORCH_OPS


def ops_on(device: torch.device | str) -> dict[str, Op]:
    """Return the ops that an engine on this device runs: those with kernels on CUDA, all of them elsewhere."""
    return OPS if torch.device(device).type == "cuda" else ALL_OPS
