"""What a trace must be: shapes, dtypes and contents of its fields, each refusal naming the field and the axis."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import UserError, names
from workbench.instrument.recorded import extras_of, require_unicode

if TYPE_CHECKING:
    from workbench.instrument.trace import Trace

PER_TOKEN = {
    "token_ids": np.dtype(np.int64),
    "positions": np.dtype(np.int64),
    "generated": np.dtype(bool),
    "source": np.dtype(np.int64),
    "draft": np.dtype(np.int8),
    "time_s": np.dtype(np.float64),
}
VALUE_DTYPES = ("float32", "float16")
_MAPPED_ROWS = 16  # of the rows without scalings, how many are looked at in a memory-mapped file
_EXPECTED_TOKENS = "tokens must be a slice, a mask or integer indices"
FLOAT16_NOTE = "values are float16: scalings between 0 and 1 are rounded by up to 3e-4"


def checked(trace: Trace) -> dict[str, Any]:
    """Return every field of `trace` in its canonical type, or raise the UserError that says what is wrong."""
    values = np.asarray(trace.values)
    if values.ndim != 3:
        raise UserError(f"values must have 3 axes [token, site, adapter]; these have shape {list(values.shape)}")
    if values.dtype.name not in VALUE_DTYPES:
        raise UserError(f"values must be float32 or float16, not {values.dtype}; convert them with .astype('float32')")
    fields: dict[str, Any] = {"values": values}
    if bool(trace.sites) != bool(trace.adapters):
        has, lacks = ("sites", "adapters") if trace.sites else ("adapters", "sites")
        raise UserError(f"a trace has sites and adapters, or neither (no scalings); this one has {has} but no {lacks}")
    for axis, (label, field) in enumerate([("token", "tokens"), ("site", "sites"), ("adapter", "adapters")]):
        fields[field] = _labels(field, label, getattr(trace, field), values.shape[axis], unique=label != "token")
    for field, dtype in PER_TOKEN.items():
        fields[field] = _per_token(field, getattr(trace, field), dtype, len(fields["tokens"]))
    _check_contents(fields)
    fields["metadata"] = _metadata(trace.metadata)
    fields["extras"] = extras_of(trace.extras, len(fields["tokens"]))
    if values.dtype == np.float16:
        fields["metadata"].setdefault("rounding", FLOAT16_NOTE)
    return fields


def is_mapped(values: np.ndarray) -> bool:
    """Whether an array lies in a file and is read when it is used."""
    while values is not None and not isinstance(values, np.memmap):
        values = getattr(values, "base", None)
    return values is not None


def token_index(tokens: Any, num_tokens: int) -> np.ndarray:
    """Return increasing token indices for a slice, a mask or a list of indices (None = all).

    Raises:
        UserError: a mask of another length, an index out of range or out of order, or nothing selected.
    """
    if tokens is None:
        tokens = slice(None)
    if isinstance(tokens, slice):
        try:
            index = np.arange(num_tokens)[tokens]
        except (TypeError, ValueError) as error:
            raise UserError(f"tokens={tokens!r} is no slice of tokens: {error}") from None
    else:
        try:
            index = np.atleast_1d(np.asarray(tokens))
        except (TypeError, ValueError, OverflowError):
            raise UserError(f"{_EXPECTED_TOKENS}, not {tokens!r}") from None
        if index.dtype == bool:
            if index.shape != (num_tokens,):
                raise UserError(f"the token mask has shape {list(index.shape)}; this trace has {num_tokens} tokens")
            index = np.flatnonzero(index)
        elif index.size and index.dtype.kind not in "iu":
            raise UserError(f"{_EXPECTED_TOKENS}, not {tokens!r}")
        if index.ndim > 1:
            raise UserError(f"{_EXPECTED_TOKENS}, in one list and not {index.ndim} levels of lists")
        outside = index[(index < -num_tokens) | (index >= num_tokens)]
        if outside.size:
            raise UserError(f"token index {outside[0]} is out of range; this trace has {num_tokens} tokens")
        index = np.where(index < 0, index + num_tokens, index).astype(np.int64)
    if not index.size:
        raise UserError(f"tokens={tokens!r} selects no token of the {num_tokens} in this trace")
    if (np.diff(index) <= 0).any():
        raise UserError("tokens must be selected in increasing order, each once: a trace keeps the order of the text")
    return index


def as_slice(index: np.ndarray) -> slice | np.ndarray:
    """Return increasing indices without a gap as a slice, which copies nothing; any others as they are."""
    if len(index) and (np.diff(index) == 1).all():
        return slice(int(index[0]), int(index[-1]) + 1)
    return index


def _labels(field: str, axis: str, labels: Any, length: int, unique: bool) -> tuple[str, ...]:
    """Return the labels of one axis as a tuple of `length` strings."""
    if isinstance(labels, str) or not all(isinstance(label, str) for label in labels):
        raise UserError(f"{field} must be a sequence of strings, one per {axis}")
    labels = tuple(labels)
    require_unicode(field, labels)
    if len(labels) != length:
        raise UserError(f"{field} has {len(labels)} names, but the {axis} axis of values has length {length}")
    if not labels and axis == "token":
        raise UserError("a trace needs at least one token; the token axis is empty")
    if unique and len(set(labels)) < len(labels):
        repeated = sorted({label for label in labels if labels.count(label) > 1})
        raise UserError(f"{field} must differ from each other; repeated: {names(repeated)}")
    return labels


def _per_token(field: str, array: Any, dtype: np.dtype, length: int) -> np.ndarray:
    """Return one value per token in `dtype`; narrower or wider numbers of the same kind are converted."""
    array = np.asarray(array)
    if array.shape != (length,):
        raise UserError(f"{field} has shape {list(array.shape)}, but the token axis of values has length {length}")
    kinds = {"i": "iu", "b": "b", "f": "fiu"}[dtype.kind]
    if array.dtype.kind not in kinds:
        raise UserError(f"{field} must be {dtype}, not {array.dtype}")
    converted = array.astype(dtype)
    if dtype.kind == "i" and (converted != array).any():
        raise UserError(f"{field} holds numbers that do not fit {dtype}")
    return converted


def _check_contents(fields: dict[str, Any]) -> None:
    """Check what the shapes cannot: order, ranges, and that a token without a source has no scalings."""
    positions, source = fields["positions"], fields["source"]
    if (positions < 0).any() or (np.diff(positions) <= 0).any():
        raise UserError("positions must be non-negative and increase along the token axis")
    if (fields["token_ids"] < 0).any():
        raise UserError(f"token_ids must not be negative; found {int(fields['token_ids'].min())}")
    wrong = np.flatnonzero((source < -1) | (source > positions))
    if wrong.size:
        at = wrong[0]
        expected = f"expected -1 (no scalings) or a position up to its own, {positions[at]}"
        raise UserError(f"source of token {at} is {source[at]}; {expected}")
    unused = np.flatnonzero(source == -1)
    if is_mapped(fields["values"]):
        # opening a file must not read it whole
        unused = unused[:_MAPPED_ROWS]
    filled = unused[~np.isnan(fields["values"][unused]).all((1, 2))]
    if filled.size:
        raise UserError(f"token {filled[0]} has scalings, but its source is -1; give the position they came from")
    if not np.isin(fields["draft"], (-1, 0, 1)).all():
        raise UserError("draft must be 1 (accepted), 0 (rejected) or -1 (not drafted) for every token")
    if not (fields["time_s"] >= 0).all() or np.isinf(fields["time_s"]).any():
        raise UserError("time_s must be finite seconds, 0 or more, for every token")


def _metadata(metadata: Any) -> dict[str, Any]:
    """Return a copy of the metadata as JSON would give it back (tuples become lists)."""
    if not isinstance(metadata, dict):
        raise UserError(f"metadata must be a dict, not {type(metadata).__name__}")
    copy = {}
    for key, value in metadata.items():
        if not isinstance(key, str):
            raise UserError(f"metadata keys must be strings; got {key!r}")
        try:
            copy[key] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UserError(f"metadata[{key!r}] cannot be stored as JSON: {error}") from None
    return copy
