"""Slots: the loaded adapters' factors, stacked per site so that adapters of any rank lie side by side.

Contract: an adapter's rows are contiguous in every site's stack, so a slot is a slice, and a mixture whose adapters
were loaded one after the other is one slice too. Loading and unloading move no other adapter's rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from lora_kernels.segments import SpanTable
from workbench.adapters.columns import Columns, Remembered, Shape, columns_of, shape_of
from workbench.adapters.model import LoRAModel
from workbench.errors import UserError

_FIRST_RANKS = 16  # rank rows a site's stack starts with; it grows by doubling


@dataclass
class SiteTable:
    """Stacked factors of one site.

    Attributes:
        a: `[capacity, in]`, compute dtype; rows outside every span are zero or stale, but finite.
        b: `[capacity, out]`, compute dtype.
        spans: slot -> `(first, last)` rank rows.
        gains: slot -> float32 `[out]`, by which a DoRA adapter multiplies the base's output.
    """

    a: Tensor
    b: Tensor
    spans: SpanTable = field(default_factory=SpanTable)
    gains: dict[int, Tensor] = field(default_factory=dict)
    _columns: Remembered[Columns] = field(default_factory=Remembered, repr=False)
    _groups: Remembered[tuple[Tensor, Tensor]] = field(default_factory=Remembered, repr=False)
    _mixtures: Remembered[tuple[Tensor, Tensor, Tensor]] = field(default_factory=Remembered, repr=False)
    _shapes: Remembered[Shape] = field(default_factory=Remembered, repr=False)

    def put(self, slot: int, a: Tensor, b: Tensor) -> None:
        """Copy one adapter's factors, `[rank, in]` and `[rank, out]`, into the first gap that holds them."""
        first = self._gap(a.shape[0])
        last = first + a.shape[0]
        if last > self.a.shape[0]:
            capacity = max(last, 2 * self.a.shape[0], _FIRST_RANKS)
            self.a, self.b = _grown(self.a, capacity), _grown(self.b, capacity)
            for made in (self._columns, self._groups, self._mixtures):
                made.clear()  # views would keep the old stacks in memory
        # from page-locked memory the copy runs beside the host's work; its order with later kernels is the stream's
        self.a[first:last].copy_(a, non_blocking=True)
        self.b[first:last].copy_(b, non_blocking=True)
        self.spans.set(slot, first, last)
        self._forget(slot)

    def drop(self, slot: int) -> None:
        """Free one adapter's rows; unknown slots are no error (the site had no delta)."""
        self.gains.pop(slot, None)
        if slot in self.spans:
            self.spans.drop(slot)
            self._forget(slot)

    def shape(self, slots: tuple[int, ...]) -> Shape:
        """Return the ranks that these slots have here, and the site's width."""
        found = self._shapes.get(slots)
        if found is None:
            ranks = tuple((slot, last - first) for slot, (first, last) in self._here(slots))
            found = self._shapes.keep(slots, shape_of(ranks, self.a.shape[1] + self.b.shape[1]))
        return found

    def columns(self, slots: tuple[int, ...]) -> Columns:
        """Return the stacked factors of several adapters, in the order in which they lie here; may have holes."""
        found = self._columns.get(slots)
        if found is None:
            made = columns_of(self.a, self.b, self._here(slots))
            found = self._columns.keep(slots, made, made.num_bytes, self.num_bytes)
        return found

    def groups(self, slots: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return a `[slot, in, rank]` and b `[slot, rank, out]` of slots that all have one rank here, in this order."""
        found = self._groups.get(slots)
        if found is None:
            a, b = (stack.view(len(slots), -1, stack.shape[1]) for stack in self._in_order(slots))
            found = self._groups.keep(slots, (a.mT, b), self._copied(a, b), self.num_bytes)
        return found

    def mixture(self, slots: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Return `(a, b, owner)` of several adapters in the given order; views when they lie side by side.

        `owner` is int64 `[rank]`: position in `slots` of each rank row's adapter. Adapters without a delta at this
        site have no rank rows.
        """
        found = self._mixtures.get(slots)
        if found is None:
            a, b = self._in_order(slots)
            spans = [self.spans.get(slot, (0, 0)) for slot in slots]
            owner = torch.tensor([place for place, span in enumerate(spans) for _ in range(*span)], dtype=torch.int64)
            owner = (owner.pin_memory() if self.a.is_cuda else owner).to(self.a.device, non_blocking=True)
            found = self._mixtures.keep(slots, (a, b, owner), self._copied(a, b), self.num_bytes)
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of the stacks, unused capacity included."""
        return sum(stack.numel() * stack.element_size() for stack in (self.a, self.b))

    def _here(self, slots: tuple[int, ...]) -> list[tuple[int, tuple[int, int]]]:
        return [(slot, self.spans[slot]) for slot in slots if slot in self.spans]

    def _in_order(self, slots: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return the factors of the slots that have any here, in this order; views when they lie side by side."""
        spans = [span for _, span in self._here(slots)] or [(0, 0)]
        if all(left[1] == right[0] for left, right in pairwise(spans)):
            return self.a[spans[0][0] : spans[-1][1]], self.b[spans[0][0] : spans[-1][1]]
        return tuple(torch.cat([stack[first:last] for first, last in spans]) for stack in (self.a, self.b))

    def _copied(self, a: Tensor, b: Tensor) -> int:
        is_view = a.untyped_storage().data_ptr() == self.a.untyped_storage().data_ptr()
        return 0 if is_view else a.nbytes + b.nbytes

    def _gap(self, size: int) -> int:
        at = 0
        for first, last in sorted(self.spans.values()):
            if first - at >= size:
                return at
            at = last
        return at

    def _forget(self, slot: int) -> None:
        # a set that names the slot holds its rows, or the fact that it had none here
        for made in (self._columns, self._groups, self._mixtures, self._shapes):
            made.forget(slot)


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
        """Load an adapter that fits the base (`LoRAModel.fit`) into the lowest free slot and return the slot.

        Raises:
            UserError: on a CPU, factors that the compute dtype turns into infinity.
        """
        assert not adapter.magnitudes, f"adapter {adapter.name!r} has not met its base's weights"
        slot = next(i for i in range(len(self.adapters) + 1) if i not in self.adapters)
        try:
            for site in adapter.sites:
                a, b = adapter.a[site], adapter.b[site]
                table = self.site(site, a.shape[1], b.shape[1])
                self._require_finite(adapter, site)
                table.put(slot, a, b)
                if site in adapter.gains:
                    table.gains[slot] = adapter.gains[site].to(self.device)
        except BaseException:  # the rows already there would be the next adapter's in this slot
            for table in self.sites.values():
                table.drop(slot)
            raise
        self.adapters[slot] = adapter
        return slot

    def _require_finite(self, adapter: LoRAModel, site: str) -> None:
        # on a CPU other adapters' rows meet these rank rows, with weight 0; in float32 it was checked at reading
        if self.device.type != "cpu" or self.dtype == torch.float32:
            return
        if not adapter.b[site].to(self.dtype).isfinite().all():
            what = f"adapter {adapter.name!r}: lora_B of {site!r} times its scale"
            raise UserError(f"{what} is too large for {self.dtype}")

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
