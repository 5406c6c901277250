"""`workbench kernels`: are the ops right here, how fast are they, and do they compile for GPUs that are not here."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from lora_kernels.options import (
    BENCH_EXAMPLE,
    CHECK_EXAMPLE,
    COMPILE_EXAMPLE,
    add_bench_options,
    add_check_options,
    add_compile_options,
)
from workbench.errors import UserError

_EXAMPLE = """examples:
  workbench kernels check
  workbench kernels bench --op mix --shape smol
  workbench kernels compile --check
"""
_COMMANDS = (
    ("check", "hold every op against float64, on every path that runs here", CHECK_EXAMPLE, add_check_options),
    ("bench", "time the ops against the copy rate of this machine", BENCH_EXAMPLE, add_bench_options),
    ("compile", "compile every kernel for GPUs that need not be here", COMPILE_EXAMPLE, add_compile_options),
)


def add_parser(commands: Any, formatter: type) -> None:
    """Add the command, its three commands and their options."""
    parser = commands.add_parser(
        "kernels", help="check, bench or compile the arithmetic", epilog=_EXAMPLE, formatter_class=formatter,
        description="The ops that add adapters to a layer: kernels/README.md says which runs when.",
    )
    inner = parser.add_subparsers(dest="tool", required=True, metavar="COMMAND")
    for name, words, example, add_options in _COMMANDS:
        tool = inner.add_parser(
            name, help=words, description=f"{words[0].upper()}{words[1:]}.", formatter_class=formatter,
            epilog=example.format(prog=f"workbench kernels {name}"),
        )
        add_options(tool)
        tool.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run one tool; exit code 1 when an op or a kernel is not as it should be."""
    tool = importlib.import_module(f"lora_kernels.{arguments.tool}")
    try:
        return tool.run(arguments)
    except ValueError as error:
        raise UserError(str(error)) from error
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
