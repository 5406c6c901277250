"""How long requests waited and ran, one dot each, by adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from workbench.display.labels import counted, visible
from workbench.display.marks import MARKERS, colour, edge, key
from workbench.display.palette import LIGHT
from workbench.display.picture import Picture
from workbench.display.sheet import Sheet, head, heading, label, open_axes, shortened, styled, ticks
from workbench.display.tables import numbers, run_facts, table

COLUMNS = ("adapter", "mixture", "ttft_s", "total_s", "completion_tokens")
MOST_GROUPS = 20
NAME_COLUMNS = 22
FEWEST_FOR_SPREAD = 5
LEFT_IN, ROW_IN, GAP_IN = 1.6, 0.3, 0.3


@dataclass(frozen=True)
class Group:
    """Requests that ran on the same: `name`, its place among the adapters (None for what is no adapter), its rows."""

    name: str
    index: int | None
    rows: np.ndarray


def latency(requests: Any, adapters: Sequence[str] | None = None, title: str | None = None) -> Picture:
    """Draw time to first token, time per further token and total time of every request, by adapter.

    Args:
        requests: a table of requests, a run, or a recorder.
        adapters: in the order of a mixture, so that letters and colours are those of its traces; None takes the order
            in which they come.
        title: above the figure.

    Raises:
        UserError: it is none of these, or nothing was recorded.
    """
    frame = table(requests, "requests", COLUMNS, "throughput")
    ttft, total, count = (numbers(frame, name) for name in ("ttft_s", "total_s", "completion_tokens"))
    per_token = np.divide(total - ttft, count - 1, out=np.full(len(frame), np.nan), where=count > 1)
    groups = grouped(frame, adapters)
    panels = [("time to first token", ttft), ("time per further token", per_token), ("total", total)]
    title = title or "How long requests took"
    without = int(np.isnan(total).sum())
    note = f"One dot per request; tick: median; bar: 10th to 90th percentile, from {FEWEST_FOR_SPREAD} requests on."
    if without:
        note += f" {without} of {len(frame)} requests have no times: they failed or were cancelled."
    with styled():
        sheet = Sheet()
        top = head(sheet, title, [*run_facts(requests), note]) + 0.3
        width = (sheet.width_in - LEFT_IN - 0.2 - 2 * GAP_IN) / 3
        height = max(0.7, ROW_IN * len(groups))
        for number, (what, seconds) in enumerate(panels):
            axes = sheet.axes(LEFT_IN + number * (width + GAP_IN), top, width, height)
            _strip(axes, groups, seconds)
            heading(axes, what, 8.5)
            if number:
                axes.tick_params(axis="y", labelleft=False)
        return Picture(sheet.close(top + height + 0.5), title, _words(title, panels, groups))


def grouped(frame: Any, adapters: Sequence[str] | None = None) -> list[Group]:
    """Return the requests by what they ran on: adapters in order, then mixtures, then the base model alone."""
    named = [value if isinstance(value, str) and value else None for value in frame["adapter"]]
    mixed = [value if isinstance(value, str) and value else None for value in frame["mixture"]]
    # a mixture's request may name the mixture's adapters too
    keys = [("mixture", m) if m else ("adapter", a) if a else ("base", "") for a, m in zip(named, mixed, strict=True)]
    order = {name: place for place, name in enumerate(adapters or ())}
    for kind, name in keys:
        if kind == "adapter":
            order.setdefault(name, len(order))
    kinds = ("adapter", "mixture", "base")
    found = sorted(set(keys), key=lambda one: (kinds.index(one[0]), order.get(one[1], 0), one[1]))
    groups = []
    for one in found:
        rows = np.array([i for i, other in enumerate(keys) if other == one])
        name = {"adapter": one[1], "mixture": f"mixture {one[1]}", "base": "base model"}[one[0]]
        groups.append(Group(name, order[one[1]] if one[0] == "adapter" else None, rows))
    if len(groups) <= MOST_GROUPS:
        return groups
    kept = sorted(groups, key=lambda group: -len(group.rows))[: MOST_GROUPS - 1]
    rest = [group for group in groups if group not in kept]
    others = Group(f"{len(rest)} others", None, np.concatenate([group.rows for group in rest]))
    return [*(group for group in groups if group in kept), others]


def _strip(axes: Axes, groups: list[Group], seconds: np.ndarray) -> None:
    held = seconds[np.isfinite(seconds)]
    in_ms = bool(held.size) and held.max() < 1
    values = seconds * 1000 if in_ms else seconds
    top = float(held.max()) * (1000 if in_ms else 1) if held.size and held.max() > 0 else 1.0
    axes.set(xlim=(0, top * 1.06), ylim=(len(groups) - 0.5, -0.5))
    for row, group in enumerate(groups):
        mine = values[group.rows]
        mine = mine[np.isfinite(mine)]
        shade = LIGHT.muted if group.index is None else colour(group.index)
        marker = "d" if group.index is None else MARKERS[group.index % len(MARKERS)]
        # dots side by side, the same in every drawing
        shift = (np.arange(len(mine)) * 0.618034 % 1 - 0.5) * 0.5
        style = {"color": shade, "edgecolors": edge(shade), "linewidths": 0.4, "alpha": 0.9 if len(mine) < 200 else 0.4}
        axes.scatter(mine, row + shift, s=13 if len(mine) < 200 else 6, marker=marker, zorder=2, **style)
        if mine.size:
            low, middle, high = np.percentile(mine, (10, 50, 90))
            if len(mine) >= FEWEST_FOR_SPREAD:
                axes.hlines(row, low, high, color=LIGHT.ink, linewidth=0.9, zorder=3)
            axes.plot([middle], [row], "|", color=LIGHT.ink, markersize=10, markeredgewidth=1.6, zorder=4)
        else:
            axes.text(top * 0.02, row, "no times", fontsize=6.5, color=LIGHT.muted, va="center")
    ticks(axes, "y", range(len(groups)), [_name(group) for group in groups])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    open_axes(axes, grid="x")
    label(axes, x="ms" if in_ms else "s")


def _name(group: Group) -> str:
    letter = "" if group.index is None else f"{key(group.index)} "
    count = f" ({len(group.rows)})"
    return f"{letter}{shortened(visible(group.name), NAME_COLUMNS - len(letter) - len(count))}{count}"


def _words(title: str, panels: list[tuple[str, np.ndarray]], groups: list[Group]) -> str:
    parts = []
    for group in groups[:8]:
        middles = []
        for what, seconds in panels:
            mine = seconds[group.rows]
            mine = mine[np.isfinite(mine)]
            middles.append(f"{what} {np.median(mine):.3g} s" if mine.size else f"{what}: none")
        parts.append(f"{group.name} ({counted(len(group.rows), 'request')}): {', '.join(middles)}")
    return f"{title}. Medians: {'; '.join(parts)}."
