"""The parts of a figure of a comparison: a setting's block of rows, the rows of differences, the texts."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from workbench.display.compare_lanes import Lane, row_values
from workbench.display.drawing import heatmap
from workbench.display.fonts import MONO, drawable, families
from workbench.display.labels import runs, short, visible
from workbench.display.marks import (
    COMPUTED,
    HATCH,
    NO_SOURCE,
    REUSED,
    key,
    leader_bars,
    source_cell,
    swatch,
)
from workbench.display.palette import LIGHT
from workbench.display.report import columns
from workbench.display.scales import Scale
from workbench.display.sheet import MARGIN_IN, Sheet, cut, one_line, plain, ticks

LEFT_IN, RIGHT_IN = 1.9, 0.2
STRIP_IN, GAP_IN = 0.28, 0.16
DIFFERENCE_IN = 0.17
UNATTRIBUTED = "xxxx"
PARTS, PARTS_TOO = "≠", "(≠)"
VISIBLE = 0.01  # of a scale: less is not drawn in the null pair's row, only said
TEXT_COLUMNS = 168


def row_in(num_rows: int) -> float:
    """Return the height of one adapter's row."""
    return 0.13 if num_rows <= 6 else 0.1


def block_in(num_rows: int) -> float:
    """Return the height of a setting's block, the gap below it included."""
    return STRIP_IN + row_in(num_rows) * num_rows + GAP_IN


def token_texts(sheet: Sheet, lane: Lane, box: tuple[float, float, float], span: tuple[int, int]) -> None:
    """Write the first setting's tokens upright below each other's place; `box` is left, top and width."""
    left, top, width = box
    axes = _axes(sheet, left, top, width, 0.02, span)
    stop = min(span[1], lane.trace.num_tokens)
    texts = [short(text, 10) for text in lane.trace.tokens[span[0] : stop]]
    axes.xaxis.tick_top()
    ticks(axes, "x", range(span[0], stop), texts, 6.2, MONO)
    axes.tick_params(axis="x", rotation=90, labelcolor=LIGHT.ink, length=0, pad=2)
    for tick in axes.xaxis.get_major_ticks():
        plain(tick.label2)  # the one at the top


def setting_block(
    sheet: Sheet, lane: Lane, rows: tuple[int, ...], box: tuple[float, float, float], span: tuple[int, int]
) -> None:
    """Draw who leads, whether scalings were computed, and each adapter's mean, with the mark where the text parts."""
    left, top, width = box
    start, stop = span[0], min(span[1], lane.trace.num_tokens)
    strip = _axes(sheet, left, top, width, STRIP_IN - 0.02, span)
    strip.set_axis_off()
    _name(sheet, lane.label, top)
    if start < stop:
        token_in = width / (span[1] - span[0])
        leader_bars(strip, lane.leading[start:stop], start, 0, 0.66, token_in)
        kinds = lane.sources[start:stop]
        for first, last in runs(kinds):
            source_cell(strip, (start + first - 0.5, 0.76), (last - first, 0.22), int(kinds[first]))
    heat = _axes(sheet, left, top + STRIP_IN, width, max(row_in(len(rows)) * len(rows), 0.02), span)
    if rows and start < stop:
        drawn = row_values(lane.means[start:stop], rows)
        heatmap(heat, drawn, (start - 0.5, stop - 0.5, len(rows) - 0.5, -0.5))
        heat.set(xlim=(span[0] - 0.5, span[1] - 0.5), ylim=(len(rows) - 0.5, -0.5))
        ticks(heat, "y", range(len(rows)), [key(row) for row in rows], 6)
        heat.tick_params(axis="y", length=0, pad=2, labelcolor=LIGHT.ink)
    heat.set_xticks([])
    if stop < span[1]:  # the text has ended: the page, not the hatch that says "no value"
        blank = Rectangle((max(stop, span[0]) - 0.5, 0), span[1] - stop, 1, transform=heat.get_xaxis_transform())
        heat.add_patch(blank)
        blank.set(facecolor=LIGHT.page, edgecolor="none", zorder=3)
    _boundary((strip, heat), lane, span)
    _parting((strip, heat), strip, lane, span)


def difference_rows(
    sheet: Sheet, lanes: Sequence[Lane], null: Lane | None, scale: Scale, box: tuple[float, float, float],
    span: tuple[int, int],
) -> float:
    """Draw one row per setting, then the null pair's, and return where they end."""
    left, top, width = box
    stop_at = null.divergence if null is not None else None
    for lane in [*lanes, *([null] if null is not None else [])]:
        axes = _axes(sheet, left, top, width, DIFFERENCE_IN - 0.03, span)
        start, stop = span[0], min(span[1], len(lane.l1))
        axes.set_xticks([])
        values = lane.shown[start:stop][None]
        if lane is null:
            values = np.where(values < scale.high * VISIBLE, np.nan, values)  # as good as nothing on this scale
            _write_in(axes, _floor_text(lane.l1))
        style = {"cmap": scale.colour_map, "norm": scale.norm, "interpolation": "nearest"}
        axes.imshow(np.ma.masked_invalid(values), aspect="auto", extent=(start - 0.5, stop - 0.5, 1, 0), **style)
        axes.set(xlim=(span[0] - 0.5, span[1] - 0.5))
        _hatch_runs(axes, np.isnan(lane.l1[start:stop]), start, HATCH)
        if stop_at is not None and lane is not null:
            _hatch_runs(axes, (np.arange(start, stop) >= stop_at) & ~np.isnan(lane.l1[start:stop]), start, UNATTRIBUTED)
        _boundary((axes,), lane, span)
        _parting((axes,), None, lane, span)
        ticks(axes, "y", [0.5], [cut(visible(lane.label), 26)], 7)
        axes.tick_params(axis="y", length=0, pad=4, labelcolor=LIGHT.ink)
        top += DIFFERENCE_IN
    return top


def token_numbers(sheet: Sheet, lane: Lane, box: tuple[float, float, float], span: tuple[int, int]) -> None:
    """Write every few tokens' numbers, and where the prompt ends."""
    left, top, width = box
    axes = _axes(sheet, left, top, width, 0.02, span)
    count = span[1] - span[0]
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if count / step <= 24)
    places = [place for place in range(span[0], span[1]) if place % step == 0]
    ticks(axes, "x", places, map(str, places), 6.5)
    axes.tick_params(axis="x", length=0, pad=1)
    at = lane.trace.prompt_tokens
    if span[0] <= at < span[1]:
        style = {"ha": "left", "va": "top", "fontsize": 6.5, "color": LIGHT.muted, "clip_on": False}
        offset = {"xytext": (0, -11), "textcoords": "offset points", "annotation_clip": False}
        plain(axes.annotate("▸ generated", (at - 0.5, 0), **offset, **style))


def texts(sheet: Sheet, entries: Sequence[tuple[str, str, str]], top: float) -> float:
    """Write `(label, sentence, text)` of each setting below each other and return where they end."""
    for label, sentence, text in entries:
        sheet.text(MARGIN_IN, top, cut(visible(label), 60), size=8, weight="bold")
        top += 0.15
        for line in textwrap.wrap(one_line(visible(sentence)), TEXT_COLUMNS, max_lines=2, placeholder=" …"):
            sheet.text(MARGIN_IN + 0.12, top, line, size=7.4, color=LIGHT.muted)
            top += 0.14
        for line in wrapped(text, TEXT_COLUMNS, 4) if text else ():
            artist = sheet.text(MARGIN_IN + 0.12, top, drawable(line, MONO), size=7)
            artist.set_family(list(families(MONO)))
            top += 0.14
        top += 0.07
    return top


def wrapped(text: str, width: int, most: int) -> list[str]:
    """Return lines of at most `width` columns (wide characters take two), at most `most` of them."""
    lines, line = [], ""
    for char in one_line(visible(text)).replace("\t", " "):
        if columns(line + char) > width:
            # at a space, if one is near: code and scripts without spaces break where they must
            at = line.rfind(" ") + 1 or len(line)
            at = at if len(line) - at < width // 8 else len(line)
            lines.append(line[:at])
            line = line[at:]
        line += char
    lines += [line] if line.strip() else []
    if len(lines) > most:
        lines = [*lines[: most - 1], lines[most - 1][:-2] + " …"]
    return lines


def adapter_entries(names: Sequence[str], rows: tuple[int, ...]) -> Iterator[tuple[int, str]]:
    """Yield `(adapter, text)` for the legend; the last may stand for all that have no row."""
    for row in rows:
        if row >= 0:
            yield row, f"{key(row)} {cut(visible(names[row]), 20)}"
        else:
            yield row, f"… {len(names) - len(rows) + 1} others, summed"


def legend(sheet: Sheet, names: Sequence[str], rows: tuple[int, ...], top: float) -> float:
    """Write the adapters' letters and what the marks mean; return where it ends."""
    entries = list(adapter_entries(names, rows))
    lines, height = -(-len(entries) // 4), 0.2 * (-(-len(entries) // 4) + 2)
    axes = sheet.axes(MARGIN_IN, top, 7.2, height)
    axes.set(xlim=(0, 7.2), ylim=(height, 0))
    axes.set_axis_off()
    for place, (index, text) in enumerate(entries):
        x, y = place % 4 * 1.8, place // 4 * 0.2 + 0.1
        swatch(axes, index, (x, y - 0.055), (0.17, 0.11))
        plain(axes.text(x + 0.24, y, drawable(text), va="center", fontsize=8))
    style = {"va": "center", "fontsize": 7.4, "color": LIGHT.muted}
    sources = ("scalings computed", COMPUTED), ("reused", REUSED), ("none, or no value", NO_SOURCE)
    for column, (text, kind) in enumerate(sources):
        x, y = (0, 1.35, 2.15)[column], lines * 0.2 + 0.1
        source_cell(axes, (x, y - 0.04), (0.17, 0.08), kind)
        axes.text(x + 0.24, y, text, **style)
    y = lines * 0.2 + 0.1
    axes.text(3.6, y, PARTS, va="center", fontsize=8, color=LIGHT.above, weight="bold")
    said = f"here the text parts from the first one's; {PARTS_TOO} by then the null pair's had, too"
    axes.text(3.76, y, said, **style)
    y += 0.2
    marks = ((0, "", "no difference above the floor"), (2.15, HATCH, "not comparable: other tokens"))
    for x, hatch, text in (*marks, (4.2, UNATTRIBUTED, "not attributed: the null pair has parted")):
        box = Rectangle((x, y - 0.055), 0.24, 0.11, hatch=hatch, facecolor=LIGHT.page, edgecolor=LIGHT.missing, lw=0.5)
        axes.add_patch(box)
        axes.text(x + 0.31, y, text, **style)
    return top + height


def _axes(sheet: Sheet, left: float, top: float, width: float, height: float, span: tuple[int, int]) -> Axes:
    axes = sheet.axes(left, top, width, height)
    axes.set(xlim=(span[0] - 0.5, span[1] - 0.5), ylim=(1, 0))
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(height > 0.05)
    return axes


def _floor_text(l1: np.ndarray) -> str:
    if np.isnan(l1).all():
        return "nothing to compare"
    return f"at most {np.nanmax(l1):.2g}" if np.nanmax(l1) > 0 else "the same, bit by bit"


def _write_in(axes: Axes, text: str) -> None:
    look = {"va": "center", "ha": "left", "fontsize": 6.5, "color": LIGHT.ink, "zorder": 6}
    back = {"boxstyle": "square,pad=0.15", "facecolor": LIGHT.page, "edgecolor": "none"}
    plain(axes.text(0.004, 0.48, text, transform=axes.transAxes, bbox=back, **look))


def _name(sheet: Sheet, label: str, top: float) -> None:
    for number, line in enumerate(textwrap.wrap(one_line(visible(label)), 25, max_lines=3, placeholder=" …")):
        sheet.text(MARGIN_IN, top + 0.02 + 0.13 * number, line, size=8, weight="bold")


def _boundary(axes: Sequence[Axes], lane: Lane, span: tuple[int, int]) -> None:
    at = lane.trace.prompt_tokens
    if span[0] < at < span[1]:
        for one in axes:
            one.axvline(at - 0.5, color=LIGHT.ink, lw=0.9, zorder=4)


def _parting(axes: Sequence[Axes], named: Axes | None, lane: Lane, span: tuple[int, int]) -> None:
    """Draw the line where a text parts from the first's, and its sign above `named`."""
    at = lane.divergence
    if at is None or not span[0] <= at < span[1]:
        return
    style = "-" if lane.is_attributed else (0, (2, 1))
    for one in axes:
        one.axvline(at - 0.5, color=LIGHT.above, lw=1.6, linestyle=style, zorder=5, clip_on=False)
    if named is not None:
        sign = PARTS if lane.is_attributed else PARTS_TOO
        look = {"ha": "center", "va": "bottom", "fontsize": 8, "color": LIGHT.above, "weight": "bold"}
        plain(named.text(at - 0.5, 0.02, sign, **look))


def _hatch_runs(axes: Axes, where: np.ndarray, start: int, hatch: str) -> None:
    for first, last in runs(where):
        if where[first]:
            box = Rectangle((start + first - 0.5, 0), last - first, 1, hatch=hatch, facecolor="none", lw=0)
            box.set_edgecolor(LIGHT.missing)
            axes.add_patch(box)


