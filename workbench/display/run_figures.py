"""What an engine did, step by step: throughput, rows, milliseconds and queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from workbench.display.labels import counted
from workbench.display.palette import LIGHT
from workbench.display.picture import Picture
from workbench.display.sheet import Sheet, head, heading, label, open_axes, plain, styled
from workbench.display.tables import in_time, numbers, run_facts, table

MOST_BARS = 240
LEFT_IN, RIGHT_IN, PANEL_IN, GAP_IN = 0.85, 1.35, 1.1, 0.42
# lines that run across a bar are seen however narrow it is
BANDS = "-----"
STEP_COLUMNS = ("time_s", "duration_ms", "adapted_rows", "scaling_rows", "tokens", "running", "waiting")


@dataclass(frozen=True)
class Bars:
    """Steps in time: each its own bar, or pooled into equal spans when there are many.

    Attributes:
        left, width: of each bar, seconds.
        owner: `[step]` the bar of each step.
        is_pooled: whether a bar may hold several steps.
    """

    left: np.ndarray
    width: np.ndarray
    owner: np.ndarray
    is_pooled: bool

    @classmethod
    def of(cls, end_s: np.ndarray, duration_s: np.ndarray) -> Bars:
        """Return the bars of steps that ended at these times."""
        begin_s = end_s - duration_s
        if len(end_s) <= MOST_BARS:
            return cls(begin_s, duration_s, np.arange(len(end_s)), False)
        edges = np.linspace(begin_s.min(), max(end_s.max(), begin_s.min() + 1e-6), MOST_BARS + 1)
        owner = (np.searchsorted(edges, end_s, side="left") - 1).clip(0, MOST_BARS - 1)
        return cls(edges[:-1], np.diff(edges), owner, True)

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of `[step]` values in each bar."""
        return np.bincount(self.owner, np.nan_to_num(values), len(self.left))

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Return the mean of `[step]` values in each bar; NaN where it holds none."""
        held = ~np.isnan(values)
        count = np.bincount(self.owner[held], minlength=len(self.left))
        return np.divide(self.sum(values), count, out=np.full(len(self.left), np.nan), where=count > 0)

    def largest(self, values: np.ndarray) -> np.ndarray:
        """Return the largest of `[step]` values in each bar; NaN where it holds none."""
        found = np.full(len(self.left), -np.inf)
        np.maximum.at(found, self.owner, np.where(np.isnan(values), -np.inf, values))
        return np.where(np.isfinite(found), found, np.nan)


def timeline(steps: Any, title: str | None = None) -> Picture:
    """Draw throughput, rows per step, milliseconds per step and the queue over time.

    Args:
        steps: a table of steps, a run, or a recorder.
        title: above the figure.

    Raises:
        UserError: it is none of these, or nothing was recorded.
    """
    frame = table(steps, "steps", STEP_COLUMNS, "throughput")
    frame, left_out = in_time(frame)
    columns = {name: numbers(frame, name) for name in STEP_COLUMNS}
    bars = Bars.of(columns["time_s"], np.nan_to_num(columns["duration_ms"]) / 1000)
    title = title or "What the engine did over time"
    with styled():
        sheet = Sheet()
        top = head(sheet, title, [*run_facts(steps), _summary(columns), _pooling(bars) + left_out]) + 0.25
        panels = (_throughput, _rows, _milliseconds, _queue)
        for number, draw in enumerate(panels):
            axes = sheet.axes(LEFT_IN, top, sheet.width_in - LEFT_IN - RIGHT_IN, PANEL_IN)
            draw(axes, bars, columns)
            time_axis(axes, bars.left.min(), (bars.left + bars.width).max(), is_last=number == len(panels) - 1)
            top += PANEL_IN + GAP_IN
        return Picture(sheet.close(top + 0.05), title, f"{title}. {_summary(columns)}")


def _summary(columns: dict[str, np.ndarray]) -> str:
    seconds = np.nansum(columns["duration_ms"]) / 1000
    span = np.nanmax(columns["time_s"]) - np.nanmin(columns["time_s"] - np.nan_to_num(columns["duration_ms"]) / 1000)
    tokens = int(np.nansum(columns["tokens"]))
    rate = f"{tokens / span:.1f} tokens/s" if span > 0 else "in no time"
    adapted, scaling = (int(np.nansum(columns[name])) for name in ("adapted_rows", "scaling_rows"))
    rows = f"{adapted + scaling} rows: {adapted} of adapted passes, {scaling} of scaling passes"
    return (
        f"{counted(len(columns['tokens']), 'step')} in {span:.2f} s ({seconds:.2f} s of them in forwards), "
        f"{tokens} tokens generated ({rate}), {rows}. Median step {_median(columns['duration_ms']):.1f} ms."
    )


def _median(values: np.ndarray) -> float:
    held = values[np.isfinite(values)]
    return float(np.median(held)) if held.size else 0.0


def _pooling(bars: Bars) -> str:
    if not bars.is_pooled:
        return "One bar per step, as wide as the step was long."
    return f"Pooled into {len(bars.left)} spans of {_seconds(float(bars.width[0]))} each."


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"


def _bar(axes: Axes, bars: Bars, values: np.ndarray, **style: Any) -> None:
    held = np.isfinite(values) & (values != 0)
    drawn = {"align": "edge", "linewidth": 0.3, "edgecolor": LIGHT.page, **style}
    bottom = drawn.pop("bottom", None)
    if bottom is not None:
        drawn["bottom"] = bottom[held]
    axes.bar(bars.left[held], values[held], bars.width[held], **drawn)


def _throughput(axes: Axes, bars: Bars, columns: dict[str, np.ndarray]) -> None:
    tokens = bars.sum(columns["tokens"])
    rate = np.divide(tokens, bars.width, out=np.zeros(len(tokens)), where=bars.width > 0)
    _bar(axes, bars, rate, color=LIGHT.scale[4])
    finish(axes, "generated tokens per second", "tokens/s", rate)


def _rows(axes: Axes, bars: Bars, columns: dict[str, np.ndarray]) -> None:
    adapted, scaling = (np.nan_to_num(bars.mean(columns[name])) for name in ("adapted_rows", "scaling_rows"))
    _bar(axes, bars, adapted, color=LIGHT.scale[4], label="adapted passes")
    banded = {"facecolor": LIGHT.scale[1], "edgecolor": LIGHT.scale[5], "hatch": BANDS}
    _bar(axes, bars, scaling, bottom=adapted, label="scaling passes", **banded)
    finish(axes, "rows of a forward" + (", mean" if bars.is_pooled else ""), "rows", adapted + scaling)
    beside(axes, [("adapted passes\n(and base)", {"facecolor": LIGHT.scale[4]}), ("scaling passes", banded)])


def _milliseconds(axes: Axes, bars: Bars, columns: dict[str, np.ndarray]) -> None:
    mean, most = bars.mean(columns["duration_ms"]), bars.largest(columns["duration_ms"])
    _bar(axes, bars, mean, color=LIGHT.scale[4])
    if bars.is_pooled:
        held = np.isfinite(most)
        middle = (bars.left + bars.width / 2)[held]
        axes.plot(middle, most[held], linestyle="none", marker="_", markersize=4, color=LIGHT.below, label="longest")
        beside(axes, [("mean", {"facecolor": LIGHT.scale[4]}), ("– longest", {"facecolor": LIGHT.below})])
    finish(axes, "milliseconds per step", "ms", most)


def _queue(axes: Axes, bars: Bars, columns: dict[str, np.ndarray]) -> None:
    edges = np.append(bars.left, bars.left[-1] + bars.width[-1])
    largest = np.zeros(1)
    for name, dashes, shade in (("running", "-", LIGHT.scale[5]), ("waiting", (0, (2, 1.2)), LIGHT.below)):
        values = bars.largest(columns[name])
        style = {"color": shade, "linestyle": dashes, "linewidth": 1.3, "label": name}
        axes.step(edges, np.append(values, values[-1:]), where="post", **style)
        largest = np.append(largest, values)
    finish(axes, "requests" + (", at most" if bars.is_pooled else ""), "requests", largest)
    name_lines(axes, ["running", "waiting"], ["-", (0, (2, 1.2))], [LIGHT.scale[5], LIGHT.below])


def finish(axes: Axes, what: str, unit: str, values: np.ndarray) -> None:
    """Head a panel, name its axis, and let it run from 0 to above its largest value."""
    held = values[np.isfinite(values)]
    top = float(held.max()) if held.size and held.max() > 0 else 1.0
    axes.set_ylim(0, top * 1.08)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10], integer=unit in ("rows", "requests")))
    heading(axes, what, 8.5, pad=4)
    label(axes, y=unit)
    open_axes(axes)


def time_axis(axes: Axes, first: float, last: float, is_last: bool) -> None:
    """Set the axis of seconds, labelled on the last panel only."""
    axes.set_xlim(*((first, last) if last > first else (first - 0.5, first + 0.5)))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10]))
    if is_last:
        label(axes, x="time since the recording began (s)")
    else:
        axes.tick_params(axis="x", labelbottom=False)


def beside(axes: Axes, entries: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Explain fills right of a panel."""
    from matplotlib.patches import Patch

    handles = [Patch(label=text, linewidth=0.5, **style) for text, style in entries]
    _legend(axes, handles)


def name_lines(axes: Axes, texts: Sequence[str], dashes: Sequence[Any], shades: Sequence[str]) -> None:
    """Explain lines right of a panel."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=shade, linestyle=dash, label=text, linewidth=1.3)
        for text, dash, shade in zip(texts, dashes, shades, strict=True)
    ]
    _legend(axes, handles)


def _legend(axes: Axes, handles: list[Any]) -> None:
    where = {"loc": "upper left", "bbox_to_anchor": (1.005, 1.05), "borderaxespad": 0}
    made = axes.legend(handles=handles, fontsize=7, frameon=False, handlelength=2, labelspacing=0.6, **where)
    for text in made.get_texts():
        plain(text)
