"""Report of a sweep: what was asked, what came out, with intervals, how to make it again, and what to beware of.

Everything is computed from the sweep's tables alone, so a report can be made on any machine that has them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError, names
from workbench.sweep.document import Block, Document
from workbench.sweep.grid import Grid
from workbench.sweep.report_tables import FIDELITY, THROUGHPUT, domain_tables, main_table

if TYPE_CHECKING:
    import pandas as pd

    from workbench.display.picture import Picture

TITLES = {"throughput": "Throughput and latency", "fidelity": "What is lost"}
_FEW = 5  # repeats below which an interval says little
_WIDE = 50  # largest through smallest value from which an axis is logarithmic
_MACHINE = ("cpu", "gpu", "threads", "platform", "torch")


def read_table(path: str | Path) -> pd.DataFrame:
    """Return a sweep's table.

    Raises:
        UserError: there is none, or it is of something else.
    """
    import pandas as pd

    path = Path(path)
    if not path.is_file():
        raise UserError(f"no results at {str(path)!r}; run `workbench sweep` on the grid first")
    try:
        frame = pd.read_parquet(path)
    except Exception as error:  # whatever reader found it truncated or foreign
        raise UserError(f"{str(path)!r} is no table of results: {str(error).splitlines()[0]}") from None
    if lacking := [key for key in ("point", "repeat", "status", "task") if key not in frame]:
        raise UserError(f"{str(path)!r} is no table of a sweep: it has no column {names(lacking)}")
    return frame


def report_of(grid: Grid, frame: pd.DataFrame, places: pd.DataFrame | None = None) -> Document:
    """Return the report of a grid's results.

    Args:
        grid: what was asked.
        frame: its table.
        places: its table of places, see `sweep.places`; None leaves their figure out.

    Raises:
        UserError: no unit of this grid has finished.
    """
    ids = {point.id for point in grid.points}
    foreign = len(set(frame["point"]) - ids)
    frame = frame[frame["point"].isin(ids)]
    done = frame[frame["status"] == "done"]
    if not len(done):
        raise UserError(f"grid {grid.name!r}: none of its {len(ids)} points has finished; there is nothing to report")
    blocks = [Block("text", grid.question)] if grid.question else []
    pictures: dict[str, Picture] = {}
    finished = set(done["point"])
    for task, figures in (("throughput", THROUGHPUT), ("fidelity", FIDELITY)):
        points = [point for point in grid.points if point.task == task and point.id in finished]
        if not points:
            continue
        own = done[done["task"] == task]
        blocks += [Block("heading", TITLES[task]), main_table(grid, points, own, figures)]
        blocks += domain_tables(grid, points, own) if task == "fidelity" else []
        for name, picture in _pictures(grid, task, own, places).items():
            file = f"{grid.name}-{name}.png"
            pictures[file] = picture
            blocks.append(Block("picture", file, picture.description))
    blocks += [Block("heading", "How it was measured"), *_how(grid, frame, done, foreign)]
    return Document(f"Sweep: {grid.name}", tuple(blocks), pictures)


def _pictures(grid: Grid, task: str, done: pd.DataFrame, places: pd.DataFrame | None) -> dict[str, Picture]:
    from workbench.display.frontier_figure import frontier
    from workbench.display.places_figure import kl_by_place
    from workbench.display.sweep_view import sweep_view

    if task == "fidelity":
        found = {"frontier": frontier(done)}
        own = None if places is None else places[places["point"].isin(set(done["point"]))]
        return found | ({} if own is None or not len(own) else {"places": kl_by_place(own)})
    chosen = axes_of(grid, done)
    if chosen is None:
        return {}
    x, series = chosen
    shown = done[[key for key in dict.fromkeys((x, series, "repeat", "tok_s")) if key is not None]]
    values = shown[x].dropna()
    is_wide = values.dtype.kind in "iuf" and values.min() > 0 and values.max() / values.min() >= _WIDE
    view = sweep_view(shown, x=x, y="tok_s", series=series, log_x=bool(is_wide), axes=[x], title=f"tok/s by {x}")
    return {"throughput": view.show()}


def axes_of(grid: Grid, done: pd.DataFrame) -> tuple[str, str | None] | None:
    """Return the setting with the most values, and the next that splits points of one value; None where none differ."""
    counts = {key: done[key].nunique(dropna=False) for key in grid.varied if key in done}
    varied = sorted((key for key in counts if counts[key] > 1), key=lambda key: -counts[key])
    if not varied:
        return None
    x, *others = varied
    parts = done.groupby(x, dropna=False)
    return x, next((key for key in others if parts[key].nunique(dropna=False).max() > 1), None)


def _how(grid: Grid, frame: pd.DataFrame, done: pd.DataFrame, foreign: int) -> list[Block]:
    where = shlex.quote(str(grid.path) if grid.path is not None else grid.name)
    first, last = done["created"].min(), done["created"].max()
    present = [key for key in _MACHINE if key in done]
    machines = done[present].drop_duplicates().to_dict("records")
    facts = [f"run from {first} to {last}", *(_machine(each) for each in machines)]
    facts.append(f"{done['point'].nunique()} of {len(grid.points)} points, {len(done)} units")
    return [Block("code", f"workbench sweep {where}\nworkbench report {where}"), Block("list", facts),
            Block("heading", "Beware"), Block("list", caveats(grid, frame, foreign))]


def _machine(each: Mapping[str, Any]) -> str:
    known = {key: value for key, value in each.items() if value is not None and value == value}
    parts = [str(known.get("gpu") or known.get("cpu") or "a machine that does not say what it is")]
    if "threads" in known:
        parts.append(f"{int(known['threads'])} threads")
    if "torch" in known:
        parts.append(f"torch {known['torch']}")
    return ", ".join([*parts, *([known["platform"]] if "platform" in known else [])])


def caveats(grid: Grid, frame: pd.DataFrame, foreign: int = 0) -> list[str]:
    """Return what a reader must know before believing the numbers.

    Args:
        grid: what was asked.
        frame: its rows.
        foreign: points of the table that the grid no longer has.
    """
    done, failed = frame[frame["status"] == "done"], frame[frame["status"] == "failed"]
    found = []
    if foreign:
        found.append(f"{foreign} points of the table are not in this grid any more, and not in this report")
    for error, count in failed["error"].value_counts().items():
        found.append(f"{_counted(count, 'unit')} failed: {error}")
    finished = set(done["point"])
    missing = [point for point in grid.points if point.id not in finished]
    if missing:
        more = ", …" if len(missing) > 4 else ""
        has = "has" if len(missing) == 1 else "have"
        found.append(f"{_counted(len(missing), 'point')} {has} no result: "
                     f"{'; '.join(grid.label(point) for point in missing[:4])}{more}")
    repeats = done.groupby("point")["repeat"].nunique()
    if repeats.min() < _FEW:
        several = f"{repeats.min()} to " if repeats.min() < repeats.max() else ""
        found.append(f"{several}{_counted(repeats.max(), 'repeat')}: an interval of times is no wider than the repeats")
    return [*found, *_of_machines(done)] or ["nothing in particular"]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count != 1 else "")


def _of_machines(done: pd.DataFrame) -> list[str]:
    found = []
    loads = done["load_before"].dropna()
    if len(loads):
        cores = done["cores"].dropna().min() if "cores" in done and done["cores"].notna().any() else 1
        is_busy = float((loads > cores).mean()) > 0.25
        found.append(f"load average before a unit: {loads.min():.1f} to {loads.max():.1f} on {int(cores)} cores"
                     + ("; other programs ran, so times say less than counts" if is_busy else ""))
    if set(done["dtype"].dropna()) - {"float32"}:
        found.append("in bfloat16 and float16 a batch's shape alone changes tokens: look at the null pair")
    if done["cpu"].nunique() > 1 or done["gpu"].nunique(dropna=False) > 1:
        found.append("points ran on different machines: their times cannot be compared")
    return found
