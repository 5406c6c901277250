"""What differs between two traces of one prompt: signed, token by token, site by site, nothing below a null pair's."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from workbench.display.drawing import (
    MAX_ROWS,
    RIGHT_IN,
    TokenLines,
    adapter_heading,
    has_cells,
    pooled,
    pooling_note,
    site_panel,
)
from workbench.display.labels import badges, counted, short, visible
from workbench.display.leading import leading_adapters, row_names, with_others
from workbench.display.marks import leader_bars
from workbench.display.palette import LIGHT
from workbench.display.picture import Picture
from workbench.display.scales import Scale, difference_scale
from workbench.display.sheet import DPI, MARGIN_IN, Sheet, cut, head, plain, styled
from workbench.display.trace_head import require_scalings
from workbench.errors import UserError, names
from workbench.instrument.trace import Trace, nan_mean

MOST_PANELS = 6
AFTER_PART = 6  # tokens shown behind the one in which the texts part
PANEL_IN = 1.6


@dataclass(frozen=True)
class Difference:
    """Two traces, aligned on tokens.

    Attributes:
        one, other: the traces, cut to the tokens that are drawn.
        values: `[token, site, adapter]` other minus one; NaN where the texts differ or one of them has no value; 0
            where the difference is not above the floor.
        part: the first token in which the texts differ, or None.
        floor: what a null pair differs by.
    """

    one: Trace
    other: Trace
    values: np.ndarray
    part: int | None
    floor: float

    @property
    def has_values(self) -> bool:
        return bool((~np.isnan(self.values)).any())

    @property
    def largest(self) -> float:
        return float(np.nanmax(np.abs(self.values))) if self.has_values else math.nan

    @property
    def mean(self) -> float:
        return float(nan_mean(np.abs(self.values), (0, 1, 2)))

    def where(self) -> str:
        """Return where the largest difference is, in words."""
        token, site, adapter = np.unravel_index(np.nanargmax(np.abs(self.values)), self.values.shape)
        text = short(self.one.tokens[token], 12)
        return f"token {token} {text!r}, {self.one.sites[site]}, adapter {visible(self.one.adapters[adapter])}"


def difference(
    one: Trace, other: Trace, floor: float | tuple[Trace, Trace] | None = None, limit: float | None = None,
    labels: tuple[str, str] = ("first", "second"), title: str | None = None,
) -> Picture:
    """Draw the second trace's scalings minus the first one's, wherever both have read the same text.

    Args:
        one, other: traces of one prompt on one model and ordering.
        floor: differences at or below it are not shown: a number, or a null pair (two traces of one setting in two
            batch shapes), whose largest difference it then is.
        limit: end of the colour scale; None takes the first of 0.01, 0.03, 0.1, 0.3, 1 that holds every difference.
        labels: what the two are called.
        title: above the figure.

    Raises:
        UserError: the adapters, sites or prompts differ (another mixture, model, ordering or text); no such floor.
    """
    found = aligned(one, other, floor)
    scale = difference_scale(found.largest, limit, name=f"scaling of {labels[1]} minus {labels[0]}")
    title = title or f"What differs: {labels[1]} minus {labels[0]}"
    with styled():
        sheet = Sheet()
        top = head(sheet, title, _lines(found, labels), _badges(one, other, labels))
        scale.bar(sheet, (MARGIN_IN + 0.5, top + 0.08, 3.2), found.values)
        _explain(sheet, top + 0.03, labels, found)
        top = _token_lines(sheet, found, scale, top + 0.85)
        top = _panels(sheet, found, scale, top)
        return Picture(sheet.close(top), title, _words(found, title, labels))


def aligned(one: Trace, other: Trace, floor: float | tuple[Trace, Trace] | None = None) -> Difference:
    """Return the difference of two traces on the tokens that both have read.

    Raises:
        UserError: they are no two traces of one prompt on one model and ordering.
    """
    for trace in (one, other):
        require_scalings(trace)
    _require_same("adapters", one.adapters, other.adapters, "another mixture")
    _require_same("sites", one.sites, other.sites, "another model or ordering")
    part, read = _read_by_both(one, other)
    floor, read = _floor(floor, one, read)
    stop = min(max(one.num_tokens, other.num_tokens), read + AFTER_PART)
    drawn, other_drawn = (trace.select(tokens=slice(0, min(stop, trace.num_tokens))) for trace in (one, other))
    values = np.full((drawn.num_tokens, *one.values.shape[1:]), np.nan, np.float32)
    both = slice(0, min(read, drawn.num_tokens))
    values[both] = other.values[both].astype(np.float32) - one.values[both]
    values[np.abs(values) <= floor] = 0
    return Difference(drawn, other_drawn, values, part, floor)


def _require_same(what: str, one: tuple[str, ...], other: tuple[str, ...], reason: str) -> None:
    if one == other:
        return
    only, others = ([label for label in a if label not in set(b)] for a, b in ((one, other), (other, one)))
    if only or others:
        lists = f"only the first has {names(only, 3)}, only the second {names(others, 3)}"
        raise UserError(f"these traces have different {what}: {lists}; they are of {reason}, and cannot be compared")
    at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    hint = f"; bring them into one order with select({what}=…)" if what == "adapters" else ""
    raise UserError(
        f"these traces have the same {what} in another order ({one[at]!r} where the other has {other[at]!r}): "
        f"another ordering made them{hint}"
    )


def _read_by_both(one: Trace, other: Trace) -> tuple[int | None, int]:
    """Return the first token in which the texts differ (or None), and how many tokens before it both have."""
    both = min(one.num_tokens, other.num_tokens)
    differ = np.flatnonzero(one.token_ids[:both] != other.token_ids[:both])
    part = int(differ[0]) if differ.size else None
    if one.prompt_tokens != other.prompt_tokens or (part is not None and part < one.prompt_tokens):
        if part is None:
            counts = f"{one.prompt_tokens} and {other.prompt_tokens} tokens"
            raise UserError(f"these traces are of different prompts, of {counts}; compare traces of one prompt")
        texts = f"{visible(one.tokens[part])!r} in the first and {visible(other.tokens[part])!r} in the second"
        raise UserError(f"these traces are of different prompts: token {part} is {texts}; compare traces of one prompt")
    return part, both if part is None else part


def _floor(floor: float | tuple[Trace, Trace] | None, one: Trace, read: int) -> tuple[float, int]:
    """Return the floor as a number, and how many tokens it holds for: none behind where the null pair's texts part."""
    if floor is None:
        return 0.0, read
    if isinstance(floor, tuple | list) and len(floor) == 2:
        first, again = floor
        for trace in (first, again):
            require_scalings(trace)
            _require_same("adapters", one.adapters, trace.adapters, "another mixture")
            _require_same("sites", one.sites, trace.sites, "another model or ordering")
        _, same = _read_by_both(first, again)
        between = np.abs(first.values[:same].astype(np.float64) - again.values[:same])
        held = between[~np.isnan(between)]
        return (float(held.max()) if held.size else 0.0), min(read, same)
    if isinstance(floor, bool) or not isinstance(floor, int | float) or not 0 <= floor < math.inf:
        raise UserError(f"floor={floor!r} is neither a difference such as 0.001 nor a null pair (two traces)")
    return float(floor), read


def _lines(found: Difference, labels: tuple[str, str]) -> list[str]:
    """Return what is compared, how much of it, and how large the differences are."""
    facts = []
    for label, trace in zip(labels, (found.one, found.other), strict=True):
        known = [trace.metadata.get(key) for key in ("mixture", "policy", "dtype", "request_id")]
        facts.append(f"{label}: {', '.join(str(one) for one in known if one is not None) or 'no metadata'}")
    bases = [trace.metadata.get("base") for trace in (found.one, found.other)]
    if bases[0] != bases[1]:
        facts.append(f"bases differ: {bases[0]} | {bases[1]}")
    elif bases[0] is not None:
        facts.append(f"base: {bases[0]}")
    return [" · ".join(facts), _extent(found), _amount(found)]


def _extent(found: Difference) -> str:
    compared = int((~np.isnan(found.values).all((1, 2))).sum())
    text = f"Compared: {counted(compared, 'token')} that both have read."
    if found.part is not None:
        text += f" The texts part at token {found.part}: "
        text += " | ".join(_text(trace, found.part) for trace in (found.one, found.other))
        text += ". From there on nothing is compared."
    return text


def _text(trace: Trace, token: int) -> str:
    return repr(short(trace.tokens[token], 16)) if token < trace.num_tokens else "the end"


def _amount(found: Difference) -> str:
    if not found.has_values:
        return "No token has scalings in both."
    if not found.largest:
        return f"No difference is above {found.floor:.2g}." if found.floor else "There is no difference."
    return f"Mean |difference| {found.mean:.2g}, largest {found.largest:.2g}: {found.where()}."


def _badges(one: Trace, other: Trace, labels: tuple[str, str]) -> list[str]:
    both = [badges(trace) for trace in (one, other)]
    common = [badge for badge in both[0] if badge in both[1]]
    own = [(label, badge) for label, found in zip(labels, both, strict=True) for badge in found]
    return [*(f"{label} {badge}" for label, badge in own if badge not in common), *common]


def _explain(sheet: Sheet, top: float, labels: tuple[str, str], found: Difference) -> None:
    """Say beside the scale what its two sides, blank and hatched cells and the strip mean."""
    first, second = (cut(visible(label), 24) for label in labels)
    signs = f"+ more, − less in {second}: marked from half the scale on"
    if not has_cells(found.one):
        signs = f"Blue: more, orange: less in {second}"
    blank = f"Blank: no difference above {found.floor:.2g}, which batch shape alone makes."
    if not found.floor:
        blank = "Blank: no difference. No null pair was given, so what rounding alone makes shows too."
    lines = (
        f"{signs}. Hatched: not compared.",
        blank,
        f"Strip: who leads in {first} (above) and in {second} (below).",
    )
    for number, line in enumerate(lines):
        sheet.text(4.4, top + 0.18 * number, line, size=7.6)


def _token_lines(sheet: Sheet, found: Difference, scale: Scale, top: float) -> float:
    means = nan_mean(found.values, 1)  # [token, adapter]
    shown, means = with_others(means, nan_mean(np.abs(means), 0), MAX_ROWS)
    other = found.other.leading()

    def leaders(axes: Axes, trace: Trace, start: int, stop: int) -> None:
        axes.set(xlim=(start - 0.5, stop - 0.5), ylim=(1, 0))
        axes.set_axis_off()
        token_in = axes.get_window_extent().width / DPI / (stop - start)
        leader_bars(axes, trace.leading()[start:stop], start, 0, 0.46, token_in)
        leader_bars(axes, other[start:stop], start, 0.54, 1, token_in)
        if found.part is not None and start <= found.part < stop:
            axes.axvline(found.part - 0.5, color=LIGHT.above, lw=1.3, clip_on=False)
            where = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "annotation_clip": False}
            style = {"fontsize": 6.5, "color": LIGHT.above, "va": "bottom", "weight": "bold"}
            plain(axes.annotate("the texts part ▸", (found.part - 0.5, 1), (0, 9), ha="center", **where, **style))

    half = scale.high / 2
    marks = (("+", means >= half), ("_", means <= -half))
    lines = TokenLines(found.one, means, row_names(shown, found.one.adapters), scale, leaders, marks)
    lines.strip_in = 0.34
    return lines.draw(sheet, top + 0.2)


def _panels(sheet: Sheet, found: Difference, scale: Scale, top: float) -> float:
    amount = nan_mean(np.abs(found.values), (0, 1))
    chosen = leading_adapters(amount, MOST_PANELS)
    columns, gap, left = (1 if len(chosen) == 1 else 2), 0.62, 0.62
    width = (sheet.width_in - left - RIGHT_IN - gap * (columns - 1)) / columns
    hidden = len(found.one.adapters) - len(chosen)
    note = f" (the {len(chosen)} that differ most of {len(found.one.adapters)})" if hidden else ""
    values, size = pooled(found.values)
    text = f"Every site, one panel per adapter{note}{pooling_note(size)}"
    sheet.text(MARGIN_IN, top, text, size=9.5, weight="bold")
    for number, index in enumerate(chosen):
        row, column = divmod(number, columns)
        axes = sheet.axes(left + column * (width + gap), top + 0.48 + row * (PANEL_IN + 0.62), width, PANEL_IN)
        site_panel(axes, found.one, values[:, :, index], size, scale)
        name = visible(found.one.adapters[index])
        mean = "no values" if np.isnan(amount[index]) else f"mean |difference| {amount[index]:.2g}"
        adapter_heading(axes, index, name, mean)
        if found.part is not None:
            axes.axvline(found.part - 0.5, color=LIGHT.above, lw=1.3)
    return top + 0.48 + (PANEL_IN + 0.62) * -(-len(chosen) // columns)


def _words(found: Difference, title: str, labels: tuple[str, str]) -> str:
    means = nan_mean(found.values, (0, 1))
    parts = [
        f"{name} {'no values' if np.isnan(mean) else format(mean, '+.2g')}"
        for name, mean in zip(found.one.adapters[:8], means, strict=False)
    ]
    return f"{title}. {_extent(found)} {_amount(found)} Mean signed difference: {', '.join(parts)}."
