"""LoRAEmbedding: an embedding plus the rows that its adapters add to each token's.

    y[t] = base(id[t]) + s * B A[:, id[t]]

s is the factor by which some architectures (gemma) multiply their embedding inside the module; PEFT applies it to the
delta too. Everything else multiplies after the module, where the delta is already in.
"""

from __future__ import annotations

from torch import Tensor, nn

from lora_kernels.blend import Filling, weigh
from workbench.adapters.linear import LoRALinear, Routing
from workbench.adapters.rows import RowWeights
from workbench.adapters.slots import SiteTable


class LoRAEmbedding(LoRALinear):
    """Wraps an embedding in place; its site's table holds A as `[rank, token]` and B, transposed, as `[rank, width]`.

    Args:
        base_layer: the wrapped embedding; its weights are never touched.
        site: its module path.
        table: the site's stacked factors.
        routing: the engine's routing.
    """

    groups = False

    def __init__(self, base_layer: nn.Module, site: str, table: SiteTable, routing: Routing):
        super().__init__(base_layer, site, table, routing)
        factor = getattr(base_layer, "embed_scale", None)
        # rounded as the base's own is
        self.factor = 1.0 if factor is None else float(base_layer.weight.new_tensor(float(factor)))

    def _flat(self, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return y.view(-1, y.shape[-1]), x.reshape(-1)

    def _blend(
        self, y: Tensor, x: Tensor, a: Tensor, b: Tensor,
        weights: Tensor | None = None, outside: Tensor | None = None, filling: Filling | None = None,
    ) -> Tensor:  # fmt: skip
        assert filling is None, f"{self.site}: groups of token ids"
        shrunk = a[0].index_select(0, x.reshape(-1))[None]  # [1, row, rank]
        y.view(1, -1, y.shape[-1]).baddbmm_(weigh(shrunk, weights, outside), b, alpha=self.factor)
        return y

    def _one_hot(self, y: Tensor, x: Tensor, rows: RowWeights) -> None:
        for start, stop, slot in rows.one_hot:
            columns = self.table.columns((slot,))
            self._blend(y[start:stop], x[start:stop], columns.a, columns.b)

    def _mix(self, y: Tensor, x: Tensor, slots: tuple[int, ...], weights: Tensor) -> Tensor:
        a, b, owner = self.table.mixture(slots)
        return self._blend(y, x, a.T[None], b[None], weights.float().index_select(1, owner)[None])
