"""A request token by token, as lines: the adapters' shares, and how undecided classifier and model were."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes

from workbench.display.drawing import LINE_TOKENS, RIGHT_IN, boundary, name_parts, source_strip, token_axis
from workbench.display.labels import runs
from workbench.display.leading import with_others
from workbench.display.legend import legend
from workbench.display.marks import (
    COMPUTED,
    OTHERS_INDEX,
    REUSED,
    adapter_line,
    end_letters,
    hatched,
    leader_bars,
    outside_marks,
    source_kinds,
)
from workbench.display.palette import LIGHT
from workbench.display.picture import Picture
from workbench.display.sheet import DPI, Sheet, heading, label, open_axes, plain, styled, ticks
from workbench.display.trace_head import require_scalings, require_trace, trace_head
from workbench.errors import UserError
from workbench.instrument.trace import Trace, nan_mean

MOST_LINES = 8
LEFT_IN = 0.75
LINES_IN, ENTROPY_IN = 2.6, 1.35
STRIP_IN = 0.27


def over_time(trace: Trace, smooth: int = 1, title: str | None = None) -> Picture:
    """Draw each adapter's share (mean scaling over all sites) along the tokens, and whether it was computed or reused.

    Args:
        trace: what to draw.
        smooth: the mean over this many neighbouring tokens is drawn, the raw values faintly behind it; 1 draws them.
        title: above the figure.

    Raises:
        UserError: the trace has no scalings, or `smooth` is no positive number of tokens.
    """
    require_scalings(trace)
    if not isinstance(smooth, int) or isinstance(smooth, bool) or smooth < 1:
        raise UserError(f"smooth={smooth!r} is no number of tokens to take the mean over; 1 draws every token's value")
    title = title or "Each adapter's share along the text"
    shown, raw = shares_along(trace)
    means = smoothed(raw, smooth)
    note = f"A share is the mean scaling over all {len(trace.sites)} sites."
    if smooth > 1:
        note += f" Lines: the mean of {smooth} neighbouring tokens, centred; faint: each token's own."
    with styled():
        sheet = Sheet()
        top = trace_head(sheet, trace, title, [note, *_outside_note(raw)])
        named = [index for index in shown if index != OTHERS_INDEX]
        top = legend(sheet, trace, top, lines=True, shown=named) + 0.38
        width = sheet.width_in - LEFT_IN - RIGHT_IN - 0.3
        _source_axes(sheet, trace, top, width)
        axes = sheet.axes(LEFT_IN, top + STRIP_IN, width, LINES_IN)
        share_lines(axes, trace, shown, means, raw if smooth > 1 else None)
        has_texts = trace.num_tokens <= LINE_TOKENS
        token_axis(axes, trace, 0, trace.num_tokens, has_texts)
        top += STRIP_IN + LINES_IN + (0.7 if has_texts else 0.5)
        return Picture(sheet.close(top), title, _words(trace, title))


def shares_along(trace: Trace, most: int = MOST_LINES) -> tuple[tuple[int, ...], np.ndarray]:
    """Return the adapters drawn, the last of them all others together, and their `[token, line]` mean over sites."""
    means = trace.token_means()
    return with_others(means, nan_mean(means, 0), most)


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Return the centred mean over `window` rows of `[token, line]`, ignoring NaN; a NaN row stays NaN."""
    if window == 1:
        return values
    missing = np.isnan(values)
    before = window // 2
    padding = ((before + 1, window - 1 - before), (0, 0))
    totals = np.cumsum(np.pad(np.where(missing, 0, values), padding), 0)
    counts = np.cumsum(np.pad((~missing).astype(np.float64), padding), 0)
    total, count = (sums[window:] - sums[:-window] for sums in (totals, counts))
    return np.divide(total, count, out=np.full(values.shape, np.nan), where=(count > 0) & ~missing)


def share_lines(
    axes: Axes, trace: Trace, shown: tuple[int, ...], means: np.ndarray, raw: np.ndarray | None = None
) -> None:
    """Draw `[token, line]` shares on the scale from 0 to 1, each line with its letter at the end."""
    tokens = np.arange(trace.num_tokens)
    axes.set(xlim=(-0.5, trace.num_tokens - 0.5), ylim=(-0.02, 1.02))
    hatch_missing(axes, np.isnan(means).all(1))
    every = max(1, trace.num_tokens // 24)
    for line, index in enumerate(shown):
        if raw is not None:
            adapter_line(axes, index, tokens, raw[:, line], alpha=0.3, linewidth=0.7, marker="", label="_raw")
        marked = (line * every // len(shown), every)
        adapter_line(axes, index, tokens, means[:, line], markevery=marked, label=str(index))
        outside_marks(axes, tokens, means[:, line])
    held = np.flatnonzero(~np.isnan(means).all(1))
    if held.size:
        end_letters(axes, tokens[-1] + 0.5, [(index, means[held[-1], line]) for line, index in enumerate(shown)], 0.062)
    ticks(axes, "y", (0, 0.25, 0.5, 0.75, 1), ("0", "0.25", "0.5", "0.75", "1"))
    label(axes, y="share of the scalings")
    open_axes(axes)
    boundary(axes, trace, 0, trace.num_tokens)


def hatch_missing(axes: Axes, missing: np.ndarray) -> None:
    """Hatch the tokens that have no value."""
    if not missing.any():
        return
    hatched(axes)
    for start, stop in runs(missing):
        if not missing[start]:
            axes.axvspan(start - 0.5, stop - 0.5, facecolor=LIGHT.page, zorder=-0.5, lw=0)


def _source_axes(sheet: Sheet, trace: Trace, top: float, width: float) -> None:
    axes = sheet.axes(LEFT_IN, top, width, STRIP_IN - 0.05)
    axes.set(xlim=(-0.5, trace.num_tokens - 0.5), ylim=(1, 0))
    axes.set_axis_off()
    token_in = axes.get_window_extent().width / DPI / trace.num_tokens
    leader_bars(axes, trace.leading(), 0, 0, 0.62, token_in)
    source_strip(axes, trace, 0, trace.num_tokens, 0.72, 0.98)
    name_parts(axes, trace, 0, trace.num_tokens)


def _outside_note(means: np.ndarray) -> list[str]:
    above, below = int((means > 1).sum()), int((means < 0).sum())
    return [f"Outside the scale and marked: {above} values above 1, {below} below 0."] if above or below else []


def _words(trace: Trace, title: str) -> str:
    shares = ", ".join(f"{name} {share:.0%}" for name, share in list(trace.share().items())[:MOST_LINES])
    kinds = source_kinds(trace)
    computed, reused = (int((kinds == kind).sum()) for kind in (COMPUTED, REUSED))
    sources = f"{computed} tokens computed their own scalings, {reused} reused others"
    return (
        f"{title}. Lines of the mean scaling of {len(trace.adapters)} adapters over {trace.num_tokens} tokens, "
        f"{trace.prompt_tokens} of them the prompt's. Mean share: {shares}. {sources}."
    )


def entropy(trace: Trace, title: str | None = None) -> Picture:
    """Draw how undecided each token was: entropy of the adapters' shares, and of the next token if it was recorded.

    Raises:
        UserError: the trace has neither.
    """
    require_trace(trace)
    panels = []
    if trace.has_scalings:
        most = math.log(len(trace.adapters))
        what = "scalings: 0 = one adapter alone" + (", dashed = all alike" if most else ": there is but one")
        panels.append((what, trace.scaling_entropy(), most, f"ln {len(trace.adapters)}"))
    if "entropy" in trace.extras:
        panels.append(("next token: 0 = certain", np.asarray(trace.extra("entropy").values, np.float64), None, ""))
    if not panels:
        raise UserError(
            "this trace has no entropy to draw: record 'scalings' of a request with a mixture, or 'entropy' "
            "(engine.record('scalings', 'entropy'))"
        )
    title = title or "How undecided each token was"
    note = "Entropy in nats: of the adapters' shares, mean over sites" + (
        "; of the distribution of the token that comes next." if "entropy" in trace.extras else "."
    )
    with styled():
        sheet = Sheet()
        top = trace_head(sheet, trace, title, [note]) + 0.3
        width = sheet.width_in - LEFT_IN - RIGHT_IN - 0.3
        has_texts = trace.num_tokens <= LINE_TOKENS
        for number, (what, values, most, name) in enumerate(panels):
            axes = sheet.axes(LEFT_IN, top, width, ENTROPY_IN)
            _entropy_panel(axes, trace, values, most, name)
            heading(axes, what, 8.5, pad=13 if number == 0 else 5)
            if number == 0:
                name_parts(axes, trace, 0, trace.num_tokens)
            is_last = number == len(panels) - 1
            token_axis(axes, trace, 0, trace.num_tokens, has_texts and is_last)
            if not is_last:
                axes.set(xlabel="", xticklabels=[])
            top += ENTROPY_IN + (0.45 if not is_last else 0.7 if has_texts else 0.5)
        return Picture(sheet.close(top), title, _entropy_words(title, panels))


def _entropy_panel(axes: Axes, trace: Trace, values: np.ndarray, most: float | None, name: str) -> None:
    tokens = np.arange(trace.num_tokens)
    held = values[np.isfinite(values)]
    high = most if most else (math.ceil(held.max() * 2) / 2 if held.size and held.max() > 0 else 1.0)
    axes.set(xlim=(-0.5, trace.num_tokens - 0.5), ylim=(-0.03 * high, 1.06 * high))
    hatch_missing(axes, np.isnan(values))
    marker = "o" if trace.num_tokens <= 4 * LINE_TOKENS else ""
    axes.fill_between(tokens, 0, values, color=LIGHT.scale[2], alpha=0.6, linewidth=0)
    axes.plot(tokens, values, color=LIGHT.scale[5], linewidth=1, marker=marker, markersize=2.6)
    label(axes, y="nats")
    open_axes(axes)
    if most:
        axes.axhline(most, color=LIGHT.muted, linewidth=0.8, linestyle=(0, (4, 2)))
        style = {"fontsize": 6.5, "color": LIGHT.muted, "va": "center", "annotation_clip": False}
        text = f"{name}\n{most:.2f}"
        style |= {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        plain(axes.annotate(text, (1, most), (4, 0), **style))
    boundary(axes, trace, 0, trace.num_tokens)


def _entropy_words(title: str, panels: list[tuple[str, np.ndarray, float | None, str]]) -> str:
    parts = []
    for what, values, _, _ in panels:
        held = values[np.isfinite(values)]
        if not held.size:
            parts.append(f"{what}: no values")
            continue
        most = f"largest {held.max():.2f} at token {int(np.nanargmax(values))}"
        parts.append(f"{what}: mean {held.mean():.2f} nats, {most}")
    return f"{title}. {'; '.join(parts)}."
