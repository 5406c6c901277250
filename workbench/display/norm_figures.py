"""Norms along the tokens and through the layers: how much each delta moves an output, how large the hidden state is.

Both are drawn on logarithmic scales of whole decades, which the figure states.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from workbench.display.drawing import (
    LEFT_IN,
    LINE_TOKENS,
    MAX_ROWS,
    RIGHT_IN,
    TokenLines,
    boundary,
    heatmap,
    name_parts,
    row_axis,
    row_in,
    token_axis,
)
from workbench.display.labels import visible
from workbench.display.leading import row_names, with_others
from workbench.display.marks import key
from workbench.display.palette import LIGHT
from workbench.display.picture import Picture
from workbench.display.scales import Scale, decade_scale, decades_of
from workbench.display.share_figures import group_axis
from workbench.display.sheet import MARGIN_IN, Sheet, heading, label, open_axes, styled, ticks
from workbench.display.site_groups import by_layer
from workbench.display.trace_head import require_trace, trace_head
from workbench.errors import UserError, names
from workbench.instrument.recorded import Recorded
from workbench.instrument.trace import Trace, nan_mean

DELTA_DECADES = (-4, 0)
MAP_IN, PROFILE_IN = 3.0, 1.9
PERCENTILES = (10, 90)


def delta_norms(trace: Trace, decades: Sequence[int] = DELTA_DECADES, title: str | None = None) -> Picture:
    """Draw how much each adapter really moves the outputs, ‖w·BAx‖ / ‖Wx‖: per token, and per layer.

    Args:
        trace: with "delta_norm" recorded.
        decades: the scale goes from 10**decades[0] to 10**decades[1], in every figure alike.
        title: above the figure.

    Raises:
        UserError: nothing was recorded, or the decades are none.
    """
    recorded = _extra(trace, "delta_norm", ("token", "site", "adapter"))
    scale = decade_scale("‖w·BAx‖ / ‖Wx‖ (ratio)", decades)
    adapters, sites = recorded.labels["adapter"], recorded.labels["site"]
    values = np.asarray(recorded.values, np.float64)
    layers = by_layer(sites)
    by_token = nan_mean(values, 1)
    through = np.stack([nan_mean(values[:, column], (0, 1)) for column in layers.columns], 1)  # [adapter, layer]
    title = title or "How much each adapter moves the outputs"
    words = _delta_words(title, adapters, by_token, layers.labels, through)
    rows, by_token, through = _rows(trace, adapters, by_token, through)
    with styled():
        sheet = Sheet()
        top = trace_head(sheet, trace, title, [_delta_note(values, scale, len(sites))])
        scale.bar(sheet, (LEFT_IN, top + 0.06, 3.2), values)
        top = TokenLines(trace, by_token, rows, scale).draw(sheet, top + 0.85)
        sheet.text(MARGIN_IN, top - 0.05, "Per layer: mean over tokens and the layer's sites", size=9.5, weight="bold")
        height = max(0.5, row_in(len(rows)) * 1.3 * len(rows))
        axes = sheet.axes(LEFT_IN, top + 0.25, sheet.width_in - LEFT_IN - RIGHT_IN, height)
        heatmap(axes, through, (-0.5, through.shape[1] - 0.5, len(rows) - 0.5, -0.5), scale)
        row_axis(axes, rows)
        group_axis(axes, layers)
        axes.tick_params(length=0, pad=2, labelcolor=LIGHT.ink)
        return Picture(sheet.close(top + 0.25 + height + 0.5), title, words)


def _rows(
    trace: Trace, adapters: tuple[str, ...], by_token: np.ndarray, through: np.ndarray
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the rows' names and values; of many adapters those that move most, and the largest of the others."""
    means = nan_mean(by_token, 0)
    shown, by_token = with_others(by_token, means, MAX_ROWS, largest=True)
    _, through = with_others(through.T, means, MAX_ROWS, largest=True)
    # letters and colours are those of the trace's axis
    places = [trace.adapters.index(name) if name in trace.adapters else i for i, name in enumerate(adapters)]
    return row_names(shown, adapters, "max", [key(place) for place in places]), by_token, through.T


def _extra(trace: Trace, name: str, axes: tuple[str, ...]) -> Recorded:
    require_trace(trace)
    recorded = trace.extra(name)
    if recorded.axes != axes:
        raise UserError(f"{name!r} of this trace has the axes {names(recorded.axes)}; this figure needs {names(axes)}")
    return recorded


def _delta_note(values: np.ndarray, scale: Scale, num_sites: int) -> str:
    held = values[np.isfinite(values)]
    note = (
        f"Mean over {num_sites} sites. 1 = the delta is as large as the base's own output. The scale is logarithmic, "
        f"from {scale.tick_text(scale.low)} to {scale.tick_text(scale.high)}; white: below it."
    )
    above, below = int((held > scale.high).sum()), int(((held < scale.low) & (held > 0)).sum())
    zero = int((held == 0).sum())
    return f"{note} Of {held.size} values {above} lie above, {below} below, {zero} are 0."


def _delta_words(
    title: str, adapters: tuple[str, ...], by_token: np.ndarray, layers: tuple[str, ...], through: np.ndarray
) -> str:
    parts = []
    for number, name in enumerate(adapters[:8]):
        mean, profile = float(nan_mean(by_token[:, number], 0)), through[number]
        if np.isnan(profile).all():
            parts.append(f"{name}: no values")
        else:
            parts.append(f"{name}: mean {mean:.2g}, most in layer {layers[int(np.nanargmax(profile))]}")
    return f"{title}. Heatmaps of ‖w·BAx‖ / ‖Wx‖ per token and per layer. {'; '.join(parts)}."


def hidden_norms(trace: Trace, decades: Sequence[int] | None = None, title: str | None = None) -> Picture:
    """Draw the L2 norm of the hidden state after every layer, token by token, and its spread per layer.

    Args:
        trace: with "hidden_norm" recorded.
        decades: the scale's ends as powers of ten; None takes the whole decades that hold every value.
        title: above the figure.

    Raises:
        UserError: nothing was recorded, or the decades are none.
    """
    recorded = _extra(trace, "hidden_norm", ("token", "layer"))
    values = np.asarray(recorded.values, np.float64)
    scale = decade_scale("L2 norm of the hidden state", decades_of(values) if decades is None else decades)
    layers = tuple(name.removeprefix("layer ") for name in recorded.labels["layer"])
    title = title or "How large the hidden state is after each layer"
    low, high = (scale.tick_text(end) for end in (scale.low, scale.high))
    note = f"L2 norm, on a logarithmic scale from {low} to {high}. Right: median and 10th to 90th percentile."
    has_texts = trace.num_tokens <= LINE_TOKENS
    with styled():
        sheet = Sheet()
        top = trace_head(sheet, trace, title, [note])
        scale.bar(sheet, (LEFT_IN, top + 0.06, 3.2), values)
        top += 0.85
        width = sheet.width_in - LEFT_IN - RIGHT_IN - PROFILE_IN - 0.3
        axes = sheet.axes(LEFT_IN, top, width, MAP_IN)
        heatmap(axes, values.T, (-0.5, trace.num_tokens - 0.5, len(layers) - 0.5, -0.5), scale)
        _layer_ticks(axes, layers)
        token_axis(axes, trace, 0, trace.num_tokens, has_texts)
        boundary(axes, trace, 0, trace.num_tokens)
        name_parts(axes, trace, 0, trace.num_tokens)
        profile = sheet.axes(LEFT_IN + width + 0.3, top, PROFILE_IN, MAP_IN)
        _profile(profile, values, scale, len(layers))
        top += MAP_IN + (0.7 if has_texts else 0.5)
        return Picture(sheet.close(top), title, _hidden_words(title, values, layers))


def _layer_ticks(axes: Axes, layers: tuple[str, ...]) -> None:
    step = max(1, -(-len(layers) // 24))
    last = len(layers) - 1
    kept = [i for i in range(len(layers)) if i == last or (i % step == 0 and last - i >= step)]
    ticks(axes, "y", kept, [visible(layers[i]) for i in kept], 6.5)
    axes.tick_params(axis="y", length=0, pad=2, labelcolor=LIGHT.ink)
    label(axes, y="after layer")


def _profile(axes: Axes, values: np.ndarray, scale: Scale, num_layers: int) -> None:
    """Draw the spread over tokens of every layer, in the rows of the map beside it."""
    middles, lows, highs = (np.full(num_layers, np.nan) for _ in range(3))
    for layer in range(num_layers):
        held = values[:, layer][np.isfinite(values[:, layer])]
        if held.size:
            lows[layer], middles[layer], highs[layer] = np.percentile(held, (PERCENTILES[0], 50, PERCENTILES[1]))
    rows = np.arange(num_layers)
    axes.set_xscale("log")
    axes.set(xlim=(scale.low, scale.high), ylim=(num_layers - 0.5, -0.5))
    # a logarithmic axis has no place for 0
    shown = [np.where(array > 0, array, np.nan) for array in (lows, middles, highs)]
    axes.fill_betweenx(rows, shown[0], shown[2], color=LIGHT.scale[2], alpha=0.7, linewidth=0)
    axes.plot(shown[1], rows, color=LIGHT.scale[5], linewidth=1.2, marker="o", markersize=2.6)
    axes.xaxis.set_minor_locator(NullLocator())
    ticks(axes, "x", scale.ticks, [scale.tick_text(value) for value in scale.ticks], 7)
    axes.set_yticks([])
    open_axes(axes, grid="x")
    heading(axes, "over all tokens", 8)
    label(axes, x="L2 norm")


def _hidden_words(title: str, values: np.ndarray, layers: tuple[str, ...]) -> str:
    means = nan_mean(values, 0)
    if np.isnan(means).all():
        return f"{title}. No values."
    most = int(np.nanargmax(means))
    token = int(np.nanargmax(values[:, most]))
    ends = f"After {_layer(layers[0])}: mean {means[0]:.3g}, after {_layer(layers[-1])}: {means[-1]:.3g}"
    where = f"after {_layer(layers[most])} ({means[most]:.3g}), there most at token {token} ({values[token, most]:.3g})"
    size = f"{len(values)} tokens after {len(layers)} layers"
    return f"{title}. Heatmap of L2 norms of {size}. {ends}. Largest mean {where}."


def _layer(name: str) -> str:
    return f"layer {name}" if name.isdigit() else name
