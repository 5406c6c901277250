"""The picture of a sweep: panels of curves with error bars, a legend, and what a reader must know."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from workbench.display.labels import visible
from workbench.display.marks import DASHES, MARKERS, line_style
from workbench.display.medians import interval_words
from workbench.display.palette import LIGHT
from workbench.display.picture import Picture
from workbench.display.sheet import MARGIN_IN, Sheet, cut, head, heading, label, open_axes, plain, styled, ticks
from workbench.display.sweep_points import NONE, spelled
from workbench.display.sweep_words import axis_words

if TYPE_CHECKING:
    import pandas

    from workbench.display.sweep_view import SweepView

Series = dict[str | None, int]  # label -> its place among all labels; None stands for one curve of everything
PANEL_IN, MOST_PANELS = 3.0, 12
_LEGEND = {4: 28, 3: 40, 2: 64, 1: 130}  # columns of the legend -> characters that each has room for
SAID = 40  # points the text alternative lists


def sweep_picture(view: SweepView) -> Picture:
    """Return the picture of what a view shows now."""
    with styled():
        if not (view.x and view.y) or not view.points.frame.shape[0]:
            return _nothing(view, "There are no points to show: " + _why_nothing(view))
        table = view.table()
        if not len(table):
            return _nothing(view, f"No row is left: the filters exclude all {len(view.points.frame)}.")
        return Picture(_draw(view, table), _title(view), description(view, table))


def description(view: SweepView, table: pandas.DataFrame) -> str:
    """Return the picture in words: each point's median, interval and number of repeats."""
    lines = []
    for row in table.head(SAID).to_dict("records"):
        # of several columns in one, the values say which
        where = [spelled(row[part]) if "," in getattr(view, part) else f"{getattr(view, part)} {spelled(row[part])}"
                 for part in ("facet", "series") if part in row]
        where.append(f"{view.x} {spelled(row['x'])}")
        lines.append(f"{', '.join(where)}: {_said(row)}")
    more = f" And {len(table) - SAID} more points." if len(table) > SAID else ""
    axes = f"{_sentence(axis_words(view.y))} by {axis_words(view.x)}, medians over repeats."
    return f"{_title(view)}. {axes} {'; '.join(lines)}.{more} {' '.join(view.warnings())}".strip()


def _said(row: dict[str, Any]) -> str:
    if not row["n"]:
        return "no value"
    if row["n"] == 1:
        return f"{row['median']:.4g} (one repeat, no interval)"
    return f"{row['median']:.4g}, {interval_words([row['n']])} {row['low']:.4g} to {row['high']:.4g}, n = {row['n']}"


def _title(view: SweepView) -> str:
    from workbench.display.sweep_view import TITLE

    if view.title != TITLE or not view.y:
        return view.title
    return _sentence(f"{axis_words(view.y)} by {axis_words(view.x)}")


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:] if words[1:2].islower() else words


def _why_nothing(view: SweepView) -> str:
    if not len(view.points.frame):
        return "the table is empty."
    return "no column holds numbers to draw." if not view.y else "no column can be the x axis."


def _nothing(view: SweepView, sentence: str) -> Picture:
    sheet = Sheet()
    top = head(sheet, _title(view), [*view.notes])
    sheet.text(MARGIN_IN, top + 0.1, sentence, size=9)
    return Picture(sheet.close(top + 0.5), _title(view), f"{_title(view)}. {sentence}")


def _draw(view: SweepView, table: pandas.DataFrame):
    sheet = Sheet()
    series, facets = _present(view, table, "series"), _present(view, table, "facet")
    drawn = dict(list(series.items())[: view.most_series]) or {None: 0}
    panels = list(facets)[:MOST_PANELS] or [None]
    notes = [_interval_note(table), *view.warnings(), *_left_out(view, table, (series, drawn), (facets, panels))]
    if view.filters:
        kept = "; ".join(f"{column}: {', '.join(labels)}" for column, labels in view.filters.items())
        notes.append(f"Only {kept}.")
    top = head(sheet, _title(view), notes)
    top = _legend(sheet, view, drawn, top) if series else top
    columns = 1 if len(panels) == 1 else 2
    width = (sheet.width_in - 0.95 * columns - MARGIN_IN) / columns
    limits = _limits(table, drawn, view.log_y)
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        box = (0.85 + column * (width + 0.95), top + 0.3 + row * (PANEL_IN + 0.85), width, PANEL_IN)
        axes = sheet.axes(*box)
        part = table if panel is None else table[[spelled(value) == panel for value in table["facet"]]]
        _panel(axes, view, part, drawn, limits)
        if panel is not None:
            heading(axes, f"{view.facet}: {cut(visible(panel), 60)}")
    rows = -(-len(panels) // columns)
    return sheet.close(top + 0.3 + rows * (PANEL_IN + 0.85) - 0.2)


def _panel(axes: Axes, view: SweepView, part: pandas.DataFrame, drawn: Series, limits: tuple[float, float]) -> None:
    open_axes(axes)
    labels = [spelled(value) for value in view.points.labels(view.x)]
    values = view.points.labels(view.x)
    present = [place for place, text in enumerate(labels) if text in {spelled(one) for one in part["x"]}]
    is_number = all(value is None or (isinstance(value, int | float) and math.isfinite(value)) for value in values)
    places = _places(axes, view, [values[p] for p in present], [labels[p] for p in present], is_number)
    if view.log_y and limits[0] > 0:
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
        marks = log_ticks(*limits)
        ticks(axes, "y", marks, [f"{mark:g}" for mark in marks], 7.5)
    for place, (name, index) in enumerate(drawn.items()):
        mine = part if name is None else part[[spelled(value) == name for value in part["series"]]]
        shift = 0.0 if is_number else (place - (len(drawn) - 1) / 2) * min(0.8 / max(len(drawn), 1), 0.12)
        _curve(axes, mine, places, index, shift, is_number, view.log_y)
    axes.set_ylim(*limits)
    label(axes, x=axis_words(view.x), y=axis_words(view.y), size=8)


def _places(axes: Axes, view: SweepView, values: list, texts: list[str], is_number: bool) -> dict[str, float]:
    """Return label -> x coordinate and set up the axis; what is missing stands apart, at the right end."""
    if not is_number:
        ticks(axes, "x", range(len(texts)), [cut(visible(text), 16) for text in texts], 7.5)
        axes.set_xlim(-0.6, len(texts) - 0.4)
        return {text: float(place) for place, text in enumerate(texts)}
    numbers = {text: float(value) for value, text in zip(values, texts, strict=True) if text != NONE}
    if view.log_x:
        numbers = {text: value for text, value in numbers.items() if value > 0}
    scaled = {text: np.log10(value) if view.log_x else value for text, value in numbers.items()}
    low, high = (min(scaled.values()), max(scaled.values())) if scaled else (0.0, 1.0)
    span = (high - low) or 1.0
    places = dict(scaled)
    if NONE in texts:
        places[NONE] = high + 0.14 * span
        axes.axvline(high + 0.07 * span, color=LIGHT.line, lw=0.8)
    axes.set_xlim(low - 0.05 * span, max(places.values(), default=1) + 0.05 * span)
    shown, last = [], -np.inf
    for text, place in sorted(places.items(), key=lambda pair: pair[1]):
        if place - last >= 0.045 * span:
            shown.append((place, text))
            last = place
    ticks(axes, "x", [place for place, _ in shown], [text for _, text in shown], 7.5)
    return places


def _curve(
    axes: Axes, part: pandas.DataFrame, places: dict[str, float], index: int, shift: float, is_number: bool, log_y: bool
) -> None:
    rows = [row for row in part.to_dict("records") if row["n"] and spelled(row["x"]) in places]
    rows = [row for row in rows if not log_y or row["median"] > 0]
    if not rows:
        return
    x = np.array([places[spelled(row["x"])] + shift for row in rows])
    middle, low, high = (np.array([row[key] for row in rows]) for key in ("median", "low", "high"))
    style = series_style(index, marker_size=4.5)
    joined = np.array([is_number and spelled(row["x"]) != NONE for row in rows])
    bars = np.isfinite(low)
    colour = style["color"]
    errors = np.abs(np.stack([middle - low, high - middle]))[:, bars]
    axes.errorbar(x[bars], middle[bars], errors, fmt="none", ecolor=colour, elinewidth=1, capsize=2.5)
    axes.plot(x[joined], middle[joined], **style)
    loose = {**style, "linestyle": "none"}
    axes.plot(x[~joined], middle[~joined], **loose)


def _limits(table: pandas.DataFrame, drawn: Series, log_y: bool) -> tuple[float, float]:
    """Return the y limits all panels share: from 0 where the values come near it."""
    rows = table if None in drawn else table[[spelled(value) in drawn for value in table["series"]]]
    values = np.concatenate([rows[key].to_numpy(np.float64) for key in ("median", "low", "high")])
    values = values[np.isfinite(values) & ((values > 0) | (not log_y))]
    if not len(values):
        return (0.1, 1.0) if log_y else (0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    if log_y:
        return low / 1.3, high * 1.3
    pad = 0.06 * ((high - low) or abs(high) or 1.0)
    return (0.0 if 0 <= low < 0.5 * high else low - pad), high + pad


def series_style(index: int, **sizes: float) -> dict[str, Any]:
    """Return how a series is drawn; dashes and markers together repeat after fifty, not after ten."""
    return {**line_style(index, **sizes), "linestyle": DASHES[(index + index // len(MARKERS)) % len(DASHES)]}


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two ends of a logarithmic axis: few where it is long, several where it is short."""
    decades = math.log10(high) - math.log10(low)
    factors = (1,) if decades > 2 else (1, 2, 5) if decades > 1 else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
    step = max(1, math.ceil(decades / 8))
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [factor * 10.0**power for power in powers if power % step == 0 for factor in factors]
    return [float(f"{mark:.6g}") for mark in marks if low <= mark <= high]


def _legend(sheet: Sheet, view: SweepView, drawn: Series, top: float) -> float:
    longest = max((len(text) for text in drawn if text), default=0)
    columns = next((count for count in (4, 3, 2) if longest <= _LEGEND[count]), 1)
    step = 10.6 / columns
    rows = -(-len(drawn) // columns)
    axes = sheet.axes(MARGIN_IN, top, 10.6, 0.2 * (rows + 1))
    axes.set(xlim=(0, 10.6), ylim=(0.2 * (rows + 1), 0))
    axes.set_axis_off()
    plain(axes.text(0, 0.1, cut(visible(view.series), 60), va="center", fontsize=8, weight="bold"))
    for place, (text, index) in enumerate(drawn.items()):
        row, column = divmod(place, columns)
        x, y = column * step, (row + 1) * 0.2 + 0.1
        axes.add_line(Line2D([x, x + 0.2, x + 0.4], [y] * 3, markevery=[1], **series_style(index)))
        plain(axes.text(x + 0.48, y, cut(visible(text), _LEGEND[columns]), va="center", fontsize=8))
    return top + 0.2 * (rows + 1)


def _interval_note(table: pandas.DataFrame) -> str:
    counts = sorted(set(table["n"].tolist()) - {0})
    if counts == [1]:
        return "One repeat per point (n = 1): there is no interval."
    several = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}" if counts else "n = 0"
    bars = interval_words(counts)
    note = f"Points are medians over repeats ({several})" + (f", bars: {bars}." if bars else ".")
    return note + (" A point without a bar has one repeat." if 1 in counts else "")


def _left_out(view: SweepView, table: pandas.DataFrame, *parts: tuple) -> list[str]:
    notes = []
    for what, column, (there, drawn) in zip(("series", "panels"), (view.series, view.facet), parts, strict=True):
        if len(there) > len(drawn):
            notes.append(f"{len(drawn)} of {len(there)} {what} are drawn; filter by {column} for others.")
    hidden = 0
    if view.log_x:
        hidden += sum(isinstance(value, int | float) and value <= 0 for value in table["x"])
    if view.log_y:
        hidden += int((table["median"] <= 0).sum())
    if hidden:
        notes.append(f"{hidden} points at or below 0 have no place on a logarithmic axis; the table has them.")
    return notes


def _present(view: SweepView, table: pandas.DataFrame, part: str) -> Series:
    """Return the labels that are there, each with its place among all labels: what a filter hides keeps its colour."""
    if part not in table:
        return {}
    there = {spelled(value) for value in table[part]}
    labels = [spelled(value) for value in view.points.labels(getattr(view, part))]
    return {text: place for place, text in enumerate(labels) if text in there}
