"""Store: arrays and traces of one recorder, in memory up to a limit and beyond it in a temporary folder.

Contract: the folder is removed with the store, or when the interpreter ends. Its space is reserved before it is
written to: a disk that is full is an error at once, never a fault when a page is touched.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import UserError
from workbench.instrument.trace import Trace


@dataclass(slots=True)
class _Kept:
    """A trace in one of three states: to be made, made, or in a file."""

    num_bytes: int
    make: Callable[[], Trace] | None = None
    trace: Trace | None = None
    path: Path | None = None


class Store:
    """Holds at most `memory_bytes` in memory, as far as it knows the sizes.

    Args:
        memory_bytes: the limit; 0 puts everything into files.
    """

    def __init__(self, memory_bytes: int):
        self.memory_bytes, self.used_bytes = memory_bytes, 0
        self._kept: dict[str, _Kept] = {}
        self._folder: Path | None = None
        self._numbers = itertools.count(1)
        # the engine's thread puts traces into files while others read them
        self._lock = threading.RLock()

    def array(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Return an uninitialised array, in memory or in a file.

        Raises:
            UserError: the disk has no room for it.
        """
        with self._lock:
            num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
            if not num_bytes or self._has_room(num_bytes):
                self.used_bytes += num_bytes
                return np.empty(shape, dtype)
            path = self._path(".bin")
            try:
                _reserve(path, num_bytes)
            except OSError as error:
                path.unlink(missing_ok=True)
                raise UserError(f"cannot keep {num_bytes} bytes in {path.parent}: {error.strerror or error}") from None
            return np.memmap(path, dtype, "r+", shape=tuple(shape))

    def release(self, array: np.ndarray) -> None:
        """Give an array back."""
        with self._lock:
            if isinstance(array, np.memmap):
                Path(array.filename).unlink(missing_ok=True)
            else:
                self.used_bytes -= array.nbytes

    def keep(self, key: str, num_bytes: int, make: Callable[[], Trace]) -> None:
        """Keep a trace of about `num_bytes`, made when it is asked for, or now if it must go to a file.

        Raises:
            UserError: it cannot be made or saved.
        """
        with self._lock:
            self.drop(key)
            kept = _Kept(num_bytes, make)
            if self._has_room(num_bytes):
                self.used_bytes += num_bytes
                self._kept[key] = kept
                return
            self._save(kept)
            self._kept[key] = kept

    def trace(self, key: str) -> Trace:
        """Return a kept trace; from a file, its values are read when they are used."""
        with self._lock:
            kept = self._kept[key]
            if kept.path is not None:
                return Trace.load(kept.path, lazy=True)
            if kept.trace is None:
                kept.trace = kept.make()
                kept.make = None
            return kept.trace

    def settle(self) -> dict[str, str]:
        """Make every trace that waits to be made; return why, of those that cannot be."""
        with self._lock:
            failed = {}
            for key, kept in list(self._kept.items()):
                if kept.make is not None:
                    try:
                        self.trace(key)
                    except UserError as error:
                        self.drop(key)
                        failed[key] = str(error)
            return failed

    def drop(self, key: str) -> None:
        """Forget a trace; no error if there is none."""
        with self._lock:
            kept = self._kept.pop(key, None)
            if kept is not None and kept.path is not None:
                kept.path.unlink(missing_ok=True)
            elif kept is not None:
                self.used_bytes -= kept.num_bytes

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def keys(self) -> list[str]:
        """The kept traces, in the order in which they came."""
        return list(self._kept)

    @property
    def num_spilled(self) -> int:
        """How many traces lie in files."""
        with self._lock:
            return sum(kept.path is not None for kept in self._kept.values())

    @property
    def folder(self) -> Path:
        """The temporary folder, made when it is first needed."""
        if self._folder is None:
            try:
                self._folder = Path(tempfile.mkdtemp(prefix="lora-workbench-record-"))
            except OSError as error:
                raise UserError(f"cannot make a temporary folder: {error.strerror or error}") from None
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def _has_room(self, num_bytes: int) -> bool:
        """Whether so much more fits, once the oldest traces have gone to files."""
        if num_bytes > self.memory_bytes:
            return False
        for kept in list(self._kept.values()):
            if self.used_bytes + num_bytes <= self.memory_bytes:
                return True
            if kept.path is None:
                self._save(kept)
                self.used_bytes -= kept.num_bytes
        return self.used_bytes + num_bytes <= self.memory_bytes

    def _save(self, kept: _Kept) -> None:
        trace = kept.trace if kept.trace is not None else kept.make()
        kept.path = trace.save(self._path(".safetensors"))
        kept.make = kept.trace = None

    def _path(self, suffix: str) -> Path:
        return self.folder / f"{next(self._numbers)}{suffix}"


class Lines:
    """JSON-able rows in the order in which they came, beyond the store's limit in a file."""

    def __init__(self, store: Store):
        self._store, self._rows, self._num_bytes = store, [], 0
        self._path: Path | None = None

    def add(self, row: dict[str, Any]) -> None:
        """Add one row.

        Raises:
            UserError: the disk has no room for it.
        """
        size = 64 * len(row) + sum(len(value) for value in row.values() if isinstance(value, str))
        self._rows.append(row)
        self._num_bytes += size
        self._store.used_bytes += size
        if self._store.used_bytes > self._store.memory_bytes:
            self._flush()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._path is not None:
            with self._path.open(encoding="utf-8") as file:
                yield from map(json.loads, file)
        yield from self._rows

    def _flush(self) -> None:
        path = self._path or self._store.folder / "requests.jsonl"
        text = "".join(json.dumps(row) + "\n" for row in self._rows)
        before = path.stat().st_size if self._path else 0
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            if path.exists():
                os.truncate(path, before)
            raise UserError(f"cannot write {path}: {error.strerror or error}") from None
        self._path = path
        self._store.used_bytes -= self._num_bytes
        self._rows, self._num_bytes = [], 0


class Table:
    """Rows of numbers under fixed columns, in blocks of the store."""

    _LENGTH = 1024

    def __init__(self, store: Store, columns: Sequence[str]):
        self.columns, self._store = tuple(columns), store
        self._blocks: list[np.ndarray] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, row: dict[str, float]) -> None:
        """Add one row; it has every column."""
        place = self._count % self._LENGTH
        if not place:
            self._blocks.append(self._store.array((self._LENGTH, len(self.columns)), np.float64))
        self._blocks[-1][place] = [row[column] for column in self.columns]
        self._count += 1

    def values(self) -> np.ndarray:
        """Return a copy, float64 `[row, column]`."""
        count = self._count
        whole = np.concatenate(self._blocks) if self._blocks else np.empty((0, len(self.columns)))
        return whole[:count]


def _reserve(path: Path, num_bytes: int) -> None:
    with path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return
        block = bytes(1 << 20)
        for first in range(0, num_bytes, len(block)):
            file.write(block[: num_bytes - first])
