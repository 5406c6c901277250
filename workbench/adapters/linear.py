"""LoRALinear: a base model's linear layer plus the deltas of whatever adapters its rows ask for.

Contract: the layer knows no request. Which rows want what stands in its engine's `Routing`, set around one forward;
two engines never share one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lora_kernels.mix import mix
from lora_kernels.segments import Segment
from lora_kernels.sgmv import sgmv
from workbench.adapters.slots import SiteTable


class EverySite(dict):
    """The `site_index` of constant weights: every site is in it."""

    def __contains__(self, site: object) -> bool:
        return True


EVERY_SITE = EverySite()


@dataclass(frozen=True)
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

    def weights_at(self, site: str) -> Tensor:
        """Return `[row, n]` weights of one site."""
        index = self.site_index[site] if self.weights.shape[1] > 1 else 0
        return self.weights[:, index].expand(self.stop - self.start, -1)


@dataclass(frozen=True)
class RowWeights:
    """The weights over adapter slots of every row of a forward; base rows are in neither list.

    Attributes:
        num_rows: rows of the forward.
        one_hot: segments of rows with one adapter.
        mixtures: segments of rows with a mixture.
        fixed_shape: compute every delta over all rows and keep the segment's, so that a row's numbers do not depend
            on how many rows its segment has (matrix products round differently with the row count).
    """

    num_rows: int
    one_hot: tuple[Segment, ...] = ()
    mixtures: tuple[MixtureSegment, ...] = ()
    fixed_shape: bool = False

    def select(self, rows: list[int]) -> RowWeights:
        """Return the weights of a forward that has only these rows, in this order (one segment per row)."""
        one_hot, mixtures = [], []
        for new, old in enumerate(rows):
            for segment in self.one_hot:
                if segment.start <= old < segment.stop:
                    one_hot.append(Segment(new, new + 1, segment.slot))
            for m in self.mixtures:
                if m.start <= old < m.stop:
                    weights = m.weights if m.weights.shape[0] == 1 else m.weights[old - m.start : old - m.start + 1]
                    mixtures.append(MixtureSegment(new, new + 1, m.slots, weights, m.site_index))
        return RowWeights(len(rows), tuple(one_hot), tuple(mixtures), self.fixed_shape)


class Routing:
    """What an engine's LoRA layers do in the forward that is running; None between forwards."""

    def __init__(self) -> None:
        self.rows: RowWeights | None = None


class LoRALinear(nn.Module):
    """Wraps a linear-like module in place: `y = base(x) + deltas of the rows' adapters`.

    Args:
        base_layer: the wrapped module; its weights are never touched.
        site: its module path.
        table: the site's stacked factors.
        routing: the engine's routing.
    """

    def __init__(self, base_layer: nn.Module, site: str, table: SiteTable, routing: Routing):
        super().__init__()
        self.base_layer, self.site, self.table, self.routing = base_layer, site, table, routing

    def __getattr__(self, name: str):
        # model code reads attributes of its linears (weight.dtype, in_features): answer with the base layer's
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_layer"), name)

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        y = self.base_layer(x, *args, **kwargs)
        rows = self.routing.rows
        if rows is None or not (rows.one_hot or rows.mixtures):
            return y
        flat_x, flat_y = self._rows_of(x), y.reshape(-1, y.shape[-1])
        assert flat_x.shape[0] == rows.num_rows, f"{self.site}: {len(flat_x)} rows, not {rows.num_rows}"
        if self.table.gains:
            self._rescale(flat_y, rows)
        (self._add_whole if rows.fixed_shape else self._add)(flat_y, flat_x, rows)
        return flat_y.view_as(y)

    def _rescale(self, y: Tensor, rows: RowWeights) -> None:
        """Multiply the base's output, bias left out, by the row factors of the DoRA adapters."""
        gains, bias = self.table.gains, getattr(self.base_layer, "bias", None)
        assert not any(slot in gains for m in rows.mixtures for slot in m.slots), f"{self.site}: DoRA in a mixture"
        for start, stop, slot in rows.one_hot:
            gain = gains.get(slot)
            if gain is not None:
                product = y[start:stop] if bias is None else y[start:stop] - bias
                y[start:stop] += (gain - 1) * product

    def _add(self, y: Tensor, x: Tensor, rows: RowWeights) -> None:
        if rows.one_hot:
            self._one_hot(y, x, rows.one_hot)
        for m in rows.mixtures:
            if self.site in m.site_index:
                part = slice(m.start, m.stop)
                self._mix(y[part], x[part], m.slots, m.weights_at(self.site))

    def _add_whole(self, y: Tensor, x: Tensor, rows: RowWeights) -> None:
        for start, stop, slot in rows.one_hot:
            delta = self._one_hot(torch.zeros_like(y), x, (Segment(0, len(x), slot),))
            y[start:stop] += delta[start:stop]
        for m in rows.mixtures:
            if self.site in m.site_index:
                weights = m.weights.new_zeros(len(x), len(m.slots))
                weights[m.start : m.stop] = m.weights_at(self.site)
                delta = self._mix(torch.zeros_like(y), x, m.slots, weights)
                y[m.start : m.stop] += delta[m.start : m.stop]

    def _rows_of(self, x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1])

    def _one_hot(self, y: Tensor, x: Tensor, segments: tuple[Segment, ...]) -> Tensor:
        return sgmv(y, x, self.table.a, self.table.b, segments, self.table.spans)

    def _mix(self, y: Tensor, x: Tensor, slots: tuple[int, ...], weights: Tensor) -> Tensor:
        return mix(y, x, *self.table.mixture(slots), weights)
