"""Inputs: what the files and folders that a point names hold, so that a run of other contents is not taken for it.

Contract: a fingerprint depends on contents alone, not on paths, dates or machines, and nothing is fetched for one. What
cannot be looked at here has none, and what has none is taken for unchanged.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from workbench import hub
from workbench.demo_base import FOLDER as DEMO_BASE
from workbench.errors import UserError
from workbench.snapshot import DATA_FILES, TOKENIZER_FILES
from workbench.sweep.passages import SETS
from workbench.sweep.point import PointSettings

_READ = DATA_FILES + TOKENIZER_FILES
_SYNTHETIC = "synthetic"
_TEXTS, _PROMPTS = "texts.json", "prompts.json"
# a larger file, such as a shard of a base, is looked at in places: reading all of it takes longer than many a unit
_WHOLE_BYTES = 512 << 20
_BLOCK_BYTES, _BLOCKS = 64 << 10, 256
_DIGITS = 16

_digests: dict[tuple, str] = {}


class Inputs:
    """Fingerprints of what points name; each file and folder is looked at once for all of them."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], str | None] = {}

    def of(self, point: PointSettings) -> dict[str, str]:
        """Return name -> fingerprint: base, mixture, texts, trace, prompts, as far as a point has them.

        One that cannot be said here is left out: a file that is not there, a Hub repository that is not cached.
        """
        if point.mode == "xlora" and point.mixture != _SYNTHETIC:
            wanted = {"mixture": self._once("mixture", point.mixture, _mixture)}
        else:
            wanted = {}
        wanted["base"] = self._base(point)
        if point.task == "fidelity":
            wanted["texts"] = self._once("texts", str(point.file("texts")), lambda _: _texts(point))
        else:
            wanted["prompts"] = self._once("prompts", "", lambda _: file_digest(hub.DEMO_MIXTURE / _PROMPTS))
        if point.trace is not None:
            wanted["trace"] = self._once("trace", str(point.file("trace")), lambda path: file_digest(Path(path)))
        return {key: value for key, value in wanted.items() if value is not None}

    def _base(self, point: PointSettings) -> str | None:
        if point.base is not None:
            return self._once("base", point.base, _base)
        return self._once("base of", point.mixture, lambda mixture: _base(_named_base(mixture)))

    def _once(self, key: str, source: str, look: Callable[[str], str | None]) -> str | None:
        if (key, source) not in self._found:
            try:
                self._found[key, source] = look(source)
            except (OSError, UserError):
                self._found[key, source] = None
        return self._found[key, source]


def changed(recorded: Mapping[str, str] | None, now: Mapping[str, str]) -> list[str]:
    """Return the names of what is known to be another now; what either side does not know is not."""
    return [key for key, value in now.items() if (recorded or {}).get(key, value) != value]


def as_text(fingerprints: Mapping[str, str] | None) -> str | None:
    """Return fingerprints as a table keeps them: "base=… mixture=…"; None for none."""
    return " ".join(f"{key}={value}" for key, value in sorted((fingerprints or {}).items())) or None


def of_text(text: object) -> dict[str, str]:
    """Return the fingerprints that a table keeps; {} of a row that has none."""
    return dict(each.split("=", 1) for each in text.split() if "=" in each) if isinstance(text, str) else {}


def file_digest(path: Path) -> str:
    """Return a file's fingerprint: of its size and content, of a very large one of blocks all over it.

    Raises:
        OSError: it cannot be read.
    """
    stat = path.stat()
    key = (os.path.realpath(path), stat.st_size, stat.st_mtime_ns, stat.st_ino)
    if key not in _digests:
        found = hashlib.sha256(str(stat.st_size).encode())
        with path.open("rb") as file:
            for start, length in _pieces(stat.st_size):
                file.seek(start)
                found.update(file.read(length))
        _digests[key] = found.hexdigest()[:_DIGITS]
    return _digests[key]


def folder_digest(folder: Path) -> str:
    """Return a folder's fingerprint: of the names and contents of the files in it that a model is read from.

    Raises:
        OSError: one of them cannot be read.
    """
    found = sorted((path.relative_to(folder).as_posix(), path) for path in _files(folder))
    lines = [f"{name} {file_digest(path)}" for name, path in found]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:_DIGITS]


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    if size <= _WHOLE_BYTES:
        yield from ((start, _BLOCK_BYTES) for start in range(0, size, _BLOCK_BYTES))
        return
    for number in range(_BLOCKS):
        yield (size - _BLOCK_BYTES) * number // (_BLOCKS - 1), _BLOCK_BYTES


def _files(folder: Path) -> Iterator[Path]:
    seen = set()
    # adapters may be links to folders elsewhere, and links may go round in circles
    for inside, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(inside)
        folders[:] = [] if real in seen else [name for name in folders if not name.startswith(".")]
        if real not in seen:
            yield from (Path(inside) / name for name in files
                        if any(fnmatch.fnmatch(name, pattern) for pattern in _READ))
        seen.add(real)


def _mixture(source: str) -> str | None:
    return _folder(Path(hub.resolve_mixture(source, offline=True, progress=False)))


def _base(source: str) -> str | None:
    # the demo's is pinned by its hash, and need not have been made yet
    return DEMO_BASE if source == hub.DEMO else _folder(hub.resolve_base(source, offline=True, progress=False))


def _named_base(mixture: str) -> str:
    # it imports torch, and few points leave their base to the mixture
    from workbench.engine.sources import named_base

    return named_base(mixture, None, {"offline": True})


def _texts(point: PointSettings) -> str | None:
    is_set = point.texts.partition(":")[0] in SETS
    return file_digest(hub.DEMO_MIXTURE / _TEXTS if is_set else point.file("texts"))


def _folder(folder: Path) -> str:
    # a snapshot's name is its commit
    return f"commit-{folder.name}" if folder.parent.name == "snapshots" else folder_digest(folder)
