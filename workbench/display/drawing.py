"""What goes into the axes of a figure: token lines, site panels, legend and colour bar.

Sizes and places are inches from the top left corner of the figure.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from functools import cache

import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from workbench.display.labels import keyed, layer_of, layer_runs, layer_ticks, runs, short
from workbench.display.palette import LIGHT, adapter_colour, adapter_key, contrast, mix, rgb
from workbench.instrument.trace import Trace

SANS, MONO = "DejaVu Sans", "DejaVu Sans Mono"
STYLE = {
    "text.usetex": False,
    "text.color": LIGHT.ink,
    "font.family": SANS,
    "axes.edgecolor": LIGHT.line,
    "axes.labelcolor": LIGHT.ink,
    "axes.linewidth": 0.8,
    "axes.grid": False,
    "axes.titlesize": 9,
    "xtick.color": LIGHT.muted,
    "ytick.color": LIGHT.muted,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "workbench",
}
LEGEND_COLUMNS = 4
HATCH = "////"


def colour_map() -> LinearSegmentedColormap:
    """Return the scale for scalings; NaN stays transparent so that the hatch behind it shows."""
    scale = LinearSegmentedColormap.from_list("scalings", LIGHT.scale)
    return scale.with_extremes(bad=(0, 0, 0, 0), over=LIGHT.above, under=LIGHT.below)


@dataclass
class Sheet:
    """A figure addressed in inches from its top left corner."""

    figure: Figure
    width_in: float
    height_in: float

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        bottom = self.height_in - top - height
        wide, high = self.width_in, self.height_in
        return self.figure.add_axes((left / wide, bottom / high, width / wide, height / high))

    def text(self, left: float, top: float, text: str, size: float, **style: object) -> None:
        x, y = left / self.width_in, 1 - top / self.height_in
        artist = self.figure.text(x, y, drawable(text), fontsize=size, va=style.pop("va", "top"), **style)
        artist.set_parse_math(False)


def drawable(text: str, family: str = SANS) -> str:
    """Return `text` with a box for every character the font lacks, so that drawing never warns."""
    known = _characters(family)
    return "".join(char if ord(char) in known else "□" for char in text)


@cache
def _characters(family: str) -> frozenset[int]:
    return frozenset(font_manager.get_font(font_manager.findfont(family)).get_charmap())


def head(sheet: Sheet, title: str, summary: str, note: str) -> None:
    """Write the title, the facts under it, and what the scale means."""
    sheet.text(0.2, 0.16, _cut(title, 90), size=14, weight="bold")
    for line, text in enumerate(head_lines(summary, note)):
        sheet.text(0.2, 0.46 + 0.16 * line, text, size=7.4, color=LIGHT.muted)


def head_lines(summary: str, note: str) -> list[str]:
    """Return the lines under the title: at most two of facts, two of what the scale means."""
    return [line for text in (summary, note) for line in textwrap.wrap(text, 196, max_lines=2, placeholder=" …")]


def _cut(text: str, limit: int) -> str:
    text = text.replace("\n", " ")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def legend_rows(trace: Trace) -> int:
    shown = min(len(trace.adapters), 5 * LEGEND_COLUMNS)
    return -(-shown // LEGEND_COLUMNS)


def legend(sheet: Sheet, trace: Trace, top: float) -> None:
    """Write colour, letter, name and share of each adapter, then how computed and reused scalings are marked."""
    shares = list(trace.share().values())
    limit = LEGEND_COLUMNS * legend_rows(trace)
    axes = sheet.axes(0.2, top, 7.6, 0.2 * (legend_rows(trace) + 1))
    axes.set(xlim=(0, 7.6), ylim=(0.2 * (legend_rows(trace) + 1), 0))
    axes.set_axis_off()
    for index, label in enumerate(keyed(trace.adapters)[:limit]):
        row, column = divmod(index, LEGEND_COLUMNS)
        x, y = column * 1.9, row * 0.2 + 0.1
        swatch = Rectangle((x, y - 0.055), 0.17, 0.11, facecolor=adapter_colour(index), edgecolor=LIGHT.ink, lw=0.4)
        axes.add_patch(swatch)
        more = len(trace.adapters) - limit
        text = f"… {more + 1} more" if more > 0 and index == limit - 1 else f"{_cut(label, 20)}  {shares[index]:.0%}"
        _plain(axes.text(x + 0.24, y, drawable(text), va="center", fontsize=8))
    y = 0.2 * legend_rows(trace) + 0.1
    marks = [("scalings computed for this token", 0), ("reused from an earlier token", 1), ("none: never an input", 2)]
    for column, (text, kind) in enumerate(marks):
        x = column * 2.3
        _source_cell(axes, (x, y - 0.04), (0.17, 0.08), kind)
        _plain(axes.text(x + 0.24, y, text, va="center", fontsize=7.4, color=LIGHT.muted))


def colour_bar(sheet: Sheet, trace: Trace, top: float) -> None:
    """Draw the scale from 0 to 1, with an arrow at an end only where values lie beyond it."""
    axes = sheet.axes(8.2, top, 2.6, 0.12)
    above, below = bool((trace.values > 1).any()), bool((trace.values < 0).any())
    extend = {(True, True): "both", (True, False): "max", (False, True): "min"}.get((above, below), "neither")
    mappable = ScalarMappable(Normalize(0, 1), colour_map())
    ticks = [0, 0.25, 0.5, 0.75, 1]
    bar = sheet.figure.colorbar(mappable, cax=axes, orientation="horizontal", extend=extend, ticks=ticks)
    bar.ax.set_xticklabels(["0", "0.25", "0.5", "0.75", "1.0"], fontsize=7)
    bar.ax.tick_params(length=2, pad=1.5)
    bar.outline.set_linewidth(0.5)
    bar.set_label("scaling", fontsize=7.4, labelpad=1)


def token_line(
    sheet: Sheet,
    trace: Trace,
    box: tuple[float, float, float],
    span: tuple[int, int],
    sizes: tuple[float, float],
    labelled: bool,
) -> None:
    """Draw one line of tokens: the strip of leading adapters and sources, then the mean over sites per adapter."""
    (left, top, width), (start, stop), (strip_in, row_in) = box, span, sizes
    strip = sheet.axes(left, top, width, strip_in - 0.03)
    _strip(strip, trace, start, stop)
    axes = sheet.axes(left, top + strip_in, width, row_in * len(trace.adapters))
    means = trace.token_means()[start:stop].T  # [adapter, token]
    _heatmap(axes, means, (start - 0.5, stop - 0.5, len(trace.adapters) - 0.5, -0.5))
    for marker, cells in (("^", means > 1), ("v", means < 0)):
        rows, columns = np.nonzero(cells)
        axes.scatter(columns + start, rows, marker=marker, s=9, color="white", linewidths=0)
    if len(trace.adapters) <= 40:
        _ticks(axes, "y", range(len(trace.adapters)), [_cut(label, 18) for label in keyed(trace.adapters)], 7.5, SANS)
        axes.tick_params(axis="y", labelcolor=LIGHT.ink)
    else:
        axes.set_ylabel(f"{len(trace.adapters)} adapters", fontsize=7.5)
        axes.set_yticks([])
    if labelled:
        _ticks(axes, "x", range(start, stop), [short(text, 10) for text in trace.tokens[start:stop]], 6.2, MONO)
        axes.tick_params(axis="x", rotation=90, labelcolor=LIGHT.ink)
    else:
        axes.set_xlabel("token", fontsize=7.5)
        axes.tick_params(axis="x", labelsize=7)
    axes.tick_params(length=0, pad=2)
    _boundary(axes, trace, start, stop, strip)


def _strip(axes: Axes, trace: Trace, start: int, stop: int) -> None:
    """Draw who leads (colour, and a letter where it changes) above whether the scalings were computed or reused."""
    axes.set(xlim=(start - 0.5, stop - 0.5), ylim=(1, 0))
    axes.set_axis_off()
    token_in = axes.get_window_extent().width / axes.figure.dpi / (stop - start)
    leading = trace.leading()[start:stop]
    for first, last in runs(leading):
        if leading[first] < 0:
            continue
        colour = adapter_colour(int(leading[first]))
        axes.add_patch(Rectangle((start + first - 0.5, 0), last - first, 0.62, facecolor=colour, lw=0))
        ink = max((LIGHT.ink, "#ffffff"), key=lambda ink: contrast(ink, colour))
        key = adapter_key(int(leading[first]))
        if (last - first) * token_in > 0.085 * len(key):
            x = start + (first + last) / 2 - 0.5
            axes.text(x, 0.33, key, ha="center", va="center", fontsize=6.5, color=ink, weight="bold")
    kinds = np.where(trace.source < 0, 2, np.where(trace.reused, 1, 0))[start:stop]
    for first, last in runs(kinds):
        _source_cell(axes, (start + first - 0.5, 0.72), (last - first, 0.26), int(kinds[first]))


def _source_cell(axes: Axes, corner: tuple[float, float], size: tuple[float, float], kind: int) -> None:
    """Draw a box of the source strip: solid = computed (0), striped = reused (1), empty = none (2)."""
    face = LIGHT.muted if kind == 0 else LIGHT.page
    hatch = "||||||" if kind == 1 else None
    axes.add_patch(Rectangle(corner, *size, facecolor=face, edgecolor=LIGHT.muted, hatch=hatch, lw=0.5))


def _heatmap(axes: Axes, values: np.ndarray, extent: tuple[float, float, float, float]) -> None:
    """Draw `values[down, across]` on the fixed scale, over a hatch that shows where a value is NaN."""
    _hatched(axes)
    values = np.ma.masked_invalid(values.astype(np.float32))
    axes.imshow(values, cmap=colour_map(), vmin=0, vmax=1, aspect="auto", interpolation="nearest", extent=extent)


def _hatched(axes: Axes) -> None:
    """Hatch the background, which shows wherever there is no value."""
    axes.set_facecolor(LIGHT.page)
    back = Rectangle((0, 0), 1, 1, transform=axes.transAxes, hatch=HATCH, zorder=-1)
    back.set(facecolor="none", edgecolor=LIGHT.missing, lw=0)
    axes.add_patch(back)


def _boundary(axes: Axes, trace: Trace, start: int, stop: int, strip: Axes | None = None) -> None:
    """Draw the line between prompt and generated tokens, named on both sides where there is a strip."""
    at = trace.prompt_tokens
    room = max(1, round(0.12 * (stop - start)))  # tokens the word "generated" takes
    if not start < at < stop:
        if strip is not None and (start == 0 or start - room < at <= start):
            name = "generated ▸" if start >= at else "prompt ▸"
            strip.text(start - 0.5, -0.12, name, ha="left", va="bottom", fontsize=6.5, color=LIGHT.muted)
        return
    for one in (axes, strip) if strip is not None else (axes,):
        one.axvline(at - 0.5, color=LIGHT.ink, lw=1.1, clip_on=False)
    if strip is not None:
        strip.text(at - 0.7, -0.12, "prompt ◂", ha="right", va="bottom", fontsize=6.5, color=LIGHT.muted)
        name = "▸ generated" if at + room <= stop else "▸"
        strip.text(at - 0.3, -0.12, name, ha="left", va="bottom", fontsize=6.5, color=LIGHT.muted)


def site_panel(axes: Axes, trace: Trace, adapter: int) -> None:
    """Draw every site of one adapter over all tokens, with the sites grouped by layer."""
    _heatmap(axes, trace.values[:, :, adapter].T, _site_extent(trace))
    name = drawable(_cut(keyed(trace.adapters)[adapter], 50))
    share = trace.share()[trace.adapters[adapter]]
    _plain(axes.set_title(f"{name}  {share:.0%}", fontsize=8.5, loc="left", pad=4, x=0.03))
    swatch = Rectangle((0, 1.045), 0.02, 0.06, transform=axes.transAxes, clip_on=False)
    swatch.set(facecolor=adapter_colour(adapter), edgecolor=mix(LIGHT.page, LIGHT.ink, 0.7), lw=0.4)
    axes.add_patch(swatch)
    _site_axes(axes, trace)


def leader_panel(axes: Axes, trace: Trace) -> None:
    """Draw at every site and token the adapter with the largest scaling, in its colour, stronger for a larger one."""
    missing = np.isnan(trace.values).all(2).T  # [site, token]
    filled = np.where(np.isnan(trace.values), -np.inf, trace.values)
    leader, strength = filled.argmax(2).T, filled.max(2).T.clip(0, 1)[..., None]
    colours = np.array([rgb(adapter_colour(i)) for i in range(len(trace.adapters))]) / 255
    page = np.array(rgb(LIGHT.page)) / 255
    image = page + (colours[leader] - page) * (0.06 + 0.94 * strength)
    _hatched(axes)
    image = np.concatenate([image, ~missing[..., None]], 2)
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=_site_extent(trace))
    _site_axes(axes, trace)


def _site_extent(trace: Trace) -> tuple[float, float, float, float]:
    return (-0.5, trace.num_tokens - 0.5, len(trace.sites) - 0.5, -0.5)


def _site_axes(axes: Axes, trace: Trace) -> None:
    """Label layers and tokens, and draw where the prompt ends."""
    layers = [layer_of(site) for site in trace.sites]
    middles, texts = zip(*layer_ticks(layers), strict=True)
    _ticks(axes, "y", middles, texts, 6.5, SANS)
    axes.set_yticks([first - 0.5 for _, first, _ in layer_runs(layers)], minor=True)
    axes.tick_params(axis="both", which="major", length=0, pad=2, labelsize=6.5)
    axes.tick_params(axis="y", which="minor", length=2, width=0.4)
    axes.set_ylabel("layer", fontsize=7.5, labelpad=1)
    axes.set_xlabel("token", fontsize=7.5, labelpad=1)
    _boundary(axes, trace, 0, trace.num_tokens)


def _ticks(axes: Axes, axis: str, places, texts: list[str], size: float, family: str) -> None:
    """Set ticks whose labels are plain text: no mathtext, no missing glyphs."""
    target = axes.xaxis if axis == "x" else axes.yaxis
    target.set_ticks(list(places), [drawable(text, family) for text in texts], fontsize=size, family=family)
    for tick in target.get_major_ticks():
        _plain(tick.label1)


def _plain(text) -> None:
    text.set_parse_math(False)
