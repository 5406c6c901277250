"""The points of a sweep as one table: a row per repeat, columns that are axes and columns that are metrics.

Non-numeric columns are axes. Numeric columns are metrics; those of whole numbers that repeat (k, rank, adapters) are
axes, too, unless they are named as metrics. In long form there are columns `metric` and `value`, a row per number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.display.medians import median_interval
from workbench.errors import UserError, names, nearest

if TYPE_CHECKING:
    import pandas

REPEATS = ("repeat", "round", "trial", "seed")  # columns that only tell repeats apart
NONE = "none"  # how a missing value of an axis is spelled
MOST_VALUES = 64  # of a numeric column that counts as an axis
MOST_LABELS, MOST_NUMBERS = 500, 5000
_LONG = ("metric", "value")


@dataclass(frozen=True)
class Points:
    """A sweep.

    Attributes:
        frame: a row per repeat.
        axes: columns that may split and filter.
        metrics: columns that may be drawn, numeric.
        notes: what a reader must know about it.
    """

    frame: pandas.DataFrame
    axes: tuple[str, ...]
    metrics: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def require(self, role: str, name: Any) -> str:
        """Return a column's name if it can be the "x", "series", "facet" or "y" of a view, or be filtered by.

        Raises:
            UserError: no such column, or a "y" that is no number.
        """
        options = list(self.frame.columns)
        if name not in options:
            raise UserError(f"{role}={name!r} is no column{nearest(name, options)}; there are {names(options, 20)}")
        if role == "y" and not _is_number(self.frame[name]):
            raise UserError(f"y={name!r} holds no numbers; metrics are {names(list(self.metrics), 20)}")
        return name

    def default_x(self) -> str | None:
        """Return the axis to begin with: the first numeric one that varies, else the first that does."""
        able = [axis for axis in self.axes if self.can_split(axis)]
        varying = [axis for axis in able if axis not in REPEATS and self.frame[axis].nunique(dropna=False) > 1]
        numeric = [axis for axis in varying if _is_number(self.frame[axis])]
        return next(iter([*numeric, *varying, *able, *self.metrics]), None)

    def default_y(self, x: str | None = None) -> str | None:
        """Return the first metric that varies, or the first; not `x`, if there is another."""
        others = [name for name in self.metrics if name != x]
        varying = [name for name in others if self.frame[name].nunique() > 1]
        return next(iter([*varying, *others, *self.metrics]), None)

    def can_split(self, column: str) -> bool:
        """Whether a column has few enough values to be an axis of a chart: more texts than `MOST_LABELS` split nothing.

        Numbers may have `MOST_NUMBERS`.
        """
        return self.frame[column].nunique(dropna=False) <= self.most_labels(column)

    def most_labels(self, column: str) -> int:
        """Return how many values a column may have that splits."""
        return MOST_NUMBERS if _is_number(self.frame[column]) else MOST_LABELS

    def labels(self, column: str) -> list[Any]:
        """Return an axis's values in the order in which they are drawn: numbers by size, others as they come."""
        import pandas as pd

        values = self.frame[column]
        held = values.dropna()
        distinct = sorted(held.unique()) if _is_number(values) else list(pd.unique(held))
        return [_plain(value) for value in distinct] + ([None] if values.isna().any() else [])


def points_of(
    source: Any, axes: Sequence[str] | None = None, metrics: Sequence[str] | None = None
) -> Points:
    """Return the points of a table, several tables, runs, or a folder of runs.

    Args:
        source: a DataFrame, wide or long; a list of them; a `Run`, a list of them or `Runs`; a folder of runs; a
            `.parquet` or `.csv` file.
        axes: columns that are axes, whatever they hold.
        metrics: columns that are metrics, whatever they hold.

    Raises:
        UserError: something else, or a column nobody knows.
    """
    frame, notes, measured = _frame_of(source)
    frame = _tidied(frame)
    if all(name in frame.columns for name in _LONG) and not _is_number(frame["metric"]):
        frame = _wide(frame)
    for role, given in (("axes", axes), ("metrics", metrics)):
        for name in [given] if isinstance(given, str) else given or ():
            if name not in frame.columns:
                known = f"{nearest(name, frame.columns)}; there are {names(list(frame.columns), 20)}"
                raise UserError(f"{role} names {name!r}, which is no column{known}")
    axes, metrics = [axes] if isinstance(axes, str) else axes, [metrics] if isinstance(metrics, str) else metrics
    metrics = metrics if metrics is not None else measured
    found = [name for name in frame.columns if _is_axis(frame, name, axes or (), metrics or ())]
    others = [name for name in frame.columns if name not in found and _is_number(frame[name])]
    if metrics is not None:
        others = [*metrics, *(name for name in others if name not in metrics)]
        wrong = [name for name in metrics if not _is_number(frame[name])]
        if wrong:
            raise UserError(f"metrics names {wrong[0]!r}, which holds no numbers")
    found.sort(key=lambda name: name in REPEATS)
    return Points(frame, tuple(found), tuple(others), tuple(notes))


def aggregate(
    points: Points, x: str, y: str, series: str | None = None, facet: str | None = None,
    where: Mapping[str, Sequence[Any]] | None = None,
) -> pandas.DataFrame:
    """Return one line per drawn point, sorted as it is drawn.

    Columns: facet and series (only if given), x, median, low, high (the median's 95 % interval, the range of fewer than
    6 repeats, NaN with one), n (repeats with a finite value), lost (those without).
    """
    import pandas as pd

    frame = kept(points, where)
    keys = {name: column for name, column in (("facet", facet), ("series", series), ("x", x)) if column is not None}
    codes = pd.DataFrame({name: _codes(points, column).loc[frame.index] for name, column in keys.items()})
    labels = {name: points.labels(column) for name, column in keys.items()}
    lines = []
    for group, part in frame.groupby([codes[name] for name in keys], sort=True):
        values = part[y].to_numpy(dtype=np.float64, na_value=np.nan)
        found = median_interval(values)
        line = dict(zip(keys, group if isinstance(group, tuple) else (group,), strict=True))
        line = {name: labels[name][int(code)] for name, code in line.items()}
        lines.append({
            **line, "median": found.value, "low": found.low, "high": found.high, "n": found.n,
            "lost": len(values) - found.n,
        })  # fmt: skip
    return pd.DataFrame(lines, columns=[*keys, "median", "low", "high", "n", "lost"])


def kept(points: Points, where: Mapping[str, Sequence[Any]] | None) -> pandas.DataFrame:
    """Return the rows whose axes have one of the values `where` allows."""
    frame = points.frame
    for column, allowed in (where or {}).items():
        wanted = {spelled(value) for value in allowed}
        frame = frame[[spelled(value) in wanted for value in frame[column]]]
    return frame


def merged_over(points: Points, chosen: Iterable[str | None], where: Mapping[str, Sequence[Any]] | None) -> list[str]:
    """Return the axes that vary among the rows of one point: a median is over them too."""
    frame = kept(points, where)
    split = [column for column in dict.fromkeys(chosen) if column]
    others = [axis for axis in points.axes if axis not in split and axis not in REPEATS and points.can_split(axis)]
    groups = frame.groupby([_codes(points, column).loc[frame.index] for column in split]) if split else None
    counts = {axis: (groups[axis].nunique(dropna=False) if groups is not None else None) for axis in others}
    found = []
    for axis, count in counts.items():
        most = frame[axis].nunique(dropna=False) if count is None else count.max()
        if len(frame) and most > 1:
            found.append(f"{axis} ({int(most)} values)")
    return found


def spelled(value: Any) -> str:
    """Return an axis's value as a label: whole numbers without a point, what is missing as "none"."""
    if value is None or (isinstance(value, float) and np.isnan(value)) or str(value) in ("<NA>", "NaT"):
        return NONE
    if isinstance(value, float | np.floating) and float(value).is_integer() and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.6g}" if isinstance(value, float | np.floating) else str(value)


def _codes(points: Points, column: str) -> pandas.Series:
    """Return for each row the place of its value among the column's labels."""
    import pandas as pd

    place = {spelled(value): number for number, value in reversed(list(enumerate(points.labels(column))))}
    return pd.Series([place[spelled(value)] for value in points.frame[column]], index=points.frame.index, dtype=int)


def _frame_of(source: Any) -> tuple[pandas.DataFrame, list[str], Sequence[str] | None]:
    """Return the table, notes on it, and which columns are metrics where that is known."""
    import pandas as pd

    from workbench.display.sweep_runs import METRICS, from_folder, from_runs
    from workbench.instrument.run import Run
    from workbench.instrument.run_list import Runs

    if isinstance(source, pd.DataFrame):
        return source, [], None
    if isinstance(source, str | Path):
        path = Path(source)
        if path.suffix in (".parquet", ".csv") and path.is_file():
            return _read(path), [], None
        return (*from_folder(path), METRICS)
    if isinstance(source, Run | Runs):
        return (*from_runs([source] if isinstance(source, Run) else list(source.values())), METRICS)
    if isinstance(source, Iterable) and not isinstance(source, Mapping):
        each = list(source)
        if each and all(isinstance(one, Run) for one in each):
            return (*from_runs(each), METRICS)
        if all(isinstance(one, pd.DataFrame) for one in each):
            return (pd.concat(each, ignore_index=True) if each else pd.DataFrame()), [], None
    raise UserError(
        "a sweep is a DataFrame with a row per repeat, a list of them, runs, or a folder of runs, not "
        f"{type(source).__name__}"
    )


def _read(path: Path) -> pandas.DataFrame:
    import pandas as pd

    try:
        return pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except Exception as error:  # whichever reader it was: truncated, foreign, empty
        raise UserError(f"{path} cannot be read as a table: {error}") from None


def _tidied(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Return the frame with text names, its index as columns if that has a name, and cells that can be grouped."""
    if any(name is not None for name in frame.index.names):
        frame = frame.reset_index()
    frame = frame.reset_index(drop=True).copy()
    if frame.columns.nlevels > 1:
        frame.columns = ["_".join(str(part) for part in parts if part != "") for parts in frame.columns]
    frame.columns = [str(name) for name in frame.columns]
    repeated = sorted({name for name in frame.columns if list(frame.columns).count(name) > 1})
    if repeated:
        raise UserError(f"columns must differ from each other; repeated: {names(repeated)}")
    for name in frame.columns:
        frame[name] = _usable(frame[name])
    return frame


def _usable(values: pandas.Series) -> pandas.Series:
    import pandas as pd

    if pd.api.types.is_bool_dtype(values):
        return values.map({True: "yes", False: "no"}).astype(object)
    if pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_complex_dtype(values):
        return values.astype(np.float64) if pd.api.types.is_extension_array_dtype(values) else values
    if isinstance(values.dtype, pd.CategoricalDtype):
        values = values.astype(object)
    held = values.dropna()
    if len(held) and all(isinstance(one, int | float | np.number) and not isinstance(one, bool) for one in held):
        return pd.to_numeric(values)
    return values.map(lambda one: None if one is None or one is pd.NaT or one != one else spelled(one)).astype(object)


def _wide(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Return a long table with a column per metric; the n-th value of a metric at one place is its n-th repeat."""
    import pandas as pd

    axes = [name for name in frame.columns if name not in _LONG]
    if not _is_number(frame["value"]):
        raise UserError("in long form the column 'value' holds the numbers; it has something else")
    keys = [frame[name].map(spelled) for name in axes] + [frame["metric"]]
    number = frame.groupby(keys, sort=False).cumcount()
    table = frame.assign(**{" repeat": number})
    parts = []
    for metric, part in table.groupby("metric", sort=False):
        parts.append(part.rename(columns={"value": str(metric)}).drop(columns="metric"))
    joined = table[[*axes, " repeat"]].drop_duplicates()
    for part in parts:
        joined = pd.merge(joined, part, how="left", on=[*axes, " repeat"], sort=False)
    return joined.drop(columns=" repeat")


def _is_number(values: pandas.Series) -> bool:
    import pandas as pd

    return bool(pd.api.types.is_numeric_dtype(values))


def _is_axis(frame: pandas.DataFrame, name: str, axes: Sequence[str], metrics: Sequence[str]) -> bool:
    values = frame[name]
    if name in axes or name in metrics:
        return name in axes
    if not _is_number(values) or name in REPEATS:
        return True
    held = values.dropna()
    whole = len(held) > 0 and bool((held == held.round()).all())
    distinct = held.nunique()
    return whole and 1 < distinct <= MOST_VALUES and distinct < len(held)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
