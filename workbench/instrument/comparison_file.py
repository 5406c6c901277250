"""The folder a comparison lives in: an index, and one trace file per setting, each of which opens by itself.

The index is a safetensors file without tensors; its header names the settings in order. A folder appears whole: it is
written beside its place and renamed.
"""

from __future__ import annotations

import glob
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import TransientError, UserError, names
from workbench.instrument.files import umask
from workbench.instrument.trace import Trace

if TYPE_CHECKING:
    from workbench.instrument.comparison import Comparison

FORMAT, VERSION = "lora-workbench-comparison", 1
INDEX, NULL = "comparison.safetensors", "null.safetensors"


def write(comparison: Comparison, path: Path) -> Path:
    """Write `comparison` as the folder `path`; a comparison that is there is replaced, anything else is not."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    if path.is_symlink() or (path.exists() and not (path / INDEX).is_file()):
        raise UserError(f"cannot save {path}: something else is there; a comparison is saved as a folder of its own")
    if not path.parent.is_dir():
        raise UserError(f"cannot save {path}: the folder {path.parent} does not exist")
    temporary = None
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        for number, trace in enumerate(comparison.traces.values()):
            trace.save(temporary / _file(number))
        if comparison.null is not None:
            comparison.null.save(temporary / NULL)
        header = {"format": FORMAT, "version": str(VERSION), "labels": json.dumps(list(comparison.labels))}
        header |= {"failed": json.dumps(dict(comparison.failed)), "has_null": json.dumps(comparison.null is not None)}
        header["was_first"] = json.dumps(comparison.was_first)
        save_file({}, temporary / INDEX, metadata=header)
        temporary.chmod(0o777 & ~umask())
        _replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise TransientError(f"cannot save {path}: {getattr(error, 'strerror', None) or error}") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return path


def is_comparison(path: Path) -> bool:
    """Whether a folder looks like one that `write` wrote."""
    return (path / INDEX).is_file()


def read(path: Path, lazy: bool = False) -> dict[str, Any]:
    """Return the fields of the comparison in the folder `path`."""
    header = _header(path)
    try:
        labels, failed, has_null = (json.loads(header[name]) for name in ("labels", "failed", "has_null"))
        was_first = json.loads(header.get("was_first", "null"))
    except (KeyError, ValueError) as error:
        raise UserError(f"{path / INDEX} is damaged: its header lacks or garbles {error}") from None
    if not isinstance(labels, list) or not isinstance(failed, dict) or len(set(map(str, labels))) != len(labels):
        raise UserError(f"{path / INDEX} is damaged: its settings are {labels!r}")
    missing = [_file(number) for number in range(len(labels)) if not (path / _file(number)).is_file()]
    if missing:
        raise UserError(f"{path} is damaged: it lacks {names(missing)}")
    return {
        "traces": {label: Trace.load(path / _file(number), lazy) for number, label in enumerate(labels)},
        "null": Trace.load(path / NULL, lazy) if has_null else None,
        "failed": failed,
        "was_first": was_first,
    }


def _header(path: Path) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    if not path.is_dir():
        what = "it is a file" if path.exists() else f"no such folder{_left(path)}"
        raise UserError(f"no comparison at {path}: {what}")
    if not is_comparison(path):
        raise UserError(f"{path} is no comparison: it has no {INDEX}")
    try:
        with safe_open(path / INDEX, framework="numpy") as file:
            header = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path / INDEX} cannot be read: truncated, or not safetensors ({error})") from None
    if header.get("format") != FORMAT:
        raise UserError(f"{path / INDEX} is not the index of a comparison")
    version = header.get("version", "")
    if not version.isdecimal() or int(version) < 1:
        raise UserError(f"{path / INDEX} is damaged: its version is {version!r}")
    if int(version) > VERSION:
        raise UserError(f"{path} has comparison version {version}; this workbench reads up to {VERSION}: update it")
    return header


def _left(path: Path) -> str:
    """Return where the comparison is that was at `path`, when saving another one there was killed half-way."""
    left = sorted(each.name for each in path.parent.glob(f".{glob.escape(path.name)}.*") if is_comparison(each))
    return f"; saving one there was interrupted: rename {names(left)}" if left else ""


def _file(number: int) -> str:
    return f"setting-{number}.safetensors"


def _replace(temporary: Path, path: Path) -> None:
    """Move a folder to its place, over the comparison that may be there."""
    if not path.exists():
        temporary.rename(path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    old.rmdir()
    path.rename(old)
    try:
        temporary.rename(path)
    except BaseException:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)
