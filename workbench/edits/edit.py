"""What an edit is: a change at some sites and positions, and the tap that tells it where it is applied."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.errors import UserError, names, nearest
from workbench.instrument.sites import matching, patterns_of

Positions = slice | range | Iterable[int] | str | None


@dataclass(frozen=True)
class Tap:
    """Where an edit is applied.

    Attributes:
        name: the key it was given under, such as "classifier:scalings".
        request_id: whose rows these are.
        adapters: the adapter axis.
        sites: the site axis: those the key's pattern matches.
        positions: int64 `[row]`, the place of each row's token in its sequence.
        prompt_tokens: how many of the sequence's tokens are the prompt's.
        scalings_at: position -> float32 `[site, adapter]` that the input there would use unedited; not beyond the last
            of `positions`.
    """

    name: str
    request_id: str
    adapters: tuple[str, ...]
    sites: tuple[str, ...]
    positions: Tensor
    prompt_tokens: int
    scalings_at: Callable[[int], Tensor] = field(repr=False)

    def adapter(self, name: str) -> int:
        """Return an adapter's index.

        Raises:
            UserError: this mixture has no such adapter.
        """
        if name not in self.adapters:
            raise UserError(f"{self.name}: no adapter {name!r}{nearest(name, self.adapters)}; "
                            f"this mixture has {names(self.adapters)}")
        return self.adapters.index(name)


class Edit:
    """A change of scalings at some sites and positions; `workbench.edits` makes them.

    Args:
        sites: pattern, or several, of the sites it changes (`"*.q_proj"`); None is all that its key matches.
        positions: which tokens' rows it changes: a slice or range, positions, "prompt" or "generated"; None is all.
    """

    def __init__(self, sites: str | Sequence[str] | None = None, positions: Positions = None):
        self.sites = patterns_of(sites, "changes")
        self.positions = checked_positions(positions)

    @property
    def label(self) -> str:
        """What results say was done."""
        where = "" if self.sites is None else f" at {', '.join(self.sites)}"
        when = "" if self.positions is None else f" of {_spoken(self.positions)}"
        return self.what + where + when

    @property
    def what(self) -> str:
        """The change, without where and when."""
        raise NotImplementedError

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters it names."""
        return ()

    def check(self, adapters: tuple[str, ...], sites: tuple[str, ...], key: str) -> None:
        """Raise a UserError if this edit does not fit a mixture of these adapters and sites."""
        for name in self.adapters:
            if name not in adapters:
                hint = nearest(name, adapters)
                raise UserError(f"{key}: no adapter {name!r}{hint}; the mixture has {names(adapters)}")
        if self.sites is not None:
            matching(sites, self.sites, f"{key}: no site")

    def change(self, scalings: Tensor, tap: Tap) -> Tensor:
        """Return the changed scalings `[row, site, adapter]` of rows and sites that are to be changed."""
        raise NotImplementedError

    def __call__(self, scalings: Tensor, tap: Tap) -> Tensor | None:
        """Return the scalings with the chosen rows and sites changed; None when there are none of them."""
        rows = _rows(self.positions, tap)
        if not len(rows):
            return None
        columns = torch.tensor(matching(tap.sites, self.sites, f"{tap.name}: no site"))
        part = scalings[rows[:, None], columns]
        inner = Tap(tap.name, tap.request_id, tap.adapters, tuple(tap.sites[i] for i in columns), tap.positions[rows],
                    tap.prompt_tokens, lambda position: tap.scalings_at(position)[columns])
        new = self.change(part, inner)
        if new is part:
            return None
        whole = scalings.clone()
        whole[rows[:, None], columns] = new
        return whole

    def __repr__(self) -> str:
        return f"<edit: {self.label}>"


def checked_positions(positions: Any) -> slice | frozenset[int] | str | None:
    """Return positions in canonical form.

    Raises:
        UserError: not positions, or counted from an end that is not known yet.
    """
    if positions is None or isinstance(positions, str) and positions in ("prompt", "generated"):
        return positions
    expected = "a slice, a range, positions from 0, 'prompt' or 'generated'"
    if isinstance(positions, slice):
        bounds = (positions.start, positions.stop, positions.step)
        if not all(bound is None or _is_whole(bound) for bound in bounds):
            raise UserError(f"positions={positions!r}: the bounds of a slice are whole numbers")
        if any(bound is not None and bound < 0 for bound in bounds):
            raise UserError(f"positions={positions!r}: a request's end is not known while it runs; expected {expected}")
        if positions.step == 0:
            raise UserError(f"positions={positions!r}: the step of a slice is at least 1")
        return positions
    if _is_whole(positions):
        positions = (positions,)
    if isinstance(positions, str) or not isinstance(positions, Iterable):
        raise UserError(f"positions must be {expected}, not {positions!r}")
    listed = list(positions)
    if not listed or not all(_is_whole(each) and each >= 0 for each in listed):
        raise UserError(f"positions must be {expected}, not {names(listed)}")
    return frozenset(map(int, listed))


def chosen(
    positions: slice | frozenset[int] | str | None, of: range, prompt_tokens: int
) -> range | frozenset[int]:
    """Return those of consecutive positions that canonical `positions` mean."""
    if positions is None:
        return of
    if positions == "prompt":
        return range(of.start, max(of.start, min(of.stop, prompt_tokens)))
    if positions == "generated":
        return range(min(of.stop, max(of.start, prompt_tokens)), of.stop)
    if isinstance(positions, slice):
        first, step = positions.start or 0, positions.step or 1
        begin = first if of.start <= first else first + -(-(of.start - first) // step) * step
        return range(begin, of.stop if positions.stop is None else min(of.stop, positions.stop), step)
    return frozenset(position for position in of if position in positions)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _rows(positions: slice | frozenset[int] | str | None, tap: Tap) -> Tensor:
    """Return int64 `[row]`: which of the tap's rows are at these positions."""
    at = tap.positions
    if positions is None:
        return torch.arange(len(at))
    if positions == "prompt":
        return (at < tap.prompt_tokens).nonzero()[:, 0]
    if positions == "generated":
        return (at >= tap.prompt_tokens).nonzero()[:, 0]
    if isinstance(positions, slice):
        first, step = positions.start or 0, positions.step or 1
        stop = math.inf if positions.stop is None else positions.stop
        return ((at >= first) & (at < stop) & ((at - first) % step == 0)).nonzero()[:, 0]
    return torch.tensor([row for row, position in enumerate(at.tolist()) if position in positions], dtype=torch.int64)


def _spoken(positions: slice | frozenset[int] | str) -> str:
    if isinstance(positions, str):
        return f"{positions} tokens"
    if isinstance(positions, slice):
        step = "" if positions.step in (None, 1) else f":{positions.step}"
        return f"tokens {positions.start or 0}:{'' if positions.stop is None else positions.stop}{step}"
    shown = sorted(positions)
    return f"tokens {', '.join(map(str, shown[:6]))}" + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")


def finite(value: Any, what: str) -> float:
    """Return a finite number as a float; `what` begins the error."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise UserError(f"{what} must be a finite number, not {value!r}")
    return float(value)
