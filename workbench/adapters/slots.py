"""Slots: the loaded adapters' factors, stacked per site so that adapters of any rank lie side by side.

Contract: an adapter's rows are contiguous in every site's stack, so a slot is a slice, and a mixture whose adapters
were loaded one after the other is one slice too. Loading and unloading move no other adapter's rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.adapters.model import LoRAModel

_FIRST_RANKS = 16  # rank rows a site's stack starts with; it grows by doubling


@dataclass
class SiteTable:
    """Stacked factors of one site.

    Attributes:
        a: `[capacity, in]`, compute dtype; rows outside every span are zero or stale, and read by nothing.
        b: `[capacity, out]`, compute dtype.
        spans: slot -> `(first, last)` rank rows.
        gains: slot -> float32 `[out]`, by which a DoRA adapter multiplies the base's output.
    """

    a: Tensor
    b: Tensor
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    gains: dict[int, Tensor] = field(default_factory=dict)
    _mixtures: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def put(self, slot: int, a: Tensor, b: Tensor) -> None:
        """Copy one adapter's factors, `[rank, in]` and `[rank, out]`, into the first gap that holds them."""
        first = self._gap(a.shape[0])
        last = first + a.shape[0]
        if last > self.a.shape[0]:
            capacity = max(last, 2 * self.a.shape[0], _FIRST_RANKS)
            self.a, self.b = _grown(self.a, capacity), _grown(self.b, capacity)
            self._mixtures.clear()
        # from page-locked memory the copy runs beside the host's work; its order with later kernels is the stream's
        self.a[first:last].copy_(a, non_blocking=True)
        self.b[first:last].copy_(b, non_blocking=True)
        self.spans[slot] = (first, last)
        self._forget(slot)

    def drop(self, slot: int) -> None:
        """Free one adapter's rows; unknown slots are no error (the site had no delta)."""
        self.gains.pop(slot, None)
        if self.spans.pop(slot, None) is not None:
            self._forget(slot)

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

    @property
    def num_bytes(self) -> int:
        """Bytes of the stacks, unused capacity included."""
        return sum(stack.numel() * stack.element_size() for stack in (self.a, self.b))

    def _gap(self, size: int) -> int:
        at = 0
        for first, last in sorted(self.spans.values()):
            if first - at >= size:
                return at
            at = last
        return at

    def _forget(self, slot: int) -> None:
        # a mixture that names the slot holds its rows, or the fact that it had none here
        for slots in [slots for slots in self._mixtures if slot in slots]:
            del self._mixtures[slots]


class SlotTable:
    """Which adapter is in which slot, and each site's stacked factors."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device
        self.sites: dict[str, SiteTable] = {}
        self.adapters: dict[int, LoRAModel] = {}

    def site(self, name: str, in_features: int, out_features: int) -> SiteTable:
        """Return the table of site `name`, made empty on first use."""
        if name not in self.sites:
            a = torch.zeros(0, in_features, dtype=self.dtype, device=self.device)
            b = torch.zeros(0, out_features, dtype=self.dtype, device=self.device)
            self.sites[name] = SiteTable(a, b)
        return self.sites[name]

    @torch.inference_mode(False)  # a stack made inside a step could not be written outside of one
    def put(self, adapter: LoRAModel) -> int:
        """Load an adapter that fits the base (`LoRAModel.fit`) into the lowest free slot and return the slot."""
        assert not adapter.magnitudes, f"adapter {adapter.name!r} has not met its base's weights"
        slot = next(i for i in range(len(self.adapters) + 1) if i not in self.adapters)
        try:
            for site in adapter.sites:
                a, b = adapter.a[site], adapter.b[site]
                table = self.site(site, a.shape[1], b.shape[1])
                table.put(slot, a, b)
                if site in adapter.gains:
                    table.gains[slot] = adapter.gains[site].to(self.device)
        except BaseException:  # the rows already there would be the next adapter's in this slot
            for table in self.sites.values():
                table.drop(slot)
            raise
        self.adapters[slot] = adapter
        return slot

    def drop(self, slot: int) -> None:
        """Empty a slot."""
        for table in self.sites.values():
            table.drop(slot)
        del self.adapters[slot]

    @property
    def num_bytes(self) -> int:
        """Bytes of all stacks on the device."""
        return sum(table.num_bytes for table in self.sites.values())


def _grown(stack: Tensor, capacity: int) -> Tensor:
    grown = stack.new_zeros(capacity, stack.shape[1])
    grown[: stack.shape[0]] = stack
    return grown
