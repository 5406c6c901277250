"""`workbench lab`: JupyterLab on the notebooks, its kernel this environment's Python."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import workbench
from workbench.errors import UserError

_EXAMPLE = """examples:
  workbench lab
  workbench lab --copy my-notebooks              your own copy, so that a checkout stays as it was
  workbench lab --no-browser --port 8899         on another machine; JupyterLab prints the address
  workbench lab --folder ./mine -- --ip 0.0.0.0  what follows -- goes to JupyterLab as it is
"""
_FIRST = "00_start_here.ipynb"
_KINDS = ("*.ipynb", "README.md", "images/*.png")
_OWN_COPY = "workbench-notebooks"
# nothing here asks the network unless it is told to; what the user has set in JupyterLab comes before these
_DEFAULTS = {"@jupyterlab/apputils-extension:notification": {"checkForUpdates": False, "fetchNews": "false"}}


def add_parser(commands: Any, formatter: type) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "lab", help="open JupyterLab on the notebooks", epilog=_EXAMPLE, formatter_class=formatter,
        description="Open JupyterLab on the workbench's notebooks. What follows -- goes to JupyterLab as it is.",
    )
    parser.add_argument("--folder", metavar="DIR", help="another folder of notebooks")
    parser.add_argument("--copy", metavar="DIR", help="copy the notebooks there first, and open the copy; a file that "
                                                      "is there already stays as it is")
    parser.add_argument("--port", type=int, metavar="N", help="listen on this port (default: 8888 or the next free)")
    parser.add_argument("--no-browser", action="store_true", help="only serve; the address is printed")
    parser.add_argument("options", nargs="*", metavar="OPTION", help="options of JupyterLab, after --")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve JupyterLab until it is ended."""
    folder = notebooks_folder(arguments.folder)
    command = [*_own_options(arguments), *arguments.options]
    _check(arguments, command)
    copy = arguments.copy or (_OWN_COPY if _is_installed(folder) else None)
    if copy is not None:
        folder = copy_notebooks(folder, Path(copy).resolve())
    first = folder / _FIRST
    print(f"JupyterLab opens on {folder}; to end it, press Ctrl-C twice", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="workbench-lab-") as data:
        os.environ.update(environment(Path(data)))
        _serve([*command, str(first if first.is_file() else folder)])
    return 0


def notebooks_folder(given: str | None) -> Path:
    """Return the folder of notebooks: the given one, the checkout's, `notebooks/` here, or the installed ones.

    Raises:
        UserError: none of them is there.
    """
    if given is not None:
        if not Path(given).is_dir():
            raise UserError(f"--folder {given!r}: there is no such folder")
        return Path(given).resolve()
    package = Path(workbench.__file__).resolve().parent
    for place in (package.parent / "notebooks", Path("notebooks").resolve(), package / "notebooks"):
        if any(place.glob("*.ipynb")):
            return place
    raise UserError("no notebooks found beside the package or here; run from a checkout, or name a --folder")


def copy_notebooks(source: Path, target: Path) -> Path:
    """Copy notebooks, their README and its pictures; a file that is there already is kept. Returns `target`.

    Raises:
        UserError: the target cannot be written.
    """
    files = [file for kind in _KINDS for file in sorted(source.glob(kind))]
    kept = [file.name for file in files if (target / file.relative_to(source)).exists() and file.suffix == ".ipynb"]
    try:
        for file in files:
            place = target / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.exists():
                shutil.copyfile(file, place)
    except OSError as error:
        raise UserError(f"the notebooks cannot be copied to {target}: {error.strerror}; name another --copy") from None
    if kept:
        print(f"kept as they are in {target}: {', '.join(kept)}", file=sys.stderr)
    return target


def environment(data: Path) -> dict[str, str]:
    """Write below `data` what JupyterLab shall find first, and return the variables by which it does.

    The kernel named `python3` becomes this environment's Python: one of that name in the home folder or an outer
    environment would run the notebooks where no workbench is.
    """
    from ipykernel.kernelspec import write_kernel_spec

    write_kernel_spec(data / "kernels" / "python3")
    settings = data / "config" / "labconfig" / "default_setting_overrides.json"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps(_DEFAULTS), encoding="utf-8")
    own = Path(sys.prefix, "share", "jupyter")
    return {
        "JUPYTER_PATH": _before("JUPYTER_PATH", data, own),
        "JUPYTER_CONFIG_PATH": _before("JUPYTER_CONFIG_PATH", data / "config"),
    }


def _before(variable: str, *folders: Path) -> str:
    """Return a search path of `folders`, then of what the variable already names."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get(variable)])])


def _serve(options: list[str]) -> None:
    from jupyterlab.labapp import LabApp

    before = signal.getsignal(signal.SIGINT)
    if not sys.stdin.isatty():
        # a server that cannot ask whether it shall end leaves Ctrl-C to chance: it may be caught by whatever runs
        signal.signal(signal.SIGINT, _end)
    try:
        LabApp.launch_instance(options)
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: Any) -> None:
    """End the server as SIGTERM does; a server that is not up yet, as Ctrl-C does."""
    stop = signal.getsignal(signal.SIGTERM)
    if not callable(stop):
        raise KeyboardInterrupt
    stop(number, frame)


def _is_installed(folder: Path) -> bool:
    return folder == Path(workbench.__file__).resolve().parent / "notebooks"


def _own_options(arguments: argparse.Namespace) -> list[str]:
    port = [] if arguments.port is None else [f"--port={arguments.port}", "--ServerApp.port_retries=0"]
    return port + ["--no-browser"] * arguments.no_browser


def _check(arguments: argparse.Namespace, command: list[str]) -> None:
    """Raise UserError for what JupyterLab would answer with a log or a traceback."""
    for module in ("jupyterlab", "ipykernel"):
        if importlib.util.find_spec(module) is None:
            raise UserError(f"{module} is not installed here; type `pip install {module}`")
    root_allowed = {"--allow-root", "--ServerApp.allow_root=True"} & set(command)
    if hasattr(os, "geteuid") and os.geteuid() == 0 and not root_allowed:
        raise UserError("JupyterLab does not run as root unless told to; type `workbench lab -- --allow-root`")
    if arguments.port is None:
        return
    if not 0 <= arguments.port < 65536:
        raise UserError(f"--port {arguments.port}: a port is a number from 0 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", arguments.port))
        except OSError as error:
            raise UserError(
                f"--port {arguments.port} cannot be used ({error.strerror.lower()}); name another, or leave --port out "
                "and JupyterLab finds a free one"
            ) from None
