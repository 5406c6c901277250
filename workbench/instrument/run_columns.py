"""The tables of a run: which columns they have, and how rows become Arrow batches.

A table's columns are fixed when its run begins. pyarrow is imported when a run is written or read, not before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import UserError, names, nearest
from workbench.instrument.trace import Trace, nan_mean

if TYPE_CHECKING:
    import pyarrow as pa

_TOKENS_AT_ONCE = 1024  # of a trace's values, while their means are taken
_KINDS = {int: "int64", float: "float64", str: "string", bool: "bool_"}
_WORDS = {int: "whole numbers", float: "numbers", str: "text", bool: "true or false", tuple: "lists of text"}


def _columns(kind: type, spaced: str) -> dict[str, type]:
    return dict.fromkeys(spaced.split(), kind)


# of one forward each; nothing is a running total except what runs, waits and lies in the KV pool
STEPS: dict[str, type] = {
    "step": int, "time_s": float, "duration_ms": float,
    **_columns(int, "rows adapted_rows scaling_rows tokens running waiting drafts_accepted drafts_rejected"),
    **_columns(int, "scalings_computed scalings_reused cached_prompt_tokens cached_scaling_tokens"),
    **_columns(int, "slot_hits slot_loads slot_evictions kv_bytes kv_cached_bytes preemptions"),
}  # fmt: skip
REQUESTS: dict[str, type] = {
    **_columns(str, "request_id adapter mixture policy"), "tgt_non_granular_index": int,
    **_columns(int, "prompt_tokens completion_tokens"), **_columns(str, "finish_reason error"),
    **_columns(float, "submitted_s ttft_s total_s tok_s"),
    **_columns(int, "scalings_computed scalings_reused drafts_accepted drafts_rejected cached_tokens"),
    **_columns(int, "cached_scaling_tokens preemptions"), "edits": tuple, "prompt": str, "text": str,
}  # fmt: skip
TOKENS: dict[str, type] = {
    "request_id": str, "token": int, "position": int, "text": str, "token_id": int, "generated": bool, "source": int,
    "draft": int, "time_s": float, "adapter": str, "share": float,
}  # fmt: skip
TABLES = {"steps": STEPS, "requests": REQUESTS, "tokens": TOKENS}


def arrow() -> Any:
    """Return pyarrow.

    Raises:
        UserError: it is not installed.
    """
    try:
        import pyarrow
    except ModuleNotFoundError:
        raise UserError("runs are kept in Arrow files, and pyarrow is not installed: pip install pyarrow") from None
    return pyarrow


def with_extra(table: str, extra: Mapping[str, type] | None) -> dict[str, type]:
    """Return a table's columns and those a caller adds, each a name and int, float, str or bool.

    Raises:
        UserError: a name that the table has, or another type.
    """
    columns = dict(TABLES[table])
    for name, kind in (extra or {}).items():
        if not isinstance(name, str) or not name.strip() or name in columns:
            raise UserError(f"the {table} of a run cannot have another column {name!r}; they have {names(columns)}")
        if kind not in _KINDS:
            raise UserError(f"column {name!r} of the {table} is of type {kind!r}, expected int, float, str or bool")
        columns[name] = kind
    return columns


def schema(columns: Mapping[str, type]) -> pa.Schema:
    """Return the Arrow schema of a table."""
    pa = arrow()
    return pa.schema([(name, _arrow_type(pa, kind)) for name, kind in columns.items()])


def unknown_column(table: str, columns: Iterable[str], row: Mapping[str, Any]) -> UserError:
    """Return the error of a row with columns that its table lacks."""
    known = list(columns)
    wrong = [name for name in row if name not in known]
    return UserError(
        f"the {table} of this run have no column {names(wrong)}{nearest(wrong[0], known)}; declare a new one when "
        f"the run begins: RunWriter(…, {table[:-1]}_columns={{{str(wrong[0])!r}: float}})"
    )


def batch(table: str, columns: Mapping[str, type], rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """Return rows as one batch; what a row does not say is missing in it.

    Raises:
        UserError: a value does not fit its column.
    """
    pa = arrow()
    arrays = []
    for name, kind in columns.items():
        values = [row.get(name) for row in rows]
        # pyarrow would make 2 of 2.5 and two texts of "ab", so it is given what is of the right type already
        if not all(value is None or type(value) is kind for value in values) or kind in (str, tuple):
            values = [_fitted(table, name, kind, value) for value in values]
        try:
            arrays.append(pa.array(values, _arrow_type(pa, kind)))
        except OverflowError:
            raise UserError(f"column {name!r} of the {table} holds a whole number past 64 bits") from None
    return pa.record_batch(arrays, schema=schema(columns))


def token_batch(request_id: str, trace: Trace) -> pa.RecordBatch:
    """Return a trace's rows of the table of tokens: one per token, with the adapter that leads and its share."""
    pa = arrow()
    leading, share = _leading(trace)
    labels = np.array([*trace.adapters, None], dtype=object)  # -1 is the last: no adapter
    data = {
        "request_id": [request_id] * trace.num_tokens, "token": np.arange(trace.num_tokens),
        "position": trace.positions, "text": list(trace.tokens), "token_id": trace.token_ids,
        "generated": trace.generated, "source": trace.source, "draft": trace.draft.astype(np.int64),
        "time_s": trace.time_s, "adapter": labels[leading].tolist(), "share": share,
    }  # fmt: skip
    arrays = [pa.array(data[name], _arrow_type(pa, kind)) for name, kind in TOKENS.items()]
    return pa.record_batch(arrays, schema=schema(TOKENS))


def _leading(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Return `[token]` int64, the adapter with the largest mean over sites (-1 = none), and that mean (NaN = none)."""
    leading, share = np.full(trace.num_tokens, -1), np.full(trace.num_tokens, np.nan)
    if not trace.values.shape[1] * trace.values.shape[2]:
        return leading, share
    for first in range(0, trace.num_tokens, _TOKENS_AT_ONCE):
        means = nan_mean(np.asarray(trace.values[first : first + _TOKENS_AT_ONCE]), 1)
        filled = np.where(np.isnan(means), -np.inf, means)
        best, has_values = filled.argmax(1), ~np.isnan(means).all(1)
        part = slice(first, first + len(means))
        leading[part] = np.where(has_values, best, -1)
        share[part] = np.where(has_values, filled.max(1), np.nan)
    return leading, share


def _arrow_type(pa: Any, kind: type) -> Any:
    return pa.list_(pa.string()) if kind is tuple else getattr(pa, _KINDS[kind])()


def _fitted(table: str, name: str, kind: type, value: Any) -> Any:
    """Return a value in its column's type, where that is only a matter of form."""
    if value is None:
        return None
    if kind is str and isinstance(value, str):
        # half of a surrogate pair is no text that any file can hold
        return value.encode("utf-8", "backslashreplace").decode()
    if kind is tuple and isinstance(value, list | tuple):
        return [_fitted(table, name, str, each) for each in value]
    if kind is bool and isinstance(value, bool | np.bool_):
        return bool(value)
    is_number = isinstance(value, int | float | np.number)
    if is_number and (kind is float or (kind is int and np.isfinite(value) and int(value) == value)):
        return kind(value)
    raise UserError(f"column {name!r} of the {table} takes {_WORDS[kind]}, not {value!r}")
