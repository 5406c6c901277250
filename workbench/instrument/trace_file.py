"""The file a trace lives in: one safetensors file, arrays as tensors, text and metadata as JSON in its header.

Version 2 adds what was recorded beside the scalings: tensors `extra.NAME`, and their axes, labels, units and meanings
as JSON under `extras`. A reader must refuse what it does not know: another format, a newer version, missing or extra
tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import TransientError, UserError, names
from workbench.instrument.files import replacing
from workbench.instrument.recorded import Recorded
from workbench.instrument.trace_checks import PER_TOKEN

if TYPE_CHECKING:
    from workbench.instrument.trace import Trace

FORMAT = "lora-workbench-trace"
VERSION = 2
SUFFIX = ".safetensors"
ARRAYS = ("values", *PER_TOKEN)
TEXTS = ("adapters", "sites", "tokens", "metadata")
EXTRA = "extra."
_MOST_HEADER_BYTES = 100_000_000  # as safetensors itself
_DTYPES = {
    "F16": np.float16, "F32": np.float32, "F64": np.float64, "I8": np.int8, "I64": np.int64, "BOOL": np.bool_,
}  # fmt: skip


def write(trace: Trace, path: Path) -> Path:
    """Write `trace` to `path`, whole or not at all.

    Raises:
        UserError: a path that no trace can be saved as; a `TransientError` if the disk is full or failed.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    if path.suffix != SUFFIX:
        raise UserError(f"a trace is saved as {SUFFIX}, not {path.suffix or 'a name without a suffix'}: {path}")
    if not path.parent.is_dir():
        raise UserError(f"cannot save {path}: the folder {path.parent} does not exist")
    header = {"format": FORMAT, "version": str(VERSION)}
    header |= {name: json.dumps(getattr(trace, name)) for name in TEXTS}
    header["extras"] = json.dumps({name: each.facts() for name, each in trace.extras.items()})
    arrays = {name: np.ascontiguousarray(getattr(trace, name)) for name in ARRAYS}
    arrays |= {EXTRA + name: np.ascontiguousarray(each.values) for name, each in trace.extras.items()}
    try:
        with replacing(path) as temporary:
            save_file(arrays, temporary, metadata=header)
    except (OSError, SafetensorError) as error:  # the latter is how its library reports a full disk
        raise TransientError(f"cannot save {path}: {getattr(error, 'strerror', None) or error}") from None
    return path


def read(path: Path, lazy: bool = False) -> dict[str, Any]:
    """Return the fields of the trace stored at `path`; shapes and contents are for `Trace` to check.

    Args:
        path: the file.
        lazy: map the values, and what has more axes than the token's, into memory, read-only, without reading them.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise UserError(f"no trace at {path}: " + ("it is a folder" if path.is_dir() else "no such file"))
    try:
        # opening checks the header and that no tensor reaches past the end of the file
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            found = list(file.keys())
            _check_header(path, header, found)
            mapped = _mapped(path) if lazy else {}
            arrays = {name: mapped[name] if name in mapped else file.get_tensor(name) for name in found}
    except (SafetensorError, OSError, TypeError) as error:
        raise UserError(f"{path} cannot be read as a trace: truncated, or not safetensors ({error})") from None
    fields: dict[str, Any] = {name: arrays[name] for name in ARRAYS}
    try:
        fields |= {name: json.loads(header[name]) for name in TEXTS}
        facts = json.loads(header.get("extras", "{}"))
    except ValueError as error:
        raise UserError(f"{path} is damaged: its header holds no valid JSON ({error})") from None
    for name in ("adapters", "sites", "tokens"):
        if not isinstance(fields[name], list):
            raise UserError(f"{path} is damaged: {name} in its header is not a list")
    fields["extras"] = _extras(path, facts, {n[len(EXTRA) :]: a for n, a in arrays.items() if n.startswith(EXTRA)})
    return fields


def _mapped(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors with several axes as read-only maps of the file; those without a value are left out."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        tensors = json.loads(file.read(min(length, _MOST_HEADER_BYTES)))
    arrays = {}
    for name, entry in tensors.items():
        if name == "__metadata__" or len(entry["shape"]) < 2 or entry["dtype"] not in _DTYPES or 0 in entry["shape"]:
            continue
        first, shape = 8 + length + entry["data_offsets"][0], tuple(entry["shape"])
        arrays[name] = np.memmap(path, _DTYPES[entry["dtype"]], "r", first, shape)
    return arrays


def _extras(path: Path, facts: Any, arrays: dict[str, np.ndarray]) -> dict[str, Recorded]:
    """Join the arrays of what was recorded with the header's facts about them."""
    if not isinstance(facts, dict) or set(facts) != set(arrays):
        described = names(sorted(facts)) if isinstance(facts, dict) else repr(facts)
        raise UserError(f"{path} is damaged: it holds {names(sorted(arrays))}, but its header describes {described}")
    found = {}
    for name, fact in facts.items():
        try:
            found[name] = Recorded(arrays[name], **fact)
        except (TypeError, UserError) as error:
            raise UserError(f"{path} is damaged: what it says of {name!r} does not fit: {error}") from None
    return found


def _check_header(path: Path, header: dict[str, str], found: list[str]) -> None:
    """Refuse a file that is not a trace of a version we know, with exactly the tensors and texts of one."""
    if header.get("format") != FORMAT:
        raise UserError(f"{path} is a safetensors file, but not a trace; it holds {names(sorted(found), 3)}")
    version = header.get("version", "")
    if not version.isdecimal() or int(version) < 1:
        raise UserError(f"{path} is damaged: its trace version is {version!r}")
    if int(version) > VERSION:
        raise UserError(f"{path} has trace version {version}; this workbench reads up to {VERSION}: update it")
    texts = TEXTS if int(version) == 1 else (*TEXTS, "extras")
    missing = [name for name in (*ARRAYS, *texts) if name not in (found if name in ARRAYS else header)]
    if missing:
        raise UserError(f"{path} is damaged: it lacks {names(missing)}")
    extra = sorted(name for name in set(found) - set(ARRAYS) if int(version) == 1 or not name.startswith(EXTRA))
    if extra:
        raise UserError(f"{path} is damaged: it holds tensors no trace has, {names(extra)}")
