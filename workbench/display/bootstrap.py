"""Means with bootstrap intervals, the same in Python and in the browser.

Contract: `sweep.js` draws with the same generator, so a table on a page and one in Python agree to rounding. The
generator is mulberry32: its states are a counter, so all of a sample comes at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 2000
SEED = 1
_MOST = 64  # repeats; of more, the interval is the mean's normal one, which is the same by then
_Z = 1.959963984540054


@dataclass(frozen=True)
class Mean:
    """The mean of `n` values, with the interval that holds 95 % of the means of resampled values.

    `low` and `high` are NaN for a single value, which says nothing about its spread.
    """

    value: float
    low: float
    high: float
    n: int


def mean_interval(values: np.ndarray) -> Mean:
    """Return the mean of the finite `values` with its percentile bootstrap interval; NaN where there are too few."""
    given = np.asarray(values, dtype=np.float64)
    given = given[np.isfinite(given)]
    if not len(given):
        return Mean(np.nan, np.nan, np.nan, 0)
    mean = float(given.mean())
    if len(given) == 1:
        return Mean(mean, np.nan, np.nan, 1)
    if len(given) > _MOST:
        half = _Z * float(given.std(ddof=1)) / len(given) ** 0.5
        return Mean(mean, mean - half, mean + half, len(given))
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(given[_resamples(len(given))].mean(1), [tail, 100 - tail])
    return Mean(mean, float(low), float(high), len(given))


@cache
def _resamples(count: int) -> np.ndarray:
    """Return `[resample, value]` indices below `count`."""
    total = RESAMPLES * count
    state = (SEED + np.arange(1, total + 1, dtype=np.uint64) * 0x6D2B79F5).astype(np.uint32)
    return (random_units(state) * count).astype(np.int64).reshape(RESAMPLES, count)


def random_units(state: np.ndarray) -> np.ndarray:
    """Return mulberry32's numbers from 0 up to 1 for uint32 states."""
    with np.errstate(over="ignore"):
        mixed = (state ^ (state >> np.uint32(15))) * (state | np.uint32(1))
        mixed ^= mixed + (mixed ^ (mixed >> np.uint32(7))) * (mixed | np.uint32(61))
    return (mixed ^ (mixed >> np.uint32(14))) / 4294967296.0
