"""Legends of figures of a trace: colour, letter, name and share of each adapter, and how tokens are marked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench.display.drawing import percent
from workbench.display.fonts import drawable
from workbench.display.labels import visible
from workbench.display.leading import leading_adapters
from workbench.display.marks import COMPUTED, NO_SOURCE, OTHERS_INDEX, REUSED, key, line_sample, source_cell, swatch
from workbench.display.palette import LIGHT
from workbench.display.sheet import MARGIN_IN, Sheet, plain, shortened
from workbench.instrument.trace import Trace

COLUMNS, COLUMN_IN, ROW_IN = 4, 1.9, 0.2
CHAR_IN = 0.07  # the width of a character of an entry
MOST = 5 * COLUMNS
SOURCES = (
    ("scalings computed for this token", COMPUTED),
    ("reused from an earlier token", REUSED),
    ("none: never an input, or no value", NO_SOURCE),
)


def legend(
    sheet: Sheet, trace: Trace, top: float, lines: bool = False, sources: bool = True,
    shown: Sequence[int] | None = None,
) -> float:
    """Write the legend of a trace's adapters and return where it ends.

    Args:
        sheet: where.
        trace: whose adapters and shares.
        top: where it begins.
        lines: show each adapter's line and marker, not a box.
        sources: explain the strip of computed and reused scalings too.
        shown: the adapters drawn by name; the others are one entry. None names as many as fit.
    """
    shares = np.array(list(trace.share().values()))
    indent = 0.36 if lines else 0.24
    entries = _entries(trace, shares, shown, COLUMN_IN - indent)
    rows = -(-len(entries) // COLUMNS)
    height = ROW_IN * (rows + sources)
    axes = sheet.axes(MARGIN_IN, top, COLUMNS * COLUMN_IN, height)
    axes.set(xlim=(0, COLUMNS * COLUMN_IN), ylim=(height, 0))
    axes.set_axis_off()
    for place, (index, text) in enumerate(entries):
        row, column = divmod(place, COLUMNS)
        x, y = column * COLUMN_IN, row * ROW_IN + 0.1
        if lines:
            line_sample(axes, index, x, y, 0.3)
        else:
            swatch(axes, index, (x, y - 0.055), (0.17, 0.11))
        plain(axes.text(x + indent, y, drawable(text), va="center", fontsize=8))
    if sources:
        _sources(axes, rows * ROW_IN + 0.1, len(trace.adapters))
    return top + height


def _entries(
    trace: Trace, shares: np.ndarray, shown: Sequence[int] | None, room_in: float
) -> list[tuple[int, str]]:
    """Return `(adapter, text)` of each entry; the last one may stand for all the others."""
    count = len(trace.adapters)
    if shown is None:
        shown = range(count) if count <= MOST else leading_adapters(shares, MOST - 1)
    entries = []
    for index in shown:
        share = percent(shares[index])
        room = int(room_in / CHAR_IN) - len(key(index)) - len(share) - 3
        entries.append((index, f"{key(index)} {shortened(visible(trace.adapters[index]), room)}  {share}"))
    others = [i for i in range(count) if i not in set(shown)]
    if others:
        total = shares[others]
        text = percent(np.nan if np.isnan(total).all() else float(np.nansum(total)))
        entries.append((OTHERS_INDEX, f"… {len(others)} others  {text} together"))
    return entries


def _sources(axes, y: float, num_adapters: int) -> None:
    for column, (text, kind) in enumerate(SOURCES):
        x = column * 2.05
        source_cell(axes, (x, y - 0.04), (0.17, 0.08), kind)
        plain(axes.text(x + 0.24, y, text, va="center", fontsize=7.4, color=LIGHT.muted))
    if num_adapters > 1:
        text = "letters: who leads, where they fit"
        plain(axes.text(3 * 2.05 + 0.12, y, text, va="center", fontsize=7.4, color=LIGHT.muted))
