"""What the picture of a comparison is drawn from: a lane per setting, on common adapters; the differences' scale."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from workbench.display.marks import OTHERS_INDEX, source_kinds
from workbench.display.palette import LIGHT
from workbench.display.scales import Scale
from workbench.instrument.comparison import Comparison
from workbench.instrument.trace import Trace, nan_mean

MOST_ROWS, KEPT_ROWS = 10, 8
L1_LIMITS = (0.01, 0.03, 0.1, 0.3, 1.0, 2.0)


@dataclass(frozen=True)
class Lane:
    """One setting, or the null pair, ready to be drawn.

    Attributes:
        label: of the setting.
        trace: its tokens.
        means: float64 `[token, adapter]`, mean over sites on the common adapters.
        l1: float64 `[token]` of the whole comparison: distance to the first; NaN where nothing can be compared.
        shown: the same, NaN where it is no difference of settings.
        divergence: first token that differs from the first's; None if none does.
        is_attributed: the divergence is the setting's own doing.
    """

    label: str
    trace: Trace
    means: np.ndarray
    l1: np.ndarray
    shown: np.ndarray
    divergence: int | None
    is_attributed: bool

    @cached_property
    def leading(self) -> np.ndarray:
        """int64 `[token]`: the adapter with the largest mean; -1 where none has any weight."""
        if not self.means.shape[1]:
            return np.full(len(self.means), -1)
        filled = np.where(np.isnan(self.means), -np.inf, self.means)
        return np.where((filled > 0).any(1), filled.argmax(1), -1)

    @property
    def sources(self) -> np.ndarray:
        """int64 `[token]`: `COMPUTED`, `REUSED` or `NO_SOURCE`."""
        return source_kinds(self.trace)


def lanes_of(comparison: Comparison) -> list[Lane]:
    """Return the settings' lanes, the first one's first."""
    return [
        Lane(
            label, trace, comparison.token_means(label), comparison.l1(label), comparison.shown_difference(label),
            comparison.divergence(label), comparison.is_attributed(label),
        )
        for label, trace in comparison.traces.items()
    ]  # fmt: skip


def null_lane(comparison: Comparison) -> Lane | None:
    """Return the null pair's lane; what it shows is what nobody else may show."""
    floor, null = comparison.floor, comparison.null
    if floor is None or null is None:
        return None
    means = nan_mean(comparison.axes.aligned(comparison.first, null), 1)
    return Lane("null pair", null, means, floor.l1, floor.l1, floor.divergence, False)


def rows_of(comparison: Comparison) -> tuple[int, ...]:
    """Return the adapters that have a row: all, or those that speak most in any setting, then all others in one."""
    count = len(comparison.adapters)
    if count <= MOST_ROWS:
        return tuple(range(count))
    shares = np.nan_to_num([list(comparison.shares(label).values()) for label in comparison.labels])
    kept = sorted(np.argsort(-shares.max(0), kind="stable")[:KEPT_ROWS].tolist())
    return (*kept, OTHERS_INDEX)


def row_values(means: np.ndarray, rows: tuple[int, ...]) -> np.ndarray:
    """Return `[row, token]` of the rows' means; the last row may be the sum of all adapters without one."""
    own = [row for row in rows if row != OTHERS_INDEX]
    found = means[:, own].T
    if OTHERS_INDEX in rows:
        others = np.delete(means, own, axis=1).sum(1)
        found = np.concatenate([found, others[None]])
    return found


def l1_scale(largest: float) -> Scale:
    """Return the scale of differences: from 0 to the first of a few fixed limits that holds `largest`."""
    high = next((one for one in L1_LIMITS if not largest > one), L1_LIMITS[-1])
    name = "difference: L1 distance of scalings, mean over sites"
    # not from white on: a difference that is shown must not look like none
    return Scale(name, LIGHT.scale[1:], 0.0, high, (0, high / 2, high))
