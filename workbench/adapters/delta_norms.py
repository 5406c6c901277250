"""Delta norms: how far each adapter's delta moves a site's output, ‖w B A x‖ / ‖W x‖ for each row and adapter.

W x is the base's output without its bias, before any delta is added, as it was computed (of a quantised base, with its
quantised weight). w is the row's weight with the mixture's global weight; alpha / rank is in B. For a DoRA adapter the
delta includes its rescaling, (g - 1) W x + B A x. An adapter without a delta at the site counts as 0; where W x is 0
the ratio means nothing and is NaN.

Contract: y and x are read only. In the forward lengths are taken; weights and quotients wait until it is over.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lora_kernels.segments import Segment
from workbench.adapters.columns import Shape
from workbench.adapters.embedding import LoRAEmbedding
from workbench.adapters.linear import LoRALinear
from workbench.adapters.rows import MixtureSegment, RowWeights

Rows = slice | Tensor


class DeltaNorms:
    """The ratios of chosen rows of one forward, at chosen sites.

    Args:
        rows: the rows to look at, rising.
        sites: site -> index on the site axis.
        width: length of the adapter axis.
        weights: what the rows want of the adapters, in the forward itself.
        device: where the forward runs.
        logit_rows: the rows that the output head will be given: if it is a site, its own forward has only these.
    """

    def __init__(
        self, rows: Sequence[int], sites: Mapping[str, int], width: int, weights: RowWeights, device: torch.device,
        logit_rows: Sequence[int] = (),
    ):
        self._moved = torch.full((len(sites), len(rows), width), float("nan"), device=device)
        self._bases = self._moved.new_full((len(sites), len(rows), 1), float("nan"))
        self._rows, self._sites, self._weights, self._logit_rows = rows, sites, weights, logit_rows
        self._groups = _groups(rows, range(len(rows)), weights, device)
        self._head: tuple[RowWeights, list[_Group]] | None = None
        self._ranks: dict[tuple[Shape, tuple[int, ...]], list[int]] = {}

    def take(self, layer: LoRALinear, y: Tensor, x: Tensor, weights: RowWeights) -> None:
        """Measure one site; y is the base's output `[..., row, out]`, x the input."""
        index = self._sites.get(layer.site)
        if index is None:
            return
        y, x = layer._flat(y, x)
        bias = getattr(layer.base_layer, "bias", None)
        for group in self._groups if weights is self._weights else self._groups_of_head(weights):
            if group.mixture is None or layer.site in group.mixture.site_index:
                base = y[group.rows] if bias is None else y[group.rows] - bias
                gain = layer.table.gains.get(group.slots[0]) if layer.table.gains and len(group.slots) == 1 else None
                shift = None if gain is None else (gain - 1) * base
                ranks = self._ranks_of(layer, group.slots)
                self._bases[index, group.places, 0] = _length(base)
                found = _lengths(layer, x[group.rows], group.slots, ranks, shift)
                self._moved[index, group.places, : len(group.slots)] = found

    def ratios(self) -> Tensor:
        """Return float32 `[site, row, adapter]`; NaN where a row has no adapter, or did not meet the site."""
        moved = self._moved
        for group in self._groups:
            if group.mixture is None:
                continue
            own = group.mixture.weights.abs()
            own = (own if len(own) == 1 else own[group.own]).transpose(0, 1)  # [site, row, n], or 1 of either
            part = moved[:, group.places, : len(group.slots)]
            if len(own) > 1:
                index = group.mixture.site_index
                # a site that the mixture does not have was not measured, whatever its weight
                own = own[[index.get(site, 0) for site in self._sites]]
            moved[:, group.places, : len(group.slots)] = part * own
        return torch.where(self._bases > 0, moved / self._bases, float("nan"))

    def _ranks_of(self, layer: LoRALinear, slots: tuple[int, ...]) -> list[int]:
        shape = layer.table.shape(slots)
        if (shape, slots) not in self._ranks:
            self._ranks[shape, slots] = [shape.ranks.get(slot, 0) for slot in slots]
        return self._ranks[shape, slots]

    def _groups_of_head(self, weights: RowWeights) -> list[_Group]:
        if self._head is None or self._head[0] is not weights:
            place = {row: at for at, row in enumerate(self._logit_rows)}
            mine = [at for at, row in enumerate(self._rows) if row in place]
            rows = [place[self._rows[at]] for at in mine]
            self._head = weights, _groups(rows, mine, weights, self._moved.device)
        return self._head[1]


class _Group:
    """Rows of one segment.

    Attributes:
        rows: of the forward.
        places: on the row axis of the values.
        own: of the segment.
        slots: the segment's.
        mixture: the segment, if it has weights.
    """

    def __init__(
        self, segment: Segment | MixtureSegment, rows: Sequence[int], places: Sequence[int], device: torch.device
    ):
        self.mixture = None if isinstance(segment, Segment) else segment
        self.slots = (segment.slot,) if isinstance(segment, Segment) else segment.slots
        self.rows, self.places = as_index(rows, device), as_index(places, device)
        self.own = as_index([row - segment.start for row in rows], device)


def as_index(rows: Sequence[int], device: torch.device) -> Rows:
    """Return rising rows as a slice where they lie together, else as int64 indices."""
    if rows and rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _lengths(layer: LoRALinear, x: Tensor, slots: tuple[int, ...], ranks: list[int], shift: Tensor | None) -> Tensor:
    """Return float32 `[row, n]`: the lengths of the adapters' deltas, without weights, each with `shift` added.

    Args:
        layer: whose table.
        x: input `[row, in]`, or `[row]` token ids of an embedding.
        slots: the adapters'.
        ranks: theirs at this site.
        shift: `[row, out]` or None.
    """
    a, b, _ = layer.table.mixture(slots)
    is_lookup = isinstance(layer, LoRAEmbedding)
    shrunk = a.index_select(1, x).T * layer.factor if is_lookup else F.linear(x, a)  # [row, rank]
    if shift is None and ranks[0] and ranks.count(ranks[0]) == len(ranks):
        grouped = shrunk.view(len(x), len(slots), -1).transpose(0, 1)
        return _length(torch.bmm(grouped, b.view(len(slots), ranks[0], -1))).T
    found, first = [], 0
    for rank in ranks:
        delta = shrunk[:, first : first + rank] @ b[first : first + rank]
        found.append(_length(delta if shift is None else delta + shift))
        first += rank
    return torch.stack(found, 1)


def _length(vectors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float32)


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
