"""How an adapter is told apart without colour: its letter, its line style, its marker; and how a source is marked."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from workbench.display.labels import runs, without_value
from workbench.display.palette import LIGHT, OTHERS, adapter_colour, adapter_key, contrast, mix
from workbench.display.sheet import plain
from workbench.instrument.trace import Trace

DASHES = ("-", (0, (5, 1.6)), (0, (1.4, 1.2)), (0, (6, 1.6, 1.4, 1.6)), (0, (9, 2)))
MARKERS = "os^DvPX<>*"
OTHERS_INDEX = -1  # stands for the adapters that are drawn together
COMPUTED, REUSED, NO_SOURCE = 0, 1, 2
HATCH = "////"


def colour(index: int) -> str:
    """Return the colour of an adapter, or of the others."""
    return OTHERS if index == OTHERS_INDEX else adapter_colour(index)


def key(index: int) -> str:
    """Return the letter of an adapter, or what stands for the others."""
    return "…" if index == OTHERS_INDEX else adapter_key(index)


def ink_on(back: str) -> str:
    """Return the ink, dark or white, that reads best on a colour."""
    return max((LIGHT.ink, LIGHT.page), key=lambda ink: contrast(ink, back))


def edge(shade: str) -> str:
    """Return an outline that makes a pale colour stand out from the page."""
    return mix(shade, LIGHT.ink, 0.55)


def line_style(index: int, width: float = 1.4, marker_size: float = 3.4) -> dict[str, Any]:
    """Return how an adapter's line is drawn: colour, dashes, marker."""
    shade = colour(index)
    others = index == OTHERS_INDEX
    return {
        "color": shade,
        "linestyle": (0, (1, 1.5)) if others else DASHES[index % len(DASHES)],
        "linewidth": width,
        "marker": "" if others else MARKERS[index % len(MARKERS)],
        "markersize": marker_size,
        "markeredgecolor": edge(shade),
        "markeredgewidth": 0.5,
        "solid_capstyle": "butt",
    }


def adapter_line(axes: Axes, index: int, x: np.ndarray, y: np.ndarray, **style: Any) -> Line2D:
    """Draw an adapter's line and return it; a pale colour gets a darker line below it, as an outline."""
    drawn = {**line_style(index), **style}
    if contrast(colour(index), LIGHT.page) < 3 and drawn["linestyle"] != "none" and "alpha" not in style:
        width = drawn["linewidth"] + 0.9
        below = {"color": edge(colour(index)), "linestyle": drawn["linestyle"], "linewidth": width}
        if isinstance(drawn["linestyle"], tuple):
            # dashes are as long as the line is wide times these numbers
            first, dashes = drawn["linestyle"]
            below["linestyle"] = (first, tuple(dash * drawn["linewidth"] / width for dash in dashes))
        axes.plot(x, y, label="_outline", zorder=drawn.get("zorder", 2), solid_capstyle="butt", **below)
    return axes.plot(x, y, **drawn)[0]


def line_sample(axes: Axes, index: int, x: float, y: float, length: float) -> None:
    """Draw a short piece of an adapter's line, for a legend."""
    adapter_line(axes, index, np.array([x, x + length / 2, x + length]), np.full(3, y), markevery=[1])


def outside_marks(axes: Axes, x: np.ndarray, y: np.ndarray) -> None:
    """Mark at the ends of a scale from 0 to 1 what lies beyond them."""
    for marker, beyond, place in (("^", y > 1, 1.0), ("v", y < 0, 0.0)):
        if beyond.any():
            style = {"color": LIGHT.above, "markersize": 4, "clip_on": False, "label": "_outside"}
            axes.plot(x[beyond], np.full(beyond.sum(), place), marker, **style)


def swatch(axes: Axes, index: int, corner: tuple[float, float], size: tuple[float, float], **style: Any) -> None:
    """Draw a box in an adapter's colour."""
    box = Rectangle(corner, *size, facecolor=colour(index), edgecolor=edge(colour(index)), lw=0.5, **style)
    axes.add_patch(box)


def hatched(axes: Axes) -> None:
    """Hatch the background, which shows wherever there is no value."""
    axes.set_facecolor(LIGHT.page)
    back = Rectangle((0, 0), 1, 1, transform=axes.transAxes, hatch=HATCH, zorder=-1)
    back.set(facecolor="none", edgecolor=LIGHT.missing, lw=0)
    axes.add_patch(back)


def source_kinds(trace: Trace) -> np.ndarray:
    """Return int64 `[token]`: `COMPUTED`, `REUSED`, or `NO_SOURCE` for what was no input or has no value."""
    none = (trace.source < 0) | without_value(trace)
    return np.where(none, NO_SOURCE, np.where(trace.reused, REUSED, COMPUTED))


def source_cell(axes: Axes, corner: tuple[float, float], size: tuple[float, float], kind: int) -> None:
    """Draw a box of the source strip: solid = computed, striped = reused, empty = none."""
    face = LIGHT.muted if kind == COMPUTED else LIGHT.page
    hatch = "||||||" if kind == REUSED else None
    axes.add_patch(Rectangle(corner, *size, facecolor=face, edgecolor=LIGHT.muted, hatch=hatch, lw=0.5))


def leader_bars(axes: Axes, leading: np.ndarray, start: int, low: float, high: float, token_in: float) -> bool:
    """Draw who leads, one bar a run, with a letter where one fits; return whether every letter did."""
    spans = [(first, last, int(leading[first])) for first, last in runs(leading) if leading[first] >= 0]
    bars = [(start + first - 0.5, last - first) for first, last, _ in spans]
    if bars:
        axes.broken_barh(bars, (low, high - low), facecolors=[colour(index) for *_, index in spans], lw=0)
    fits = True
    for first, last, index in spans:
        name = key(index)
        if (last - first) * token_in <= 0.085 * len(name):
            fits = False
            continue
        x, ink = start + (first + last) / 2 - 0.5, ink_on(colour(index))
        y = (low + high) / 2 + 0.02
        plain(axes.text(x, y, name, ha="center", va="center", fontsize=6.5, color=ink, weight="bold"))
    return fits


def end_letters(axes: Axes, x: float, ends: list[tuple[int, float]], gap: float) -> None:
    """Write each adapter's letter right of its line's end at `x`, moved apart to at least `gap` of the y axis."""
    ends = sorted(((index, y) for index, y in ends if np.isfinite(y)), key=lambda end: end[1])
    if not ends:
        return
    low, high = axes.get_ylim()
    places = [min(max(y, low), high) for _, y in ends]
    for here in range(1, len(places)):
        places[here] = max(places[here], places[here - 1] + gap)
    places[-1] = min(places[-1], max(high, low + gap * (len(places) - 1)))
    for here in range(len(places) - 2, -1, -1):
        places[here] = min(places[here], places[here + 1] - gap)
    for (index, _), y in zip(ends, places, strict=True):
        letter_chip(axes, index, (x, y), (5, 0), va="center")


def letter_chip(
    axes: Axes, index: int, at: tuple[float, float], offset: tuple[float, float], xycoords: str = "data",
    va: str = "baseline",
) -> None:
    """Write an adapter's letter on its colour, `offset` points right of and above a place."""
    shade = colour(index)
    chip = {"boxstyle": "square,pad=0.2", "facecolor": shade, "edgecolor": edge(shade), "linewidth": 0.4}
    style = {"fontsize": 6.5, "weight": "bold", "color": ink_on(shade), "bbox": chip, "annotation_clip": False}
    where = {"xycoords": xycoords, "xytext": offset, "textcoords": "offset points", "ha": "left", "va": va}
    plain(axes.annotate(key(index), at, **where, **style))
