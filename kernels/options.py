"""Command-line options of the kernels' tools, apart from what they need to run: this imports nothing heavy."""

from __future__ import annotations

import argparse
import os

ARCHITECTURES = (80, 90, 100)
CHECK_EXAMPLE = """examples:
  {prog}
  {prog} --op bgmv mix
"""
BENCH_EXAMPLE = """examples:
  {prog}
  {prog} --op bgmv mix --rows 1 32 --rank 8 64 --shape smol --dtype float32
  {prog} --op sgmv --popularity identical distinct uniform skewed --json
"""
COMPILE_EXAMPLE = """examples:
  {prog} --check
  {prog} --op mix --sm 90
  {prog} --write
"""


def add_check_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of lora_kernels.check."""
    _add_ops(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON line only")


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of lora_kernels.bench."""
    _add_ops(parser)
    parser.add_argument("--rows", nargs="+", type=_count, default=[32], metavar="N", help="rows of the forward (32)")
    parser.add_argument("--rank", nargs="+", type=_count, default=[16], metavar="R", help="of every adapter (16)")
    parser.add_argument("--shape", nargs="+", default=["7b"], metavar="NAME", help="smol, 7b or 70b (7b)")
    parser.add_argument("--layer", nargs="+", metavar="NAME", help="q, kv, up, down (all)")
    parser.add_argument("--dtype", nargs="+", metavar="NAME",
                        help="float32, float16, bfloat16 (bfloat16 on a GPU, else float32)")
    parser.add_argument("--popularity", nargs="+", default=["uniform"], metavar="NAME",
                        help="how rows choose adapters: identical, distinct, uniform, zipf:1.5, skewed, all_base, "
                        "half_base (uniform)")
    parser.add_argument("--context", nargs="+", type=_count, default=[1024], metavar="N",
                        help="positions that attention reads per row (1024)")
    parser.add_argument("--repeats", type=_count, default=50, metavar="N", help="samples of each case (50)")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")


def add_compile_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of lora_kernels.compile."""
    _add_ops(parser)
    parser.add_argument("--sm", nargs="+", type=int, choices=ARCHITECTURES, default=list(ARCHITECTURES), metavar="CC",
                        help="architectures: 80, 90, 100 (all)")
    parser.add_argument("--dtype", default="bf16", metavar="NAME", help="bf16, fp16 or fp32 (bf16, as in the table)")
    parser.add_argument("--jobs", type=_count, default=os.cpu_count() or 1, metavar="N",
                        help="processes (one per core)")
    act = parser.add_mutually_exclusive_group()
    act.add_argument("--check", action="store_true", help="compare with the committed table, kernels/aot.json")
    act.add_argument("--write", action="store_true", help="write that table")


def parser_for(module: str, description: str, example: str) -> argparse.ArgumentParser:
    """Return a parser for `python -m lora_kernels.<module>`."""
    prog = f"python -m lora_kernels.{module}"
    return argparse.ArgumentParser(
        prog=prog, description=description, epilog=example.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip


def _add_ops(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", nargs="+", metavar="OP",
                        help="only these: bgmv, sgmv, mix, scalings, paged_attention, blend, blend_groups (all)")


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return int(text)
