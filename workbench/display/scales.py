"""The scales of heatmaps: what a colour means, fixed before the data is seen.

Scalings lie on one scale from 0 to 1 in every panel of every figure; differences on one symmetric about 0; norms on
whole decades. What lies beyond an end has a colour of its own and an arrow at the bar; what is NaN shows a hatch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize

from workbench.display.palette import DIFFERENCE, LIGHT
from workbench.display.sheet import Sheet, label, ticks
from workbench.errors import UserError

DIFFERENCE_LIMITS = (0.01, 0.03, 0.1, 0.3, 1.0)
DIGITS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Scale:
    """What colours stand for.

    Attributes:
        name: of the quantity, with its unit.
        colours: evenly spaced stops from the low end to the high one.
        low, high: the ends.
        ticks: where the bar is labelled.
        is_log: colours are spaced by the logarithm.
        above, below: the colours beyond the ends.
    """

    name: str
    colours: tuple[str, ...]
    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False
    above: str = LIGHT.above
    below: str = LIGHT.below

    @property
    def norm(self) -> Normalize:
        return LogNorm(self.low, self.high) if self.is_log else Normalize(self.low, self.high)

    @property
    def colour_map(self) -> LinearSegmentedColormap:
        """The colours; NaN stays transparent so that the hatch behind it shows."""
        # an odd number of steps: the middle of a symmetric scale has a step of its own
        made = LinearSegmentedColormap.from_list(self.name, self.colours, N=257)
        return made.with_extremes(bad=(0, 0, 0, 0), over=self.above, under=self.below)

    def colour_of(self, value: float) -> str:
        """Return the colour of one value as `#rrggbb`."""
        from matplotlib.colors import to_hex

        return to_hex(self.colour_map(self.norm(value)))

    def tick_text(self, value: float) -> str:
        """Return how the bar spells one of its ticks."""
        if self.is_log:
            power = round(math.log10(value))
            return f"10{str(power).translate(DIGITS)}" if abs(power) > 2 else f"{value:g}"
        text = f"{value:+g}" if self.low < 0 and value else f"{value:g}"
        return text.replace("-", "−")

    def bar(self, sheet: Sheet, box: tuple[float, float, float], values: np.ndarray) -> None:
        """Draw the scale at `(left, top, width)`, with an arrow at an end only where some of `values` lie beyond it."""
        left, top, width = box
        axes = sheet.axes(left, top, width, 0.12)
        above, below = bool((values > self.high).any()), bool((values < self.low).any())
        extend = {(True, True): "both", (True, False): "max", (False, True): "min"}.get((above, below), "neither")
        mappable = ScalarMappable(self.norm, self.colour_map)
        bar = sheet.figure.colorbar(mappable, cax=axes, orientation="horizontal", extend=extend)
        bar.ax.minorticks_off()
        ticks(bar.ax, "x", self.ticks, [self.tick_text(value) for value in self.ticks], 7)
        bar.ax.tick_params(length=2, pad=1.5)
        bar.outline.set_linewidth(0.5)
        label(bar.ax, x=self.name, size=7.4)


SCALINGS = Scale("scaling", LIGHT.scale, 0.0, 1.0, (0, 0.25, 0.5, 0.75, 1))
PROBABILITIES = Scale("probability", LIGHT.scale, 0.0, 1.0, (0, 0.25, 0.5, 0.75, 1))


def difference_scale(largest: float, limit: float | None = None, name: str = "difference of scalings") -> Scale:
    """Return a scale symmetric about 0: up to `limit`, or to the first of a few fixed limits that holds `largest`.

    Raises:
        UserError: a limit that is not above 0.
    """
    if limit is None:
        limit = next((one for one in DIFFERENCE_LIMITS if not largest > one), DIFFERENCE_LIMITS[-1])
    if not limit > 0 or not math.isfinite(limit):
        raise UserError(f"limit={limit!r} is no end of a scale; give the largest difference to show, such as 0.1")
    return Scale(name, DIFFERENCE, -limit, limit, (-limit, -limit / 2, 0, limit / 2, limit))


def decade_scale(name: str, decades: Sequence[int]) -> Scale:
    """Return a logarithmic scale from 10**decades[0] to 10**decades[1].

    Raises:
        UserError: not two whole numbers, the smaller one first.
    """
    try:
        low, high = (int(one) for one in decades)
    except (TypeError, ValueError):
        raise UserError(f"decades must be two whole numbers such as (-4, 0), not {decades!r}") from None
    if not low < high or (low, high) != tuple(decades) or high - low > 30:
        raise UserError(f"decades must be two whole numbers, the smaller one first, such as (-4, 0), not {decades!r}")
    step = -(-(high - low) // 6)
    marks = tuple(10.0**power for power in range(low, high + 1, step))
    return Scale(name, LIGHT.scale, 10.0**low, 10.0**high, marks, is_log=True, below=LIGHT.page)


def decades_of(values: np.ndarray) -> tuple[int, int]:
    """Return the whole decades that hold every positive finite value; `(0, 1)` when there is none."""
    held = values[np.isfinite(values) & (values > 0)]
    if not held.size:
        return 0, 1
    low, high = math.floor(math.log10(held.min())), math.ceil(math.log10(held.max()))
    return max(low, high - 30), max(high, low + 1)
