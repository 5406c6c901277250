"""What check, bench and compile ask of an op, and the check itself: against float64, and a twin that must not pass.

An op's `run` binds operands first and returns what is to be timed: plans and span tables belong to a step, not a site.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from lora_kernels import triton_support
from lora_kernels.checks import Cost
from lora_kernels.problems import row_error, slots_for

# rows of x are rounded on their way through the shrink, and y once more: two roundings, and room for one more
LIMITS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class ModelShape:
    """Widths of one family of models: hidden, intermediate and key/value features, sites with adapters, and heads."""

    hidden: int
    intermediate: int
    kv: int
    num_sites: int
    num_heads: int
    num_kv_heads: int

    @property
    def head_dim(self) -> int:
        """Features of a key/value head."""
        return self.kv // self.num_kv_heads

    @property
    def layers(self) -> dict[str, tuple[int, int]]:
        """In and out features of the distinct linear layers: q (and o), kv, up (and gate), down."""
        return {
            "q": (self.hidden, self.hidden), "kv": (self.hidden, self.kv),
            "up": (self.hidden, self.intermediate), "down": (self.intermediate, self.hidden),
        }  # fmt: skip


SHAPES = {
    "smol": ModelShape(576, 1536, 192, 210, 9, 3),
    "7b": ModelShape(4096, 14336, 1024, 224, 32, 8),
    "70b": ModelShape(8192, 28672, 1024, 560, 64, 8),
}
LAYERS = ("q", "kv", "up", "down")


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
    context: int = 1024
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
        ahead: axis -> values of the cases that are compiled ahead of time, beside the shapes, layers and ranks;
            empty for an op that is torch's products on every device.
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
    path = path_of(problem.operand) if op.ahead else "torch"
    return Checked(
        op.name, path, name, found, row_error(reference, exact), wrong, op.limits[dtype]
    )


def path_of(operand: Tensor) -> str:
    """Return what an op with kernels does with this operand: "triton", "interpreter" or "torch"."""
    if not triton_support.runs_triton(operand):
        return "torch"
    return "triton" if operand.is_cuda else "interpreter"


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
