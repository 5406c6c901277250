"""`workbench show`: the static page of a trace, a run or a comparison, from the shell."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError, names, nearest

_INDEXES = ("run.json", "comparison.safetensors")

if TYPE_CHECKING:
    from workbench.instrument.comparison import Comparison
    from workbench.instrument.run import Run
    from workbench.instrument.trace import Trace

_EXAMPLE = """examples:
  workbench show workbench-demo/run --open
  workbench show runs/monday --request req-3 --out req-3.html
  workbench show trace.safetensors --out figure.pdf --title 'Which adapter speaks'
  workbench show compared --out compared.html
"""


def add_parser(commands: Any, formatter: type) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "show", help="write the page or figure of a trace, a run or a comparison", epilog=_EXAMPLE,
        formatter_class=formatter,
        description="Write a page that needs no server and no network, or a figure, of a saved trace, run or "
        "comparison. Of a run it shows the trace, if it has one trace or --request names it; else its timelines.",
    )
    what = "the folder of a run or a comparison, or a trace (.safetensors)"
    parser.add_argument("path", metavar="RUN|TRACE|COMPARISON", help=what)
    parser.add_argument("--out", metavar="FILE", help="what to write: .html (the default), .png, .svg or .pdf")
    parser.add_argument("--request", metavar="ID", help="which trace of a run")
    parser.add_argument("--title", metavar="TEXT", help="heading of the page")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the page and print its path."""
    path = Path(arguments.path)
    path = path.parent if path.name in _INDEXES else path
    shown = subject(path, arguments.request)
    out = Path(arguments.out) if arguments.out else Path(f"{_stem(path, arguments.request)}.html")
    write(shown, [out], arguments.title)
    print(out)
    if arguments.open:
        import webbrowser

        if not webbrowser.open(out.resolve().as_uri()):
            print(f"no browser could be opened; open {out} yourself", file=sys.stderr)
    return 0


def subject(path: Path, request_id: str | None) -> Trace | Run | Comparison:
    """Return what lies at `path`: a trace, a comparison, a run's only or named trace, or a run without or with several.

    Raises:
        UserError: none of them, or no such request.
    """
    from workbench.instrument.comparison import Comparison
    from workbench.instrument.comparison_file import is_comparison
    from workbench.instrument.run import open_run
    from workbench.instrument.trace import Trace

    if not path.exists():
        near = nearest(path.name, _siblings(path))
        raise UserError(
            f"{str(path)!r} does not exist{near}; expected the folder of a run or comparison, or a trace (.safetensors)"
        )
    if not path.is_dir():
        if request_id is not None:
            raise UserError(f"--request chooses a trace of a run, and {str(path)!r} is a file")
        return Trace.load(path, lazy=True)
    if is_comparison(path):
        if request_id is not None:
            raise UserError(f"--request chooses a trace of a run, and {str(path)!r} is a comparison")
        return Comparison.load(path, lazy=True)
    opened = open_run(path)
    ids = opened.trace_ids
    if request_id is not None or len(ids) == 1:
        return opened.trace(request_id)
    if ids:
        print(f"{len(ids)} traces: {names(ids)}; --request ID shows one of them", file=sys.stderr)
    return opened


def write(shown: Trace | Run | Comparison, files: Iterable[Path], title: str | None = None) -> None:
    """Write the picture of a trace, run or comparison to each of the files, in the format that its suffix says."""
    from workbench.display import show

    picture = show(shown, title=title)
    for file in files:
        if not file.parent.is_dir():
            raise UserError(f"cannot write {str(file)!r}: there is no folder {str(file.parent)!r}")
        picture.save(file)


def _stem(path: Path, request_id: str | None) -> str:
    """Return the name of the page: the trace's or the run's, in the working folder."""
    name = path.stem if path.is_file() else path.resolve().name or "run"
    if request_id is None:
        return name
    return f"{name}-" + "".join(char if char.isalnum() or char in "-_" else "-" for char in request_id)[:80]


def _siblings(path: Path) -> list[str]:
    try:
        return [each.name for each in path.parent.iterdir()]
    except OSError:
        return []
