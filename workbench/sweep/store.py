"""Results of a sweep on disk: one folder per unit (a point and a repeat), one Parquet table for all.

    OUT/<grid>/grid.json                      what the grid was
    OUT/<grid>/units/<point id>-r<repeat>/    a run folder, and result.json, written last
    OUT/<grid>.parquet                        one row per unit

Contract: a unit is there whole or not at all: it is made under another name and renamed. Units of several processes and
machines may be written side by side.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError, names
from workbench.jsonfile import read_json
from workbench.sweep.grid import Grid
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


class Store:
    """The results folder of one grid.

    Args:
        out: where results of all grids lie.
        grid: whose.

    Raises:
        UserError: the folder holds another grid's results, or those of another version.
    """

    def __init__(self, out: str | Path, grid: Grid):
        self.grid, self.out = grid, Path(out)
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
        return Store(self.out.absolute(), self.grid)

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

    def missing(self, units: Iterable[Unit], retry_failed: bool = False) -> list[Unit]:
        """Return those without a result, and, if wished, those that failed."""
        found = []
        for unit in units:
            result = self.result(unit)
            if result is None or (retry_failed and result["status"] == FAILED):
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

    def rows(self, units: Iterable[Unit]) -> list[dict[str, Any]]:
        """Return the finished ones' results as flat rows: settings, status, error, figures, machine."""
        found = []
        for unit in units:
            result = self.result(unit)
            if result is not None:
                found.append(flat(self.grid, unit, result))
        return found

    def write_table(self, units: Iterable[Unit]) -> Path | None:
        """Write the table of all finished units; None when there are none."""
        import pandas as pd

        rows = self.rows(units)
        if not rows:
            return None
        frame = pd.DataFrame(rows)
        for column in frame.columns:
            # one type per column, as Parquet wants: a rank may be a number or a list of them
            if any(isinstance(value, list) for value in frame[column]):
                is_said = [isinstance(value, list) or pd.notna(value) for value in frame[column]]
                whole = [int(value) if isinstance(value, float) and value.is_integer() else value
                         for value in frame[column]]
                frame[column] = [str(value) if said else None for value, said in zip(whole, is_said, strict=True)]
        write_parquet(frame, self.table)
        return self.table

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
    }  # fmt: skip


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


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
