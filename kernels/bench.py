"""Time the ops against the copy rate of the machine: `python -m lora_kernels.bench`.

No number on red: an op is checked against float64 first, on the case it is timed on. Bytes are the least an op must
move (its `cost`); the roofline share is those bytes a second over the rate of a copy, of a large one and of one that
moves as much as the op. The problems are those of the tests, and the last line of output is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch

from lora_kernels.options import BENCH_EXAMPLE, add_bench_options, parser_for
from lora_kernels.registry import ALL_OPS, LAYERS, Case, Op, cases_of, check, known, ops_on
from lora_kernels.timing import LARGE_COPY_BYTES, copy_rate, num_copies, time_calls

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

class WrongResult(Exception):
    """An op's result is wrong, so its speed is of no interest."""


def bench(
    ops: Sequence[str | Op] | None = None,
    *,
    num_rows: Sequence[int] = (32,),
    ranks: Sequence[int] = (16,),
    shapes: Sequence[str] = ("7b",),
    layers: Sequence[str] = LAYERS,
    popularity: Sequence[str] = ("uniform",),
    contexts: Sequence[int] = (1024,),
    dtypes: Sequence[torch.dtype] | None = None,
    device: torch.device | str | None = None,
    repeats: int = 50,
    report=None,
) -> list[dict]:
    """Check and time ops over the product of the axes; an axis that an op does not read counts once.

    Args:
        ops: names, or ops of one's own; None is all that an engine on the device runs.
        num_rows, ranks, shapes, layers, popularity, contexts: see `lora_kernels.registry.Case`.
        dtypes: of the operands; None is bfloat16 on CUDA, float32 elsewhere.
        device: None is CUDA where there is one.
        repeats: samples of each case.
        report: called with each record as it is made.

    Returns:
        One flat dictionary per op and case: what was run, `error`, `p20_us`, `p50_us`, `p80_us`, `host_us` (CUDA:
        the host's time to launch), `num_bytes`, `flops`, `bytes_per_s`, `share_of_copy` and `share_of_copy_this_size`.

    Raises:
        WrongResult: an op is wrong; nothing is timed after it.
        ValueError: an unknown op, shape, layer or popularity, or an axis without values.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtypes = dtypes or ((torch.bfloat16,) if device.type == "cuda" else (torch.float32,))
    chosen = [op if isinstance(op, Op) else ALL_OPS[known("op", op, ALL_OPS)] for op in ops or ops_on(device)]
    axes = {
        "num_rows": tuple(num_rows), "rank": tuple(ranks), "shape": tuple(shapes), "layer": tuple(layers),
        "popularity": tuple(popularity), "context": tuple(contexts), "dtype": tuple(dtypes),
    }  # fmt: skip
    cases = [(op, case) for op in chosen for case in cases_of(op, Case(device=str(device)), **axes)]
    large_rate = _large_copy_rate(device)
    records = []
    for op, case in cases:
        records.append(_measured(op, case, device, large_rate, repeats))
        if report:
            report(records[-1])
    return records


@functools.cache
def _large_copy_rate(device: torch.device) -> float:
    # once a process, so that all shares are of one rate
    return copy_rate(device, LARGE_COPY_BYTES[device.type])


def _measured(op: Op, case: Case, device: torch.device, large_rate: float, repeats: int) -> dict:
    checked = check(op, op.make_problem(case))
    if not checked.is_right:
        raise WrongResult(f"{checked}, at {_words(op, case)}; nothing was timed")
    problem = op.make_problem(case)
    cost = op.cost(problem)
    # the first is the problem itself: on a CPU there is no other
    problems = [problem] + [op.make_problem(case) for _ in range(num_copies(device, cost.num_bytes) - 1)]
    with torch.inference_mode():
        times = time_calls([op.run(p) for p in problems], device, repeats)
    rate = cost.num_bytes / (1e-6 * times.p50_us)
    own_rate = copy_rate(device, cost.num_bytes)
    return {
        "op": op.name, "path": checked.path, "num_rows": case.num_rows, "shape": case.shape,
        **{axis: getattr(case, axis) for axis in op.axes}, "dtype": checked.dtype, "error": checked.error,
        **asdict(times), "num_bytes": cost.num_bytes, "flops": cost.flops, "bytes_per_s": rate,
        "copy_bytes_per_s": large_rate, "copy_this_size_bytes_per_s": own_rate,
        "share_of_copy": rate / large_rate, "share_of_copy_this_size": rate / own_rate,
    }  # fmt: skip


def _words(op: Op, case: Case) -> str:
    read = ", ".join(f"{axis} {getattr(case, axis)}" for axis in op.axes if getattr(case, axis) is not None)
    return f"{case.num_rows} rows, shape {case.shape}" + f", {read}" * bool(read)


def machine(device: torch.device) -> str:
    """Return the name of what the ops ran on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def main(argv: Sequence[str] | None = None) -> int:
    """Bench and print; exit code 1 when an op is wrong, 2 when the arguments are."""
    parser = parser_for("bench", "Time the ops against the copy rate of this machine.", BENCH_EXAMPLE)
    add_bench_options(parser)
    try:
        return run(parser.parse_args(argv))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(arguments: argparse.Namespace) -> int:
    """Do what the arguments ask for, and print it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = None if arguments.json else _Printed()
    dtypes = arguments.dtype and [DTYPES[known("dtype", name, DTYPES)] for name in arguments.dtype]
    try:
        records = bench(
            arguments.op, num_rows=arguments.rows, ranks=arguments.rank, shapes=arguments.shape,
            layers=arguments.layer or LAYERS, popularity=arguments.popularity, contexts=arguments.context,
            dtypes=dtypes, repeats=arguments.repeats, device=device, report=report,
        )  # fmt: skip
    except WrongResult as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    # Windows does not say its load
    load, cores = getattr(os, "getloadavg", lambda: (0.0,))()[0], os.cpu_count() or 1
    if device.type == "cpu" and load > cores / 2 + 1:
        print(f"note: other programs were running (load {load:.1f} on {cores} cores); times are theirs, too",
              file=sys.stderr)  # fmt: skip
    facts = {"machine": machine(device), "torch": torch.__version__, "load": round(load, 2)}
    print(json.dumps({**facts, "records": records}))
    return 0


class _Printed:
    """A table that is printed while it is made."""

    _HEAD = ("op", "path", "rows", "rank", "layer", "popularity", "us", "20-80 %", "GB/s", "of copy", "of same size")
    _ROW = "{:<15} {:<7} {:>5} {:>5} {:<6} {:<11} {:>9} {:>17} {:>7} {:>8} {:>13}"

    def __init__(self):
        self.is_started = False

    def __call__(self, record: dict) -> None:
        if not self.is_started:
            print(self._ROW.format(*self._HEAD))
            self.is_started = True
        print(self._ROW.format(
            record["op"], record["path"], record["num_rows"], record.get("rank", "-"), record.get("layer", "-"),
            record.get("popularity", "-"), f"{record['p50_us']:.1f}",
            f"{record['p20_us']:.1f}-{record['p80_us']:.1f}", f"{record['bytes_per_s'] / 1e9:.1f}",
            f"{record['share_of_copy']:.0%}", f"{record['share_of_copy_this_size']:.0%}",
        ), flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
