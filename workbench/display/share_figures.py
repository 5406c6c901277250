"""Who speaks where in the model: shares of the adapters by layer and by projection."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from workbench.display.drawing import RIGHT_IN, adapter_heading, percent
from workbench.display.labels import visible
from workbench.display.leading import with_others
from workbench.display.legend import legend
from workbench.display.marks import (
    OTHERS_INDEX,
    adapter_line,
    colour,
    edge,
    end_letters,
    hatched,
    ink_on,
    key,
    outside_marks,
)
from workbench.display.palette import LIGHT
from workbench.display.picture import Picture
from workbench.display.sheet import DPI, Sheet, label, open_axes, plain, styled, ticks
from workbench.display.site_groups import Groups, by_layer
from workbench.display.site_groups import by_projection as projections_of
from workbench.display.trace_head import require_scalings, trace_head
from workbench.instrument.trace import Trace, nan_mean

MOST_PANELS = 8
STACK_IN, PANEL_IN = 2.1, 1.25
LEFT_IN = 0.75
PERCENTILES = (10, 90)


@dataclass(frozen=True)
class Shares:
    """Mean scalings of groups of sites.

    Attributes:
        groups: the groups.
        shown: the adapters drawn by themselves, then `OTHERS_INDEX` if there are more.
        means: `[group, shown]`, mean over tokens; NaN without a value.
        low, high: `[group, shown]`, percentiles over tokens.
    """

    groups: Groups
    shown: tuple[int, ...]
    means: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def is_whole(self) -> bool:
        """Whether the shares can be stacked: parts of 1, none of them below 0."""
        sums = np.nansum(self.means, 1)
        return bool((sums <= 1.005).all() and not (self.means < 0).any())


def shares_of(trace: Trace, groups: Groups, most: int = MOST_PANELS) -> Shares:
    """Return the shares of the adapters that speak most, at most `most`, the last of them all the others together."""
    values = groups.means(trace)  # [token, group, adapter]
    shown, values = with_others(values, nan_mean(values, (0, 1)), most)
    low, high = (np.full(values.shape[1:], np.nan) for _ in PERCENTILES)
    for cell in np.ndindex(*values.shape[1:]):
        held = values[:, cell[0], cell[1]]
        held = held[~np.isnan(held)]
        if held.size:
            low[cell], high[cell] = np.percentile(held, PERCENTILES)
    return Shares(groups, shown, nan_mean(values, 0), low, high)


def by_depth(trace: Trace, title: str | None = None) -> Picture:
    """Draw each adapter's share layer by layer: stacked, and one panel per adapter with its spread over tokens.

    A share is the mean scaling over tokens and the sites of a layer.

    Raises:
        UserError: the trace has no scalings.
    """
    require_scalings(trace)
    return _share_figure(trace, title or "Which adapter speaks in which layer", by_layer(trace.sites))


def by_projection(trace: Trace, title: str | None = None) -> Picture:
    """Draw each adapter's share in every projection (q, k, v, o, gate, up, down), over all layers and tokens.

    Raises:
        UserError: the trace has no scalings.
    """
    require_scalings(trace)
    return _share_figure(trace, title or "Which adapter speaks in which projection", projections_of(trace.sites))


def _share_figure(trace: Trace, title: str, groups: Groups) -> Picture:
    shares = shares_of(trace, groups)
    low, high = PERCENTILES
    note = (
        f"A share is the mean scaling over all tokens and the sites of a {groups.name}. "
        f"Band or bar: the {low}th to {high}th percentile over tokens."
    )
    if not shares.is_whole:
        note += " The scalings of a site are no parts of 1 here, so they are not stacked."
    with styled():
        sheet = Sheet()
        top = trace_head(sheet, trace, title, [note])
        named = [index for index in shares.shown if index != OTHERS_INDEX]
        top = legend(sheet, trace, top, sources=False, shown=named) + 0.22
        if shares.is_whole:
            stack(sheet.axes(LEFT_IN, top, sheet.width_in - LEFT_IN - RIGHT_IN - 0.25, STACK_IN), shares)
            top += STACK_IN + 0.72
        top = _panels(sheet, trace, shares, top)
        return Picture(sheet.close(top), title, _words(trace, title, shares))


def stack(axes: Axes, shares: Shares) -> None:
    """Draw the shares of each group on top of each other, with the letters where they fit."""
    places = np.arange(len(shares.groups.labels))
    axes.set(xlim=(-0.5, len(places) - 0.5), ylim=(0, 1))
    box = axes.get_window_extent()
    cell_in = box.width / DPI / len(places)
    bottom = np.zeros(len(places))
    ends = []
    for column, index in enumerate(shares.shown):
        heights = np.nan_to_num(shares.means[:, column])
        style = {"facecolor": colour(index), "edgecolor": LIGHT.page, "linewidth": 0.5}
        axes.bar(places, heights, 0.94, bottom, label=key(index), **style)
        for place, height in enumerate(heights):
            text = key(index) if cell_in < 0.75 else f"{key(index)}  {height:.0%}"
            if height * STACK_IN > 0.12 and cell_in * 0.94 > 0.085 * len(text):
                ink = {"color": ink_on(colour(index)), "fontsize": 6.5, "weight": "bold", "ha": "center"}
                plain(axes.text(place, bottom[place] + height / 2, text, va="center_baseline", **ink))
        # beside the last bar, where the bars are too narrow for letters
        ends.append((index, float(bottom[-1] + heights[-1] / 2) if heights[-1] else np.nan))
        bottom += heights
    if cell_in * 0.94 <= 0.085:
        end_letters(axes, places[-1] + 0.5, ends, 0.075)
    group_axis(axes, shares.groups)
    ticks(axes, "y", (0, 0.25, 0.5, 0.75, 1), ("0", "0.25", "0.5", "0.75", "1"))
    label(axes, y="share")
    open_axes(axes, grid=None)
    _hatch_missing(axes, shares.means)


def _hatch_missing(axes: Axes, means: np.ndarray) -> None:
    if np.isnan(means).all(1).any():
        hatched(axes)
        for place in np.flatnonzero(~np.isnan(means).all(1)):
            axes.axvspan(place - 0.5, place + 0.5, facecolor=LIGHT.page, zorder=-0.5, lw=0)


def _panels(sheet: Sheet, trace: Trace, shares: Shares, top: float) -> float:
    """Draw one small panel per adapter, and return where they end."""
    columns = min(4, len(shares.shown)) if len(shares.groups.labels) <= 48 else min(2, len(shares.shown))
    gap = 0.5
    width = (sheet.width_in - LEFT_IN - RIGHT_IN - gap * (columns - 1)) / columns
    whole = np.array(list(trace.share().values()))
    for number, index in enumerate(shares.shown):
        row, column = divmod(number, columns)
        axes = sheet.axes(LEFT_IN + column * (width + gap), top + row * (PANEL_IN + 0.78), width, PANEL_IN)
        profile(axes, shares, number)
        name = "all others together" if index == OTHERS_INDEX else visible(trace.adapters[index])
        adapter_heading(axes, index, name, percent(_share(whole, shares.shown, index)))
        if column == 0:
            label(axes, y="share")
    return top + (PANEL_IN + 0.78) * -(-len(shares.shown) // columns) - 0.15


def _share(values: np.ndarray, shown: tuple[int, ...], index: int) -> float:
    """Return an adapter's share of the whole trace, or that of those that are not shown by themselves."""
    if index != OTHERS_INDEX:
        return float(values[index])
    others = np.delete(values, [one for one in shown if one != OTHERS_INDEX])
    return float(np.nan if np.isnan(others).all() else np.nansum(others))


def profile(axes: Axes, shares: Shares, number: int) -> None:
    """Draw one adapter's share of every group, and its spread over tokens."""
    index = shares.shown[number]
    means, low, high = (array[:, number] for array in (shares.means, shares.low, shares.high))
    places = np.arange(len(means))
    axes.set(xlim=(-0.5, len(places) - 0.5), ylim=(-0.02, 1.02))
    if shares.groups.name == "layer":
        axes.fill_between(places, low, high, color=colour(index), alpha=0.25, linewidth=0, label="spread")
        adapter_line(axes, index, places, means, label="mean", markersize=3)
    else:
        bar = {"color": edge(colour(index)), "linewidth": 1}
        axes.vlines(places, low, high, label="spread", **bar)
        adapter_line(axes, index, places, means, label="mean", linestyle="none", markersize=5)
    outside_marks(axes, places, means)
    group_axis(axes, shares.groups)
    ticks(axes, "y", (0, 0.5, 1), ("0", "0.5", "1"))
    open_axes(axes)
    _hatch_missing(axes, means[:, None])


def group_axis(axes: Axes, groups: Groups) -> None:
    """Name the groups: every layer where there is room, every projection in any case."""
    width_in = axes.get_window_extent().width / DPI
    labels = groups.labels
    if groups.name == "layer":
        step = next(step for step in (1, 2, 4, 5, 10, 20, 50, 100, 1000) if len(labels) * 0.2 <= width_in * step)
        kept = [i for i, one in enumerate(labels) if not one.isdigit() or i % step == 0]
        ticks(axes, "x", kept, [labels[i] for i in kept], 7)
        label(axes, x="layer")
        return
    texts = [one.removesuffix("_proj") for one in labels] if width_in / len(labels) < 0.75 else list(labels)
    ticks(axes, "x", range(len(labels)), texts, 7)
    label(axes, x="projection")
    if max(map(len, texts)) * 0.062 > width_in / len(texts):
        axes.tick_params(axis="x", rotation=30)
        for tick in axes.get_xticklabels():
            tick.set(ha="right", rotation_mode="anchor")


def _words(trace: Trace, title: str, shares: Shares) -> str:
    parts = []
    for number, index in enumerate(shares.shown):
        name = "the others together" if index == OTHERS_INDEX else trace.adapters[index]
        means = shares.means[:, number]
        if np.isnan(means).all():
            parts.append(f"{name}: no scalings")
            continue
        most, least = int(np.nanargmax(means)), int(np.nanargmin(means))
        labels, kind = shares.groups.labels, shares.groups.name
        parts.append(
            f"{name}: mean {np.nanmean(means):.0%}, most in {kind} {labels[most]} ({means[most]:.0%}), "
            f"least in {kind} {labels[least]} ({means[least]:.0%})"
        )
    size = f"{len(trace.adapters)} adapters over {len(shares.groups.labels)} {shares.groups.name}s"
    return f"{title}. Shares of {size}. {'; '.join(parts)}."
