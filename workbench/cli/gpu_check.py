"""`workbench gpu-check`: is everything right on this card, and how fast is it."""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from workbench.errors import UserError
from workbench.sweep.plan import split

_EXAMPLE = """examples:
  workbench gpu-check
  workbench gpu-check --budget-s 120 --sections exact,kernels
  python -m workbench.cli gpu-check          # in a checkout that is not installed
"""
_BUDGET_S = 240.0


def find_kernels() -> None:
    """Make `lora_kernels` importable in a checkout that is not installed, where it is the folder `kernels`."""
    folder = Path(__file__).resolve().parents[2] / "kernels"
    if importlib.util.find_spec("lora_kernels") is None and folder.is_dir():
        spec = importlib.machinery.ModuleSpec("lora_kernels", None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        sys.modules["lora_kernels"] = importlib.util.module_from_spec(spec)


# now, not when the command runs: commands that the command line imports after this one import lora_kernels
find_kernels()


def add_parser(commands: Any, formatter: type) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "gpu-check", help="check and measure everything on this machine's card", epilog=_EXAMPLE,
        formatter_class=formatter, description="In under four minutes on one card: the engine batched against alone, "
        "every op against float64, graphs against eager launches, decoding on a random model of Mistral-7B's shape, "
        "and each op's share of the copy rate. Results are written as they come. Exit code 1 when anything is wrong "
        "or did not finish.",
    )
    add = parser.add_argument
    add("--budget-s", type=float, default=_BUDGET_S, metavar="S", help="seconds for everything (default 240)")
    add("--sections", action="append", metavar="NAMES",
        help="only these, with commas: exact, kernels, graphs, decode, roofline")
    add("--out", metavar="FILE", help="results file (default experiments/results/gpu/CARD.json of the checkout)")
    add("--json", action="store_true", help="print one JSON document as the last line")
    # a rehearsal without a card, which the tests run
    add("--device", help=argparse.SUPPRESS)
    add("--toy", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check, write and print."""
    if not arguments.budget_s > 0:
        raise UserError(f"--budget-s must be above 0 seconds, not {arguments.budget_s:g}")
    from workbench.sweep.gpu_check import Report, Section, Setting, chosen, results_path, run_sections, summary
    from workbench.sweep.gpu_engine import decode, exact
    from workbench.sweep.gpu_kernels import graphs, kernels, roofline

    # what must hold before anything is timed comes first
    sections = [
        Section("exact", "batched as alone, and as on a CPU", exact, 2),
        Section("kernels", "ops against float64", kernels, 3),
        Section("graphs", "replayed as launched", graphs, 1),
        Section("decode", "throughput at Mistral-7B's shape", decode, 4),
        Section("roofline", "share of the copy rate", roofline, 3),
    ]
    wanted = split(arguments.sections)
    if arguments.sections and not wanted:
        raise UserError("--sections names no section")
    todo = chosen(sections, wanted)
    setting = Setting(_device(arguments), arguments.toy)
    path = Path(arguments.out) if arguments.out else results_path(setting.device)
    kept = [section.name for section in sections if section not in todo]
    report = Report.start(path, setting, _command(arguments), kept)
    is_right = run_sections(todo, setting, report, arguments.budget_s, lambda line: print(line, file=sys.stderr))
    print(json.dumps(report.data) if arguments.json else summary(report))
    return 0 if is_right else 1


def _device(arguments: argparse.Namespace) -> Any:
    import torch

    name = arguments.device or "cuda"
    if arguments.toy and name == "cpu":
        return torch.device(name)
    if not name.startswith("cuda"):
        raise UserError(f"--device {name!r}: gpu-check checks a CUDA card")
    if not torch.cuda.is_available():
        raise UserError("gpu-check needs a CUDA card, and torch finds none here; workbench bench measures a CPU")
    index = name.removeprefix("cuda").lstrip(":") or "0"
    if not index.isdigit() or int(index) >= torch.cuda.device_count():
        raise UserError(f"--device {name!r}: torch finds {torch.cuda.device_count()} CUDA cards, counted from cuda:0")
    # graphs are captured on the current device
    torch.cuda.set_device(int(index))
    return torch.device("cuda", int(index))


def _command(arguments: argparse.Namespace) -> str:
    words = ["workbench", "gpu-check", "--budget-s", f"{arguments.budget_s:g}"]
    for key in ("sections", "out", "device"):
        value = getattr(arguments, key)
        words += [f"--{key}", ",".join(split(value)) if key == "sections" else value] if value else []
    return shlex.join(words + ["--toy"] * arguments.toy)
