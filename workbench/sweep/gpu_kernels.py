"""The sections of the check on a card that need the ops alone: right, as fast as the memory, the same in a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lora_kernels.bench import WrongResult, bench
from lora_kernels.bgmv import bgmv
from lora_kernels.registry import LAYERS, OPS, Case, Op, cases_of, check
from lora_kernels.segments import SpanTable, plan_rows, segments
from workbench.sweep.gpu_check import Record, Setting, cut_short

# the format that models run in comes first
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# decode steps and a chunk of a prompt; what bgmv and sgmv were not made for is left out
_ROWS = {"bgmv": (1, 8, 32), "sgmv": (8, 32, 512)}
_ALL_ROWS = (32, 512, 8, 1)  # the size of the target first
_POPULARITY = ("uniform", "distinct", "half_base")
_RANKS = (16, 64)


def kernels(setting: Setting) -> Iterator[Record]:
    """Yield whether each op is right against float64: odd shapes, then the shapes of 7B and 70B models."""
    for dtype in _DTYPES:
        for op in OPS.values():
            for what, problem in _problems(op, dtype, setting):
                if not setting.has_time():
                    yield cut_short(f"{op.name} in {_word(dtype)}, {what}")
                    return
                yield _checked(op, what, problem, setting)


def roofline(setting: Setting) -> Iterator[Record]:
    """Yield each op's share of the measured copy rate, at the shapes of 7B and then of 70B models."""
    shapes, all_rows = (("smol",), (3,)) if setting.toy else (("7b", "70b"), _ALL_ROWS)
    layers, repeats = (("kv",), 5) if setting.toy else (LAYERS, 30)
    for shape in shapes:
        for rows in all_rows:
            for name in OPS:
                if not setting.toy and rows not in _ROWS.get(name, _ALL_ROWS):
                    continue
                if not setting.has_time():
                    yield cut_short(f"{name} at {shape} and {rows} rows")
                    return
                yield from _shares(name, setting, num_rows=(rows,), shapes=(shape,), layers=layers, repeats=repeats)


def graphs(setting: Setting) -> Iterator[Record]:
    """Yield whether a captured launch replays to the bit what an eager one gives, for other values too."""
    for op in OPS.values():
        if not setting.has_time():
            yield cut_short(op.name)
            return
        yield _replayed(op, op.make_problem(_case(setting, num_rows=3 if setting.toy else 32)), setting)
    if setting.device.type == "cuda":
        yield _other_slots(OPS["bgmv"].make_problem(_case(setting)))


def _shares(name: str, setting: Setting, **axes: Any) -> Iterator[Record]:
    try:
        found = bench([OPS[name]], device=setting.device, **axes)
    except WrongResult as error:
        yield {"ok": False, "op": name, "problem": str(error)}
        return
    shares = ", ".join(f"{each.get('layer', 'head')} {each['share_of_copy']:.0%}" for each in found)
    for number, each in enumerate(found):
        # one line for all layers
        shown = f"{name:<9}{each['shape']:>5}{each['num_rows']:>5} rows, of the copy rate: {shares}"
        yield {"ok": True, **each, "line": None if number else shown}


def _problems(op: Op, dtype: torch.dtype, setting: Setting) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what a problem is, and how to make it: one of 70B's shape is made when it is its turn."""
    for number, problem in enumerate(op.small(dtype, str(setting.device)), 1):
        yield f"odd shape {number}", lambda problem=problem: problem
    sizes = {"shape": ("smol",), "num_rows": (3,)} if setting.toy else {
        "shape": ("7b", "70b"), "num_rows": _ROWS.get(op.name, _ALL_ROWS)
    }
    few = {"shape": sizes["shape"][:1], "num_rows": (32,), "layer": ("q",), "popularity": _POPULARITY, "rank": _RANKS}
    # all layers of all sizes, and then at one size who uses what, and ranks
    axes = [{**sizes, "layer": LAYERS}] + [few] * (not setting.toy)
    for case in dict.fromkeys(case for each in axes for case in cases_of(op, _case(setting, dtype=dtype), **each)):
        words = [f"{case.num_rows} rows"] + [f"{axis} {getattr(case, axis)}" for axis in op.axes]
        yield f"{case.shape}, {', '.join(words)}", lambda case=case: op.make_problem(case)


def _checked(op: Op, what: str, make: Callable[[], Any], setting: Setting) -> Record:
    found = check(op, make())
    is_compiled = setting.device.type != "cuda" or found.path == "triton"
    record = {"ok": found.is_right and is_compiled, "op": op.name, "case": what, "dtype": found.dtype,
              "path": found.path, "error": found.error, "limit": found.limit, "twin_error": found.twin_error}
    if not found.is_right:
        record["problem"] = f"{what}: {found}"
    elif not is_compiled:
        record["problem"] = f"{op.name}, {what}: ran in plain torch, as Triton does not run on this card"
    return record


def _replayed(op: Op, problem: Any, setting: Setting) -> Record:
    source = problem.hidden if op.name == "scalings" else problem.x
    target: Tensor | None = getattr(problem, "y", None)
    start = None if target is None else target.clone()
    call = op.run(problem)

    def restore() -> None:
        if target is not None:
            target.copy_(start)

    def eager() -> Tensor:
        restore()
        return call().clone()

    first = eager()
    restore()
    replay, out = _captured(call, setting.device)
    restore()
    replay()
    is_same = torch.equal(out(), first)
    source.copy_(source.flip(0) * 0.5)
    second = eager()
    restore()
    replay()
    follows = torch.equal(out(), second) and not torch.equal(first, second)
    record = {"ok": is_same and follows, "op": op.name, "rows": len(source), "captured": setting.device.type == "cuda"}
    if not is_same:
        record["problem"] = f"{op.name}: a replayed graph differs from an eager launch"
    elif not follows:
        record["problem"] = f"{op.name}: a replayed graph does not follow its operands"
    return record


def _other_slots(problem: Any) -> Record:
    """Return whether a captured bgmv serves other slots, once they are copied over those it was captured with."""
    spans, num_rows, device = SpanTable(problem.spans), len(problem.slots), problem.y.device
    plans = [plan_rows(segments(slots), num_rows, device) for slots in (problem.slots, problem.slots[::-1])]
    y = [problem.y.clone() for _ in range(2)]
    for target, plan in zip(y, plans, strict=True):
        bgmv(target, problem.x, problem.a, problem.b, plan, spans)
    target = problem.y.clone()
    replay, out = _captured(lambda: bgmv(target, problem.x, problem.a, problem.b, plans[0], spans), device)
    plans[0].slot_of_row.copy_(plans[1].slot_of_row)
    target.copy_(problem.y)
    replay()
    is_same = torch.equal(out(), y[1]) and not torch.equal(y[0], y[1])
    record = {"ok": is_same, "op": "bgmv", "rows": num_rows, "captured": True}
    return record if is_same else {**record, "problem": "bgmv: a captured launch does not follow other slots"}


def _captured(call: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], None], Callable[[], Tensor]]:
    """Return how to replay a call and how to read its result; on a CPU a replay is a call."""
    if device.type != "cuda":
        made: list[Tensor] = []

        def again() -> None:
            made[:] = [call()]

        return again, lambda: made[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph.replay, lambda: out


def _case(setting: Setting, **changes: Any) -> Case:
    small = {"shape": "smol", "layer": "kv"} if setting.toy else {}
    return Case(**{"dtype": torch.bfloat16, "device": str(setting.device), **small, **changes})


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
