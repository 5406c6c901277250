"""The figures of a whole trace: tokens by adapters, sites by tokens, and both together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench.display import drawing
from workbench.display.labels import TITLE, description, visible
from workbench.display.leading import leading_adapters, row_names, with_others
from workbench.display.legend import legend
from workbench.display.picture import Picture
from workbench.display.scales import SCALINGS
from workbench.display.sheet import Sheet, styled
from workbench.display.trace_head import require_scalings, trace_head
from workbench.errors import UserError, names, nearest
from workbench.instrument.trace import Trace, nan_mean

MAX_SITE_PANELS = 10
PANEL_IN, PANEL_GAP_IN = 1.6, 0.62
LEADERS_IN = 2.1
PANELS_LEFT_IN = 0.62


def token_adapter(trace: Trace, title: str | None = None) -> Picture:
    """Draw tokens across and adapters down (mean over sites), the text wrapped over several lines."""
    require_scalings(trace)
    return _figure(trace, title, lines=True, panels=())


def site_token(trace: Trace, title: str | None = None, adapters: Sequence[str] | None = None) -> Picture:
    """Draw sites down and tokens across, one panel per adapter (all, or those named; at most the ten that speak most).

    Raises:
        UserError: no adapter of that name.
    """
    require_scalings(trace)
    return _figure(trace, title, lines=False, panels=_panels(trace, adapters))


def overview(trace: Trace, title: str | None = None) -> Picture:
    """Draw both: the token lines, then the site panels."""
    require_scalings(trace)
    return _figure(trace, title, lines=True, panels=_panels(trace, None))


def adapter_index(trace: Trace, name: str) -> int:
    """Return the place of an adapter on the trace's axis.

    Raises:
        UserError: no adapter of that name.
    """
    if name not in trace.adapters:
        hint = nearest(name, trace.adapters)
        raise UserError(f"no adapter {name!r} in this trace{hint}; it has {names(trace.adapters)}")
    return trace.adapters.index(name)


def _panels(trace: Trace, adapters: Sequence[str] | None) -> tuple[int, ...]:
    """Return the adapter indices to draw, in the trace's order."""
    if adapters is not None:
        wanted = [adapters] if isinstance(adapters, str) else list(adapters)
        return tuple(adapter_index(trace, name) for name in wanted)
    return leading_adapters(np.array(list(trace.share().values())), MAX_SITE_PANELS)


def _figure(trace: Trace, title: str | None, lines: bool, panels: tuple[int, ...]) -> Picture:
    """Draw the parts that are asked for, one below the other."""
    title = title or TITLE
    with styled():
        sheet = Sheet()
        top = trace_head(sheet, trace, title)
        SCALINGS.bar(sheet, (8.2, top + 0.04, 2.6), trace.values)
        top = legend(sheet, trace, top) + 0.36
        if lines:
            means = trace.token_means()
            shown, means = with_others(means, nan_mean(means, 0), drawing.MAX_ROWS)
            top = drawing.TokenLines(trace, means, row_names(shown, trace.adapters)).draw(sheet, top)
        if panels:
            top = _site_panels(sheet, trace, panels, top)
        return Picture(sheet.close(top + 0.05), title, description(trace, title))


def _site_panels(sheet: Sheet, trace: Trace, panels: tuple[int, ...], top: float) -> float:
    """Draw who leads at every site, then the panels of these adapters."""
    values, size = drawing.pooled(trace.values)
    note = drawing.pooling_note(size)
    if len(trace.adapters) > 1:
        text = f"Who leads at every site: stronger = larger scaling{note}"
        sheet.text(0.2, top + 0.02, text, size=9.5, weight="bold")
        box = (PANELS_LEFT_IN, top + 0.27, sheet.width_in - PANELS_LEFT_IN - drawing.RIGHT_IN, LEADERS_IN)
        drawing.leader_panel(sheet.axes(*box), trace, values, size)
        top += LEADERS_IN + 0.82
    columns, gap = (1 if len(panels) == 1 else 2), 0.62
    width = (sheet.width_in - PANELS_LEFT_IN - drawing.RIGHT_IN - gap * (columns - 1)) / columns
    hidden = len(trace.adapters) - len(panels)
    chosen = f" (the {len(panels)} with the largest share of {len(trace.adapters)})" if hidden else ""
    sheet.text(0.2, top + 0.02, f"Every site, one panel per adapter{chosen}{note}", size=9.5, weight="bold")
    shares = trace.share()
    for number, adapter in enumerate(panels):
        row, column = divmod(number, columns)
        place = (PANELS_LEFT_IN + column * (width + gap), top + 0.5 + row * (PANEL_IN + PANEL_GAP_IN))
        axes = sheet.axes(*place, width, PANEL_IN)
        drawing.site_panel(axes, trace, values[:, :, adapter], size)
        name = trace.adapters[adapter]
        drawing.adapter_heading(axes, adapter, visible(name), drawing.percent(shares[name]))
    return top + (PANEL_IN + PANEL_GAP_IN) * -(-len(panels) // columns) + 0.33
