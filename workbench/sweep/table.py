"""The table of a sweep: one row per unit, of those on disk and of those that only the table knows any more.

Contract: a row of the grid's points and repeats stays until its unit is on disk, so that a table that was kept without
its units (a checkout, a copy) survives a sweep of some of its points. What has failed does not replace what succeeded.
Rows of points the grid no longer has, and of files that have changed since, go.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError, names
from workbench.sweep.inputs import Inputs, changed, of_text
from workbench.sweep.point import SETTINGS
from workbench.sweep.store import DONE, Store, Unit, flat, units_of

if TYPE_CHECKING:
    import pandas as pd

_KEYS = ("point", "repeat", "status")
_GRIDS = ("grid", "point", "label", "repeat", "status", "error", *SETTINGS)


def rows_of(store: Store) -> list[dict[str, Any]]:
    """Return the rows of a sweep's table: settings, status, error, figures, machine.

    Raises:
        UserError: something else lies where the table belongs.
    """
    units = units_of(store.grid)
    kept, stale, found = kept_rows(store)[0], store.stale(units), []
    for unit in units:
        result = None if unit in stale else store.result(unit)
        row = kept.get(unit)
        if result is not None and not (result["status"] != DONE and row is not None and row["status"] == DONE):
            row = flat(store.grid, unit, result)
        if row is not None:
            found.append(row)
    return found


def kept_rows(store: Store) -> tuple[dict[Unit, dict[str, Any]], dict[Unit, list[str]]]:
    """Return the rows that stand in the table now, and the units of those left out, with the files that changed.

    Raises:
        UserError: something else lies where the table belongs.
    """
    frame = read_own(store.table, _KEYS, "table of results")
    kept: dict[Unit, dict[str, Any]] = {}
    stale: dict[Unit, list[str]] = {}
    if frame is None:
        return kept, stale
    points, inputs = {point.id: point for point in store.grid.points}, Inputs()
    # numbers that are not there are NaN, all else is None
    for column in frame.columns:
        if frame[column].dtype.kind not in "iufb":
            frame[column] = frame[column].astype(object).where(frame[column].notna(), None)
    for row in frame.to_dict("records"):
        point = points.get(row["point"])
        if point is None or not 0 <= row["repeat"] < store.grid.repeats:
            continue
        unit = Unit(point, int(row["repeat"]))
        if keys := changed(of_text(row.get("inputs")), inputs.of(point)):
            stale[unit] = keys
        else:
            kept[unit] = _kept(store, unit, row)
    return kept, stale


def frame_of(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return rows as a table with one type per column, as Parquet wants: a rank may be a number or a list of them."""
    import pandas as pd

    frame = pd.DataFrame(rows)
    for column in frame.columns:
        if any(isinstance(value, list) for value in frame[column]):
            is_said = [isinstance(value, list) or pd.notna(value) for value in frame[column]]
            whole = [int(value) if isinstance(value, float) and value.is_integer() else value
                     for value in frame[column]]
            frame[column] = [str(value) if said else None for value, said in zip(whole, is_said, strict=True)]
    return frame


def read_own(path: Path, keys: tuple[str, ...], what: str) -> pd.DataFrame | None:
    """Return a table that a sweep wrote, None where there is none.

    Raises:
        UserError: something else lies there.
    """
    import pandas as pd

    if not path.is_file():
        return None
    try:
        frame = pd.read_parquet(path)
    except Exception as error:  # whatever reader found it truncated or foreign
        raise UserError(f"{str(path)!r} is no {what}: {str(error).splitlines()[0]}") from None
    if lacking := [key for key in keys if key not in frame]:
        raise UserError(f"{str(path)!r} is no {what}: it has no column {names(lacking)}")
    return frame


def _kept(store: Store, unit: Unit, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the table as `flat` would make it of the unit: settings and label as the grid says them now."""
    figures = {key: value for key, value in row.items() if key not in _GRIDS}
    return {"grid": store.grid.name, "point": unit.point.id, "label": store.grid.label(unit.point),
            "repeat": unit.repeat, "status": row["status"], "error": row.get("error"), **unit.point.settings,
            **figures}  # fmt: skip
