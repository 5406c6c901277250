"""The file a trace lives in: one safetensors file, arrays as tensors, text and metadata as JSON in its header.

A reader must refuse what it does not know: another format, a newer version, missing or extra tensors.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import UserError, names
from workbench.instrument.trace_checks import PER_TOKEN

if TYPE_CHECKING:
    from workbench.instrument.trace import Trace

FORMAT = "lora-workbench-trace"
VERSION = 1
SUFFIX = ".safetensors"
ARRAYS = ("values", *PER_TOKEN)
TEXTS = ("adapters", "sites", "tokens", "metadata")


def write(trace: Trace, path: Path) -> Path:
    """Write `trace` to `path` through a temporary file in the same folder, so a reader never sees half of it."""
    from safetensors.numpy import save_file

    if path.suffix != SUFFIX:
        raise UserError(f"a trace is saved as {SUFFIX}, not {path.suffix or 'a name without a suffix'}: {path}")
    if not path.parent.is_dir():
        raise UserError(f"cannot save {path}: the folder {path.parent} does not exist")
    header = {"format": FORMAT, "version": str(VERSION)}
    header |= {name: json.dumps(getattr(trace, name)) for name in TEXTS}
    arrays = {name: np.ascontiguousarray(getattr(trace, name)) for name in ARRAYS}
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise UserError(f"cannot save {path}: {error.strerror}") from None
    os.close(handle)
    try:
        save_file(arrays, temporary, metadata=header)
        # mkstemp makes the file private; a result file gets what the user's umask gives every other file
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise UserError(f"cannot save {path}: {error.strerror or error}") from None
        raise
    return path


def read(path: Path) -> dict[str, Any]:
    """Return the fields of the trace stored at `path`; shapes and contents are for `Trace` to check."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise UserError(f"no trace at {path}: " + ("it is a folder" if path.is_dir() else "no such file"))
    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            found = list(file.keys())
            _check_header(path, header, found)
            fields: dict[str, Any] = {name: file.get_tensor(name) for name in ARRAYS}
    except (SafetensorError, OSError, TypeError) as error:
        raise UserError(f"{path} cannot be read as a trace: truncated, or not safetensors ({error})") from None
    try:
        fields |= {name: json.loads(header[name]) for name in TEXTS}
    except ValueError as error:
        raise UserError(f"{path} is damaged: its header holds no valid JSON ({error})") from None
    for name in ("adapters", "sites", "tokens"):
        if not isinstance(fields[name], list):
            raise UserError(f"{path} is damaged: {name} in its header is not a list")
    return fields


def _check_header(path: Path, header: dict[str, str], found: list[str]) -> None:
    """Refuse a file that is not a trace of a version we know, with exactly the tensors and texts of one."""
    if header.get("format") != FORMAT:
        raise UserError(f"{path} is a safetensors file, but not a trace; it holds {names(sorted(found), 3)}")
    version = header.get("version", "")
    if not version.isdecimal() or int(version) < 1:
        raise UserError(f"{path} is damaged: its trace version is {version!r}")
    if int(version) > VERSION:
        raise UserError(f"{path} has trace version {version}; this workbench reads up to {VERSION}: update it")
    missing = [name for name in (*ARRAYS, *TEXTS) if name not in (found if name in ARRAYS else header)]
    if missing:
        raise UserError(f"{path} is damaged: it lacks {names(missing)}")
    extra = sorted(set(found) - set(ARRAYS))
    if extra:
        raise UserError(f"{path} is damaged: it holds tensors no trace has, {names(extra)}")
