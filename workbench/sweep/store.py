"""Results of a sweep on disk: one folder per unit (a point and a repeat), one Parquet table for all.

    OUT/<grid>/grid.json                      what the grid was
    OUT/<grid>/units/<point id>-r<repeat>/    a run folder, and result.json, written last
    OUT/<grid>.parquet                        one row per unit, see `workbench.sweep.table`

Contract: a unit is there whole or not at all: it is made under another name and renamed. Units of several processes and
machines may be written side by side. One whose files have changed since counts as missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError, names
from workbench.jsonfile import read_json
from workbench.sweep.grid import Grid
from workbench.sweep.inputs import Inputs, as_text, changed
from workbench.sweep.point import SCHEMA, PointSettings

if TYPE_CHECKING:
    import pandas as pd

DONE, FAILED = "done", "failed"
GRID_FILE = "grid.json"
_RESULT, _UNITS, _PART = "result.json", "units", ".part"


@dataclass(frozen=True)
class Unit:
    """One repeat of one point."""

    point: PointSettings
    repeat: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.point.id}-r{self.repeat}"


@dataclass(frozen=True)
class Session:
    """One call of a sweep: its units ran on the same day, beside the same programs.

    Attributes:
        backend: where its units run: "in process", "joblib 4", "ray".
        is_alone: no two of them run at once.
        id: random.
        host: hash of the machine it was started on.
    """

    backend: str = "in process"
    is_alone: bool = True
    id: str = field(default_factory=lambda: secrets.token_hex(4))
    host: str = field(default_factory=lambda: _host_hash())

    def facts(self) -> dict[str, str]:
        """Return what a unit that runs in this process keeps of it; each machine of a cluster has its own session."""
        here = _host_hash()
        return {"session": self.id if here == self.host else f"{self.id}-{here}", "backend": self.backend}


class Store:
    """The results folder of one grid.

    Args:
        out: where results of all grids lie.
        grid: whose.

    Attributes:
        session: under which units run that are written now; `sweep` begins a new one.

    Raises:
        UserError: the folder holds another grid's results, or those of another version.
    """

    def __init__(self, out: str | Path, grid: Grid):
        self.grid, self.out, self.session = grid, Path(out), Session()
        self.folder, self.table = self.out / grid.name, self.out / f"{grid.name}.parquet"
        if (self.folder / GRID_FILE).exists():
            self._require_ours()
        elif self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"{str(self.folder)!r} is a file, and results go to a folder of that name; give another "
                            "--out")
        elif self.folder.exists() and any(self.folder.iterdir()):
            inside = sorted(path.name for path in self.folder.iterdir())
            raise UserError(f"{str(self.folder)!r} holds {names(inside, 3)} and no {GRID_FILE}: it is no results "
                            "folder; give another with --out")

    def begin(self) -> None:
        """Make the folder, and clear away what killed processes of this machine left."""
        with writing(self.folder):
            (self.folder / _UNITS).mkdir(parents=True, exist_ok=True)
            write_json(self.folder / GRID_FILE, {
                "schema": SCHEMA, "name": self.grid.name, "question": self.grid.question, "repeats": self.grid.repeats,
                "digest": self.grid.digest, "points": {point.id: point.settings for point in self.grid.points},
            })  # fmt: skip
        for part in (self.folder / _UNITS).glob(f"*{_PART}"):
            host, _, pid = part.name.removesuffix(_PART).rpartition(".")[0].rpartition(".")
            if host.endswith(f".{_host()}") and pid.isdigit() and not _is_alive(int(pid)):
                shutil.rmtree(part, ignore_errors=True)

    def absolute(self) -> Store:
        """Return the same store for processes that run in another folder."""
        found = Store(self.out.absolute(), self.grid)
        found.session = self.session
        return found

    def path(self, unit: Unit) -> Path:
        """Return a unit's folder, there or not."""
        return self.folder / _UNITS / unit.name

    def result(self, unit: Unit) -> dict[str, Any] | None:
        """Return a finished unit's result, None for one that has not run."""
        path = self.path(unit) / _RESULT
        return read_json(path, "a unit's result") if path.is_file() else None

    def finished(self) -> set[str]:
        """Return the names of the units that have a result, failed ones too."""
        found = {path.parent.name for path in (self.folder / _UNITS).glob(f"*/{_RESULT}")}
        return {name for name in found if not name.endswith(_PART)}

    def has_ended(self, unit: Unit) -> bool:
        """Whether a unit has a result of this session; one that failed before may still lie there."""
        result = self.result(unit)
        return result is not None and str(result.get("session")).split("-")[0] == self.session.id

    def stale(self, units: Iterable[Unit]) -> dict[Unit, list[str]]:
        """Return the finished ones that read other files than lie there now, and which: "base", "trace"."""
        inputs, found = Inputs(), {}
        for unit in units:
            result = self.result(unit)
            if result is not None and (keys := changed(result.get("inputs"), inputs.of(unit.point))):
                found[unit] = keys
        return found

    def missing(self, units: Iterable[Unit], retry_failed: bool = False) -> list[Unit]:
        """Return those without a result or with one of other files, and, if wished, those that failed."""
        units, found = list(units), []
        stale = self.stale(units)
        for unit in units:
            result = self.result(unit)
            if result is None or unit in stale or (retry_failed and result["status"] == FAILED):
                found.append(unit)
        return found

    def discard(self, unit: Unit) -> None:
        """Forget a unit's result."""
        shutil.rmtree(self.path(unit), ignore_errors=True)

    @contextmanager
    def making(self, unit: Unit) -> Iterator[Path]:
        """Give an empty folder which becomes the unit's when the context is left without an error."""
        units = self.folder / _UNITS
        with writing(units):
            units.mkdir(parents=True, exist_ok=True)
            # others who share the folder may read it: mkdtemp would make it private
            part = units / f"{unit.name}.{_host()}.{os.getpid()}.{secrets.token_hex(4)}{_PART}"
            part.mkdir()
        try:
            yield part
            with writing(part):
                self.discard(unit)
                part.rename(self.path(unit))
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise

    def _require_ours(self) -> None:
        said = read_json(self.folder / GRID_FILE, "a results folder's grid")
        if not isinstance(said, dict):
            raise UserError(f"{str(self.folder / GRID_FILE)!r} is none of ours: it holds no object; give another --out")
        if said.get("schema") != SCHEMA:
            raise UserError(f"{str(self.folder)!r} was written with schema {said.get('schema')!r}, this version writes "
                            f"{SCHEMA}; give another --out, or remove that folder")
        if said.get("name") != self.grid.name:
            raise UserError(f"{str(self.folder)!r} holds results of grid {said.get('name')!r}, not of "
                            f"{self.grid.name!r}; give another --out")


def flat(grid: Grid, unit: Unit, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return one row of the table."""
    machine = result.get("environment") or {}
    return {
        "grid": grid.name, "point": unit.point.id, "label": grid.label(unit.point), "repeat": unit.repeat,
        "status": result["status"], "error": result.get("error"), **unit.point.settings,
        **(result.get("figures") or {}), "seconds": result.get("seconds"), "load_before": result.get("load_before"),
        "load_after": result.get("load_after"), "created": result.get("created"), "cpu": machine.get("cpu"),
        "gpu": machine.get("gpu"), "cores": machine.get("cores"), "threads": machine.get("threads"),
        "platform": machine.get("platform"), "torch": (machine.get("versions") or {}).get("torch"),
        "session": result.get("session"), "backend": result.get("backend"), "others_cores": _others_cores(result),
        "inputs": as_text(result.get("inputs")),
    }  # fmt: skip


def stale_sentence(
    stale: Mapping[Unit, Iterable[str]], what: str = "finished run{s}", so: str = "counted as missing"
) -> str:
    """Return how many results are of other files than lie there now, of which, and what becomes of them.

    Args:
        stale: of `Store.stale`; not empty.
        what: they are, with "{s}" where several have an s.
        so: what becomes of them.
    """
    said = dict.fromkeys((key, getattr(unit.point, key, None)) for unit, keys in stale.items() for key in keys)
    of = {key: [name for where, name in said if where == key and name] for key, _ in said}
    files = " or ".join(f"{key} ({names(known, 3)})" if known else key for key, known in of.items())
    results = what.format(s="s" if len(stale) != 1 else "")
    return f"{len(stale)} {results} read another {files} than there is now: {so}"


def units_of(grid: Grid, points: Iterable[PointSettings] | None = None) -> list[Unit]:
    """Return the units of points, repeat by repeat, every other round backwards: what drifts meets all alike."""
    chosen = list(grid.points if points is None else points)
    found: list[Unit] = []
    for repeat in range(grid.repeats):
        found += [Unit(point, repeat) for point in (chosen if repeat % 2 == 0 else reversed(chosen))]
    return found


def write_parquet(frame: pd.DataFrame, path: Path) -> None:
    """Write a table, whole or not at all."""
    with writing(path):
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            frame.to_parquet(temporary, index=False)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Write a unit's result."""
    with writing(folder):
        write_json(folder / _RESULT, result)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what a disk may answer into a sentence."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write results at {str(path)!r}: {error.strerror or error}; what is finished is kept, "
                        "and the same command goes on from there") from error


def _host() -> str:
    return "".join(char if char.isalnum() else "-" for char in socket.gethostname()) or "host"


def _host_hash() -> str:
    # results may be published, and a machine's name is nobody's business
    return hashlib.sha256(_host().encode()).hexdigest()[:8]


def _others_cores(result: Mapping[str, Any]) -> float:
    value = result.get("others_cores")
    return float("nan") if value is None else value


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
