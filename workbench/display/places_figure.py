"""Where in the text reuse loses: KL by place, a panel for each family of policies, and where the topic switches.

A frame has rows of `policy`, `texts`, `place` (tokens after the prompt, from 0) and `kl`: several rows of one place,
such as one for each passage, are averaged. Other settings that it has columns of (mixture, base, dtype) have panels of
their own where they differ. `switch_at`, where there is one, is the place at which a text changes topic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullLocator

from workbench.display.frontier_figure import number_text, parts_of
from workbench.display.labels import visible
from workbench.display.marks import DASHES
from workbench.display.palette import LIGHT, mix
from workbench.display.picture import Picture
from workbench.display.placing import spread
from workbench.display.policies import EXACT, Family, family_of, number_of, ordered, short_label
from workbench.display.scales import DIGITS
from workbench.display.sheet import Sheet, cut, head, heading, label, open_axes, plain, styled, ticks
from workbench.errors import UserError, names

if TYPE_CHECKING:
    import pandas

NEEDED = ("policy", "place", "kl")
SMOOTHED = 5  # places that are averaged, for the eye
MOST_TEXTS, MOST_LINES = 4, 8
_PANEL_IN, _LEFT_IN, _RIGHT_IN, _GAP_IN = 2.3, 0.72, 0.6, 0.9
_DECADES = 4  # at most, below the largest value


def kl_by_place(frame: pandas.DataFrame, title: str | None = None) -> Picture:
    """Draw the mean KL at every place of the texts, by policy.

    Raises:
        UserError: columns that are missing, or nothing to draw.
    """
    curves, switches = curves_of(frame), {name: _switch(rows) for name, rows in parts_of(frame)}
    title = title or "Where in the text reuse loses"
    texts = list(curves)[:MOST_TEXTS]
    families = list(dict.fromkeys(family_of(policy) for part in texts for policy in curves[part] if policy != EXACT))
    families = families or [family_of(EXACT)]
    low, high = _limits([smoothed(curve, switches[part]) for part in texts for curve in curves[part].values()])
    note = (
        f"KL of the next-token distribution against exact scalings: mean over passages, and over {SMOOTHED} places for "
        f"the eye, never across a switch. Places without any difference are left out; values below {number_text(low)} "
        "lie on the foot. Grey and dotted: exact against itself, the null floor."
    )
    notes = [note] + ([f"{len(texts)} of {len(curves)} kinds of text are drawn."] if len(texts) < len(curves) else [])
    notes += _merged(frame)
    with styled():
        sheet = Sheet()
        top = head(sheet, title, notes) + 0.3
        width = (sheet.width_in - _LEFT_IN - _RIGHT_IN - _GAP_IN * (len(families) - 1)) / len(families)
        for row, part in enumerate(texts):
            for column, family in enumerate(families):
                place = (_LEFT_IN + column * (width + _GAP_IN), top + row * (_PANEL_IN + 0.75), width, _PANEL_IN)
                axes = sheet.axes(*place)
                _axes(axes, low, high, is_first=not column)
                name = f"{part}, {family.title}" if part else family.title
                heading(axes, cut(visible(name), int(width / 0.075)))
                _panel(axes, curves[part], family, (low, high), switches[part])
        figure = sheet.close(top + len(texts) * (_PANEL_IN + 0.75) - 0.15)
        return Picture(figure, title, _words(title, curves, switches))


def curves_of(frame: pandas.DataFrame) -> dict[str, dict[str, np.ndarray]]:
    """Return panel -> policy -> float64 `[place]`: the mean KL, NaN where a place has none.

    Raises:
        UserError: columns that are missing, or nothing to draw.
    """
    if lacking := [key for key in NEEDED if key not in frame]:
        raise UserError(f"kl_by_place needs the columns {names(NEEDED)}; {names(lacking)} are missing")
    if not len(frame):
        raise UserError("kl_by_place: the table is empty; run the sweep first")
    found: dict[str, dict[str, np.ndarray]] = {}
    for part, rows in parts_of(frame):
        means = rows.groupby(["policy", "place"])["kl"].mean()
        found[part] = {}
        for policy in ordered(rows["policy"]):
            values = means[policy]
            curve = np.full(int(values.index.max()) + 1, np.nan)
            curve[values.index.to_numpy(int)] = values.to_numpy(float)
            found[part][policy] = curve
    return found


def smoothed(curve: np.ndarray, switch: float | None = None, width: int = SMOOTHED) -> np.ndarray:
    """Return the mean over `width` places around each, over fewer at the ends and at a switch.

    Where nothing differs (0) there is no value (NaN), and none that counts.
    """
    if switch is not None:
        at = int(switch)
        return np.concatenate([smoothed(half, None, width) for half in (curve[:at], curve[at:]) if len(half)])
    held = np.isfinite(curve) & (curve > 0)
    window = np.ones(width)
    # "same" would be as long as the window, where that is the longer one
    first = width // 2
    total = np.convolve(np.where(held, curve, 0.0), window)[first : first + len(curve)]
    count = np.convolve(held.astype(float), window)[first : first + len(curve)]
    return np.divide(total, count, out=np.full(len(curve), np.nan), where=held & (count > 0))


def _merged(frame: pandas.DataFrame) -> list[str]:
    """Return a sentence where a curve is a mean over points whose difference no column says."""
    if "point" not in frame:
        return []
    most = max(rows.groupby("policy")["point"].nunique().max() for _, rows in parts_of(frame))
    return [f"Curves are means over up to {most} points that differ in other settings."] if most > 1 else []


def _switch(rows: pandas.DataFrame) -> float | None:
    if "switch_at" not in rows:
        return None
    places = rows["switch_at"].dropna().unique()
    return float(places[0]) if len(places) == 1 else None


def _limits(curves: Sequence[np.ndarray]) -> tuple[float, float]:
    values = np.concatenate(curves)
    values = values[np.isfinite(values) & (values > 0)]
    if not len(values):
        return 1e-6, 1e-5
    high = float(values.max()) * 1.5
    return max(float(values.min()) / 1.5, high * 10.0**-_DECADES), high


def _axes(axes: Axes, low: float, high: float, is_first: bool) -> None:
    axes.set(ylim=(low, high), yscale="log")
    axes.yaxis.set_minor_locator(NullLocator())
    marks = [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    if len(marks) < 2:
        marks = [low * (high / low) ** share for share in (0.1, 0.5, 0.9)]
        ticks(axes, "y", marks, [number_text(mark) for mark in marks])
    else:
        ticks(axes, "y", marks, [f"10{str(round(math.log10(mark))).translate(DIGITS)}" for mark in marks])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 4, 5, 8, 10], integer=True))
    open_axes(axes)
    label(axes, x="tokens after the prompt", y="KL, nats per token" if is_first else None)


def _panel(
    axes: Axes, curves: dict[str, np.ndarray], family: Family, limits: tuple[float, float], switch: float | None
) -> None:
    own = [policy for policy in curves if family_of(policy) == family and policy != EXACT][:MOST_LINES]
    length = max(len(curves[policy]) for policy in [*own, *([EXACT] if EXACT in curves else [])] or curves)
    axes.set_xlim(-0.5, length - 0.5)
    if switch is not None:
        axes.axvline(switch - 0.5, color=LIGHT.below, linewidth=1, linestyle=(0, (3, 2)), zorder=1)
        style = {"fontsize": 6.8, "color": LIGHT.below, "va": "top", "ha": "left"}
        plain(axes.text(switch - 0.5 + length * 0.012, limits[1] * 0.97, "the topic switches", **style))
    ends = []
    if EXACT in curves:
        drawn = _drawn(curves[EXACT], limits[0], switch)
        axes.plot(drawn, color=LIGHT.muted, linestyle=(0, (1, 1.6)), linewidth=1.1, zorder=2, clip_on=False)
        ends.append((EXACT, _last(drawn), LIGHT.muted))
    for place, policy in enumerate(own):
        # a family has one colour; its numbers differ in dashes and in depth, and each line has its name at its end
        shade = mix(family.colour, LIGHT.page, 0.55 * place / max(1, len(own) - 1))
        line = {"color": shade, "linewidth": 1.5, "linestyle": DASHES[place % len(DASHES)], "zorder": 3}
        drawn = _drawn(curves[policy], limits[0], switch)
        axes.plot(drawn, **line)
        ends.append((short_label(visible(policy)), _last(drawn), LIGHT.ink))
    _names(axes, [end for end in ends if math.isfinite(end[1])], limits, length)


def _drawn(curve: np.ndarray, low: float, switch: float | None) -> np.ndarray:
    values = smoothed(curve, switch)
    return np.where(np.isfinite(values), np.maximum(values, low), np.nan)


def _last(drawn: np.ndarray) -> float:
    held = drawn[np.isfinite(drawn)]
    return float(held[-1]) if len(held) else math.nan


def _names(axes: Axes, ends: list[tuple[str, float, str]], limits: tuple[float, float], length: int) -> None:
    """Write each line's name right of its end, apart from each other, with a thin line to it."""
    low, high = (math.log(limit) for limit in limits)
    places = spread([math.log(y) for _, y, _ in ends], (high - low) * 0.125 / _PANEL_IN, low, high)
    for (text, y, ink), place in zip(ends, places, strict=True):
        far = abs(place - math.log(y)) > (high - low) * 0.02
        arrow = {"arrowstyle": "-", "color": LIGHT.muted, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 0,
                 "relpos": (0, 0.5)} if far else None
        where = {"xytext": (length * 1.035, math.exp(place)), "va": "center", "ha": "left", "annotation_clip": False}
        plain(axes.annotate(text, (length - 1, y), fontsize=6.8, color=ink, arrowprops=arrow, **where))


def _words(title: str, curves: dict[str, dict[str, np.ndarray]], switches: dict[str, float | None]) -> str:
    parts = []
    for part, own in curves.items():
        switch = switches[part]
        said = []
        for policy in sorted(own, key=lambda name: (family_of(name).name, number_of(name))):
            curve = own[policy]
            at = len(curve) // 2 if switch is None else int(switch)
            first, second = (float(np.nanmean(half)) if np.isfinite(half).any() else math.nan
                             for half in (curve[:at], curve[at:]))
            said.append(f"{policy}: {first:.2g} before, {second:.2g} after")
        where = "the middle" if switch is None else f"the switch at place {int(switch)}"
        parts.append(f"{part or 'All texts'}, mean KL before and after {where}: {'; '.join(said)}.")
    return f"{title}. {' '.join(parts)}"
