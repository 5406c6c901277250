"""Report of a sweep: what was asked, what came out, with intervals, how to make it again, and what to beware of.

Everything is computed from the sweep's tables alone, so a report can be made on any machine that has them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.display.medians import FEW
from workbench.display.sweep_points import spelled
from workbench.display.sweep_words import axis_words
from workbench.errors import UserError, names
from workbench.sweep.document import Block, Document
from workbench.sweep.grid import Grid
from workbench.sweep.report_tables import AMOUNTS, FIDELITY, THROUGHPUT, domain_tables, main_table, memory_table
from workbench.sweep.shipped import shipped_grids
from workbench.sweep.statistics import FEW_TEXTS

if TYPE_CHECKING:
    import pandas as pd

    from workbench.display.picture import Picture

TITLES = {"throughput": "Throughput and latency", "fidelity": "What is lost"}
_WIDE = 50  # largest through smallest value from which an axis is logarithmic
_MOST_CURVES = 12  # of one panel; with more, a setting makes panels
_MACHINE = ("cpu", "gpu", "cores", "threads", "platform", "torch")
_HERE = "in process"
# settings whose values need no name beside them
_SPEAKING = ("mode", "policy", "popularity", "mixture", "base", "dtype", "texts", "arrivals")
_IDLE = 0.1  # cores that other programs may use without a word


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
        blocks += memory_table(grid, points, own)
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
        return found | ({} if own is None or not len(own) else {"places": kl_by_place(_with_settings(own, done, grid))})
    chosen = axes_of(grid, done)
    if chosen is None:
        return {}
    x, others = chosen
    shown, series, facet = curves_of(done, x, others)
    values = shown[x].dropna()
    is_wide = values.dtype.kind in "iuf" and values.min() > 0 and values.max() / values.min() >= _WIDE
    axes = [key for key in (x, series, facet) if key is not None]
    title = f"Tokens per second by {axis_words(x)}"
    view = sweep_view(shown, x=x, y="tok_s", series=series, facet=facet, log_x=bool(is_wide), axes=axes,
                      metrics=["tok_s"], title=title)
    view.notes = [*view.notes, *_without(done, x)]
    return {"throughput": view.show()}


def _without(done: pd.DataFrame, x: str) -> list[str]:
    """Return what the points are that have no value of `x`."""
    modes = done[done[x].isna()]["mode"].unique() if "mode" in done else ()
    return [f"'none': without a {x}, as is mode {' or '.join(modes)}."] if len(modes) else []


def curves_of(
    done: pd.DataFrame, x: str, others: Sequence[str]
) -> tuple[pd.DataFrame, str | None, str | None]:
    """Return a table with a column that tells curves apart in everything but `x`, its name, and a setting for panels.

    Args:
        done: rows of the units that are done.
        x: the setting along the axis.
        others: the settings that tell points of one `x` apart.
    """
    kept = done[list(dict.fromkeys((x, *others, "repeat", "tok_s")))]
    facet = None
    if len(kept[list(others)].drop_duplicates()) > _MOST_CURVES and len(others) > 1:
        facet = min(others, key=lambda key: kept[key].nunique(dropna=False))
    told = [key for key in others if key != facet]
    if not told:
        return kept, None, facet
    name = ", ".join(told)
    # a name says its setting unless every curve is told by that one alone
    said = [", ".join(_said(key, value, len(told) > 1) for key, value in zip(told, row, strict=True)
                      if value is not None and value == value) or "none" for row in kept[told].itertuples(index=False)]
    columns = [x, *([facet] if facet else []), "repeat", "tok_s"]
    return kept[columns].assign(**{name: said}), name, facet


def _said(key: str, value: Any, is_named: bool) -> str:
    words = spelled(value)
    return f"{key} {words}" if is_named and key not in _SPEAKING else words


def _with_settings(places: pd.DataFrame, done: pd.DataFrame, grid: Grid) -> pd.DataFrame:
    """Return places with the settings in which their points differ, where their own table does not say them."""
    points = done.drop_duplicates("point").set_index("point")
    missing = [key for key in grid.varied if key in points and key not in places]
    return places.assign(**{key: places["point"].map(points[key]) for key in missing})


def axes_of(grid: Grid, done: pd.DataFrame) -> tuple[str, list[str]] | None:
    """Return the setting with the most values, and those that tell points of one value apart; None where none differ.

    A setting that follows from the ones before (slots that go with the number of adapters) tells nothing.
    """
    counts = {key: done[key].nunique(dropna=False) for key in grid.varied if key in done}
    # of settings with as many values, numbers make the better axis, and what was asked a better one than how much was
    varied = sorted((key for key in counts if counts[key] > 1),
                    key=lambda key: (-counts[key], done[key].dtype.kind not in "iuf", key in AMOUNTS))
    if not varied:
        return None
    x, *others = varied
    told: list[str] = []
    for key in sorted(others, key=list(grid.varied).index):
        if done.groupby([x, *told], dropna=False)[key].nunique(dropna=False).max() > 1:
            told.append(key)
    return x, told


def _how(grid: Grid, frame: pd.DataFrame, done: pd.DataFrame, foreign: int) -> list[Block]:
    # a shipped grid goes by its name wherever it lies, unless it was asked for by a path from here
    is_named = grid.path is None or (grid.path.is_absolute() and grid.path in shipped_grids().values())
    where = shlex.quote(grid.name if is_named else str(grid.path))
    backends = list(done["backend"].dropna().unique()) if "backend" in done else []
    commands = [f"workbench sweep {where}{_option(each)}" for each in backends or [_HERE]]
    first, last = done["created"].min(), done["created"].max()
    present = [key for key in _MACHINE if key in done]
    machines = done[present].drop_duplicates().to_dict("records")
    facts = [f"run from {first} to {last}", *(_machine(each) for each in machines)]
    facts.append(f"{done['point'].nunique()} of {len(grid.points)} points, {len(done)} units")
    if "session" in done and done["session"].notna().any():
        facts.append(f"{_counted(done['session'].nunique(), 'session')}; units ran {', '.join(backends) or _HERE}")
    quiet = _others(done)
    if quiet is not None and quiet[1] <= _IDLE:
        facts.append(f"other programs used at most {quiet[1]:.2f} cores while units ran")
    return [Block("code", "\n".join([*commands, f"workbench report {where}"])), Block("list", facts),
            Block("heading", "Beware"), Block("list", caveats(grid, frame, foreign))]


def _option(backend: str) -> str:
    """Return what a command needs to run units as they were run."""
    kind, _, number = backend.partition(" ")
    return f" --jobs {number}" if kind == "joblib" else " --ray" if kind == "ray" else ""


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
    return [*found, *_of_numbers(done), *_of_sessions(done), *_of_machines(done)] or ["nothing in particular"]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count != 1 else "")


def _of_numbers(done: pd.DataFrame) -> list[str]:
    """Return what repeats and texts are too few to say."""
    found = []
    repeats = done.groupby("point")["repeat"].nunique()
    if repeats.min() < FEW:
        several = f"{repeats.min()} to " if repeats.min() < repeats.max() else ""
        words = ("one run says nothing of how far times vary" if repeats.max() == 1 else
                 f"with fewer than {FEW} an interval of times is the range of the repeats, which holds the true median "
                 "less often than in 95 of 100 cases")
        found.append(f"{several}{_counted(repeats.max(), 'repeat')}: {words}")
    if "num_passages" not in done or not done["num_passages"].notna().any():
        return found
    rows = done[done["num_passages"].notna()].drop_duplicates("point")
    if "num_texts" not in rows or rows["num_texts"].isna().all():
        return [*found, "intervals of KL take passages for texts of their own; where several are of one text, they are "
                        "too narrow"]
    for texts, own in rows.groupby("texts", sort=False) if "texts" in rows else [("", rows)]:
        few = own[own["num_texts"] < FEW_TEXTS]
        if len(few):
            first = few.iloc[0]
            found.append(f"texts {texts}: {_counted(int(first['num_passages']), 'passage')} of "
                         f"{_counted(int(first['num_texts']), 'distinct text')}; intervals over fewer than {FEW_TEXTS} "
                         "texts say little of others")
    return found


def _of_sessions(done: pd.DataFrame) -> list[str]:
    found = []
    sessions = done["session"].nunique() if "session" in done else 1
    if sessions > 1:
        found.append(f"units ran in {sessions} sessions: only rounds of one session are compared round by round")
    others = [each for each in (done["backend"].dropna().unique() if "backend" in done else ()) if each != _HERE]
    if others:
        found.append(f"units ran side by side ({', '.join(others)}): they slowed each other, so times say less")
    return found


def _others(done: pd.DataFrame) -> tuple[float, float] | None:
    """Return the least and the most cores that other programs used while a unit ran; None where nobody measured it."""
    used = done["others_cores"].dropna().astype(float) if "others_cores" in done else ()
    return (float(used.min()), float(used.max())) if len(used) else None


def _of_machines(done: pd.DataFrame) -> list[str]:
    found, used, loads = [], _others(done), done["load_before"].dropna()
    if used is not None and used[1] > _IDLE:
        found.append(f"other programs used {used[0]:.1f} to {used[1]:.1f} cores while units ran: times say less than "
                     "counts")
    elif used is None and len(loads):
        cores = done["cores"].dropna().min() if "cores" in done and done["cores"].notna().any() else 1
        found.append(f"load average before a unit: {loads.min():.1f} to {loads.max():.1f} on {int(cores)} cores, of "
                     "which the sweep's own threads are a part")
    if set(done["dtype"].dropna()) - {"float32"}:
        found.append("in bfloat16 and float16 a batch's shape alone changes tokens: look at the null pair")
    differ = [key for key in _MACHINE if key in done and done[key].nunique(dropna=False) > 1]
    if differ:
        found.append(f"points ran on different machines ({names(differ)} differ): their times cannot be compared")
    return found
