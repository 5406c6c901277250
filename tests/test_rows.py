"""Every row of a forward gets its own adapters' deltas and no other's: `pytest tests/test_rows.py`."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rows_problem import RANKS, SITES, SOME_SITES, Layers, Rows, adapter_of, check, rows_over, scene

from lora_kernels.blend import blend
from lora_kernels.segments import Segment, plan_rows, segments
from lora_kernels.triton_support import interpreting
from workbench import UserError
from workbench.adapters import columns, linear, parts
from workbench.adapters import partition as by_cost
from workbench.adapters import rows as rows_module
from workbench.adapters.linear import MixtureSegment, RowWeights
from workbench.adapters.partition import partition
from workbench.adapters.parts import Part
from workbench.adapters.slots import SiteTable


@pytest.fixture(params=["joint", "alone", "grouped", "one site at a time", "no holes"])
def choice(request, monkeypatch):
    """Run under each choice that is made by cost: the results may not depend on it."""
    if request.param == "alone":
        monkeypatch.setattr(by_cost, "CALL_MACS", 0)
    elif request.param == "grouped":
        monkeypatch.setattr(by_cost, "FILL_MACS", 0)
    elif request.param == "one site at a time":
        monkeypatch.setattr(parts, "MOST_WEIGHTS", 0)
    elif request.param == "no holes":
        monkeypatch.setattr(columns, "MOST_HOLES", 0)
    partition.cache_clear()
    yield request.param
    partition.cache_clear()


@settings(max_examples=16, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_row_gets_its_own_deltas_whatever_was_loaded_and_evicted_before(choice, data):
    layers, seed = Layers(), 0
    for _ in range(data.draw(st.integers(1, 5))):
        for _ in range(data.draw(st.integers(0, 3))):
            seed += 1
            layers.put(adapter_of(data.draw(RANKS), seed, data.draw(SOME_SITES)))
        if layers.loaded and data.draw(st.booleans()):
            layers.drop(data.draw(st.sampled_from(sorted(layers.loaded))))
        with torch.inference_mode(data.draw(st.booleans())), torch.no_grad():
            check(layers, data.draw(rows_over(sorted(layers.loaded))))


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 1, 1), (3, 1, 2), (1, 5)])
def test_rows_of_adapters_of_one_rank_get_their_own_deltas_in_groups(sizes, monkeypatch):
    calls = []
    monkeypatch.setattr(linear, "blend", lambda *given: calls.append(given) or blend(*given))
    monkeypatch.setattr(by_cost, "FILL_MACS", 0)
    partition.cache_clear()
    layers = Layers()
    for seed in range(4):
        layers.put(adapter_of(3, seed, SITES))
    for first in (0, 2):  # after base rows, or none; in the order of the table, or not
        slots = [-1] * first + [slot for slot, size in zip((1, 3, 0), sizes, strict=False) for _ in range(size)]
        own = [{slot: 1.0} if slot >= 0 else {} for slot in slots]
        with torch.inference_mode():
            check(layers, Rows(RowWeights(len(slots), segments(slots)), dict.fromkeys(SITES, own)))
    partition.cache_clear()
    assert len(calls) == 2 * 3, "one call at each site with features"
    assert all(len(a) == len(sizes) for _, _, a, *_ in calls)
    assert all((filling is None) == (min(sizes) == max(sizes)) for *_, filling in calls)


@settings(max_examples=30)
@given(data=st.data())
def test_the_kernels_path_and_the_padded_path_give_the_same(data):
    """On a GPU each segment goes to bgmv, sgmv or mix; those paths are the same on a CPU."""
    layers = Layers()
    for seed in range(data.draw(st.integers(1, 4))):
        layers.put(adapter_of(data.draw(RANKS), seed, data.draw(SOME_SITES)))
    rows = data.draw(rows_over(sorted(layers.loaded), fixed_shape=data.draw(st.booleans())))
    for layer in layers.layers.values():
        layer._add = layer._add_by_kernel
    with torch.inference_mode():
        check(layers, rows)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 5)], ids=["bgmv", "sgmv"])
def test_kernels_get_one_plan_per_step_and_give_every_row_its_own(sizes, monkeypatch):
    """In Triton's interpreter; the mixture's rows go to mix."""
    layers, _ = scene()
    plans = []
    monkeypatch.setattr(rows_module, "plan_rows", lambda *given: plans.append(given) or plan_rows(*given))
    slots = [-1] + [0] * sizes[0] + [3] * sizes[1]
    weights = torch.rand(2, len(SITES), 2)
    mixture = MixtureSegment(len(slots), len(slots) + 2, (2, 1), weights, {site: i for i, site in enumerate(SITES)})
    rows = RowWeights(len(slots) + 2, segments(slots), (mixture,))
    own = {
        site: [{slot: 1.0} if slot >= 0 else {} for slot in slots]
        + [dict(zip((2, 1), each.tolist(), strict=True)) for each in mixture.weights_at(site)]
        for site in SITES
    }
    for layer in layers.layers.values():
        layer._add = layer._add_by_kernel
    with torch.inference_mode(), interpreting():
        check(layers, Rows(rows, own))
    assert len(plans) == 1


@settings(max_examples=30)
@given(data=st.data())
def test_with_a_fixed_shape_a_row_is_bitwise_the_same_whatever_its_neighbours_want(data):
    layers = Layers()
    for seed in range(4):
        layers.put(adapter_of(data.draw(RANKS), seed, SITES))
    rows = data.draw(rows_over([0, 1, 2, 3], fixed_shape=True))
    weights, num_rows = rows.weights, rows.weights.num_rows
    with torch.inference_mode():
        together = {site: layers.run(site, weights) for site in SITES}
        for segment in (*weights.one_hot, *weights.mixtures):
            row = data.draw(st.integers(segment.start, segment.stop - 1))
            if isinstance(segment, Segment):
                alone = RowWeights(num_rows, (Segment(row, row + 1, segment.slot),), (), True)
            else:
                alone = RowWeights(num_rows, (), (segment.select(row, row + 1, row),), True)
            for site in SITES:
                assert torch.equal(layers.run(site, alone)[row], together[site][row])


@settings(max_examples=30)
@given(data=st.data())
def test_selected_rows_get_what_they_got_among_all(data):
    layers = Layers()
    for seed in range(3):
        layers.put(adapter_of(2, seed, SITES))
    rows = data.draw(rows_over([0, 1, 2])).weights
    chosen = data.draw(st.lists(st.integers(0, rows.num_rows - 1), min_size=1, max_size=9))
    with torch.inference_mode():
        for site in SITES:
            all_rows = layers.run(site, rows)
            found = layers.run(site, rows.select(chosen), layers.input(site, rows.num_rows)[:, chosen])
            assert (found - all_rows[chosen]).abs().max() < 1e-4


def test_rows_selected_one_after_the_other_stay_one_segment():
    weights = torch.rand(4, 1, 2)
    mixture = MixtureSegment(6, 10, (0, 1), weights, {"wide": 0})
    rows = RowWeights(10, (Segment(1, 3, 5), Segment(3, 6, 2)), (mixture,))
    found = rows.select([0, 2, 3, 5, 7, 8])
    assert found.one_hot == (Segment(1, 2, 5), Segment(2, 4, 2))
    (part,) = found.mixtures
    assert (part.start, part.stop) == (4, 6) and torch.equal(part.weights, weights[1:3])


# the twins of the tests above


def test_a_row_that_meets_its_neighbours_adapters_does_not_pass(monkeypatch):
    layers, rows = scene()
    check(layers, rows)
    monkeypatch.setattr(Part, "weights_at", lambda *_: (None, None))
    with pytest.raises(AssertionError):
        check(layers, rows)


@torch.no_grad()
def test_columns_of_an_adapter_that_left_do_not_pass(monkeypatch):
    for forgets in (True, False):
        layers, rows = scene()
        check(layers, rows)
        if not forgets:
            monkeypatch.setattr(SiteTable, "_forget", lambda *_: None)
        layers.drop(3)
        layers.put(adapter_of(2, 9, SITES))
        if forgets:
            check(layers, rows)
        else:
            with pytest.raises(AssertionError):
                check(layers, rows)


def test_one_wrong_rank_row_of_one_adapter_does_not_pass():
    layers, rows = scene()
    table = layers.table.sites["wide"]
    table.b[table.spans[1][0]] *= 1.1
    with pytest.raises(AssertionError, match="wide"):
        check(layers, rows)


# what a row may not do to another


@torch.no_grad()
def test_an_adapter_that_overflows_spoils_its_own_rows_alone():
    clean, rows = scene()
    layers = Layers()
    for seed in range(4):
        layers.put(adapter_of(seed + 1, seed, SITES, scale=1e38 if seed == 1 else 1.0))
    for site in ("wide", "narrow"):
        found, wanted = layers.run(site, rows.weights), clean.run(site, rows.weights)
        assert not found[3].isfinite().all()
        others = [0, 1, 2, 4]
        assert torch.equal(found[others], wanted[others])


def test_factors_that_the_compute_dtype_turns_into_infinity_are_refused_and_leave_nothing():
    layers = Layers(torch.float16)
    large = adapter_of(2, 0, ("wide", "narrow"))
    large.b["narrow"][1, 1] = 1e5
    with pytest.raises(UserError, match="'0': lora_B of 'narrow' times its scale is too large for torch.float16"):
        layers.put(large)
    assert all(table.b.isfinite().all() and not table.spans for table in layers.table.sites.values())
