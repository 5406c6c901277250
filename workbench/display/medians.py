"""Medians with the intervals that a few repeats allow, the same in Python and in the browser.

Contract: an interval's ends are two of the values, so that it holds the median of whatever they were drawn from at
least as often as it says, however that is distributed; `sweep_data.js` has the same rule. With fewer than `FEW` values
even the least and the largest do not reach 95 %: then the interval is their range, and is called so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
FEW = 6  # values below which their range holds the median less often than in 95 of 100 cases
_MOST = 64  # values from which the binomial distribution is as good as normal
_Z = 1.959963984540054


@dataclass(frozen=True)
class Median:
    """The median of `n` values with an interval; `low` and `high` are NaN for one value, which says no spread."""

    value: float
    low: float
    high: float
    n: int


def median_interval(values: np.ndarray) -> Median:
    """Return the median of the finite `values` with its interval; NaN where there are too few."""
    given = np.asarray(values, dtype=np.float64)
    given = np.sort(given[np.isfinite(given)])
    count = len(given)
    if not count:
        return Median(np.nan, np.nan, np.nan, 0)
    if count == 1:
        return Median(float(given[0]), np.nan, np.nan, 1)
    outside = num_outside(count)
    return Median(float(np.median(given)), float(given[outside]), float(given[count - 1 - outside]), count)


def num_outside(count: int, confidence: float = CONFIDENCE) -> int:
    """Return how many of `count` sorted values lie outside the interval of their median, on each side."""
    if count > _MOST and confidence == CONFIDENCE:
        return max(0, math.floor((count - _Z * math.sqrt(count) - 1) / 2))
    # fewer than k + 1 values lie below the median with the chance of so few heads
    tail, outside = 0.0, -1
    while outside < (count - 1) // 2:
        tail += math.comb(count, outside + 1) / 2**count
        if 2 * tail > 1 - confidence:
            break
        outside += 1
    return max(outside, 0)


def interval_words(counts: Iterable[int], what: str = "repeats") -> str:
    """Return what the intervals beside medians of so many values each are called; "" where no median has one."""
    several = sorted(set(counts) - {0, 1})
    few, many = [count for count in several if count < FEW], [count for count in several if count >= FEW]
    if not several:
        return ""
    span = f"{few[0]}" if len(few) == 1 else f"{few[0]} to {few[-1]}" if few else ""
    if few and many:
        return f"95 % interval, or the range of {what} where there are fewer than {FEW}"
    return f"range of {span} {what}" if few else "95 % interval"
