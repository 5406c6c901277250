"""The `workbench` command.

A user's mistake is one sentence on standard error and exit code 2; nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from workbench.cli import advise, bench, demo, generate, gpu_check, inspect, kernels, lab, ordering, report, show, sweep
from workbench.errors import UserError

_EXAMPLE = """examples:
  workbench demo
  workbench generate --mixture demo --prompt 'Wer zuletzt lacht,' --max-tokens 30
  workbench show workbench-demo/run --open
  workbench inspect ./my-adapter
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    arguments = parser().parse_args(argv)
    warnings.showwarning = _show_warning
    try:
        return arguments.run(arguments) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader (head, less) has gone; python would complain again when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        prog="workbench", description="Run, record and look at mixtures of LoRA adapters.", epilog=_EXAMPLE,
        formatter_class=raw,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (demo, generate, show, ordering, inspect, advise, bench, sweep, report, kernels, gpu_check, lab):
        module.add_parser(commands, raw)
    return top


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    if issubclass(category, (DeprecationWarning, FutureWarning, PendingDeprecationWarning)):
        return
    print(f"warning: {message}", file=sys.stderr)
