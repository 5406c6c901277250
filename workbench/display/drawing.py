"""What goes into the axes of a figure of a trace: heatmaps, the token line with its strip, site panels.

Parts to build figures from: `Sheet` (inches), `heatmap`, `strip`, `boundary`, `token_axis`, `site_axes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from workbench.display.fonts import MONO
from workbench.display.labels import layer_of, layer_runs, layer_ticks, runs, short
from workbench.display.marks import hatched, key, leader_bars, letter_chip, source_cell, source_kinds
from workbench.display.palette import LIGHT, adapter_colour, rgb
from workbench.display.scales import SCALINGS, Scale
from workbench.display.sheet import DPI, Sheet, heading, label, shortened, ticks
from workbench.instrument.trace import Trace, nan_mean

LEFT_IN, RIGHT_IN = 1.35, 0.15
LINE_TOKENS = 72  # as many token texts as stay legible side by side on one line
MAX_LINES = 6
MAX_COLUMNS = 4096  # of a heatmap: more than it has pixels
MAX_ROWS = 24  # as many adapters as are told apart in the rows of a token line
STRIP_IN = 0.26


def heatmap(axes: Axes, values: np.ndarray, extent: tuple[float, float, float, float], scale: Scale = SCALINGS) -> None:
    """Draw `values[down, across]` on a fixed scale, over a hatch that shows where a value is NaN."""
    hatched(axes)
    drawn = np.ma.masked_invalid(values.astype(np.float32) if values.dtype == np.float16 else values)
    if scale.is_log:
        # a logarithmic norm hides what is not above 0, as if it were missing; it is below the scale
        drawn = np.ma.where(drawn > 0, drawn, scale.low * 1e-3)
    style = {"cmap": scale.colour_map, "norm": scale.norm, "interpolation": "nearest", "interpolation_stage": "data"}
    axes.imshow(drawn, aspect="auto", extent=extent, **style)


def line_spans(num_tokens: int) -> list[tuple[int, int]]:
    """Return the `(start, stop)` of each line: balanced lines, or a single one when the text is too long to label."""
    if num_tokens > LINE_TOKENS * MAX_LINES:
        return [(0, num_tokens)]
    count = -(-num_tokens // LINE_TOKENS)
    size = -(-num_tokens // count)
    return [(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def has_cells(trace: Trace) -> bool:
    """Whether a token line has room for each token's text, and for marks in its cells."""
    return trace.num_tokens <= LINE_TOKENS * MAX_LINES


def row_in(num_rows: int) -> float:
    """Return the height of one adapter's row in a token line."""
    return 0.19 if num_rows <= 12 else 0.115


class TokenLines:
    """The rows of several adapters over the tokens, wrapped over lines like text.

    Args:
        trace: whose tokens.
        values: `[token, row]` to draw.
        rows: what each row is called.
        scale: what its colours mean.
        draw_strip: draws what lies above a line: `(axes, trace, start, stop)`.
        marks: `(marker, [token, row] bool)`: white marks in cells, besides those for values beyond the scale.
    """

    def __init__(
        self, trace: Trace, values: np.ndarray, rows: Sequence[str], scale: Scale = SCALINGS,
        draw_strip: Callable[[Axes, Trace, int, int], None] | None = None,
        marks: Sequence[tuple[str, np.ndarray]] = (),
    ):
        self.trace, self.values, self.rows, self.scale = trace, values, tuple(rows), scale
        self.draw_strip = draw_strip or strip
        # 0 lies below every logarithmic scale and is nothing odd
        below = [] if scale.is_log else [("v", values < scale.low)]
        self.spans = line_spans(trace.num_tokens)
        self.is_labelled = has_cells(trace)
        # in cells narrower than a mark, marks would be all there is to see
        self.marks = [("^", values > scale.high), *below, *(marks if self.is_labelled else ())]
        self.strip_in = STRIP_IN if trace.has_scalings else 0.14
        self.row_in = row_in(len(self.rows))

    @property
    def line_in(self) -> float:
        """Height of one line, its labels included."""
        return self.strip_in + self.row_in * len(self.rows) + (0.78 if self.is_labelled else 0.54)

    def draw(self, sheet: Sheet, top: float) -> float:
        """Draw every line and return where the last one ends."""
        widest = max(stop - start for start, stop in self.spans)
        # a lone token as wide as the page would look like a bar
        widest = max(widest, 8)
        for start, stop in self.spans:
            width = (sheet.width_in - LEFT_IN - RIGHT_IN) * (stop - start) / widest
            self._line(sheet, top, width, start, stop)
            top += self.line_in
        return top

    def _line(self, sheet: Sheet, top: float, width: float, start: int, stop: int) -> None:
        axes = sheet.axes(LEFT_IN, top + self.strip_in, width, self.row_in * len(self.rows))
        strip_axes = sheet.axes(LEFT_IN, top, width, self.strip_in - 0.03)
        self.draw_strip(strip_axes, self.trace, start, stop)
        drawn = self.values[start:stop].T  # [row, token]
        heatmap(axes, drawn, (start - 0.5, stop - 0.5, len(self.rows) - 0.5, -0.5), self.scale)
        for marker, cells in self.marks:
            columns, rows = np.nonzero(cells[start:stop])
            width = 0.8 if marker in "+_" else 0
            axes.scatter(columns + start, rows, marker=marker, s=12, color="white", linewidths=width)
        row_axis(axes, self.rows)
        token_axis(axes, self.trace, start, stop, self.is_labelled)
        boundary(axes, self.trace, start, stop, strip_axes)


def row_axis(axes: Axes, rows: Sequence[str]) -> None:
    """Name the rows of a heatmap."""
    size, limit = (7.5, 17) if len(rows) <= 12 else (6, 21)
    ticks(axes, "y", range(len(rows)), [shortened(row, limit) for row in rows], size)
    axes.tick_params(axis="y", length=0, pad=2, labelcolor=LIGHT.ink)


def token_axis(axes: Axes, trace: Trace, start: int, stop: int, has_texts: bool) -> None:
    """Label the tokens with their texts, or only with their numbers where the texts would not fit."""
    if has_texts:
        texts = [short(text, 10) for text in trace.tokens[start:stop]]
        ticks(axes, "x", range(start, stop), texts, 6.2, MONO)
        axes.tick_params(axis="x", rotation=90, labelcolor=LIGHT.ink, length=0, pad=2)
    else:
        label(axes, x="token")
        axes.xaxis.set_major_locator(whole_numbers(12))
        axes.tick_params(axis="x", labelsize=7, length=0, pad=2)


def strip(axes: Axes, trace: Trace, start: int, stop: int) -> None:
    """Draw who leads (colour, and a letter where it fits) above whether the scalings were computed or reused."""
    axes.set(xlim=(start - 0.5, stop - 0.5), ylim=(1, 0))
    axes.set_axis_off()
    if not trace.has_scalings:
        return
    token_in = axes.get_window_extent().width / DPI / (stop - start)
    leader_bars(axes, trace.leading()[start:stop], start, 0, 0.62, token_in)
    source_strip(axes, trace, start, stop, 0.72, 0.98)


def source_strip(axes: Axes, trace: Trace, start: int, stop: int, low: float, high: float) -> None:
    """Draw whether each token's scalings were computed, reused, or none, as one box a run."""
    kinds = source_kinds(trace)[start:stop]
    for first, last in runs(kinds):
        source_cell(axes, (start + first - 0.5, low), (last - first, high - low), int(kinds[first]))


def boundary(axes: Axes, trace: Trace, start: int, stop: int, named: Axes | None = None) -> None:
    """Draw the line between prompt and generated tokens, named on both sides above `named`, if that is given."""
    at = trace.prompt_tokens
    if start < at < stop:
        for one in {axes, named} - {None}:
            # light beside dark: it is seen on both ends of the scale
            around = [patheffects.withStroke(linewidth=2.4, foreground=LIGHT.page)]
            one.axvline(at - 0.5, color=LIGHT.ink, lw=1.1, clip_on=False, path_effects=around)
    if named is not None:
        name_parts(named, trace, start, stop)


def name_parts(axes: Axes, trace: Trace, start: int, stop: int) -> None:
    """Write "prompt" and "generated" above the line between them, as far as there is room; else what the line is."""
    at, token_in = trace.prompt_tokens, axes.get_window_extent().width / DPI / (stop - start)
    room = 0.75  # inches the longer word takes
    if start < at < stop:
        if (at - start) * token_in > room:
            _part(axes, at - 0.5, "prompt ◂", "right")
        _part(axes, at - 0.5, "▸ generated" if (stop - at) * token_in > room else "▸", "left")
    elif start == 0 or (start - at) * token_in < room and start >= at:
        _part(axes, start - 0.5, "generated ▸" if start >= at else "prompt ▸", "left")


def _part(axes: Axes, x: float, text: str, ha: str) -> None:
    style = {"fontsize": 6.5, "color": LIGHT.muted, "va": "bottom", "ha": ha, "annotation_clip": False}
    offset = {"left": (2, 2), "right": (-2, 2)}[ha]
    axes.annotate(text, (x, 1), offset, xycoords=("data", "axes fraction"), textcoords="offset points", **style)


def pooled(values: np.ndarray, most: int = MAX_COLUMNS) -> tuple[np.ndarray, int]:
    """Return `[column, …]` values of at most `most` columns, and how many tokens one column is the mean of.

    More columns than pixels would show only some of the tokens.
    """
    size = -(-len(values) // most)
    if size <= 1:
        return values, 1
    blocks = [nan_mean(np.asarray(values[start : start + size]), 0) for start in range(0, len(values), size)]
    return np.stack(blocks).astype(np.float32), size


def pooling_note(size: int) -> str:
    """Return what is added to a heading when a column stands for several tokens."""
    return f"; a column is the mean of {size} tokens" if size > 1 else ""


def site_panel(axes: Axes, trace: Trace, values: np.ndarray, size: int = 1, scale: Scale = SCALINGS) -> None:
    """Draw `[column, site]` values of one adapter, the sites grouped by layer; a column holds `size` tokens."""
    heatmap(axes, values.T, _extent(values, size), scale)
    site_axes(axes, trace)


def adapter_heading(axes: Axes, adapter: int, name: str, note: str) -> None:
    """Write an adapter's letter in its colour, its name, and a note, above a panel."""
    letter_chip(axes, adapter, (0, 1), (3, 6), xycoords="axes fraction")
    room_in = axes.get_window_extent().width / DPI
    left_in = 0.16 + 0.07 * len(key(adapter))
    room = int((room_in - left_in) / 0.075) - len(note) - 2
    heading(axes, f"{shortened(name, max(6, room))}  {note}", 8.5, pad=4, x=left_in / room_in)


def leader_panel(axes: Axes, trace: Trace, values: np.ndarray, size: int = 1) -> None:
    """Draw the adapter with the largest of `[column, site, adapter]` in its colour, stronger for a larger scaling."""
    missing = np.isnan(values).all(2).T  # [site, column]
    filled = np.where(np.isnan(values), -np.inf, values)
    leader, strength = filled.argmax(2).T, filled.max(2).T.clip(0, 1)[..., None]
    colours = np.array([rgb(adapter_colour(i)) for i in range(values.shape[2])], np.float32) / 255
    page = np.array(rgb(LIGHT.page), np.float32) / 255
    image = page + (colours[leader] - page) * (0.06 + 0.94 * strength)
    hatched(axes)
    image = np.concatenate([image, ~missing[..., None]], 2)
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=_extent(values, size))
    site_axes(axes, trace)


def _extent(values: np.ndarray, size: int) -> tuple[float, float, float, float]:
    """Return where the heatmap of all sites lies: a token is one wide, its middle at its index."""
    return (-0.5, len(values) * size - 0.5, values.shape[1] - 0.5, -0.5)


def site_axes(axes: Axes, trace: Trace) -> None:
    """Label layers and tokens, and draw where the prompt ends."""
    layers = [layer_of(site) for site in trace.sites]
    middles, texts = zip(*layer_ticks(layers), strict=True)
    ticks(axes, "y", middles, texts, 6.5)
    axes.set_yticks([first - 0.5 for _, first, _ in layer_runs(layers)], minor=True)
    axes.tick_params(axis="both", which="major", length=0, pad=2, labelsize=6.5)
    axes.tick_params(axis="y", which="minor", length=2, width=0.4)
    axes.xaxis.set_major_locator(whole_numbers(10))
    label(axes, x="token", y="layer")
    axes.set_xlim(-0.5, trace.num_tokens - 0.5)
    boundary(axes, trace, 0, trace.num_tokens)


def whole_numbers(most: int) -> MaxNLocator:
    """Return a locator of at most about `most` round whole numbers, of one if there is but one."""
    return MaxNLocator(nbins=most, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])


def percent(share: float) -> str:
    """Return a share as whole percents; a dash where there is none."""
    return "–" if np.isnan(share) else f"{share:.0%}"
