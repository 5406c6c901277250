"""Spearman's rank correlation of adapters: do two settings put them in the same order, whatever the amounts?"""

from __future__ import annotations

import numpy as np

from workbench.instrument.trace import nan_mean


def rank_correlation(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the correlation of the adapters' ranks, mean over sites: float64 `[token]`.

    Ties share their mean rank. NaN where a value is missing at every site, or no site has two different values in both.

    Args:
        one, other: float `[token, site, adapter]`.
    """
    ranks, others = (_ranks(values) for values in (one, other))
    middle = (one.shape[2] - 1) / 2
    ranks, others = ranks - middle, others - middle
    spread = np.sqrt((ranks**2).sum(2) * (others**2).sum(2))
    missing = np.isnan(one).any(2) | np.isnan(other).any(2) | (spread == 0)
    found = np.divide((ranks * others).sum(2), spread, out=np.full(spread.shape, np.nan), where=~missing)
    return nan_mean(found, 1)


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return each adapter's rank from 0 on, ties sharing the mean of theirs, float64 of the same shape."""
    found = np.zeros(values.shape)
    for column in range(values.shape[2]):
        mine = values[:, :, column, None]
        found[:, :, column] = (values < mine).sum(2) + ((values == mine).sum(2) - 1) / 2
    return found
