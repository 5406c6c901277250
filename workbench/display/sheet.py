"""A figure addressed in inches from its top left corner, with a head that every figure shares.

Its height is only known when everything is placed: `close` sets it. Never pyplot: nothing is registered anywhere.
"""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from workbench.display.fonts import SANS, drawable, families
from workbench.display.labels import columns
from workbench.display.palette import LIGHT

WIDTH_IN = 11.0
MARGIN_IN = 0.2
DPI = 150
LINE_IN = 0.16  # one line of the small text under the title
STYLE = {
    "text.usetex": False,
    "text.color": LIGHT.ink,
    "axes.edgecolor": LIGHT.line,
    "axes.facecolor": LIGHT.page,
    "axes.labelcolor": LIGHT.ink,
    "axes.linewidth": 0.8,
    "axes.grid": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "axes.formatter.use_mathtext": False,
    "axes.titlesize": 9,
    "xtick.color": LIGHT.muted,
    "ytick.color": LIGHT.muted,
    "hatch.linewidth": 0.6,
    "path.simplify": True,
    "pdf.fonttype": 42,
    "svg.hashsalt": "workbench",
}


@contextmanager
def styled() -> Iterator[None]:
    """Give artists the house's style inside, whatever the user's own settings are."""
    # a fallback font need not have every weight, and Matplotlib would say so at each text
    log = logging.getLogger("matplotlib.font_manager")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with matplotlib.rc_context({**STYLE, "font.family": list(families(SANS))}):
            yield
    finally:
        log.setLevel(level)


class Sheet:
    """A figure under construction: axes and texts are placed in inches, `close` gives it its height.

    Args:
        width_in: width of the figure.
    """

    def __init__(self, width_in: float = WIDTH_IN):
        self.width_in = width_in
        self.figure = Figure(figsize=(width_in, 1), dpi=DPI, facecolor=LIGHT.page)
        FigureCanvasAgg(self.figure)
        self._axes: list[tuple[Axes, tuple[float, float, float, float]]] = []
        self._texts: list[tuple[Text, float]] = []

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Return new axes whose box has this top left corner and size."""
        axes = self.figure.add_axes((left / self.width_in, 0, width / self.width_in, 1))
        self._axes.append((axes, (left, top, width, height)))
        return axes

    def text(self, left: float, top: float, text: str, size: float, **style: Any) -> Text:
        """Write plain text with its top left corner here (or as `ha` and `va` say)."""
        artist = self.figure.text(left / self.width_in, 0, drawable(text), fontsize=size, va=style.pop("va", "top"))
        artist.set(**style)
        self._texts.append((plain(artist), top))
        return artist

    def close(self, height_in: float) -> Figure:
        """Set the height and move everything to where it belongs; return the figure."""
        self.figure.set_size_inches(self.width_in, height_in)
        for axes, (left, top, width, height) in self._axes:
            box = (left / self.width_in, 1 - (top + height) / height_in, width / self.width_in, height / height_in)
            axes.set_position(box)
        for artist, top in self._texts:
            artist.set_y(1 - top / height_in)
        return self.figure


def head(sheet: Sheet, title: str, lines: Iterable[str], badges: Sequence[str] = ()) -> float:
    """Write the title, warnings beside it, and small lines under it; return where the next thing may begin.

    Args:
        sheet: where.
        title: what is seen.
        lines: facts and notes; each is wrapped to at most two lines.
        badges: what a reader must not miss, such as "edited" or "bf16".
    """
    left = sheet.width_in - MARGIN_IN
    for badge in reversed(badges):
        left -= _badge(sheet, left, cut(badge, 60)) + 0.1
    room = int((left - MARGIN_IN) / 0.118)  # characters of the title's size
    sheet.text(MARGIN_IN, 0.16, cut(title, max(room, 20)), size=14, weight="bold")
    return small_lines(sheet, 0.46, lines) + 0.06


def small_lines(sheet: Sheet, top: float, lines: Iterable[str], left: float = MARGIN_IN, most: int = 2) -> float:
    """Write small muted lines below each other, wrapped to the sheet's width; return where they end."""
    room = int((sheet.width_in - left - MARGIN_IN) / 0.0545)
    for text in lines:
        for line in textwrap.wrap(one_line(text), room, max_lines=most, placeholder=" …"):
            sheet.text(left, top, line, size=7.4, color=LIGHT.muted)
            top += LINE_IN
    return top


def _badge(sheet: Sheet, right: float, text: str) -> float:
    """Write a framed word that ends at `right`; return its width in inches."""
    frame = {"boxstyle": "round,pad=0.3", "facecolor": LIGHT.page, "edgecolor": LIGHT.below, "linewidth": 1}
    artist = sheet.text(right - 0.05, 0.19, text, size=8, weight="bold", color=LIGHT.below, ha="right", bbox=frame)
    return artist.get_window_extent().width / DPI + 0.1


def plain(text: Text) -> Text:
    """Switch mathtext off, so that a `$` is a `$`; return the text."""
    text.set_parse_math(False)
    return text


def one_line(text: str) -> str:
    return " ".join(text.split("\n"))


def cut(text: str, limit: int) -> str:
    """Return `text` on one line of at most `limit` characters."""
    text = one_line(text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shortened(name: str, limit: int) -> str:
    """Return a name on one line, at most `limit` columns wide; what is left out is in its middle."""
    name = one_line(name)
    made, room = name, limit
    while columns(made) > limit and room > 2:
        tail = (room - 1) // 2
        made = f"{name[: room - 1 - tail]}…{name[-tail:]}"
        room -= 1
    return made


def ticks(
    axes: Axes, axis: str, places: Iterable[float], texts: Iterable[str], size: float = 7.5, family: str = SANS
) -> None:
    """Set the ticks of axis "x" or "y", with labels of plain text in glyphs that exist."""
    target = axes.xaxis if axis == "x" else axes.yaxis
    labels = [drawable(text, family) for text in texts]
    target.set_ticks(list(places), labels, fontsize=size, family=list(families(family)))
    for tick in target.get_major_ticks():
        plain(tick.label1), plain(tick.label2)


def label(axes: Axes, x: str | None = None, y: str | None = None, size: float = 7.5) -> None:
    """Name the axes, units included."""
    if x is not None:
        plain(axes.set_xlabel(drawable(x), fontsize=size, labelpad=2))
    if y is not None:
        plain(axes.set_ylabel(drawable(y), fontsize=size, labelpad=3))


def heading(axes: Axes, text: str, size: float = 9, **style: Any) -> None:
    """Write what a panel shows above its left end."""
    plain(axes.set_title(drawable(text), fontsize=size, loc="left", pad=style.pop("pad", 5), **style))


def open_axes(axes: Axes, grid: str | None = "y") -> None:
    """Style the axes of a chart: two spines, light grid lines, small ticks."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(LIGHT.muted)
    axes.tick_params(length=2.5, width=0.6, labelsize=7.5, color=LIGHT.muted, labelcolor=LIGHT.ink)
    if grid:
        axes.grid(axis=grid, color=LIGHT.line, linewidth=0.6)
