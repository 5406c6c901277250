"""Merging: the units of several results folders, such as those of a sweep's shards, in one."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from workbench.errors import UserError
from workbench.sweep.grid import Grid
from workbench.sweep.places import write_tables
from workbench.sweep.store import DONE, GRID_FILE, Store, units_of, writing


def merge(grid: Grid, sources: Iterable[str | Path], out: str | Path) -> Store:
    """Copy the units of several results folders into one, and write its tables.

    Raises:
        UserError: a folder without results of this grid.
    """
    target = Store(out, grid)
    target.begin()
    units = units_of(grid)
    for source in sources:
        store = Store(source, grid)
        if not (store.folder / GRID_FILE).is_file():
            raise UserError(f"{str(source)!r} holds no results of grid {grid.name!r}")
        if store.folder.resolve() == target.folder.resolve():
            continue
        for unit in units:
            own, theirs = target.result(unit), store.result(unit)
            if theirs is None or (own is not None and (own["status"] == DONE or theirs["status"] != DONE)):
                continue
            with target.making(unit) as part, writing(part):
                shutil.copytree(store.path(unit), part, dirs_exist_ok=True)
    write_tables(target)
    return target
