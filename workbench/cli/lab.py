"""`workbench lab`: JupyterLab on the notebooks."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import workbench
from workbench.errors import UserError

_EXAMPLE = """examples:
  workbench lab
  workbench lab --folder ./my-notebooks -- --no-browser --port 8899
"""


def add_parser(commands: Any, formatter: type) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "lab", help="open JupyterLab on the notebooks", epilog=_EXAMPLE, formatter_class=formatter,
        description="Open JupyterLab on the workbench's notebooks. What follows -- goes to JupyterLab as it is.",
    )
    parser.add_argument("--folder", metavar="DIR", help="another folder of notebooks")
    parser.add_argument("options", nargs="*", metavar="OPTION", help="options of JupyterLab, after --")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Start JupyterLab and wait for it."""
    folder = notebooks_folder(arguments.folder)
    if importlib.util.find_spec("jupyterlab") is None:
        raise UserError("JupyterLab is not installed here; type `pip install jupyterlab`")
    print(f"JupyterLab opens on {folder}; end it with Ctrl-C", file=sys.stderr)
    command = [sys.executable, "-m", "jupyterlab", *arguments.options, str(folder)]
    return subprocess.run(command, check=False).returncode


def notebooks_folder(given: str | None) -> Path:
    """Return the folder of notebooks: the given one, the checkout's, or `notebooks/` here.

    Raises:
        UserError: none of them is there.
    """
    if given is not None:
        if not Path(given).is_dir():
            raise UserError(f"--folder {given!r}: there is no such folder")
        return Path(given).resolve()
    places = (Path(workbench.__file__).resolve().parents[1] / "notebooks", Path("notebooks").resolve())
    for place in places:
        if any(place.glob("*.ipynb")):
            return place
    raise UserError("no notebooks found beside the package or here; run from a checkout, or name a --folder")
