"""Recorded: one measured quantity of a request, token by token, with its axes, labels, unit and meaning.

The first axis is always the token; the others carry labels. NaN (-1 where the values are whole numbers) marks what was
not recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench.errors import UserError, names

DTYPES = ("float32", "float64", "float16", "int64")


@dataclass(frozen=True, eq=False, repr=False)
class Recorded:
    """Values of one quantity.

    Attributes:
        values: `[token, ...]`, float or int64; NaN or -1 where nothing was recorded.
        axes: what each axis is, "token" first: ("token",), ("token", "layer"), ("token", "site", "adapter").
        labels: axis -> its labels, for every axis after the first.
        unit: "nats", "ratio", "norm", "token id".
        meaning: what one value is, in one sentence.

    Raises:
        UserError: an axis and its labels do not fit the values; the message names them.
    """

    values: np.ndarray
    axes: tuple[str, ...]
    labels: Mapping[str, tuple[str, ...]]
    unit: str
    meaning: str

    def __post_init__(self) -> None:
        values, axes = np.asarray(self.values), _texts("axes", self.axes)
        if values.dtype.name not in DTYPES:
            raise UserError(f"recorded values must be one of {names(DTYPES)}, not {values.dtype}")
        if not axes or axes[0] != "token" or len(set(axes)) != len(axes):
            raise UserError(f"axes must differ and begin with 'token', not {names(axes)}")
        if values.ndim != len(axes):
            raise UserError(f"values of shape {list(values.shape)} need {values.ndim} axes; {len(axes)} are named")
        for field in ("unit", "meaning"):
            if not isinstance(getattr(self, field), str):
                raise UserError(f"{field} must be text, not {getattr(self, field)!r}")
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "labels", _labels(self.labels, axes, values.shape))

    def __repr__(self) -> str:
        shape = " × ".join(f"{length} {axis}s" for length, axis in zip(self.values.shape, self.axes, strict=True))
        return f"Recorded({shape}, {self.unit}: {self.meaning})"

    @property
    def is_missing(self) -> np.ndarray:
        """Where nothing was recorded: bool, shaped as `values`."""
        return self.values == -1 if self.values.dtype.kind == "i" else np.isnan(self.values)

    def at(self, rows: slice | np.ndarray) -> Recorded:
        """Return the part with these token rows."""
        return replace(self, values=self.values[rows])

    def keep(self, axis: str, wanted: Sequence[str]) -> Recorded | None:
        """Return the part with those of the `wanted` labels that the axis has, in their order; None if it has none.

        What lacks the axis is returned as it is.
        """
        if axis not in self.axes:
            return self
        index = {label: place for place, label in enumerate(self.labels[axis])}
        chosen = [label for label in wanted if label in index]
        if not chosen:
            return None
        values = self.values
        if tuple(chosen) != self.labels[axis]:
            values = np.take(values, [index[label] for label in chosen], self.axes.index(axis))
        return replace(self, values=values, labels={**self.labels, axis: tuple(chosen)})

    def facts(self) -> dict[str, Any]:
        """Return everything but the values, as JSON has it."""
        labels = {axis: list(each) for axis, each in self.labels.items()}
        return {"axes": list(self.axes), "labels": labels, "unit": self.unit, "meaning": self.meaning}


def extras_of(given: Any, num_tokens: int) -> dict[str, Recorded]:
    """Return what was recorded beside the scalings, checked against the length of the trace.

    Raises:
        UserError: a name that is no text, a value that is no `Recorded`, or one of another length.
    """
    if not isinstance(given, Mapping):
        raise UserError(f"extras must map names to Recorded values, not be {type(given).__name__}")
    for name, recorded in given.items():
        if not isinstance(name, str) or not name:
            raise UserError(f"the names of extras must be text; got {name!r}")
        if not isinstance(recorded, Recorded):
            raise UserError(f"extras[{name!r}] must be a Recorded, not {type(recorded).__name__}")
        if len(recorded.values) != num_tokens:
            raise UserError(f"extras[{name!r}] has {len(recorded.values)} tokens, but the trace has {num_tokens}")
    return dict(given)


def require_unicode(field: str, texts: Sequence[str]) -> None:
    """Raise unless every text can be written to a file."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        broken = [text for text in texts if any("\ud800" <= char <= "\udfff" for char in text)]
        raise UserError(f"{field} must be valid Unicode; {names(broken, 2)} holds half of a surrogate pair") from None


def _labels(given: Any, axes: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, tuple[str, ...]]:
    if not isinstance(given, Mapping) or set(given) != set(axes[1:]):
        has = names(list(given)) if isinstance(given, Mapping) else repr(given)
        raise UserError(f"labels must name the axes {names(axes[1:])}, one entry each; they name {has}")
    labels = {}
    for axis, length in zip(axes[1:], shape[1:], strict=True):
        labels[axis] = _texts(f"labels[{axis!r}]", given[axis])
        if len(labels[axis]) != length:
            raise UserError(f"labels[{axis!r}] has {len(labels[axis])} names, but that axis has length {length}")
        if len(set(labels[axis])) != length:
            raise UserError(f"labels[{axis!r}] must differ from each other")
    return labels


def _texts(field: str, given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(each, str) for each in given):
        raise UserError(f"{field} must be a sequence of strings, not {given!r}")
    require_unicode(field, given)
    return tuple(given)
