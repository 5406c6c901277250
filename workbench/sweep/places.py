"""Where in the texts a policy loses: the mean over passages at each place, of all fidelity points of a sweep.

A unit keeps a row per token; this small table of their means is what a report draws, and what is worth committing.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.sweep.grid import Grid
from workbench.sweep.point import PointSettings
from workbench.sweep.store import DONE, GRID_FILE, Store, stale_sentence, units_of, write_parquet
from workbench.sweep.table import frame_of, kept_rows, read_own, rows_of

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("point", "texts", "policy", "place", "switch_at", "kl", "top1", "scalings_l1", "passages")
# what older tables do not say
MORE = ("mixture", "base", "dtype")
_MEANS = ("kl", "top1", "scalings_l1")
_TOKENS = "tokens.parquet"


def write_tables(store: Store) -> Path | None:
    """Write a sweep's tables of what has finished; return the one of its figures, None when there is nothing.

    Raises:
        UserError: one cannot be written, or something else lies in its place.
    """
    rows = rows_of(store)
    if not rows:
        return None
    done = {row["point"] for row in rows if row["status"] == DONE}
    write_places(store, done)
    _write(frame_of(rows), store.table)
    return store.table


def require_tables(store: Store) -> None:
    """Raise a UserError, before hours are spent, where something else lies in the place of a table."""
    kept_rows(store)
    read_places(places_path(store))


def refresh_tables(out: str | Path, grid: Grid) -> list[str]:
    """Bring the tables of a grid up to its units on disk, such as those of a sweep that was killed.

    Nothing is written where there are no units, or where the tables have all of them already.

    Args:
        out: where results of all grids lie.
        grid: whose.

    Returns:
        What a reader of the tables should know: which finished runs are left out, and why.

    Raises:
        UserError: the folder is another grid's, a table cannot be written, or something else lies in its place.
    """
    out = Path(out)
    if not (out / grid.name / GRID_FILE).is_file():
        return []
    store = Store(out, grid)
    notes = notes_of(store)
    write_tables(store)
    return notes


def notes_of(store: Store) -> list[str]:
    """Return what the next tables leave out, and why: no sentence, one of runs on disk, one of rows."""
    stale = store.stale(units_of(store.grid))
    return [*([stale_sentence(stale)] if stale else []), *notes_of_rows(store)]


def notes_of_rows(store: Store) -> list[str]:
    """Return what the next table leaves out of those rows whose run is not on disk."""
    stale = {unit: keys for unit, keys in kept_rows(store)[1].items() if store.result(unit) is None}
    return [stale_sentence(stale, "row{s} of the table", "left out of it from now on")] if stale else []


def places_path(store: Store) -> Path:
    """Return where a sweep's table of places lies."""
    return store.out / f"{store.grid.name}-places.parquet"


def write_places(store: Store, done: Collection[str]) -> Path | None:
    """Write the table of places of fidelity points; None when there are none.

    Points whose tokens are not on disk keep the rows that the table has of them.

    Args:
        store: whose.
        done: ids of the points that have a row without an error in the table.

    Raises:
        UserError: it cannot be written, or something else lies there.
    """
    import pandas as pd

    old, tokens = read_places(places_path(store)), _tokens(store)
    parts = []
    for point in store.grid.points:
        if point.task != "fidelity" or point.id not in done:
            continue
        if point in tokens:
            parts.append(_of_point(point, pd.read_parquet(tokens[point])))
        elif old is not None:
            parts.append(old[old["point"] == point.id].assign(**_facts(point)))
    parts = [part for part in parts if len(part)]
    if not parts:
        return None
    _write(pd.concat(parts, ignore_index=True)[[*COLUMNS, *MORE]], places_path(store))
    return places_path(store)


def read_places(path: Path) -> pd.DataFrame | None:
    """Return a table of places, None where there is none; `MORE` is None in a table that does not say it.

    Raises:
        UserError: something else lies there.
    """
    frame = read_own(path, COLUMNS, "table of places")
    return None if frame is None else frame.assign(**{key: None for key in MORE if key not in frame})


def _tokens(store: Store) -> dict[PointSettings, Path]:
    """Return a file of tokens per point: repeats score the same texts with the same result, they differ in time."""
    units = units_of(store.grid)
    stale, found = store.stale(units), {}
    for unit in units:
        path = store.path(unit) / _TOKENS
        if unit.point not in found and unit not in stale and path.is_file():
            found[unit.point] = path
    return found


def _of_point(point: PointSettings, tokens: pd.DataFrame) -> pd.DataFrame:
    by_place = tokens.groupby("place")
    found = by_place[list(_MEANS)].mean().astype("float32").reset_index()
    switch_at = tokens["switch_at"].iloc[0]
    return found.assign(**_facts(point), switch_at=float("nan") if switch_at is None else float(switch_at),
                        passages=by_place.size().to_numpy())


def _facts(point: PointSettings) -> dict[str, Any]:
    return {"point": point.id, "texts": point.texts, "policy": point.policy,
            **{key: getattr(point, key) for key in MORE}}


def _write(frame: pd.DataFrame, path: Path) -> None:
    """Write a table unless it says the same already: what is committed and unchanged stays as it is."""
    old = read_own(path, (), "table")
    if old is None or list(old.columns) != list(frame.columns) or len(old) != len(frame) or not _same(old, frame):
        write_parquet(frame, path)


def _same(old: pd.DataFrame, new: pd.DataFrame) -> bool:
    both = zip((old[key] for key in old), (new[key] for key in new), strict=True)
    return all(((one.isna() & other.isna()) | (one == other)).all() for one, other in both)
