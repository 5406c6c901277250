"""Compile every kernel ahead of time, without a GPU: `python -m lora_kernels.compile`.

Launches are recorded, not listed: each op runs on operands without memory at the shapes that matter, and what it
would have launched is built for each architecture. A spilled register (STACK above 0) or more shared memory than the
architecture has fails, naming the kernel. kernels/aot.json holds the table and the Triton version it is of.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lora_kernels.options import ARCHITECTURES, COMPILE_EXAMPLE, add_compile_options, parser_for
from lora_kernels.registry import LAYERS, OPS, Case, cases_of, known
from lora_kernels.triton_support import Launch, recording, triton

TABLE = Path(__file__).parent / "aot.json"
# a program's shared memory on an A100, an H100 and a B200
SHARED_BYTES = dict(zip(ARCHITECTURES, (163 * 1024, 227 * 1024, 227 * 1024), strict=True))
# the table is of bfloat16, which models run in; the others must build, too
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHAPES_AHEAD, RANKS_AHEAD = ("7b", "70b"), (8, 16, 64, 256)
# fused multiply-adds are Triton's default; said here, so that an environment variable does not change the table
FP_FUSION = True


@dataclass(frozen=True)
class Built:
    """One kernel built for one architecture, or why it could not be."""

    kernel: str
    sm: int
    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    error: str = ""

    @property
    def problem(self) -> str:
        """What is wrong with it; empty when nothing is."""
        where = f"{self.kernel} on sm_{self.sm}"
        if self.error:
            return f"{where} does not compile: {self.error}"
        if self.stack_bytes:
            return f"{where} spills: {self.stack_bytes} bytes of stack at {self.registers} registers"
        if self.shared_bytes > SHARED_BYTES[self.sm]:
            return f"{where} needs {self.shared_bytes} bytes of shared memory, which has {SHARED_BYTES[self.sm]}"
        return ""


def kernels(ops: Sequence[str] | None = None, dtype: torch.dtype = DTYPES["bf16"]) -> dict[str, Launch]:
    """Return what the ops launch at the shapes that matter, by name; equal builds count once."""
    found: dict[str, Launch] = {}
    for name in ops or OPS:
        op = OPS[known("op", name, OPS)]
        axes = {"rank": RANKS_AHEAD, "shape": SHAPES_AHEAD, "layer": LAYERS} | op.ahead
        for case in cases_of(op, Case(dtype=dtype, device="meta"), **axes):
            with recording() as launches:
                op.run(op.make_problem(case))()
            found |= {name_of(launch): launch for launch in launches}
    return dict(sorted(found.items()))


def name_of(launch: Launch) -> str:
    """Return a kernel's name: op and stage, dtype, constants, warps and stages, and integers not a multiple of 16."""
    pointers = [kind[1:] for kind in launch.signature.values() if kind.startswith("*")]
    # partial sums are float32 in any op: what tells builds apart is the operands' dtype
    dtype = next((kind for kind in pointers if kind in ("bf16", "fp16")), pointers[0])
    constants = [f"{name}={value}" for name, value in launch.constexprs.items()]
    numbers = [i for i, kind in enumerate(launch.signature.values()) if kind in ("i32", "i64")]
    names = list(launch.signature)
    odd = [names[i] for i in numbers if (i,) not in launch.attrs]
    parts = [launch.label, dtype, *constants, *(f"{name}={value}" for name, value in launch.options.items())]
    return " ".join(parts + [f"odd:{','.join(odd)}"] * bool(odd))


def build(wanted: Sequence[tuple[str, int]], jobs: int = 1, dtype: str = "bf16") -> list[Built]:
    """Build `(kernel, sm)` pairs of one dtype in `jobs` child processes, in which Triton does not interpret.

    Raises:
        RuntimeError: a child process died.
    """
    shares = [share for share in (wanted[start::jobs] for start in range(jobs)) if share]
    with ThreadPoolExecutor(max(1, len(shares))) as pool:
        built = [row for rows in pool.map(_in_child, shares, [dtype] * len(shares)) for row in rows]
    place = {pair: index for index, pair in enumerate(wanted)}
    return sorted(built, key=lambda row: place[row.kernel, row.sm])


def _in_child(wanted: Sequence[tuple[str, int]], dtype: str) -> list[Built]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "lora_kernels.compile", "--worker", "--dtype", dtype], input=json.dumps(wanted),
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RuntimeError(f"the process that compiles stopped: {last}")
    return [Built(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def _work(dtype: str) -> int:
    wanted = json.loads(sys.stdin.read())
    launches = kernels(sorted({name.split(".")[0] for name, _ in wanted}), DTYPES[dtype])
    print(json.dumps([asdict(_built(name, launches.get(name), sm)) for name, sm in wanted]))
    return 0


def _built(name: str, launch: Launch | None, sm: int) -> Built:
    if launch is None:
        return Built(name, sm, error="nothing launches it")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(launch.kernel, launch.signature, launch.constexprs, launch.attrs)
    options = launch.options | {"enable_fp_fusion": FP_FUSION}
    try:
        made = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
        registers, stack_bytes = _usage(made.asm["cubin"])
    except Exception as error:  # whatever the compiler raises belongs to this kernel alone
        return Built(name, sm, error=(str(error).strip().splitlines() or [type(error).__name__])[-1])
    return Built(name, sm, registers, stack_bytes, made.metadata.shared)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Return a kernel's registers and its stack in bytes, as the `cuobjdump` of the Triton wheel reads them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    words = dict(word.split(":", 1) for word in done.stdout.split() if ":" in word)
    return int(words["REG"]), int(words["STACK"])


def read_table(path: Path = TABLE) -> dict:
    """Return the committed table.

    Raises:
        ValueError: it is missing or no table.
    """
    try:
        table = json.loads(path.read_text())
        return {"triton": str(table["triton"]), "kernels": dict(table["kernels"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no table of kernels ({error}); --write makes one") from error


def write_table(built: Sequence[Built], path: Path = TABLE) -> None:
    """Write the table of builds, one line a kernel and architecture."""
    rows: dict[str, dict[str, list[int]]] = {}
    for row in built:
        rows.setdefault(row.kernel, {})[f"sm_{row.sm}"] = [row.registers, row.stack_bytes, row.shared_bytes]
    head = {
        "triton": triton.__version__, "fp_fusion": FP_FUSION, "columns": ["registers", "stack_bytes", "shared_bytes"]
    }  # fmt: skip
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(by_sm)}" for name, by_sm in rows.items())
    path.write_text(json.dumps(head, indent=2)[:-2] + ',\n  "kernels": {\n' + lines + "\n  }\n}\n")


def compare(built: Sequence[Built], table: dict) -> list[str]:
    """Return how builds differ from a table of the same Triton version."""
    committed = table["kernels"]
    differences = []
    for row in built:
        numbers = [row.registers, row.stack_bytes, row.shared_bytes]
        if (known_numbers := committed.get(row.kernel, {}).get(f"sm_{row.sm}")) is None:
            differences.append(f"{row.kernel} on sm_{row.sm} has no row in the table")
        elif numbers != known_numbers:
            differences.append(f"{row.kernel} on sm_{row.sm} was {known_numbers} in the table and is {numbers}")
    return differences


def main(argv: Sequence[str] | None = None) -> int:
    """Compile and print; exit code 1 for a spill or a table that no longer holds, 2 for arguments that cannot be."""
    parser = parser_for("compile", "Compile every kernel for GPUs that need not be here.", COMPILE_EXAMPLE)
    add_compile_options(parser)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    try:
        return _work(arguments.dtype) if arguments.worker else run(arguments)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(arguments: argparse.Namespace) -> int:
    """Do what the arguments ask for, and print it."""
    if triton is None:
        raise ValueError("Triton is not installed (it comes for Linux), so there is nothing to compile with")
    is_whole = not arguments.op and set(arguments.sm) == set(ARCHITECTURES)
    if arguments.write and not is_whole:
        raise ValueError("--write writes the whole table; leave out --op and --sm")
    if arguments.dtype != "bf16" and (arguments.check or arguments.write):
        raise ValueError("the table is of bf16; leave out --dtype, or --check and --write")
    table = read_table() if arguments.check else None
    names = list(kernels(arguments.op, DTYPES[known("dtype", arguments.dtype, DTYPES)]))
    built = build([(name, sm) for name in names for sm in arguments.sm], arguments.jobs, arguments.dtype)
    print(f"Triton {triton.__version__}\narch    registers  stack  shared  kernel")
    for row in built:
        print(f"sm_{row.sm:<5}{row.registers:>9}  {row.stack_bytes:>5}  {row.shared_bytes:>6}  {row.kernel}")
    problems = [row.problem for row in built if row.problem]
    if table is not None:
        problems += _against(table, built, set(names), whole=not arguments.op)
    if arguments.write and not problems:
        write_table(built)
        print(f"wrote {TABLE}")
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    print(json.dumps({"triton": triton.__version__, "built": len(built), "problems": problems}))
    return 1 if problems else 0


def _against(table: dict, built: Sequence[Built], names: set[str], whole: bool) -> list[str]:
    if table["triton"] != triton.__version__:
        print(f"the table is of Triton {table['triton']}: here only spills and shared memory are checked")
        return []
    gone = [f"{name} is in the table, but nothing launches it" for name in table["kernels"] if name not in names]
    return compare(built, table) + gone * whole


if __name__ == "__main__":
    sys.exit(main())
