"""Which adapters are drawn by themselves where there are too many to tell apart; the rest are drawn as one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench.display.labels import visible
from workbench.display.marks import OTHERS_INDEX, key


def leading_adapters(shares: np.ndarray, most: int) -> tuple[int, ...]:
    """Return the adapters with the largest shares, at most `most`, in the trace's order."""
    order = np.argsort(-np.nan_to_num(np.asarray(shares, np.float64), nan=-np.inf), kind="stable")
    return tuple(sorted(order[:most].tolist()))


def with_others(
    values: np.ndarray, shares: np.ndarray, most: int, largest: bool = False
) -> tuple[tuple[int, ...], np.ndarray]:
    """Return the adapters drawn, at most `most`, the last of them `OTHERS_INDEX` if there are more, and their values.

    Args:
        values: `[..., adapter]`; the others' are added up, NaN counting as nothing where any of them has a value.
        shares: `[adapter]`, by which the leading ones are chosen.
        most: how many are told apart.
        largest: take the others' largest value, not their sum.
    """
    count = values.shape[-1]
    if count <= most:
        return tuple(range(count)), values
    shown = leading_adapters(shares, most - 1)
    others = values[..., [i for i in range(count) if i not in set(shown)]]
    missing = np.isnan(others).all(-1)
    joined = np.where(np.isnan(others), -np.inf, others).max(-1) if largest else np.nansum(others, -1)
    rest = np.where(missing, np.nan, joined)
    return (*shown, OTHERS_INDEX), np.concatenate([values[..., list(shown)], rest[..., None]], -1)


def row_names(
    shown: Sequence[int], adapters: Sequence[str], others: str = "sum", keys: Sequence[str] | None = None
) -> list[str]:
    """Return what each row is called: `A python`, and `… 180 others (sum)` for the last one of many.

    Args:
        shown: the adapters drawn.
        adapters: all their names.
        others: what is drawn of the others.
        keys: each adapter's letter, if it is not that of its place.
    """
    left = len(adapters) - len(shown) + 1
    letters = [key(index) for index in range(len(adapters))] if keys is None else keys
    return [
        f"… {left} others ({others})" if index == OTHERS_INDEX else f"{letters[index]} {visible(adapters[index])}"
        for index in shown
    ]
