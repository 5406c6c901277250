"""Merging: the units of several results folders, such as those of a sweep's shards, in one."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from workbench.errors import UserError
from workbench.sweep.grid import Grid
from workbench.sweep.places import require_tables, write_tables
from workbench.sweep.store import DONE, GRID_FILE, Store, units_of, writing


def merge(grid: Grid, sources: Iterable[str | Path], out: str | Path) -> Store:
    """Copy the units of several results folders into one, and write its tables.

    What succeeded goes before what failed, and units that read the files that lie here before those that read others.

    Raises:
        UserError: a folder without results of this grid.
    """
    target = Store(out, grid)
    target.begin()
    require_tables(target)
    units = units_of(grid)
    for source in sources:
        store = Store(source, grid)
        if not (store.folder / GRID_FILE).is_file():
            raise UserError(f"{str(source)!r} holds no results of grid {grid.name!r}")
        if store.folder.resolve() == target.folder.resolve():
            continue
        own_stale, stale = target.stale(units), store.stale(units)
        for unit in units:
            own, theirs = target.result(unit), store.result(unit)
            if theirs is None or (own is not None and _rank(own, unit in own_stale) >= _rank(theirs, unit in stale)):
                continue
            with target.making(unit) as part, writing(part):
                shutil.copytree(store.path(unit), part, dirs_exist_ok=True)
    write_tables(target)
    return target


def _rank(result: Mapping[str, Any], is_stale: bool) -> tuple[bool, bool]:
    return not is_stale, result["status"] == DONE
