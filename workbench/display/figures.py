"""Figures of a trace for paper and for places where scripts do not run. Never pyplot: nothing is registered anywhere.

Every scaling is drawn on one scale from 0 to 1, whatever the data; see `palette`.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from workbench.display import drawing
from workbench.display.labels import TITLE, facts, scale_note
from workbench.display.palette import LIGHT
from workbench.errors import UserError, names, nearest
from workbench.instrument.trace import Trace

WIDTH_IN = 11.0
LEFT_IN, RIGHT_IN = 1.35, 0.15
LINE_TOKENS = 72  # as many token texts as stay legible side by side on one line
MAX_LINES = 6
MAX_SITE_PANELS = 10
STRIP_IN = 0.26
PANEL_IN = 1.6
LEADERS_IN = 2.1
DPI = 150


def token_adapter(trace: Trace, title: str | None = None) -> Figure:
    """Draw tokens across and adapters down (mean over sites), the text wrapped over several lines."""
    return _figure(trace, title, lines=True, panels=())


def site_token(trace: Trace, title: str | None = None, adapters: Sequence[str] | None = None) -> Figure:
    """Draw sites down and tokens across, one panel per adapter (all, or those named; at most the ten that speak most).

    Raises:
        UserError: no adapter of that name.
    """
    return _figure(trace, title, lines=False, panels=_panels(trace, adapters))


def overview(trace: Trace, title: str | None = None) -> Figure:
    """Draw both: the token lines, then the site panels."""
    return _figure(trace, title, lines=True, panels=_panels(trace, None))


def _panels(trace: Trace, adapters: Sequence[str] | None) -> tuple[int, ...]:
    """Return the adapter indices to draw, in the trace's order."""
    if adapters is not None:
        for name in adapters:
            if name not in trace.adapters:
                hint = nearest(name, trace.adapters)
                raise UserError(f"no adapter {name!r} in this trace{hint}; it has {names(trace.adapters)}")
        return tuple(trace.adapters.index(name) for name in adapters)
    share = np.nan_to_num(list(trace.share().values()))
    return tuple(sorted(np.argsort(-share, kind="stable")[:MAX_SITE_PANELS].tolist()))


@dataclass(frozen=True)
class _Layout:
    """Where the parts of a figure go, in inches from the top: title and legend, token lines, site panels."""

    spans: list[tuple[int, int]]
    panels: tuple[int, ...]
    labelled: bool
    legend_top: float
    lines_top: float
    row_in: float
    line_in: float
    has_leaders: bool

    @property
    def panels_top(self) -> float:
        leaders_top = self.lines_top + self.line_in * len(self.spans)
        return leaders_top + (LEADERS_IN + 0.82 if self.has_leaders else 0)

    @property
    def columns(self) -> int:
        return 1 if len(self.panels) == 1 else 2

    @property
    def height(self) -> float:
        rows = -(-len(self.panels) // self.columns)
        return self.panels_top + ((PANEL_IN + 0.62) * rows + 0.38 if self.panels else 0.05)


def _layout(trace: Trace, head_lines: int, lines: bool, panels: tuple[int, ...]) -> _Layout:
    num_adapters = len(trace.adapters)
    labelled = trace.num_tokens <= LINE_TOKENS * MAX_LINES
    row_in = 0.19 if num_adapters <= 12 else max(0.03, 2.3 / num_adapters)
    legend_top = 0.54 + 0.16 * head_lines
    return _Layout(
        spans=line_spans(trace.num_tokens) if lines else [],
        panels=panels,
        labelled=labelled,
        legend_top=legend_top,
        lines_top=legend_top + 0.36 + 0.2 * drawing.legend_rows(trace),
        row_in=row_in,
        line_in=STRIP_IN + row_in * num_adapters + (0.78 if labelled else 0.54),
        has_leaders=bool(panels) and num_adapters > 1,
    )


def _figure(trace: Trace, title: str | None, lines: bool, panels: tuple[int, ...]) -> Figure:
    """Draw the parts that are asked for, one below the other."""
    summary, note = " · ".join(f"{name}: {value}" for name, value in facts(trace)), scale_note(trace)
    layout = _layout(trace, len(drawing.head_lines(summary, note)), lines, panels)
    with matplotlib.rc_context(drawing.STYLE):
        figure = Figure(figsize=(WIDTH_IN, layout.height), dpi=DPI, facecolor=LIGHT.page)
        FigureCanvasAgg(figure)
        sheet = drawing.Sheet(figure, WIDTH_IN, layout.height)
        drawing.head(sheet, title or TITLE, summary, note)
        drawing.legend(sheet, trace, top=layout.legend_top)
        drawing.colour_bar(sheet, trace, top=layout.legend_top + 0.04)
        widest = max((stop - start for start, stop in layout.spans), default=1)
        for number, (start, stop) in enumerate(layout.spans):
            width = (WIDTH_IN - LEFT_IN - RIGHT_IN) * (stop - start) / widest
            box = (LEFT_IN, layout.lines_top + number * layout.line_in, width)
            drawing.token_line(sheet, trace, box, (start, stop), (STRIP_IN, layout.row_in), layout.labelled)
        if layout.has_leaders:
            top = layout.panels_top - LEADERS_IN - 0.82
            sheet.text(0.2, top + 0.02, "Who leads at every site: stronger = larger scaling", size=9.5, weight="bold")
            drawing.leader_panel(sheet.axes(0.62, top + 0.27, WIDTH_IN - 0.62 - RIGHT_IN, LEADERS_IN), trace)
        _site_panels(sheet, trace, panels, layout.columns, layout.panels_top)
    return figure


def line_spans(num_tokens: int) -> list[tuple[int, int]]:
    """Return the `(start, stop)` of each line: balanced lines, or a single one when the text is too long to label."""
    if num_tokens > LINE_TOKENS * MAX_LINES:
        return [(0, num_tokens)]
    count = -(-num_tokens // LINE_TOKENS)
    size = -(-num_tokens // count)
    return [(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def _site_panels(sheet: drawing.Sheet, trace: Trace, panels: tuple[int, ...], columns: int, top: float) -> None:
    if not panels:
        return
    left, gap = 0.62, 0.62
    width = (WIDTH_IN - left - RIGHT_IN - gap * (columns - 1)) / columns
    hidden = len(trace.adapters) - len(panels)
    note = f" (the {len(panels)} with the largest share of {len(trace.adapters)})" if hidden else ""
    sheet.text(left - 0.42, top + 0.02, f"Every site, one panel per adapter{note}", size=9.5, weight="bold")
    for number, adapter in enumerate(panels):
        row, column = divmod(number, columns)
        axes = sheet.axes(left + column * (width + gap), top + 0.5 + row * (PANEL_IN + 0.62), width, PANEL_IN)
        drawing.site_panel(axes, trace, adapter)


def write(figure: Figure, kind: str) -> bytes:
    """Return the figure as `png`, `svg` or `pdf` bytes; equal figures give equal bytes."""
    stream = io.BytesIO()
    metadata = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    with matplotlib.rc_context(drawing.STYLE):
        figure.savefig(stream, format=kind, dpi=DPI, metadata=metadata)
    return stream.getvalue()
