"""Medians with intervals: what a handful of repeats says, and what it does not.

Contract: everything is a function of the numbers and a seed, so a report can be made again from what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
_RESAMPLES = 4000

Statistic = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Estimate:
    """A statistic of `n` values with its percentile bootstrap interval `low` to `high`.

    With few values the interval is no wider than the values themselves: five repeats cannot show a rare sixth.
    """

    value: float
    low: float
    high: float
    n: int

    @property
    def width(self) -> float:
        """Length of the interval."""
        return self.high - self.low


def median(samples: np.ndarray) -> np.ndarray:
    """Return medians over the last axis."""
    return np.median(samples, axis=-1)


def estimate(
    values: Sequence[float], statistic: Statistic = median, *, confidence: float = CONFIDENCE, seed: int = 0
) -> Estimate:
    """Return a statistic of `values` with its bootstrap interval.

    Args:
        values: at least one finite number.
        statistic: from an array `[..., n]` to one `[...]`; the median by default.
        confidence: between 0 and 1.
        seed: of the resampling.

    Raises:
        ValueError: no values, one that is not finite, or a confidence that means nothing.
    """
    given = _checked(values, confidence)
    drawn = given[_resamples(len(given), seed)]
    low, high = _percentiles(statistic(drawn), confidence)
    return Estimate(float(statistic(given)), low, high, len(given))


def ratio(
    values: Sequence[float], baseline: Sequence[float], *, confidence: float = CONFIDENCE, seed: int = 0
) -> Estimate:
    """Return median(values) / median(baseline) with its bootstrap interval.

    Both must hold the same rounds in the same order: rounds are resampled together, so that what slowed a whole round
    does not widen the interval.

    Raises:
        ValueError: as `estimate`, different lengths, or a baseline that is not positive.
    """
    top, bottom = _checked(values, confidence), _checked(baseline, confidence)
    if len(top) != len(bottom):
        raise ValueError(f"ratio: {len(top)} values against {len(bottom)} of the baseline; give both the same rounds")
    if not (bottom > 0).all():
        raise ValueError(f"ratio: the baseline holds {bottom.min():g}, expected numbers above 0")
    drawn = _resamples(len(top), seed)
    low, high = _percentiles(median(top[drawn]) / median(bottom[drawn]), confidence)
    return Estimate(float(median(top) / median(bottom)), low, high, len(top))


def _checked(values: Sequence[float], confidence: float) -> np.ndarray:
    given = np.asarray(values, dtype=np.float64)
    if given.ndim != 1 or not len(given):
        raise ValueError(f"expected a list of at least one number, not one of shape {list(given.shape)}")
    if not np.isfinite(given).all():
        raise ValueError(f"expected finite numbers, not {given[~np.isfinite(given)][0]}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, not be {confidence}")
    return given


def _resamples(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, count, (_RESAMPLES, count))


def _percentiles(drawn: np.ndarray, confidence: float) -> tuple[float, float]:
    tail = 50 * (1 - confidence)
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return float(low), float(high)
