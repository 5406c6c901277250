"""What every op asks of Triton: whether it can run here, how a kernel is launched, and what a launch looked like.

Contract: ops launch through `launch` only. So that a launch can be compiled ahead of time exactly as it would run,
`recording()` notes launches instead of making them; operands may then be on the `meta` device:

    with recording() as launches:
        bgmv(y, x, a, b, plan, spans)               # meta tensors: shapes and dtypes, no memory
    for item in launches:
        source = ASTSource(item.kernel, item.signature, item.constexprs, item.attrs)
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options=item.options)
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS and Windows have no Triton
    triton = tl = None

# programs that fill a large card: 4 of 4 warps on each of an H100's 132 multiprocessors
PROGRAMS = 528
_POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float64: "*fp64",
             torch.int32: "*i32", torch.int64: "*i64"}  # fmt: skip


def jit(function: Callable) -> Callable:
    """Return `triton.jit(function)`; the function itself where there is no Triton, so that modules import."""
    return function if triton is None else triton.jit(function)


@dataclass
class _State:
    interpreting: bool = False
    warned: bool = False
    recorded: list[Launch] | None = field(default=None)


_state = _State()


@dataclass(frozen=True)
class Launch:
    """One launch: what `triton.compile` needs to build it, and the grid it would run on.

    Attributes:
        label: op and stage, "bgmv.shrink".
        kernel: the jit function.
        grid: programs along each axis.
        args: the arguments in order: tensors and numbers.
        blocks: the constexprs, which follow them.
        options: num_warps and num_stages.
    """

    label: str
    kernel: Callable
    grid: tuple[int, ...]
    args: dict[str, object]
    blocks: dict[str, object]
    options: dict[str, int]

    @property
    def signature(self) -> dict[str, str]:
        """Type of each argument as Triton's JIT would choose it: an int of 1 is a constant there."""
        return {name: _type(value) for name, value in self.args.items()} | dict.fromkeys(self.blocks, "constexpr")

    @property
    def constexprs(self) -> dict[str, object]:
        """Values of the arguments whose type is constexpr."""
        return {name: value for name, value in self.args.items() if _type(value) == "constexpr"} | self.blocks

    @property
    def attrs(self) -> dict[tuple[int], list]:
        """Divisibility by 16, of pointers (torch aligns them) and of ints that have it."""
        aligned = (isinstance(v, Tensor) or (isinstance(v, int) and v % 16 == 0) for v in self.args.values())
        return {(i,): [["tt.divisibility", 16]] for i, is_aligned in enumerate(aligned) if is_aligned}

    @property
    def num_programs(self) -> int:
        """Programs of the grid."""
        return functools.reduce(int.__mul__, self.grid, 1)


def _type(value: object) -> str:
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if value == 1:
        return "constexpr"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def launch(
    label: str, kernel: Callable, grid: tuple[int, ...], args: tuple, blocks: dict[str, object], **options: int
) -> None:
    """Launch `kernel` over `grid`; `args` in the order of its arguments, `blocks` its constexprs."""
    if _state.recorded is not None:
        named = dict(zip(kernel.arg_names, args, strict=False))
        _state.recorded.append(Launch(label, kernel, grid, named, blocks, options))
        return
    # Triton launches on the current device
    with torch.cuda.device_of(args[0]):
        kernel[grid](*args, **blocks, **options)


def runs_triton(x: Tensor) -> bool:
    """Return whether ops on this tensor launch Triton kernels: on CUDA when Triton works, on a CPU in `interpreting()`.

    Where Triton is missing or cannot launch, a CUDA tensor takes the plain torch path, with one warning per process.
    """
    if x.is_cuda:
        return _state.recorded is not None or _works_on(x.device)
    return _state.interpreting or _state.recorded is not None


@contextmanager
def interpreting() -> Iterator[None]:
    """Run kernels on CPU tensors, in Triton's interpreter (about 10 ms a program).

    Not simply where TRITON_INTERPRET is set: there the whole of an engine on a CPU would crawl.

    Raises:
        RuntimeError: Triton is missing or was imported without TRITON_INTERPRET=1.
    """
    if triton is None or not triton.knobs.runtime.interpret:
        raise RuntimeError("Triton's interpreter needs Triton and TRITON_INTERPRET=1 set before it is imported")
    before, _state.interpreting = _state.interpreting, True
    try:
        yield
    finally:
        _state.interpreting = before


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Note launches in the list it gives, instead of making them; operands are left as they are.

    Raises:
        RuntimeError: Triton is missing.
    """
    if triton is None:
        raise RuntimeError("launches are Triton's, and Triton is not installed")
    before, _state.recorded = _state.recorded, []
    try:
        yield _state.recorded
    finally:
        _state.recorded = before


@jit
def _probe_kernel(out_ptr):
    tl.store(out_ptr, 1)


@functools.cache
def _works_on(device: torch.device) -> bool:
    """Launch the smallest kernel once per device: it needs a compiler, a driver and a GPU that Triton knows."""
    if triton is None:
        return _fall_back("Triton is not installed (it comes for Linux)")
    try:
        with torch.cuda.device(device):
            _probe_kernel[(1,)](torch.zeros(1, dtype=torch.int32, device=device))
    except Exception as error:  # whatever Triton, the compiler or the driver raises: the torch path needs none of them
        return _fall_back(f"Triton cannot run on {device} ({type(error).__name__}: {str(error).splitlines()[0]})")
    return True


def _fall_back(reason: str) -> bool:
    if not _state.warned:
        _state.warned = True
        warnings.warn(f"{reason}: adapters use plain torch operations, which are exact but slower", stacklevel=4)
    return False
