"""The tables that figures of runs are drawn from: a DataFrame, a run, or a recorder, checked for their columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import UserError, names, nearest

if TYPE_CHECKING:
    import pandas


def table(source: Any, kind: str, columns: Sequence[str], record: str) -> pandas.DataFrame:
    """Return the "steps" or "requests" of a run or recorder, or the DataFrame itself.

    Args:
        source: a DataFrame, or something with the table as an attribute or method: a run, a recorder.
        kind: "steps" or "requests".
        columns: that the figure needs.
        record: what to record so that there are any.

    Raises:
        UserError: it is none of these, lacks a column, or has no row.
    """
    import pandas as pd

    found = source if isinstance(source, pd.DataFrame) else getattr(source, kind, None)
    if callable(found) and not isinstance(found, pd.DataFrame):
        found = found()
    if not isinstance(found, pd.DataFrame):
        known = f"a DataFrame, a run (open_run(path)) or a recorder (rec.{kind}())"
        raise UserError(f"this figure is drawn from a table of {kind}: {known}, not {type(source).__name__}")
    lacking = [column for column in columns if column not in found.columns]
    if lacking:
        hint = nearest(lacking[0], map(str, found.columns))
        recorded = f"which engine.record({record!r}) makes"
        raise UserError(f"these {kind} lack the columns {names(lacking)}, {recorded}{hint}")
    if not len(found):
        raise UserError(f"there are no {kind} to draw: none was recorded")
    return found


def numbers(frame: pandas.DataFrame, column: str) -> np.ndarray:
    """Return a column as float64; what is missing is NaN.

    Raises:
        UserError: it holds something else.
    """
    try:
        return frame[column].to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError):
        raise UserError(f"column {column!r} must hold numbers, not {frame[column].dtype} values") from None


def in_time(frame: pandas.DataFrame) -> tuple[pandas.DataFrame, str]:
    """Return the steps that have a time, in its order, and a note on those that have none.

    Raises:
        UserError: none has.
    """
    time_s = numbers(frame, "time_s")
    held = np.isfinite(time_s)
    if not held.any():
        raise UserError("none of these steps has a time in its column 'time_s'")
    order = np.flatnonzero(held)[np.argsort(time_s[held], kind="stable")]
    left = len(frame) - len(order)
    return frame.iloc[order], f" {left} steps have no time and are left out." if left else ""


def run_facts(source: Any) -> list[str]:
    """Return what a run says of itself, as one line; nothing for a table."""
    meta = getattr(source, "meta", None)
    if not isinstance(meta, dict):
        return []
    status = getattr(source, "status", None)
    facts = {"Run": getattr(source, "name", None), "Status": status if status != "complete" else None}
    facts |= {label: meta.get(key) for key, label in (("base", "Base"), ("dtype", "Dtype"), ("device", "Device"))}
    return [" · ".join(f"{label}: {value}" for label, value in facts.items() if isinstance(value, str) and value)]
