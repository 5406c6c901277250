"""Safetensors files, read once: hashed while they are read, and their tensors views of what was read.

The library reads a file too, but its tensors lie in a mapping of the file, so that an adapter overwritten on disk would
change, or crash, the one that runs; from bytes it copies. Both cost more than the reading.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from workbench.errors import TransientError, UserError, names
from workbench.jsonfile import parse_json

_PIECE = 1 << 18  # bytes read, then hashed while the disk goes on
_MOST_HEADER = 100_000_000  # the format's limit
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


class Digest(Protocol):
    """What takes a file's bytes in, such as `hashlib.sha256()`."""

    def update(self, data: memoryview, /) -> None: ...


def read_tensors(path: Path, what: str, digest: Digest | None = None) -> dict[str, Tensor]:
    """Read a safetensors file; return its tensors by name, all views of one buffer that nothing else holds.

    Args:
        path: the file. Pickle files beside it are named, never opened.
        what: names the file's owner in errors.
        digest: takes in the file's bytes.

    Raises:
        UserError: no such file, or not in the format; TransientError: the disk fails, or somebody writes to the file.
    """
    if not path.is_file():
        pickles = sorted(p.name for p in path.parent.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".pkl"))
        if pickles:
            raise UserError(
                f"{what}: {path.parent} has only pickle weights ({names(pickles)}), which can run code when opened and "
                "are refused; convert them to safetensors"
            )
        raise UserError(f"{what}: weights not found: {path}")
    try:
        buffer = _read(path, digest)
    except OSError as error:
        raise TransientError(f"{what}: {path} cannot be read: {error.strerror or error}") from None
    if buffer is None:
        raise TransientError(f"{what}: {path} changed while it was read; load it again")
    if bytes(buffer[:23].numpy()) == b"version https://git-lfs":
        raise UserError(f"{what}: {path} is a Git LFS pointer, not the weights; fetch them with 'git lfs pull'")
    try:
        return parse(buffer)
    except ValueError as error:
        raise UserError(f"{what}: {path} is not a readable safetensors file (truncated or corrupt?): {error}") from None


def parse(buffer: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a file's bytes (uint8 `[byte]`) by name, as views of it.

    Raises:
        ValueError: what is not in the format; a UserError where it is the header's JSON.
    """
    num_bytes = buffer.numel()
    if num_bytes < 8:
        raise ValueError(f"it has {num_bytes} bytes, fewer than a header's length takes")
    size = int.from_bytes(buffer[:8].numpy().tobytes(), "little")
    if size > min(_MOST_HEADER, num_bytes - 8):
        raise ValueError(f"its header is said to have {size} bytes, the file has {num_bytes}")
    header = parse_json(str(buffer[8 : 8 + size].numpy().tobytes(), "utf-8"), "its header")
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    notes = header.get("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
        raise ValueError("its header's __metadata__ is not made of texts")
    data, num_bytes = buffer[8 + size :], num_bytes - 8 - size
    found, end = {}, 0
    entries = [(name, _entry(name, entry)) for name, entry in header.items() if name != "__metadata__"]
    for name, (dtype, shape, start, stop) in sorted(entries, key=lambda each: each[1][2:]):
        if start != end:
            raise ValueError(f"tensor {name!r} starts at byte {start} of the data, the one before ends at {end}")
        if stop > num_bytes:
            raise ValueError(f"tensor {name!r} ends at byte {stop} of the data, which has {num_bytes}")
        part, end = data[start:stop], stop
        # an odd header length would put numbers where no view of their type can begin
        part = part if part.storage_offset() % dtype.itemsize == 0 else part.clone()
        found[name] = part.view(dtype).reshape(shape)
    if end != num_bytes:
        raise ValueError(f"its tensors end at byte {end} of the data, which has {num_bytes}")
    return dict(sorted(found.items()))


def _entry(name: str, entry: Any) -> tuple[torch.dtype, list[int], int, int]:
    """Return dtype, shape and place of one tensor of a header."""
    try:
        kind, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, start, stop))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole:
        raise ValueError(f"its header gives tensor {name!r} no dtype, shape and data_offsets")
    if kind not in _DTYPES:
        raise ValueError(f"tensor {name!r} has dtype {kind!r}; known are {names(list(_DTYPES), len(_DTYPES))}")
    if stop - start != math.prod(shape) * _DTYPES[kind].itemsize:
        raise ValueError(f"tensor {name!r} of shape {shape} and dtype {kind} is given {stop - start} bytes")
    return _DTYPES[kind], shape, start, stop


def _read(path: Path, digest: Digest | None) -> Tensor | None:
    """Return a file's bytes, uint8 `[byte]`; None when it changes its length meanwhile."""
    with path.open("rb", buffering=0) as file:
        buffer = torch.empty(os.fstat(file.fileno()).st_size, dtype=torch.uint8)
        view, at = memoryview(buffer.numpy()), 0
        while at < len(view) and (count := file.readinto(view[at : at + _PIECE])):
            if digest is not None:
                digest.update(view[at : at + count])
            at += count
        return buffer if at == len(view) and not file.read(1) else None
