"""Which rows share a call, and on what factors: `pytest tests/test_partition.py`."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_problem import SITES, adapter_of, scene

from workbench.adapters import columns
from workbench.adapters import partition as by_cost
from workbench.adapters.partition import partition
from workbench.adapters.slots import SlotTable


@st.composite
def bounds_and_shapes(draw):
    ranks = draw(st.dictionaries(st.integers(0, 6), st.sampled_from([8, 8, 8, 1, 64]), max_size=6))
    mixtures = st.sets(st.integers(0, 7), min_size=1).map(lambda slots: tuple(sorted(slots)))
    segments = st.tuples(st.sampled_from([0, 0, 0, 2]), st.sampled_from([1, 1, 4, 900]), st.integers(0, 7) | mixtures)
    bounds, at = [], 0
    for gap, count, slots in draw(st.lists(segments, max_size=9)):
        bounds.append((at + gap, at + gap + count, slots))
        at += gap + count
    return tuple(bounds), columns.Shape(ranks, draw(st.sampled_from([8, 768, 16384])))


def slots_in(segment: tuple, shape: columns.Shape) -> set[int]:
    """The slots of a segment that have a delta."""
    wanted = segment[2] if isinstance(segment[2], tuple) else (segment[2],)
    return {slot for slot in wanted if slot in shape.ranks}


def cost_of(bounds: tuple, shape: columns.Shape, is_grouped: bool) -> int:
    """The work of one call over these segments, by the formulas of the ops."""
    if is_grouped:
        size = max(stop - start for start, stop, _ in bounds)
        filling = 0 if min(stop - start for start, stop, _ in bounds) == size else by_cost.FILL_MACS
        return by_cost.CALL_MACS + filling + len(bounds) * size * shape.ranks[bounds[0][2]] * shape.width
    used = set().union(*(slots_in(each, shape) for each in bounds))
    return by_cost.CALL_MACS + (bounds[-1][1] - bounds[0][0]) * sum(shape.ranks[slot] for slot in used) * shape.width


@settings(max_examples=100)
@given(bounds_and_shapes())
def test_every_segment_with_a_delta_is_in_one_group_and_no_choice_costs_more_than_a_call_each(drawn):
    bounds, shape = drawn
    found = partition(bounds, shape)
    busy = [place for place, each in enumerate(bounds) if slots_in(each, shape)]
    covered = [place for first, last, _ in found for place in range(first, last)]
    assert covered == sorted(set(covered)) and set(busy) <= set(covered)
    assert all(first in busy and last - 1 in busy for first, last, _ in found)
    for first, last, is_grouped in found:
        if is_grouped:
            assert {shape.ranks[slot] for _, _, slot in bounds[first:last]} == {shape.ranks[bounds[first][2]]}
            assert all(left[1] == right[0] for left, right in pairwise(bounds[first:last])), "rows of no group"
    alone = sum(cost_of(bounds[place : place + 1], shape, False) for place in busy)
    assert sum(cost_of(bounds[first:last], shape, is_grouped) for first, last, is_grouped in found) <= alone


def one_hot(*sizes: int, slots: tuple[int, ...] = (0, 1, 2, 3)) -> tuple:
    """Segments of these sizes, one after the other, of these slots."""
    stops = list(accumulate(sizes))
    return tuple((stop - size, stop, slot) for stop, size, slot in zip(stops, sizes, slots, strict=True))


EIGHTS = tuple((slot, 8) for slot in range(4))
FEW = columns.shape_of(EIGHTS, 576 + 576)
MIXED = columns.shape_of(((0, 8), (1, 4), (2, 8), (3, 16)), 576 + 576)


@pytest.mark.parametrize(
    ("bounds", "shape", "groups"),
    [
        (one_hot(4, 4, 4, 4), FEW, [(0, 4, True)]),
        (one_hot(1, 1, 1, 1), FEW, [(0, 4, True)]),
        (one_hot(2, 5, 4, 5), FEW, [(0, 4, False)]),  # little to gain by filling up
        (one_hot(7, 8, 7, 8), FEW, [(0, 4, True)]),
        (one_hot(4, 4, 4, 4), MIXED, [(0, 4, False)]),  # not of one rank
        (one_hot(512, 512, 512, 512), FEW, [(0, 1, False), (1, 2, False), (2, 3, False), (3, 4, False)]),
        (one_hot(4, 4, 4, 512), FEW, [(0, 3, True), (3, 4, False)]),
        (one_hot(512, 512, 512, slots=(1, 1, 1)), FEW, [(0, 3, False)]),  # rows of one adapter meet nothing in vain
        (((0, 8, (0, 1, 2, 3)), (8, 16, (0, 1, 2, 3))), FEW, [(0, 2, False)]),
        (((0, 4, 0), (4, 8, 1), (8, 12, (0, 1, 2, 3))), FEW, [(0, 3, False)]),
        (((0, 4, 0), (8, 12, 7), (12, 16, 1)), FEW, [(0, 3, False)]),  # 7 has no delta here
        (((0, 4, 7),), FEW, []),
    ],
)
def test_decoding_rows_share_a_call_and_prompts_go_alone(bounds, shape, groups):
    assert [tuple(group) for group in partition(bounds, shape)] == groups


def test_sites_alike_share_one_set_of_weights():
    layers, rows = scene()
    for site in SITES:
        layers.run(site, rows.weights)
    shapes = [layers.table.sites[site].shape((0, 1, 3)) for site in SITES]
    (part,) = {part for shape in shapes for part, _ in rows.weights.parts.at(shape)}
    assert len(part._made) == 1 and part.slots == (0, 1, 3)


def test_slots_nearly_side_by_side_are_a_view_and_others_a_copy():
    table = SlotTable(torch.float32, torch.device("cpu"))
    for seed in range(5):
        table.put(adapter_of(2, seed, ("wide",)))
    site = table.sites["wide"]
    for slots, is_copy, rank in [((0, 1), False, 4), ((1, 2, 4), False, 8), ((0, 4), True, 4), ((7,), False, 0)]:
        found = site.columns(slots)
        assert (found.is_copy, found.layout.rank) == (is_copy, rank)
        assert found is site.columns(slots), "made once"
        assert (found.a.data_ptr() == site.a[2 * slots[0] :].data_ptr()) == (not is_copy) or not rank


def test_a_stack_that_grew_is_let_go():
    table = SlotTable(torch.float32, torch.device("cpu"))
    table.put(adapter_of(2, 0, ("wide",)))
    site = table.sites["wide"]
    views = site.columns((0,)).a, site.mixture((0,))[0]
    table.put(adapter_of(40, 1, ("wide",)))
    for before, now in zip(views, (site.columns((0,)).a, site.mixture((0,))[0]), strict=True):
        assert torch.equal(before, now) and now.data_ptr() == site.a.data_ptr() != before.data_ptr()


def test_a_site_remembers_few_sets_of_slots_and_few_copies():
    table = SlotTable(torch.float32, torch.device("cpu"))
    for seed in range(9):
        table.put(adapter_of(2, seed, ("wide",)))
    site = table.sites["wide"]
    for number in range(1, 2**9):
        slots = tuple(slot for slot in range(9) if number >> slot & 1)
        site.columns(slots)
        site.shape(slots)
        site.mixture(slots)
        site.groups(slots)
        for made in (site._columns, site._shapes, site._mixtures, site._groups):
            assert len(made) <= 32
        assert sum(each.num_bytes for each in site._columns.values()) <= site.num_bytes
        copies = [a for a, _ in site._groups.values() if a.data_ptr() not in {row.data_ptr() for row in site.a}]
        assert sum(2 * a.nbytes for a in copies) <= 2 * site.a.nbytes
