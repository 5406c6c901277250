"""Parts: the rows of a forward that share one call per site on a CPU, and what that call needs beside factors.

Contract: a part's weights are made once per forward, for all sites whose rank rows lie alike.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_kernels.segments import Segment
from workbench.adapters.columns import Layout, Shape
from workbench.adapters.partition import partition

if TYPE_CHECKING:
    from workbench.adapters.rows import MixtureSegment

    Member = Segment | MixtureSegment

# weights of all sites at once up to here; beyond (a prompt of a mixture), one site at a time costs next to nothing
MOST_WEIGHTS = 1 << 22


class Parts:
    """The segments of a forward, grouped.

    Attributes:
        slots: every slot in use, ascending.
    """

    def __init__(self, one_hot: Sequence[Segment], mixtures: Sequence[MixtureSegment]):
        self._members: list[Member] = sorted([*one_hot, *mixtures], key=lambda member: member.start)
        self._bounds = tuple(
            (each.start, each.stop, each.slot if isinstance(each, Segment) else each.slots) for each in self._members
        )
        self.slots = tuple(sorted({slot for member in self._members for slot in slots_of(member)}))
        self._found: dict[Shape, tuple[tuple[Part, bool], ...]] = {}
        self._parts: dict[tuple[int, int], Part] = {}

    def at(self, shape: Shape) -> tuple[tuple[Part, bool], ...]:
        """Return the parts of every site of this shape, in row order, each with whether its slots are groups."""
        found = self._found.get(shape)
        if found is None:
            groups = partition(self._bounds, shape)
            found = tuple((self._part(first, last), is_grouped) for first, last, is_grouped in groups)
            self._found[shape] = found
        return found

    def _part(self, first: int, last: int) -> Part:
        if (first, last) not in self._parts:
            self._parts[first, last] = Part(self._members[first:last])
        return self._parts[first, last]


class Part:
    """Consecutive segments computed together.

    Attributes:
        start, stop: their rows, and those between them; `num_rows` in all.
        slots: the slots of all of them, ascending, each once.
    """

    def __init__(self, members: Sequence[Member]):
        self._members = members
        self.start, self.stop = members[0].start, members[-1].stop
        self.num_rows = self.stop - self.start
        self.slots = tuple(sorted({slot for member in members for slot in slots_of(member)}))
        self._mixtures = [member for member in members if not isinstance(member, Segment)]
        self._sites = site_axis(self._mixtures)
        self._made: dict[Layout, tuple[Sequence[Tensor] | None, Tensor | None]] = {}

    def weights_at(self, layout: Layout, site: str) -> tuple[Tensor | None, Tensor | None]:
        """Return `weights` and `outside` of the op `blend` at a site whose rank rows lie as in `layout`."""
        weights, outside = self._made.get(layout) or self._make(layout)
        return None if weights is None else weights[self._sites.get(site, -1)], outside

    def _make(self, layout: Layout) -> tuple[Sequence[Tensor] | None, Tensor | None]:
        owner = layout.owner(self.slots)
        weights = outside = None
        if len(self._members) > 1 or layout.has_holes:
            outside = (~self._inside).index_select(1, owner)
            outside = outside[None] if outside.any() else None
        if self._mixtures:
            by_slot = self._by_slot
            is_small = by_slot.shape[0] * by_slot.shape[1] * layout.rank <= MOST_WEIGHTS
            weights = _OneSiteAtATime(by_slot, owner)
            if is_small:
                weights = by_slot.gather(2, owner.expand(*by_slot.shape[:2], -1))[:, None].unbind(0)
        self._made[layout] = weights, outside
        return weights, outside

    @functools.cached_property
    def in_order(self) -> tuple[int, ...]:
        """The slots of one-hot segments, in row order."""
        return tuple(slot for member in self._members for slot in slots_of(member))

    @functools.cached_property
    def filling(self) -> tuple[Tensor, Tensor] | None:
        """How `blend` makes groups of one size out of the segments; None where they are of one."""
        sizes = [member.stop - member.start for member in self._members]
        size = max(sizes)
        if min(sizes) == size:
            return None
        gather, scatter = [], []
        for group, member in enumerate(self._members):
            first, count = member.start - self.start, sizes[group]
            gather += [*range(first, first + count), *[first] * (size - count)]
            scatter += range(group * size, group * size + count)
        return torch.tensor(gather), torch.tensor(scatter)

    @functools.cached_property
    def _inside(self) -> Tensor:
        """Which slots each row uses: bool `[row, slot + 1]`; the last column is that of holes."""
        of_members = [[slot in slots_of(member) for slot in (*self.slots, None)] for member in self._members]
        nothing = [False] * (len(self.slots) + 1)
        found, lengths = [of_members[0]], [self._members[0].stop - self.start]
        for (before, after), used in zip(pairwise(self._members), of_members[1:], strict=True):
            found += [nothing, used]
            lengths += [after.start - before.stop, after.stop - after.start]
        return torch.tensor(found).repeat_interleave(torch.tensor(lengths), 0, output_size=self.num_rows)

    @functools.cached_property
    def _by_slot(self) -> Tensor:
        """The weights `[site + 1, row, slot + 1]`; the last site stands for all that no mixture names."""
        num_sites = 1 + max(self._sites.values(), default=-1)
        found = self._inside.float().repeat(num_sites + 1, 1, 1)
        for mixture in self._mixtures:
            rows = found[:, mixture.start - self.start : mixture.stop - self.start]
            own = rows.new_zeros(*rows.shape[:2], len(mixture.slots))
            given = mixture.weights.transpose(0, 1)  # [site, row, n], or 1 of either
            if mixture.is_everywhere:
                own[:] = given
            elif mixture.site_index is self._sites:
                own[:-1] = given
            else:
                places = torch.tensor([self._sites[site] for site in mixture.site_index])
                indices = torch.tensor(list(mixture.site_index.values()))
                own[places] = given[indices] if len(given) > 1 else given
            rows.index_copy_(2, torch.tensor([self.slots.index(slot) for slot in mixture.slots]), own)
        return found


class _OneSiteAtATime:
    """Expanded weights, made when a site asks for its own."""

    def __init__(self, by_slot: Tensor, owner: Tensor):
        self._by_slot, self._owner = by_slot, owner

    def __getitem__(self, index: int) -> Tensor:
        return self._by_slot[index].index_select(1, self._owner)[None]


def slots_of(member: Member) -> tuple[int, ...]:
    """Return the slots that a segment's rows use."""
    return (member.slot,) if isinstance(member, Segment) else member.slots


def site_axis(mixtures: Sequence[MixtureSegment]) -> Mapping[str, int]:
    """Return site -> index on one axis for all mixtures; constant weights need none."""
    given = {id(mixture.site_index): mixture.site_index for mixture in mixtures if not mixture.is_everywhere}
    if len(given) == 1:
        return next(iter(given.values()))
    sites = dict.fromkeys(site for each in given.values() for site in each)
    return {site: index for index, site in enumerate(sites)}
