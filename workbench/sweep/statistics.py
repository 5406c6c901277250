"""Medians with intervals: what a handful of repeats says, and what it does not; and means over texts.

Contract: everything is a function of the numbers and a seed, so a report can be made again from what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from workbench.display.medians import CONFIDENCE, FEW, num_outside

FEW_TEXTS = 8  # distinct texts below which the interval of a mean over them is no better than a guess
_RESAMPLES = 4000


@dataclass(frozen=True)
class Estimate:
    """A statistic of `n` values with its interval `low` to `high`.

    Of fewer than 6 values the interval is their range: five repeats cannot show a rare sixth.
    """

    value: float
    low: float
    high: float
    n: int
    is_paired: bool = True

    @property
    def width(self) -> float:
        """Length of the interval."""
        return self.high - self.low

    @property
    def is_range(self) -> bool:
        """Whether the values were too few for a 95 % interval of their median."""
        return self.n < FEW


def median(samples: np.ndarray) -> np.ndarray:
    """Return medians over the last axis."""
    return np.median(samples, axis=-1)


def estimate(values: Sequence[float], *, confidence: float = CONFIDENCE) -> Estimate:
    """Return the median of `values` with its interval: two of the sorted values, the outermost of fewer than 6.

    Args:
        values: at least one finite number.
        confidence: between 0 and 1.

    Raises:
        ValueError: no values, one that is not finite, or a confidence that means nothing.
    """
    given = np.sort(_checked(values, confidence))
    outside = num_outside(len(given), confidence)
    return Estimate(float(median(given)), float(given[outside]), float(given[-1 - outside]), len(given))


def mean_over(
    values: Sequence[float], sources: Sequence[Sequence[Hashable]], *, confidence: float = CONFIDENCE, seed: int = 0
) -> Estimate:
    """Return the mean of `values` with a bootstrap interval that resamples what they were made from.

    Values of one source rise and fall together, so sources are drawn, not values: a value counts as often as the
    product of its sources was drawn. The interval is no narrower than that of independent values, which is all there
    is where only one source was given.

    Args:
        values: at least one finite number.
        sources: of each value, what it was made from: one text, or the two of a passage that switches.
        confidence: between 0 and 1.
        seed: of the resampling.

    Raises:
        ValueError: as `estimate`, or not a source for each value.
    """
    given = _checked(values, confidence)
    if len(sources) != len(given) or not all(len(each) for each in sources):
        raise ValueError(f"mean_over: {len(given)} values need the sources of each, not {len(sources)} lists of them")
    low, high = _percentiles(_counts(len(given), seed) @ given / len(given), _widened(confidence, len(given)))
    place = {source: number for number, source in enumerate(dict.fromkeys(one for each in sources for one in each))}
    counts = np.ascontiguousarray(_counts(len(place), seed).T)
    weights = np.stack([math.prod(counts[place[one]] for one in each) for each in sources])
    total = weights.sum(0)
    # a resample of one text alone has no passage that goes from one to another
    if (total > 0).any():
        means = (given @ weights)[total > 0] / total[total > 0]
        by_source = _percentiles(means, _widened(confidence, len(place)))
        low, high = min(low, by_source[0]), max(high, by_source[1])
    return Estimate(float(given.mean()), low, high, len(given))


def ratio(
    values: Sequence[float], baseline: Sequence[float], *, confidence: float = CONFIDENCE, seed: int = 0
) -> Estimate:
    """Return median(values) / median(baseline) with its interval.

    Both must hold the same rounds in the same order: rounds are resampled together, so that what slowed a whole round
    does not widen the interval. Of fewer than 6 rounds it is the range of the rounds' own ratios.

    Raises:
        ValueError: as `estimate`, different lengths, or a baseline that is not positive.
    """
    top, bottom = _ratio_of(values, baseline, confidence)
    if len(top) != len(bottom):
        raise ValueError(f"ratio: {len(top)} values against {len(bottom)} of the baseline; give both the same rounds")
    if len(top) < FEW:
        low, high = float((top / bottom).min()), float((top / bottom).max())
    else:
        drawn = _resamples(len(top), seed)
        low, high = _percentiles(median(top[drawn]) / median(bottom[drawn]), confidence)
    return Estimate(float(median(top) / median(bottom)), low, high, len(top))


def ratio_apart(
    values: Sequence[float], baseline: Sequence[float], *, confidence: float = CONFIDENCE, seed: int = 0
) -> Estimate:
    """Return median(values) / median(baseline) of runs that share no rounds: each is resampled alone.

    Of fewer than 6 values on either side the interval goes from the smallest quotient to the largest.

    Raises:
        ValueError: as `estimate`, or a baseline that is not positive.
    """
    top, bottom = _ratio_of(values, baseline, confidence)
    count = min(len(top), len(bottom))
    if count < FEW:
        low, high = float(top.min() / bottom.max()), float(top.max() / bottom.min())
    else:
        mine, theirs = _resamples(len(top), seed), _resamples(len(bottom), seed + 1)
        low, high = _percentiles(median(top[mine]) / median(bottom[theirs]), confidence)
    return Estimate(float(median(top) / median(bottom)), low, high, count, is_paired=False)


def _ratio_of(
    values: Sequence[float], baseline: Sequence[float], confidence: float
) -> tuple[np.ndarray, np.ndarray]:
    top, bottom = _checked(values, confidence), _checked(baseline, confidence)
    if not (bottom > 0).all():
        raise ValueError(f"ratio: the baseline holds {bottom.min():g}, expected numbers above 0")
    return top, bottom


def _checked(values: Sequence[float], confidence: float) -> np.ndarray:
    given = np.asarray(values, dtype=np.float64)
    if given.ndim != 1 or not len(given):
        raise ValueError(f"expected a list of at least one number, not one of shape {list(given.shape)}")
    if not np.isfinite(given).all():
        raise ValueError(f"expected finite numbers, not {given[~np.isfinite(given)][0]}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, not be {confidence}")
    return given


def _counts(count: int, seed: int) -> np.ndarray:
    """Return `[resample, value]`: how often each of `count` is drawn."""
    drawn = _resamples(count, seed) + count * np.arange(_RESAMPLES)[:, None]
    return np.bincount(drawn.ravel(), minlength=_RESAMPLES * count).reshape(_RESAMPLES, count).astype(np.float64)


def _widened(confidence: float, count: int) -> float:
    """Return the confidence at which percentiles of a resampled mean of `count` values cover it as often as asked.

    Resampled means spread less than the mean does, by sqrt((n - 1) / n), and as if the spread were known: what a t
    interval allows for, percentiles farther out do too.
    """
    if count < 2:
        return confidence
    normal, free = NormalDist(), count - 1
    z = normal.inv_cdf(0.5 + confidence / 2)
    # Student's quantile by its expansion around the normal one
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    t = z + sum(term / free**power for power, term in enumerate(terms, 1))
    return 2 * normal.cdf(t * math.sqrt(count / free)) - 1


def _resamples(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, count, (_RESAMPLES, count))


def _percentiles(drawn: np.ndarray, confidence: float) -> tuple[float, float]:
    tail = 50 * (1 - confidence)
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return float(low), float(high)
