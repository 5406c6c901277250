"""Where in the texts a policy loses: the mean over passages at each place, of all fidelity points of a sweep.

A unit keeps a row per token; this small table of their means is what a report draws, and what is worth committing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError, names
from workbench.sweep.store import Store, Unit, units_of, write_parquet

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("point", "texts", "policy", "place", "switch_at", "kl", "top1", "scalings_l1", "passages")
_MEANS = ("kl", "top1", "scalings_l1")
_TOKENS = "tokens.parquet"


def write_tables(store: Store) -> Path | None:
    """Write a sweep's tables of what has finished; return the one of its figures, None when there is nothing.

    Raises:
        UserError: one cannot be written.
    """
    units = units_of(store.grid)
    write_places(store, units)
    return store.write_table(units)


def places_path(store: Store) -> Path:
    """Return where a sweep's table of places lies."""
    return store.out / f"{store.grid.name}-places.parquet"


def write_places(store: Store, units: Iterable[Unit]) -> Path | None:
    """Write the table of places of the fidelity units that have finished; None when there are none.

    Raises:
        UserError: it cannot be written.
    """
    import pandas as pd

    parts, seen = [], set()
    for unit in units:
        path = store.path(unit) / _TOKENS
        # repeats score the same texts with the same result: they differ in time alone
        if unit.point.task == "fidelity" and unit.point not in seen and path.is_file():
            seen.add(unit.point)
            parts.append(_of_unit(unit, pd.read_parquet(path)))
    if not parts:
        return None
    write_parquet(pd.concat(parts, ignore_index=True), places_path(store))
    return places_path(store)


def read_places(path: Path) -> pd.DataFrame | None:
    """Return a table of places, None where there is none.

    Raises:
        UserError: something else lies there.
    """
    import pandas as pd

    if not path.is_file():
        return None
    try:
        frame = pd.read_parquet(path)
    except Exception as error:  # whatever reader found it truncated or foreign
        raise UserError(f"{str(path)!r} is no table of places: {str(error).splitlines()[0]}") from None
    if lacking := [key for key in COLUMNS if key not in frame]:
        raise UserError(f"{str(path)!r} is no table of places: it has no column {names(lacking)}")
    return frame


def _of_unit(unit: Unit, tokens: pd.DataFrame) -> pd.DataFrame:
    by_place = tokens.groupby("place")
    facts: dict[str, Any] = {"point": unit.point.id, "texts": unit.point.texts, "policy": unit.point.policy}
    found = by_place[list(_MEANS)].mean().astype("float32").reset_index()
    switch_at = tokens["switch_at"].iloc[0]
    found = found.assign(**facts, switch_at=float("nan") if switch_at is None else float(switch_at),
                         passages=by_place.size().to_numpy())
    return found[list(COLUMNS)]
