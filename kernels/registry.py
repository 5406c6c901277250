"""The ops by name: how to make a problem of one, run it, know its exact result, and count its cost.

Checks, benches and the ahead-of-time compilation go through this table, so an op that joins it has all three. An op's
`run` binds operands first and returns what is to be timed: plans and span tables belong to a step, not to a site.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from lora_kernels import bgmv, mix, scalings, sgmv, triton_support
from lora_kernels.checks import Cost
from lora_kernels.problems import HeadProblem, RowsProblem, make_problem, row_error, slots_for
from lora_kernels.segments import SpanTable, plan_rows

# rows of x are rounded on their way through the shrink, and y once more: two roundings, and room for one more
LIMITS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class ModelShape:
    """Widths of one family of models: hidden, intermediate and key/value features, and sites with adapters."""

    hidden: int
    intermediate: int
    kv: int
    num_sites: int

    @property
    def layers(self) -> dict[str, tuple[int, int]]:
        """In and out features of the distinct linear layers: q (and o), kv, up (and gate), down."""
        return {
            "q": (self.hidden, self.hidden), "kv": (self.hidden, self.kv),
            "up": (self.hidden, self.intermediate), "down": (self.intermediate, self.hidden),
        }  # fmt: skip


SHAPES = {
    "smol": ModelShape(576, 1536, 192, 210),
    "7b": ModelShape(4096, 14336, 1024, 224),
    "70b": ModelShape(8192, 28672, 1024, 560),
}
LAYERS = ("q", "kv", "up", "down")
HEAD_ADAPTERS = 9


def known(what: str, name: str, choices: Iterable[str]) -> str:
    """Return `name` if it is one of `choices`.

    Raises:
        ValueError: it is none; with the nearest of them.
    """
    if name in choices:
        return name
    near = difflib.get_close_matches(name, list(choices), 1, 0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{what} must be one of {', '.join(choices)}, not {name!r}{hint}")


@dataclass(frozen=True)
class Case:
    """What a problem is made from; an op reads the fields it names in its `axes`, and every op the others.

    Raises:
        ValueError: an unknown shape, layer or popularity, with the nearest name.
    """

    num_rows: int = 32
    rank: int = 16
    shape: str = "7b"
    layer: str = "up"
    popularity: str = "uniform"
    top_k: int | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self):
        known("shape", self.shape, SHAPES)
        known("layer", self.layer, LAYERS)
        slots_for(self.popularity, 1)

    @property
    def model(self) -> ModelShape:
        """The widths of `shape`."""
        return SHAPES[self.shape]

    @property
    def widths(self) -> tuple[int, int]:
        """In and out features of `layer`."""
        return self.model.layers[self.layer]


class Problem(Protocol):
    """What an op's problem must offer."""

    @property
    def operand(self) -> Tensor:
        """The operand whose dtype and device are the op's."""

    def exact(self) -> Tensor:
        """Return the result in float64."""

    def corrupted(self) -> Problem | None:
        """Return a copy with a wrong operand, whose result must not pass; None where none could show."""


@dataclass(frozen=True)
class Op:
    """One op.

    Attributes:
        name: the op's and its file's.
        make_problem: from a case.
        run: binds a problem's operands and returns the call.
        reference: the float32 specification's result.
        cost: least work of a problem.
        axes: fields of `Case` that make a difference to the op, besides rows, shape, dtype, device and seed.
        small: problems for a check that must be quick, odd in every width, of a dtype on a device.
        ahead: axis -> values of the cases that are compiled ahead of time, beside the shapes, layers and ranks.
        limits: largest error of a row, relative to the RMS of the result, by dtype of the operands.
    """

    name: str
    make_problem: Callable[[Case], Problem]
    run: Callable[[Problem], Callable[[], Tensor]]
    reference: Callable[[Problem], Tensor]
    cost: Callable[[Problem], Cost]
    axes: tuple[str, ...]
    small: Callable[[torch.dtype, str], list[Problem]]
    ahead: dict[str, tuple]
    limits: dict[torch.dtype, float] = field(default_factory=lambda: LIMITS)


@dataclass(frozen=True)
class Checked:
    """What a check found: errors are the largest of a row, relative to the RMS of the exact result."""

    op: str
    path: str
    dtype: str
    error: float
    reference_error: float
    twin_error: float | None
    limit: float

    @property
    def is_right(self) -> bool:
        """Op and reference stay within the limit, and the corrupted twin (where there is one) does not."""
        is_caught = self.twin_error is None or not self.twin_error <= self.limit
        return self.error <= self.limit and self.reference_error <= self.limit and is_caught

    def __str__(self) -> str:
        if self.is_right:
            return f"{self.op} ({self.path}, {self.dtype}): error {self.error:.1e}, at most {self.limit:.0e}"
        if not self.error <= self.limit:
            return f"{self.op} ({self.path}, {self.dtype}) is wrong by {self.error:.1e}, more than {self.limit:.0e}"
        if not self.reference_error <= self.limit:
            return f"{self.op}: its reference is wrong by {self.reference_error:.1e}, more than {self.limit:.0e}"
        return f"{self.op}: a wrong operand changes the result by {self.twin_error:.1e} only, so the check sees nothing"


def check(op: Op, problem: Problem) -> Checked:
    """Run an op on a problem and hold it against float64, its reference, and a twin with a wrong operand."""
    exact, reference, twin = problem.exact(), op.reference(problem), problem.corrupted()
    found = row_error(op.run(problem)(), exact)
    wrong = None if twin is None else row_error(op.run(twin)(), exact)
    dtype = problem.operand.dtype
    name = str(dtype).removeprefix("torch.")
    return Checked(
        op.name, path_of(problem.operand), name, found, row_error(reference, exact), wrong, op.limits[dtype]
    )


def path_of(operand: Tensor) -> str:
    """Return what an op does with this operand: "triton", "interpreter" or "torch"."""
    if not triton_support.runs_triton(operand):
        return "torch"
    return "triton" if operand.is_cuda else "interpreter"


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
    )
}  # fmt: skip


def cases_of(op: Op, case: Case, **axes: tuple) -> Iterator[Case]:
    """Yield `case` with every combination of `axes` (field -> values); axes that an op does not read count once.

    Raises:
        ValueError: an axis without values.
    """
    for name, values in axes.items():
        if not values:
            raise ValueError(f"{name} has no values")
    always = {"num_rows", "shape", "dtype"}
    read = {name: values if name in always or name in op.axes else values[:1] for name, values in axes.items()}
    for values in itertools.product(*read.values()):
        yield replace(case, **dict(zip(read, values, strict=True)))
