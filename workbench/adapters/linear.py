"""LoRALinear: a base model's linear layer plus the deltas of whatever adapters its rows ask for.

Contract: the layer knows no request. Which rows want what stands in its engine's `Routing`, set around one forward;
two engines never share one. Who watches a layer reads its input and the base's output, and changes neither.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lora_kernels.bgmv import bgmv
from lora_kernels.blend import Filling, blend
from lora_kernels.mix import mix
from lora_kernels.sgmv import sgmv
from workbench.adapters.rows import EVERY_SITE, MixtureSegment, RowWeights
from workbench.adapters.slots import SiteTable

__all__ = ["EVERY_SITE", "LoRALinear", "MixtureSegment", "Routing", "RowWeights"]


class Routing:
    """What an engine's LoRA layers do in the forward that is running.

    Attributes:
        rows: what each row wants of the adapters; None between forwards.
        watchers: called with each layer, the base's output, the input and `rows`, before any delta is added.
    """

    def __init__(self) -> None:
        self.rows: RowWeights | None = None
        self.watchers: tuple[Callable[[LoRALinear, Tensor, Tensor, RowWeights], None], ...] = ()


class LoRALinear(nn.Module):
    """Wraps a linear-like module in place: `y = base(x) + deltas of the rows' adapters`.

    Args:
        base_layer: the wrapped module; its weights are never touched.
        site: its module path.
        table: the site's stacked factors.
        routing: the engine's routing.
    """

    # whether rows of one size per slot can go through batched products
    groups = True

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
        # found where they lie: a module's attribute access costs as much as a small product
        y = self._modules["base_layer"](x, *args, **kwargs)
        rows = self.routing.rows
        if rows is None or rows.is_base:
            return y
        # so that what is added to a view of its rows is added to y
        y = y if y.is_contiguous() else y.contiguous()
        assert y.shape[-2] == rows.num_rows, f"{self.site}: {y.shape[-2]} rows, not {rows.num_rows}"
        if self.routing.watchers:
            for watch in self.routing.watchers:
                watch(self, y, x, rows)
        if self.table.gains:
            self._rescale(y.view(-1, y.shape[-1]), rows)
        if rows.fixed_shape:
            self._add_whole(y, x, rows)
        elif y.is_cpu:
            self._add(y, x, rows)
        else:
            self._add_by_kernel(y, x, rows)
        return y

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
        """Add the deltas on a CPU, where a call costs more than the products of neighbours: few calls."""
        table, parts = self.table, rows.parts
        for part, is_grouped in parts.at(table.shape(parts.slots)):
            own_y, own_x = y, x
            if part.num_rows < rows.num_rows:
                own_y, own_x = (each[part.start : part.stop] for each in self._flat(y, x))
            if is_grouped and self.groups:
                self._blend(own_y, own_x, *table.groups(part.in_order), None, None, part.filling)
            else:
                columns = table.columns(part.slots)
                self._blend(own_y, own_x, columns.a, columns.b, *part.weights_at(columns.layout, self.site))

    def _add_by_kernel(self, y: Tensor, x: Tensor, rows: RowWeights) -> None:
        """Add the deltas on a device, row by row or mixture by mixture: each row meets its own rank rows only."""
        y, x = self._flat(y, x)
        if rows.one_hot:
            self._one_hot(y, x, rows)
        for m in rows.mixtures:
            if self.site in m.site_index:
                part = slice(m.start, m.stop)
                self._mix(y[part], x[part], m.slots, m.weights_at(self.site))

    def _add_whole(self, y: Tensor, x: Tensor, rows: RowWeights) -> None:
        """Add the deltas, each computed over all rows with its adapters' own rank rows."""
        y, x = self._flat(y, x)
        for start, stop, slot in rows.one_hot:
            columns = self.table.columns((slot,))
            y[start:stop] += self._blend(torch.zeros_like(y), x, columns.a, columns.b)[start:stop]
        for m in rows.mixtures:
            if self.site in m.site_index:
                weights = m.weights.new_zeros(len(x), len(m.slots))
                weights[m.start : m.stop] = m.weights_at(self.site)
                delta = self._mix(torch.zeros_like(y), x, m.slots, weights)
                y[m.start : m.stop] += delta[m.start : m.stop]

    def _flat(self, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the rows of y and x."""
        return y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])

    def _blend(
        self, y: Tensor, x: Tensor, a: Tensor, b: Tensor,
        weights: Tensor | None = None, outside: Tensor | None = None, filling: Filling | None = None,
    ) -> Tensor:  # fmt: skip
        return blend(y, x, a, b, weights, outside, filling)

    def _one_hot(self, y: Tensor, x: Tensor, rows: RowWeights) -> None:
        plan = rows.plan_on(x.device)
        (bgmv if plan.is_decode else sgmv)(y, x, self.table.a, self.table.b, plan, self.table.spans)

    def _mix(self, y: Tensor, x: Tensor, slots: tuple[int, ...], weights: Tensor) -> Tensor:
        return mix(y, x, *self.table.mixture(slots), weights)
