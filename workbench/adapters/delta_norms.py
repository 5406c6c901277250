"""Delta norms: how far each adapter's delta moves a site's output, ‖w B A x‖ / ‖W x‖ for each row and adapter.

W x is the base's output without its bias, before any delta is added, as it was computed (of a quantised base, with its
quantised weight). w is the row's weight with the mixture's global weight; alpha / rank is in B. For a DoRA adapter the
delta includes its rescaling, (g - 1) W x + B A x. An adapter without a delta at the site counts as 0; where W x is 0
the ratio means nothing and is NaN.

Contract: y and x are read only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lora_kernels.segments import Segment
from workbench.adapters.embedding import LoRAEmbedding
from workbench.adapters.linear import LoRALinear
from workbench.adapters.rows import MixtureSegment, RowWeights

Rows = slice | Tensor


class DeltaNorms:
    """The ratios of chosen rows of one forward, at chosen sites.

    Args:
        rows: the rows to look at.
        sites: site -> index on the site axis of `values`.
        width: length of the adapter axis of `values`.
        weights: what the rows want of the adapters, in the forward itself.
        device: where the forward runs.

    Attributes:
        values: float32 `[site, row, adapter]`; NaN where a row has no adapter.
    """

    def __init__(
        self, rows: list[int], sites: Mapping[str, int], width: int, weights: RowWeights, device: torch.device
    ):
        self.values = torch.full((len(sites), len(rows), width), float("nan"), device=device)
        self._rows, self._sites, self._weights = rows, sites, weights
        self._groups = _groups(rows, range(len(rows)), weights, device)
        self._head_rows: list[int] = []
        self._head: tuple[RowWeights, list[_Group]] | None = None

    def expect_head(self, logit_rows: list[int]) -> None:
        """Say which rows the output head will be given, if it is a site: its own forward has only these."""
        self._head_rows = logit_rows

    def take(self, layer: LoRALinear, y: Tensor, x: Tensor, weights: RowWeights) -> None:
        """Measure one site; y is the base's output `[..., row, out]`, x the input."""
        index = self._sites.get(layer.site)
        if index is None:
            return
        y, x = layer._flat(y, x)
        values = self.values[index]
        for group in self._groups if weights is self._weights else self._groups_of_head(weights):
            if group.mixture is None or layer.site in group.mixture.site_index:
                own = group.weights_at(layer.site)
                ratios = delta_ratios(layer, y[group.rows], x[group.rows], group.slots, own)
                values[group.places, : len(group.slots)] = ratios

    def _groups_of_head(self, weights: RowWeights) -> list[_Group]:
        if self._head is None or self._head[0] is not weights:
            place = {row: at for at, row in enumerate(self._head_rows)}
            mine = [at for at, row in enumerate(self._rows) if row in place]
            rows = [place[self._rows[at]] for at in mine]
            self._head = weights, _groups(rows, mine, weights, self.values.device)
        return self._head[1]


class _Group:
    """Rows of one segment.

    Attributes:
        rows: of the forward.
        places: on the row axis of the values.
        slots: the segment's.
        mixture: the segment, if it has weights.
    """

    def __init__(
        self, segment: Segment | MixtureSegment, rows: Sequence[int], places: Sequence[int], device: torch.device
    ):
        self.mixture = None if isinstance(segment, Segment) else segment
        self.slots = (segment.slot,) if isinstance(segment, Segment) else segment.slots
        self.rows, self.places = as_index(rows, device), as_index(places, device)
        self._own = as_index([row - segment.start for row in rows], device)

    def weights_at(self, site: str) -> Tensor | None:
        """Return `[row, n]` weights at a site; None is 1."""
        return None if self.mixture is None else self.mixture.weights_at(site)[self._own]


def delta_ratios(
    layer: LoRALinear, y: Tensor, x: Tensor, slots: tuple[int, ...], weights: Tensor | None
) -> Tensor:
    """Return float32 `[row, n]`, the ratios of the adapters in `slots`.

    Args:
        layer: whose table and base.
        y: the base's output `[row, out]`, bias included.
        x: its input `[row, in]`, or `[row]` token ids of an embedding.
        slots: the adapters'.
        weights: `[row, n]`; None is 1.
    """
    bias = getattr(layer.base_layer, "bias", None)
    base = y if bias is None else y - bias
    gain = layer.table.gains.get(slots[0]) if len(slots) == 1 else None
    shift = None if gain is None else (gain - 1) * base
    found = _delta_norms(layer, x, slots, shift)
    if weights is not None:
        found = found * weights.abs()
    length = torch.linalg.vector_norm(base.float(), dim=-1, keepdim=True)
    return torch.where(length > 0, found / length, float("nan"))


def as_index(rows: Sequence[int], device: torch.device) -> Rows:
    """Return rising rows as a slice where they lie together, else as int64 indices."""
    if rows and rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _delta_norms(layer: LoRALinear, x: Tensor, slots: tuple[int, ...], shift: Tensor | None) -> Tensor:
    """Return float32 `[row, n]`: the lengths of the adapters' deltas, each plus `shift`."""
    a, b, _ = layer.table.mixture(slots)
    ranks = [layer.table.shape(slots).ranks.get(slot, 0) for slot in slots]
    is_lookup = isinstance(layer, LoRAEmbedding)
    shrunk = a.index_select(1, x).T * layer.factor if is_lookup else F.linear(x, a)  # [row, rank]
    if shift is None and ranks[0] and len(set(ranks)) == 1:
        grouped = shrunk.view(len(x), len(slots), -1).transpose(0, 1)
        deltas = torch.bmm(grouped, b.view(len(slots), ranks[0], -1))  # [n, row, out]
        return torch.linalg.vector_norm(deltas.float(), dim=-1).T
    found, first = [], 0
    for rank in ranks:
        delta = shrunk[:, first : first + rank] @ b[first : first + rank]
        delta = delta if shift is None else delta + shift
        found.append(torch.linalg.vector_norm(delta.float(), dim=-1))
        first += rank
    return torch.stack(found, 1)


def _groups(
    rows: Sequence[int], places: Sequence[int], weights: RowWeights, device: torch.device
) -> list[_Group]:
    """Return the rows of each segment that has any of them, with their places."""
    found = []
    for segment in (*weights.one_hot, *weights.mixtures):
        first, last = (bisect_left(rows, bound) for bound in (segment.start, segment.stop))
        if first < last:
            found.append(_Group(segment, rows[first:last], places[first:last], device))
    return found
