"""Where in the model each adapter speaks, as a grid of layers and projections."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from workbench.display.drawing import RIGHT_IN, adapter_heading, heatmap, percent
from workbench.display.fonts import drawable
from workbench.display.labels import visible
from workbench.display.leading import leading_adapters
from workbench.display.marks import ink_on
from workbench.display.palette import LIGHT
from workbench.display.picture import Picture
from workbench.display.scales import SCALINGS
from workbench.display.share_figures import MOST_PANELS, group_axis
from workbench.display.sheet import MARGIN_IN, Sheet, plain, styled, ticks
from workbench.display.site_groups import Groups, by_layer, by_projection
from workbench.display.trace_figures import adapter_index
from workbench.display.trace_head import require_scalings, trace_head
from workbench.instrument.trace import Trace, nan_mean


def depth_projection(trace: Trace, adapter: str | None = None, title: str | None = None) -> Picture:
    """Draw the mean scaling of every layer and projection as a grid: of one adapter with its numbers, or of all.

    Raises:
        UserError: the trace has no scalings, or no adapter of that name.
    """
    require_scalings(trace)
    if adapter is None:
        chosen = leading_adapters(np.array(list(trace.share().values())), MOST_PANELS)
        title = title or "Which adapter speaks in which layer and projection"
    else:
        chosen = (adapter_index(trace, adapter),)
        title = title or f"Where {adapter} speaks: layer and projection"
    grid, layers, kinds = layer_grid(trace)
    note = "A cell is the mean scaling over all tokens; hatched: the model has no such site, or it has no scalings."
    if len(chosen) < len(trace.adapters) and adapter is None:
        note += f" The {len(chosen)} adapters with the largest share of {len(trace.adapters)}."
    with styled():
        sheet = Sheet()
        top = trace_head(sheet, trace, title, [note])
        SCALINGS.bar(sheet, (MARGIN_IN + 0.5, top + 0.06, 2.6), grid[:, :, list(chosen)])
        top = _grids(sheet, trace, (grid, layers, kinds), chosen, top + 0.78)
        return Picture(sheet.close(top), title, _grid_words(trace, title, grid, chosen, layers, kinds))


def layer_grid(trace: Trace) -> tuple[np.ndarray, Groups, Groups]:
    """Return the mean over tokens `[projection, layer, adapter]`, and the layers and projections."""
    profile_of_sites = nan_mean(trace.values, 0)  # [site, adapter]
    layers, kinds = by_layer(trace.sites), by_projection(trace.sites)
    grid = np.full((len(kinds.labels), len(layers.labels), len(trace.adapters)), np.nan)
    for row, column in np.ndindex(*grid.shape[:2]):
        both = np.intersect1d(kinds.columns[row], layers.columns[column])
        if both.size:
            grid[row, column] = nan_mean(profile_of_sites[both], 0)
    return grid, layers, kinds


def _grids(
    sheet: Sheet, trace: Trace, grids: tuple[np.ndarray, Groups, Groups], chosen: tuple[int, ...], top: float
) -> float:
    grid, layers, kinds = grids
    columns = 1 if len(chosen) == 1 or len(layers.labels) > 60 else 2
    left, gap = 1.0, 1.0
    width = (sheet.width_in - left - RIGHT_IN - gap * (columns - 1)) / columns
    height = max(0.9, min(3.2, len(kinds.labels) * (0.26 if columns == 1 else 0.19)))
    shares = trace.share()
    for number, index in enumerate(chosen):
        row, column = divmod(number, columns)
        axes = sheet.axes(left + column * (width + gap), top + row * (height + 0.75), width, height)
        values = grid[:, :, index]
        heatmap(axes, values, (-0.5, values.shape[1] - 0.5, values.shape[0] - 0.5, -0.5))
        ticks(axes, "y", range(len(kinds.labels)), kinds.labels, 7)
        group_axis(axes, layers)
        axes.tick_params(length=0, pad=2, labelcolor=LIGHT.ink)
        name = trace.adapters[index]
        adapter_heading(axes, index, visible(name), percent(shares[name]))
        if len(chosen) == 1 and width / values.shape[1] > 0.2:
            _numbers(axes, values)
    return top + (height + 0.75) * -(-len(chosen) // columns) - 0.2


def _numbers(axes: Axes, values: np.ndarray) -> None:
    """Write each cell's value into it, in hundredths."""
    for row, column in zip(*np.nonzero(~np.isnan(values)), strict=True):
        value = float(values[row, column])
        text = f"{value:.2f}".replace("0.", ".", 1).replace("-", "−")
        ink = ink_on(SCALINGS.colour_of(value))
        plain(axes.text(column, row, drawable(text), ha="center", va="center", fontsize=5.6, color=ink))


def _grid_words(
    trace: Trace, title: str, grid: np.ndarray, chosen: tuple[int, ...], layers: Groups, kinds: Groups
) -> str:
    parts = []
    for index in chosen:
        values = grid[:, :, index]
        if np.isnan(values).all():
            parts.append(f"{trace.adapters[index]}: no scalings")
            continue
        row, column = np.unravel_index(np.nanargmax(values), values.shape)
        where = f"layer {layers.labels[column]} {kinds.labels[row]}"
        parts.append(f"{trace.adapters[index]} most in {where} ({values[row, column]:.2f})")
    size = f"{len(layers.labels)} layers by {len(kinds.labels)} projections"
    return f"{title}. Heatmaps of mean scalings, {size}. {'; '.join(parts)}."
