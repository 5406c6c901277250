"""What the rows of one forward want of the adapters: one, several with constant weights, a mixture, or none.

Contract: made once per step and never changed. What is derived from it (`parts`, `plan`) is made when it is first
asked for, and serves every site of the forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lora_kernels.segments import RowPlan, Segment, plan_rows
from workbench.adapters.parts import Parts


class EverySite(dict):
    """The `site_index` of constant weights: every site is in it."""

    def __contains__(self, site: object) -> bool:
        return True


EVERY_SITE = EverySite()


@dataclass(frozen=True, eq=False)
class MixtureSegment:
    """Consecutive rows that share one mixture, with their own weights.

    Attributes:
        start, stop: the rows.
        slots: slot of each of the mixture's n adapters.
        weights: `[row, site, n]` (or `[1, 1, n]`, the same for all), global weight included.
        site_index: site -> index on the site axis of `weights`.
    """

    start: int
    stop: int
    slots: tuple[int, ...]
    weights: Tensor
    site_index: Mapping[str, int]

    @property
    def is_everywhere(self) -> bool:
        """Whether the weights are those of every site."""
        return isinstance(self.site_index, EverySite)

    def weights_at(self, site: str) -> Tensor:
        """Return `[row, n]` weights of one site."""
        index = self.site_index[site] if self.weights.shape[1] > 1 else 0
        return self.weights[:, index].expand(self.stop - self.start, -1)

    def select(self, first: int, last: int, start: int) -> MixtureSegment:
        """Return this segment's rows `first:last` of the forward as the rows of another one, from its row `start`."""
        weights = self.weights if self.weights.shape[0] == 1 else self.weights[first - self.start : last - self.start]
        return MixtureSegment(start, start + last - first, self.slots, weights, self.site_index)


@dataclass(frozen=True, eq=False)
class RowWeights:
    """The weights over adapter slots of every row of a forward; base rows are in neither list.

    Attributes:
        num_rows: rows of the forward.
        one_hot: segments of rows with one adapter.
        mixtures: segments of rows with a mixture; no row is in two segments.
        fixed_shape: compute every delta over all rows and keep the segment's, so that a row's numbers do not depend
            on how many rows its segment has (matrix products round differently with the row count).
    """

    num_rows: int
    one_hot: tuple[Segment, ...] = ()
    mixtures: tuple[MixtureSegment, ...] = ()
    fixed_shape: bool = False

    @cached_property
    def is_base(self) -> bool:
        """Whether no row has an adapter."""
        return not (self.one_hot or self.mixtures)

    @cached_property
    def parts(self) -> Parts:
        """How these rows are grouped where the deltas of several adapters are computed at once."""
        return Parts(self.one_hot, self.mixtures)

    @cached_property
    def _plans(self) -> dict[torch.device, RowPlan]:
        return {}

    def plan_on(self, device: torch.device) -> RowPlan:
        """Return the plan of the one-hot rows for the kernels, made once on each device."""
        if device not in self._plans:
            self._plans[device] = plan_rows(self.one_hot, self.num_rows, device)
        return self._plans[device]

    def select(self, rows: list[int]) -> RowWeights:
        """Return the weights of a forward that has only these rows, in this order."""
        one_hot: list[Segment] = []
        mixtures: list[MixtureSegment] = []
        segments = sorted([*self.one_hot, *self.mixtures], key=lambda segment: segment.start)
        for first, last, start in _runs(rows):
            for segment in segments:
                low, high = max(first, segment.start), min(last, segment.stop)
                if low < high and isinstance(segment, Segment):
                    _append(one_hot, Segment(start + low - first, start + high - first, segment.slot))
                elif low < high:
                    mixtures.append(segment.select(low, high, start + low - first))
        return RowWeights(len(rows), tuple(one_hot), tuple(mixtures), self.fixed_shape)


def _runs(rows: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield `(first, last, start)`: rows `first:last` of a forward stand from place `start` on in `rows`."""
    start = 0
    for place in range(1, len(rows) + 1):
        if place == len(rows) or rows[place] != rows[place - 1] + 1:
            yield rows[start], rows[place - 1] + 1, start
            start = place


def _append(placed: list[Segment], new: Segment) -> None:
    """Add a segment, as one with its neighbour where both are of one slot."""
    if placed and placed[-1].stop == new.start and placed[-1].slot == new.slot:
        new = Segment(placed.pop().start, new.stop, new.slot)
    placed.append(new)
