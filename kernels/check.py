"""Hold every op against float64, on every path that runs here: `python -m lora_kernels.check`.

The torch path always; Triton's kernels on a GPU where there is one, else in Triton's interpreter, in a child process
(Triton decides at its import whether to interpret). bfloat16 is left out there: the interpreter computes garbage.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch

from lora_kernels import triton_support
from lora_kernels.options import CHECK_EXAMPLE, add_check_options, parser_for
from lora_kernels.registry import ALL_OPS, OPS, Checked, check, known, ops_on

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INTERPRETED = (torch.float32, torch.float16)


def check_here(
    ops: Sequence[str] | None = None, device: torch.device | str = "cpu", dtypes: Sequence[torch.dtype] = DTYPES
) -> list[Checked]:
    """Check ops in this process on one device.

    Raises:
        ValueError: an unknown op.
    """
    chosen = [ALL_OPS[known("op", name, ALL_OPS)] for name in ops or ops_on(device)]
    return [check(op, problem) for op in chosen for dtype in dtypes for problem in op.small(dtype, str(device))]


def check_interpreted(ops: Sequence[str]) -> list[Checked]:
    """Check ops that have kernels in Triton's interpreter, in a process of its own.

    Raises:
        RuntimeError: the process died.
    """
    done = subprocess.run(
        [sys.executable, "-m", "lora_kernels.check", "--worker", "--op", *ops],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RuntimeError(f"the process that interprets stopped: {last}")
    return [Checked(**found) for found in json.loads(done.stdout.splitlines()[-1])]


def check_all(ops: Sequence[str] | None = None) -> list[Checked]:
    """Check ops on every path that runs on this machine."""
    found = check_here(ops)
    compiled = [name for name in ops or OPS if name in OPS]
    if not compiled:
        return found
    if torch.cuda.is_available():
        return found + check_here(compiled, "cuda")
    return found + (check_interpreted(compiled) if triton_support.triton is not None else [])


def run(arguments: argparse.Namespace) -> int:
    """Do what the arguments ask for, and print it; 1 when an op is wrong."""
    found = check_all(arguments.op)
    wrong = [str(one) for one in found if not one.is_right]
    if not arguments.json:
        for one in _worst(found):
            if one.is_right:
                print(one)
        if triton_support.triton is None:
            print("Triton is not installed (it comes for Linux), so only the torch path runs here")
    for sentence in wrong:
        print(f"error: {sentence}", file=sys.stderr)
    paths = sorted({one.path for one in found})
    print(json.dumps({"checked": len(found), "paths": paths, "wrong": wrong}))
    return 1 if wrong else 0


def _worst(found: Sequence[Checked]) -> list[Checked]:
    """Return, of each op, path and dtype, the check with the largest error."""
    worst: dict[tuple[str, str, str], Checked] = {}
    for one in found:
        key = one.op, one.path, one.dtype
        if key not in worst or not one.error <= worst[key].error:
            worst[key] = one
    return list(worst.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Check and print; exit code 1 when an op is wrong, 2 when the arguments are."""
    parser = parser_for("check", "Hold every op against float64, on every path that runs here.", CHECK_EXAMPLE)
    add_check_options(parser)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    try:
        return _work(arguments.op) if arguments.worker else run(arguments)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _work(ops: Sequence[str]) -> int:
    torch.set_num_threads(1)
    with triton_support.interpreting():
        print(json.dumps([asdict(found) for found in check_here(ops, dtypes=INTERPRETED)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
