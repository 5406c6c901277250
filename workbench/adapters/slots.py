"""Slots: the loaded adapters' factors, stacked per site so that adapters of any rank lie side by side.

Contract: an adapter's rows are contiguous in every site's stack, so a slot is a slice, and a mixture whose adapters
were loaded one after the other is one slice too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.adapters.model import LoRAModel


@dataclass
class SiteTable:
    """Stacked factors of one site.

    Attributes:
        a: `[rank, in]`, compute dtype.
        b: `[rank, out]`, compute dtype.
        spans: slot -> `(first, last)` rank rows.
    """

    a: Tensor
    b: Tensor
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    _mixtures: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def put(self, slot: int, a: Tensor, b: Tensor) -> None:
        """Append one adapter's factors."""
        first = self.a.shape[0]
        self.a = torch.cat([self.a, a.to(self.a)])
        self.b = torch.cat([self.b, b.to(self.b)])
        self.spans[slot] = (first, first + a.shape[0])
        self._mixtures.clear()

    def drop(self, slot: int) -> None:
        """Remove one adapter's factors and close the gap; unknown slots are no error (the site had no delta)."""
        if slot not in self.spans:
            return
        first, last = self.spans.pop(slot)
        self.a = torch.cat([self.a[:first], self.a[last:]])
        self.b = torch.cat([self.b[:first], self.b[last:]])
        gap = last - first
        self.spans = {s: (f - gap, t - gap) if f >= last else (f, t) for s, (f, t) in self.spans.items()}
        self._mixtures.clear()

    def mixture(self, slots: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Return `(a, b, owner)` of several adapters in the given order; views when they lie side by side.

        `owner` is int64 `[rank]`: position in `slots` of each rank row's adapter. Adapters without a delta at this
        site have no rank rows.
        """
        if slots not in self._mixtures:
            here = [(index, self.spans[slot]) for index, slot in enumerate(slots) if slot in self.spans]
            lengths = torch.tensor([last - first for _, (first, last) in here], dtype=torch.int64)
            owner = torch.repeat_interleave(torch.tensor([index for index, _ in here], dtype=torch.int64), lengths)
            side_by_side = all(left[1][1] == right[1][0] for left, right in zip(here, here[1:], strict=False))
            if here and side_by_side:
                rows = slice(here[0][1][0], here[-1][1][1])
                a, b = self.a[rows], self.b[rows]
            else:
                index = torch.cat([torch.arange(first, last) for _, (first, last) in here] or [owner])
                a, b = self.a[index.to(self.a.device)], self.b[index.to(self.b.device)]
            self._mixtures[slots] = (a, b, owner.to(self.a.device))
        return self._mixtures[slots]


class SlotTable:
    """Which adapter is in which slot, and each site's stacked factors."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device
        self.sites: dict[str, SiteTable] = {}
        self.adapters: dict[int, LoRAModel] = {}

    def site(self, name: str, in_features: int, out_features: int) -> SiteTable:
        """Return the table of site `name`, made empty on first use."""
        if name not in self.sites:
            a = torch.empty(0, in_features, dtype=self.dtype, device=self.device)
            b = torch.empty(0, out_features, dtype=self.dtype, device=self.device)
            self.sites[name] = SiteTable(a, b)
        return self.sites[name]

    def put(self, adapter: LoRAModel) -> int:
        """Load an adapter that fits the base (`LoRAModel.fit`) into the lowest free slot and return the slot."""
        slot = next(i for i in range(len(self.adapters) + 1) if i not in self.adapters)
        for site in adapter.sites:
            a, b = adapter.a[site], adapter.b[site]
            self.site(site, a.shape[1], b.shape[1]).put(slot, a, b)
        self.adapters[slot] = adapter
        return slot

    def drop(self, slot: int) -> None:
        """Empty a slot."""
        for table in self.sites.values():
            table.drop(slot)
        del self.adapters[slot]
