"""`sweep_view(points)`: pick axes, see curves with error bars, and the same numbers in a table below.

A live widget in a notebook; `show()` is its picture, `save` writes a picture or a page that needs no kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import numpy as np
from traitlets import Bool, Bytes, Dict, Int, List, Unicode, validate

from workbench.display import page
from workbench.display.labels import visible
from workbench.display.palette import adapter_colour, themes
from workbench.display.saving import save
from workbench.display.sweep_points import (
    REPEATS,
    Points,
    aggregate,
    kept,
    merged_over,
    points_of,
    spelled,
)
from workbench.display.sweep_words import axis_words
from workbench.errors import UserError, names, nearest

if TYPE_CHECKING:
    import pandas

    from workbench.display.picture import Picture

TITLE = "A sweep"
AUTO = "auto"
THEMES = ("auto", "light", "dark")
MOST_SERIES = 12  # drawn at first; the others are one tick away
_COLOURS = 40
MOST_TOLD = 40  # points
# the traits a page is made from
_STATE = (
    "view", "theme", "themes", "title", "notes", "columns", "num_rows", "codes", "numbers", "colours", "most_series",
    "x", "y", "series", "facet", "filters", "log_x", "log_y",
)  # fmt: skip


class SweepView(anywidget.AnyWidget):
    """Curves of a sweep: see `sweep_view`. What is chosen on the page can be read, and set, in Python.

    Attributes:
        x, y: columns of the axes.
        series, facet: columns that split into curves and into panels; "" is none.
        filters: axis -> the labels that are kept.
        log_x, log_y: whether an axis is logarithmic.
    """

    _esm = page.module()
    _css = page.css()
    view = Unicode("sweep").tag(sync=True)
    theme = Unicode("auto").tag(sync=True)
    themes = Dict().tag(sync=True)
    title = Unicode().tag(sync=True)
    notes = List().tag(sync=True)
    columns = List().tag(sync=True)
    num_rows = Int().tag(sync=True)
    codes = Bytes().tag(sync=True)
    numbers = Bytes().tag(sync=True)
    colours = List().tag(sync=True)
    most_series = Int(MOST_SERIES).tag(sync=True)
    x = Unicode().tag(sync=True)
    y = Unicode().tag(sync=True)
    series = Unicode().tag(sync=True)
    facet = Unicode().tag(sync=True)
    filters = Dict().tag(sync=True)
    log_x = Bool().tag(sync=True)
    log_y = Bool().tag(sync=True)

    def __init__(self, points: Points, **chosen: Any):
        self.points = points
        super().__init__(themes=themes(), **state_of(points), **chosen)

    @validate("x", "y", "series", "facet")
    def _known(self, proposal: Any) -> str:
        role, name = proposal["trait"].name, proposal["value"]
        return _required(self.points, role, name) if name else name

    @validate("filters")
    def _possible(self, proposal: Any) -> dict[str, list[str]]:
        return filters_of(self.points, proposal["value"])

    def __repr__(self) -> str:
        # all that is left of the view in a notebook that was exported, or executed without a front end
        what = f"{self.title}: {self.num_rows} rows"
        if not (self.x and self.y):
            return "\n".join([what, *self.notes])
        table = self.table()
        told = [table.head(MOST_TOLD).to_string(index=False)]
        told += [f"… {len(table) - MOST_TOLD} points more in .table()"] if len(table) > MOST_TOLD else []
        return "\n".join([f"{what}; median {self.y} by {self.x}", *told, *self.warnings()])

    def table(self) -> pandas.DataFrame:
        """Return what is drawn, one line per point: facet, series, x, median, low, high, n, lost."""
        if not (self.x and self.y):
            raise UserError("there is nothing to tabulate: the sweep has no points, or no metric")
        return aggregate(self.points, self.x, self.y, self.series or None, self.facet or None, self.filters)

    def warnings(self) -> list[str]:
        """Return what a reader of the curves must know: what the medians are over, what is not drawn."""
        if not (self.x and self.y):
            return list(self.notes)
        found = list(self.notes)
        others = merged_over(self.points, (self.x, self.series, self.facet), self.filters)
        if others:
            found.append(f"Each point is a median over {', '.join(others)} as well: split or filter by it.")
        values = kept(self.points, self.filters)[self.y].to_numpy(np.float64, na_value=np.nan)
        lost = int((~np.isfinite(values)).sum())
        if lost:
            found.append(f"{lost} {'row has' if lost == 1 else 'rows have'} no {self.y}, and no part in a median.")
        return found

    def show(self) -> Picture:
        """Return the picture of what is chosen now."""
        from workbench.display.sweep_figure import sweep_picture

        return sweep_picture(self)

    def save(self, path: str | Path) -> Path:
        """Write a picture (.png, .svg, .pdf) or a page on which everything can be chosen (.html).

        Raises:
            UserError: another suffix, or a folder that does not exist.
        """
        return save(path, self._content)

    def _content(self, suffix: str) -> bytes:
        picture = self.show()
        if suffix != ".html":
            return picture.write(suffix[1:])
        body = page.fragment({name: getattr(self, name) for name in _STATE}, picture.png, picture.description)
        return page.page(body, self.title).encode()


def sweep_view(
    points: Any, x: str | None = None, y: str | None = None, series: str | None = AUTO, facet: str | None = None, *,
    where: Mapping[str, Any] | None = None, log_x: bool = False, log_y: bool = False,
    axes: Sequence[str] | None = None, metrics: Sequence[str] | None = None, title: str | None = None,
    theme: str = "auto",
) -> SweepView:
    """Show a sweep: curves of medians over the repeats with their 95 % intervals, and a table of the same numbers.

    Fewer than 6 repeats say no such interval: bars are their range, and are called so.

    A table has one row per repeat. Its numeric columns are metrics, the others axes; a numeric column of whole numbers
    that repeat (k, rank, adapters) is an axis too. Columns called repeat, round, trial or seed only tell repeats apart.
    In long form the columns `metric` and `value` hold a metric's name and its number.

    Args:
        points: a DataFrame, a list of them, a `Run` or a list of them, a folder of runs, a `.parquet` or `.csv` file.
        x, y: columns of the axes; by default the first numeric axis that varies, and the first metric.
        series: the column that splits into curves; None is none, "auto" the first other axis that varies.
        facet: the column that splits into panels.
        where: axis -> the value, or the values, that are kept.
        log_x, log_y: logarithmic axes.
        axes, metrics: columns that are axes or metrics, whatever they hold.
        title: heading.
        theme: "auto" follows the notebook, "light" and "dark" do not.

    Raises:
        UserError: something that is no sweep, or a name nobody knows; the message names the nearest.
    """
    if theme not in THEMES:
        raise UserError(f"theme is one of {names(THEMES)}, not {theme!r}{nearest(theme, THEMES)}")
    found = points_of(points, axes, metrics)
    chosen = {"x": x or found.default_x() or ""}
    chosen["y"] = y or found.default_y(chosen["x"]) or ""
    for role, name in (("x", x), ("y", y), ("series", None if series == AUTO else series), ("facet", facet)):
        if name:
            _required(found, role, name)
    if series == AUTO and AUTO not in found.frame.columns:
        series = _default_series(found, chosen["x"], facet)
    return SweepView(
        found, **chosen, series=series or "", facet=facet or "", filters=filters_of(found, where or {}),
        log_x=bool(log_x), log_y=bool(log_y), title=visible(page.heading(title, TITLE)), theme=theme,
    )


def _default_series(points: Points, x: str, facet: str | None) -> str | None:
    others = [axis for axis in points.axes if axis not in (x, facet) and axis not in REPEATS]
    counts = {axis: points.frame[axis].nunique(dropna=False) for axis in others}
    return next((axis for axis, count in counts.items() if 1 < count <= MOST_SERIES), None)


def _required(points: Points, role: str, name: Any) -> str:
    """Return a column's name if it can have a role in a view.

    Raises:
        UserError: as `Points.require`; or what splits or filters has more values than the page has labels for.
    """
    points.require(role, name)
    if role not in ("x", "y") and not points.can_split(name):
        count, most = points.frame[name].nunique(dropna=False), points.most_labels(name)
        able = [column for column in points.axes if points.can_split(column)]
        raise UserError(
            f"{role}: {name!r} has {count} different values, and a view is split or filtered by at most {most}; "
            f"columns that can be: {names(able, 20)}"
        )
    return name


def filters_of(points: Points, where: Any) -> dict[str, list[str]]:
    """Return axis -> labels to keep; one value stands for a list of it.

    Raises:
        UserError: no such column, one with too many values, or a value that it does not have.
    """
    if not isinstance(where, Mapping):
        raise UserError(f"where maps an axis to the values that are kept, such as {{'k': [0, 4]}}, not {where!r}")
    found = {}
    for column, allowed in where.items():
        _required(points, "where", column)
        several = isinstance(allowed, Sequence | np.ndarray | set | range) and not isinstance(allowed, str)
        labels = [spelled(value) for value in (allowed if several else [allowed])]
        known = [spelled(value) for value in points.labels(column)]
        for label in labels:
            if label not in known:
                raise UserError(
                    f"where: {column!r} has no value {label!r}{nearest(label, known)}; it has {names(known, 12)}"
                )
        found[column] = labels
    return found


def state_of(points: Points) -> dict[str, Any]:
    """Return the table as the page wants it: columns as JSON, codes (int32) and numbers (float64) as bytes."""
    columns, codes, numbers, notes = [], [], [], list(points.notes)
    for name in points.frame.columns:
        values = points.frame[name]
        is_number = values.dtype.kind in "iuf"
        labels = points.labels(name)
        entry: dict[str, Any] = {
            "name": name, "title": visible(name), "axis": axis_words(name), "is_axis": name in points.axes,
            "is_metric": name in points.metrics, "is_repeat": name in REPEATS, "labels": None, "said": None,
            "label_values": None, "codes_at": None, "numbers_at": None,
        }  # fmt: skip
        if points.can_split(name):
            spelt = [spelled(value) for value in labels]
            place = {label: number for number, label in enumerate(spelt)}
            entry |= {"labels": spelt, "said": list(map(visible, spelt)), "codes_at": len(codes)}
            codes.append(np.array([place[spelled(value)] for value in values], dtype="<i4"))
            if is_number and all(value is None or np.isfinite(value) for value in labels):
                entry["label_values"] = [None if value is None else float(value) for value in labels]
        else:
            notes.append(f"{name} has {len(labels)} different values: it splits nothing.")
        if is_number:
            entry["numbers_at"] = len(numbers)
            numbers.append(values.to_numpy(dtype="<f8", na_value=np.nan))
        columns.append(entry)
    return {
        "columns": columns, "num_rows": len(points.frame), "notes": notes,
        "codes": np.concatenate(codes).tobytes() if codes else b"",
        "numbers": np.concatenate(numbers).tobytes() if numbers else b"",
        "colours": [adapter_colour(index) for index in range(_COLOURS)],
    }  # fmt: skip
