"""LoRAEmbedding: an embedding plus the rows that its adapters add to each token's.

    y[t] = base(id[t]) + s * B A[:, id[t]]

s is the factor by which some architectures (gemma) multiply their embedding inside the module; PEFT applies it to the
delta too. Everything else multiplies after the module, where the delta is already in.
"""

from __future__ import annotations

from torch import Tensor, nn

from lora_kernels.segments import Segment
from workbench.adapters.linear import LoRALinear, Routing
from workbench.adapters.slots import SiteTable


class LoRAEmbedding(LoRALinear):
    """Wraps an embedding in place; its site's table holds A as `[rank, token]` and B, transposed, as `[rank, width]`.

    Args:
        base_layer: the wrapped embedding; its weights are never touched.
        site: its module path.
        table: the site's stacked factors.
        routing: the engine's routing.
    """

    def __init__(self, base_layer: nn.Module, site: str, table: SiteTable, routing: Routing):
        super().__init__(base_layer, site, table, routing)
        factor = getattr(base_layer, "embed_scale", None)
        # rounded as the base's own is
        self.factor = 1.0 if factor is None else float(base_layer.weight.new_tensor(float(factor)))

    def _rows_of(self, x: Tensor) -> Tensor:
        return x.reshape(-1)

    def _one_hot(self, y: Tensor, x: Tensor, segments: tuple[Segment, ...]) -> Tensor:
        for start, stop, slot in segments:
            first, last = self.table.spans.get(slot, (0, 0))
            if first < last:
                shrunk = self.table.a[first:last].index_select(1, x[start:stop]).T  # [row, rank]
                y[start:stop].addmm_(shrunk, self.table.b[first:last], alpha=self.factor)
        return y

    def _mix(self, y: Tensor, x: Tensor, slots: tuple[int, ...], weights: Tensor) -> Tensor:
        a, b, owner = self.table.mixture(slots)
        if len(a):
            per_rank = weights.float().index_select(1, owner)  # [row, rank]
            shrunk = a.index_select(1, x).T.float().mul(per_rank).to(y.dtype)
            y.addmm_(shrunk, b, alpha=self.factor)
        return y
