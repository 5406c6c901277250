"""What reusing scalings loses against what it costs: the frontier of reuse policies, one panel for each kind of text.

A frame has a row per policy (and repeat): `policy`, `texts`, `kl` with `kl_low` and `kl_high`, `forwards_per_token`,
`tok_s`. Policy "exact" against itself is the null floor: what another batch shape alone changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from workbench.display.labels import visible
from workbench.display.palette import LIGHT
from workbench.display.picture import Picture
from workbench.display.placing import label_boxes
from workbench.display.policies import EXACT, family_of, ordered, short_label
from workbench.display.scales import DIGITS
from workbench.display.sheet import MARGIN_IN, Sheet, cut, head, heading, label, open_axes, plain, styled, ticks
from workbench.errors import UserError, names, nearest

if TYPE_CHECKING:
    import pandas

COSTS = {
    "forwards_per_token": ("forwards per token (fewer is cheaper)", -1),
    "tok_s": ("tokens per second (more is cheaper)", 1),
}
# settings of a sweep's points but for the policy: where they differ, points have panels of their own
PANELS = (
    "mixture", "base", "dtype", "texts", "passages", "passage_tokens", "prefix_tokens", "device", "drafting",
    "attention", "prefix_cache", "kv_bytes", "max_rows_per_step", "max_requests", "seed", "task", "mode", "adapters",
    "rank", "popularity", "slots", "concurrency", "requests", "prompt_tokens", "tokens", "arrivals", "rate", "cv",
    "trace", "slo_ttft_ms", "slo_time_per_token_ms",
)  # fmt: skip
MOST_PANELS = 8
NEEDED = ("policy", "kl")
_PANEL_IN, _BAND_IN, _LEFT_IN, _GAP_IN = 3.7, 0.34, 0.72, 0.86
_REACH = 6.0  # how far below the other policies the floor is drawn in scale
_CHAR_IN, _BOLD_IN, _LINE_IN = 0.067, 0.075, 0.125  # of a label's text
_APART_IN = 0.05  # between a label and whatever comes after it


@dataclass(frozen=True)
class Spot:
    """A policy on one panel: its cost, its KL with the interval; whether no other is both cheaper and closer."""

    policy: str
    cost: float
    kl: float
    low: float
    high: float
    is_best: bool = False


@dataclass(frozen=True)
class Panel:
    """One kind of text.

    Attributes:
        name: of it.
        spots: by policy.
        floor: KL of "exact" against itself, None where it was not measured.
    """

    name: str
    spots: tuple[Spot, ...]
    floor: float | None


def frontier(
    frame: pandas.DataFrame, x: str = "forwards_per_token", title: str | None = None, limit: float | None = None
) -> Picture:
    """Draw KL against cost, every reuse policy a point.

    Args:
        frame: fidelity rows of a sweep's table, or of an advice.
        x: the cost: "forwards_per_token" or "tok_s".
        title: above the figure.
        limit: a KL that is to be kept, drawn as a line.

    Raises:
        UserError: columns that are missing, or no row with a value.
    """
    panels = panels_of(frame, x)
    title = title or "What reusing scalings loses, and what it costs"
    with styled():
        sheet = Sheet()
        note = (
            "KL of the next-token distribution against exact scalings, mean over passages with its "
            f"{_interval(frame)}; {COSTS[x][0].partition(' (')[0]}: median over repeats. At or below the null floor a "
            "policy cannot be told from exact. Filled and joined by the pale line: no other policy is both cheaper and "
            "closer."
        )
        shown = panels[:MOST_PANELS]
        notes = [note] + ([f"{len(shown)} of {len(panels)} panels are drawn."] if len(shown) < len(panels) else [])
        top = _legend(sheet, head(sheet, title, notes), shown) + 0.42
        columns = 1 if len(shown) == 1 else 2
        width = (sheet.width_in - _LEFT_IN - 0.25 - _GAP_IN * (columns - 1)) / columns
        scale = _scale(shown, limit)
        for number, panel in enumerate(shown):
            row, column = divmod(number, columns)
            place = (_LEFT_IN + column * (width + _GAP_IN), top + row * (_PANEL_IN + 0.85), width, _PANEL_IN)
            axes = sheet.axes(*place)
            _draw(axes, panel, scale, x, place[2:])
        rows = -(-len(shown) // columns)
        return Picture(sheet.close(top + rows * (_PANEL_IN + 0.85) - 0.25), title, _words(title, panels, x))


def panels_of(frame: pandas.DataFrame, x: str = "forwards_per_token") -> list[Panel]:
    """Return what is drawn: medians of costs over repeats, the KL and its interval, by panel and policy.

    Raises:
        UserError: columns that are missing, or no row with a value.
    """
    if x not in COSTS:
        raise UserError(f"frontier: x is one of {names(COSTS)}, not {x!r}{nearest(x, COSTS)}")
    if lacking := [key for key in (*NEEDED, x) if key not in frame]:
        raise UserError(f"frontier needs the columns {names([*NEEDED, x])}; {names(lacking)} are missing")
    rows = frame[frame["status"] == "done"] if "status" in frame else frame
    rows = rows[np.isfinite(rows["kl"].astype(float)) & np.isfinite(rows[x].astype(float))]
    if not len(rows):
        raise UserError("frontier: no row has both a KL and a cost; run the sweep first")
    return [_panel(name, part, x) for name, part in parts_of(rows)]


def parts_of(rows: pandas.DataFrame) -> list[tuple[str, pandas.DataFrame]]:
    """Return the rows of each panel with its name: one for each combination of settings, the policy aside, that differ.

    A setting that follows from the others (how many passages each kind of text makes) splits nothing and is not named.
    """
    there = [key for key in PANELS if key in rows and (key == "texts" or rows[key].nunique(dropna=False) > 1)]
    split: list[str] = []
    for key in sorted(there, key=lambda key: key != "texts"):
        parts = rows.groupby(split, dropna=False)[key].nunique(dropna=False).max() if split else rows[key].nunique()
        split += [key] if parts > 1 or key == "texts" else []
    split = [key for key in PANELS if key in split]
    parts = rows.groupby(split, sort=False, dropna=False) if split else [((), rows)]
    return [(" ".join(f"{key}: {_said(value)}" for key, value in zip(split, values, strict=True)), part)
            for values, part in parts]


def _interval(frame: pandas.DataFrame) -> str:
    """Return what the intervals rest on: few texts make none that can be called one of 95 %."""
    texts = frame["num_texts"].dropna() if "num_texts" in frame else ()
    if not len(texts):
        return "bootstrap interval"
    span = f"{int(texts.min())}" + (f" to {int(texts.max())}" if texts.max() > texts.min() else "")
    return f"95 % bootstrap interval over {span} distinct texts"


def _said(value: Any) -> str:
    return "none" if value is None or value != value else str(value)


def _panel(name: str, rows: pandas.DataFrame, x: str) -> Panel:
    spots = []
    for policy in ordered(rows["policy"]):
        own = rows[rows["policy"] == policy]
        kl = float(own["kl"].iloc[0])
        low, high = (float(own[key].iloc[0]) if key in own else kl for key in ("kl_low", "kl_high"))
        low, high = (end if math.isfinite(end) else kl for end in (low, high))
        spots.append(Spot(policy, float(own[x].median()), max(kl, 0.0), max(low, 0.0), max(high, 0.0)))
    floor = next((spot.kl for spot in spots if spot.policy == EXACT), None)
    best = _best(spots, floor or 0.0, COSTS[x][1])
    found = tuple(Spot(s.policy, s.cost, s.kl, s.low, s.high, s.policy in best) for s in spots)
    return Panel(name, found, floor)


def _best(spots: Sequence[Spot], floor: float, sign: int) -> set[str]:
    """Return the policies that no other beats in cost and KL; below the floor all KL are alike."""
    places = {spot.policy: (-sign * spot.cost, max(spot.kl, floor)) for spot in spots}

    def is_beaten(mine: tuple[float, float]) -> bool:
        return any(other[0] <= mine[0] and other[1] <= mine[1] and other != mine for other in places.values())

    return {policy for policy, mine in places.items() if not is_beaten(mine)}


@dataclass(frozen=True)
class _Scale:
    """The axes that all panels share: ends of the cost, foot and top of the KL, the floor's band, and a limit."""

    cost: tuple[float, float]
    foot: float
    band: float
    top: float
    limit: float | None = None

    def inches(self, cost: float, kl: float, size: tuple[float, float]) -> tuple[float, float]:
        """Return where a point lies on a panel of this size."""
        low, high = self.cost
        down, up = math.log(self.foot), math.log(self.top)
        return (cost - low) / (high - low) * size[0], (math.log(kl) - down) / (up - down) * size[1]

    def drawn(self, kl: float, floor: float | None) -> float:
        """Return the height at which a KL is drawn: no lower than the floor's band."""
        return max(kl, self.band if floor is None else max(self.band, floor))


def _scale(panels: Sequence[Panel], limit: float | None) -> _Scale:
    spots = [spot for panel in panels for spot in panel.spots]
    above = [spot.kl for panel in panels for spot in panel.spots if spot.kl > (panel.floor or 0.0)]
    limits = [limit] if limit else []
    top = max([spot.high for spot in spots if spot.high > 0] + above + limits, default=1e-6) * 1.6
    lowest = min(above + limits, default=top / 30)
    # a floor far below everything else would leave no room for what is to be told apart
    floors = [panel.floor for panel in panels if panel.floor is not None and panel.floor > 0]
    band = min([lowest / _REACH, *(floor for floor in floors if floor >= lowest / _REACH)])
    foot = band * (band / top) ** (_BAND_IN / (_PANEL_IN - _BAND_IN))
    costs = [spot.cost for spot in spots]
    low, high = min(costs), max(costs)
    pad = 0.09 * ((high - low) or abs(high) or 1.0)
    return _Scale((low - pad, high + pad), foot, band, top, limit)


def _draw(axes: Axes, panel: Panel, scale: _Scale, x: str, size: tuple[float, float]) -> None:
    axes.set(xlim=scale.cost, ylim=(scale.foot, scale.top), yscale="log")
    axes.yaxis.set_minor_locator(NullLocator())
    marks = _decades(scale)
    ticks(axes, "y", marks, [_power(mark) for mark in marks])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]))
    open_axes(axes)
    label(axes, x=COSTS[x][0], y="KL against exact scalings, nats per token")
    heading(axes, cut(visible(panel.name), 70))
    band_top = scale.drawn(0.0, panel.floor)
    axes.axhspan(scale.foot, band_top, color=LIGHT.card, zorder=0)
    axes.axhline(band_top, color=LIGHT.muted, linewidth=0.9, linestyle=(0, (4, 2)), zorder=1)
    words = _floor_words(panel, scale)
    style = {"va": "bottom", "fontsize": 6.8, "color": LIGHT.muted, "transform": axes.transAxes}
    plain(axes.text(0.012, 0.012, words, **style))
    if scale.limit:
        axes.axhline(scale.limit, color=LIGHT.below, linewidth=1.1, zorder=1.6)
        words_of = {"va": "bottom", "ha": "right", "fontsize": 6.8, "color": LIGHT.below}
        plain(axes.text(scale.cost[1], scale.limit, f"limit {number_text(scale.limit)} ", **words_of))
    _lines(axes, panel, scale)
    for spot in panel.spots:
        family, y = family_of(spot.policy), scale.drawn(spot.kl, panel.floor)
        ends = [scale.drawn(end, panel.floor) for end in (spot.low, spot.high)]
        axes.vlines(spot.cost, *ends, color=family.colour, linewidth=1, zorder=3)
        axes.plot([spot.cost], [y], zorder=5 if spot.is_best else 4, **family.point(spot.is_best))
    _labels(axes, panel, scale, size, len(words) * 0.052 + 0.1)


def _lines(axes: Axes, panel: Panel, scale: _Scale) -> None:
    """Join the policies of each family, and those on the frontier."""
    best = sorted((spot.cost, scale.drawn(spot.kl, panel.floor)) for spot in panel.spots if spot.is_best)
    axes.plot(*zip(*best, strict=True), color=LIGHT.line, linewidth=6, zorder=1.5, solid_capstyle="round")
    for name in dict.fromkeys(family_of(spot.policy).name for spot in panel.spots):
        own = [(s.cost, scale.drawn(s.kl, panel.floor)) for s in panel.spots if family_of(s.policy).name == name]
        axes.plot(*zip(*own, strict=True), zorder=2, alpha=0.75, **family_of(own and name).line(1.0))


def _labels(axes: Axes, panel: Panel, scale: _Scale, size: tuple[float, float], words_in: float) -> None:
    """Name every policy, with a thin line to those that found no place beside their point."""
    at = np.array([scale.inches(s.cost, scale.drawn(s.kl, panel.floor), size) for s in panel.spots])
    texts = [short_label(visible(spot.policy)) for spot in panel.spots]
    widths = [len(text) * (_BOLD_IN if s.is_best else _CHAR_IN) for s, text in zip(panel.spots, texts, strict=True)]
    sizes = np.array([(width + _APART_IN, _LINE_IN) for width in widths])
    floor_in = scale.inches(0, scale.drawn(0.0, panel.floor), size)[1]
    hard = [(x - 0.06, y - 0.06, 0.12, 0.12) for x, y in at]
    hard += [(0, 0, words_in, 0.16), (0, floor_in - 0.01, size[0], 0.02)]
    if scale.limit:
        limit_in = scale.inches(0, scale.limit, size)[1]
        hard += [(0, limit_in - 0.01, size[0], 0.02), (size[0] - 0.8, limit_in, 0.8, 0.16)]
    for spot, (x, _) in zip(panel.spots, at, strict=True):
        low, high = (scale.inches(spot.cost, scale.drawn(end, panel.floor), size)[1] for end in (spot.low, spot.high))
        hard.append((x - 0.015, low, 0.03, high - low))
    corners = label_boxes(at, sizes, size, hard=hard, soft=_along(panel, at))
    for spot, text, here, corner, room in zip(panel.spots, texts, at, corners, sizes, strict=True):
        where = {"xytext": tuple((corner - here) * 72), "textcoords": "offset points", "va": "bottom", "ha": "left"}
        style = {"fontsize": 7.5, "weight": "bold" if spot.is_best else "normal", "color": LIGHT.ink, "zorder": 6}
        gap = np.maximum(0, np.maximum(corner - here, here - corner - room))
        if np.hypot(*gap) > 0.15:
            style["arrowprops"] = {"arrowstyle": "-", "color": LIGHT.muted, "linewidth": 0.6, "shrinkB": 4}
        y = scale.drawn(spot.kl, panel.floor)
        plain(axes.annotate(text, (spot.cost, y), annotation_clip=False, **where, **style))


def _along(panel: Panel, at: np.ndarray) -> list[tuple[float, float, float, float]]:
    """Return small boxes along the lines between policies of a family."""
    found = []
    for number in range(1, len(at)):
        if family_of(panel.spots[number].policy).name == family_of(panel.spots[number - 1].policy).name:
            one, other = at[number - 1], at[number]
            for share in np.linspace(0, 1, max(2, int(np.hypot(*(other - one)) / 0.06))):
                found.append((*(one + share * (other - one) - 0.015), 0.03, 0.03))
    return found


def _floor_words(panel: Panel, scale: _Scale) -> str:
    if panel.floor is None:
        return "exact was not measured: there is no null floor" if panel.spots else ""
    if not panel.floor:
        return "null floor: exact against itself differs by nothing"
    words = f"null floor: exact against itself differs by {number_text(panel.floor)}"
    return words + (" (not to scale)" if panel.floor < scale.band else "")


def _decades(scale: _Scale) -> list[float]:
    low, high = math.ceil(math.log10(scale.band) - 1e-9), math.floor(math.log10(scale.top))
    if high - low >= 1:
        return [10.0**power for power in range(low, high + 1)]
    return [factor * 10.0**power for power in range(low - 1, high + 1) for factor in (1, 2, 5)
            if scale.band <= factor * 10.0**power <= scale.top]


def _power(value: float) -> str:
    power = math.floor(math.log10(value) + 1e-9)
    factor = round(value / 10.0**power)
    return ("" if factor == 1 else f"{factor}·") + "10" + str(power).translate(DIGITS)


def number_text(value: float) -> str:
    """Return a number in two digits, as 1.2·10⁻⁵ where it is very small."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.2g}"
    mantissa, power = f"{value:.1e}".split("e")
    return f"{mantissa}·10{str(int(power)).translate(DIGITS)}"


def _legend(sheet: Sheet, top: float, panels: Sequence[Panel]) -> float:
    families = list(dict.fromkeys(family_of(policy) for policy in
                                  ordered(spot.policy for panel in panels for spot in panel.spots)))
    width, columns = sheet.width_in - 2 * MARGIN_IN, 2
    height = 0.2 * -(-len(families) // columns)
    axes = sheet.axes(MARGIN_IN, top, width, height)
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    for place, family in enumerate(families):
        row, column = divmod(place, columns)
        x, y = column * width / columns, row * 0.2 + 0.1
        axes.add_line(Line2D([x, x + 0.36], [y, y], **family.line()))
        axes.add_line(Line2D([x + 0.18], [y], **family.point(size=5.5)))
        words = f"{visible(family.title)}" + (f": {family.meaning}" if family.meaning else "")
        plain(axes.text(x + 0.46, y, cut(words, 90), va="center", fontsize=8))
    return top + height


def _words(title: str, panels: Sequence[Panel], x: str) -> str:
    parts = []
    for panel in panels:
        spots = [
            f"{spot.policy}: KL {spot.kl:.2g} ({spot.low:.2g} to {spot.high:.2g}), {x} {spot.cost:.3g}"
            + (", on the frontier" if spot.is_best else "") for spot in panel.spots
        ]
        parts.append(f"{panel.name or 'all texts'}: {'; '.join(spots)}.")
    return f"{title}. KL in nats per token against {COSTS[x][0].partition(' (')[0]}. {' '.join(parts)}"
