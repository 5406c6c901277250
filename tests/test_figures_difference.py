"""A difference is signed and aligned, and above a null pair's. Run: pytest tests/test_figures_difference.py"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from figure_parts import heatmaps, texts, without_scalings
from trace_problem import make_trace

from workbench.display import figures
from workbench.display.difference_figure import aligned
from workbench.display.scales import difference_scale
from workbench.errors import UserError
from workbench.instrument.trace import Trace

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module")
def one() -> Trace:
    return make_trace(2, None)


def changed(trace: Trace, amount: float, token: int = 100, adapter: int = 1) -> Trace:
    values = trace.values.copy()
    values[token, :, adapter] += amount
    return replace(trace, values=values)


def parted(trace: Trace, token: int) -> Trace:
    ids, words = trace.token_ids.copy(), list(trace.tokens)
    ids[token:] += 1
    words[token] = " other"
    return replace(trace, token_ids=ids, tokens=tuple(words))


def test_the_difference_is_the_second_minus_the_first(one: Trace) -> None:
    picture = figures.difference(one, changed(one, 0.05))
    maps = heatmaps(picture)
    line = np.concatenate([drawn for drawn, axes in maps if len(drawn) == 4], 1)
    assert line[1, 100] == pytest.approx(0.05, abs=1e-6) and np.nansum(np.abs(line)) == pytest.approx(0.05, abs=1e-5)
    sites = [drawn for drawn, _ in maps if len(drawn) == 10]
    assert len(sites) == 4 and sites[1][:, 100] == pytest.approx(np.full(10, 0.05), abs=1e-6)
    assert {axes.images[0].get_clim() for _, axes in maps} == {(-0.1, 0.1)}
    assert np.isnan(line[:, -1]).all()
    assert any("largest 0.05: token 100" in text for text in texts(picture))
    assert "german +" in picture.description


def test_the_scale_is_symmetric_and_one_of_a_few() -> None:
    held = {0: 0.01, 0.01: 0.01, 0.011: 0.03, 0.2: 0.3, 1.5: 1, float("nan"): 0.01}
    assert [difference_scale(largest).high for largest in held] == list(held.values())
    scale = difference_scale(0.2)
    assert scale.low == -scale.high and scale.colour_of(0) == scale.colours[3]
    assert difference_scale(0.2, limit=0.5).high == 0.5
    for wrong in (0, -1, float("inf"), float("nan")):
        with pytest.raises(UserError, match="limit="):
            difference_scale(0.2, limit=wrong)


def test_differences_at_or_below_the_floor_are_not_shown(one: Trace) -> None:
    both = changed(changed(one, 0.05), 0.002, token=50)
    shown = aligned(one, both, floor=0.01).values
    assert (shown[50] == 0).all() and shown[100, 0, 1] == pytest.approx(0.05, abs=1e-6)
    null = (one, changed(one, 0.004, token=30))
    shown = aligned(one, both, floor=null)
    assert shown.floor == pytest.approx(0.004, abs=1e-6) and (shown.values[50] == 0).all()
    assert aligned(one, both).values[50, 0, 1] == pytest.approx(0.002, abs=1e-6)
    picture = figures.difference(one, changed(one, 0.002), floor=null)
    assert all(np.nansum(np.abs(drawn)) == 0 for drawn, _ in heatmaps(picture))
    assert any("No difference is above 0.004" in text for text in texts(picture))
    for wrong in (-1, "0.1", True, float("nan"), (one,)):
        with pytest.raises(UserError, match="floor="):
            aligned(one, both, floor=wrong)


def test_nothing_is_compared_from_where_the_texts_part(one: Trace) -> None:
    other = parted(changed(one, 0.05, token=110), 105)
    found = aligned(one, other)
    assert found.part == 105 and np.isnan(found.values[105:]).all() and not np.isnan(found.values[104]).any()
    assert found.one.num_tokens == 111
    picture = figures.difference(one, other)
    shown = texts(picture)
    assert "the texts part ▸" in shown and any("part at token 105" in text and "'·other'" in text for text in shown)
    assert any(line.get_xdata()[0] == 104.5 for axes in picture.figure.axes for line in axes.lines)


def test_where_the_null_pairs_texts_part_it_bounds_the_comparison_too(one: Trace) -> None:
    found = aligned(one, changed(one, 0.05), floor=(one, parted(one, 90)))
    assert np.isnan(found.values[90:]).all() and not np.isnan(found.values[89]).any() and found.part is None


def test_a_shorter_text_is_compared_as_far_as_it_goes(one: Trace) -> None:
    found = aligned(one, one.select(tokens=slice(0, 100)))
    assert found.part is None and np.isnan(found.values[100:]).all() and found.one.num_tokens == 106
    assert (found.values[:100] == 0).all()
    found = aligned(one.select(tokens=slice(0, 100)), one)
    assert found.values.shape[0] == 100 and (found.values == 0).all()


def test_large_differences_carry_their_sign(one: Trace) -> None:
    picture = figures.difference(one, changed(changed(one, 0.08), -0.08, token=101), limit=0.1)
    markers = [
        (collection.get_offsets().data.round().astype(int).tolist(), len(collection.get_paths()[0].vertices))
        for axes in picture.figure.axes
        for collection in axes.collections
        if len(collection.get_offsets()) and collection.get_offsets()[0][0] in (100, 101)
    ]
    assert [places for places, _ in markers] == [[[100, 1]], [[101, 1]]]
    assert markers[0][1] > markers[1][1]  # a plus has two strokes, a minus one


def other_prompt(trace: Trace) -> Trace:
    return parted(trace, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.select(adapters=["python", "german", "spanish"]), "adapters: only the first has 'scripture'"),
        (lambda t: t.select(adapters=["german", "python", "spanish", "scripture"]), "adapters in another order"),
        (lambda t: t.select(sites="*.q_proj"), "different sites.*another model or ordering"),
        (lambda t: replace(t, sites=t.sites[::-1]), "sites in another order.*another ordering"),
        (other_prompt, "different prompts: token 3 is"),
        (lambda t: t.select(tokens=slice(0, 50)), "different prompts, of 82 and 50 tokens"),
        (without_scalings, "no scalings to draw"),
        (lambda t: "a path", "drawn from a Trace"),
    ],
)
def test_what_cannot_be_compared_is_named(one: Trace, change, message: str) -> None:
    with pytest.raises(UserError, match=message):
        figures.difference(one, change(one))


def test_both_edits_and_other_bases_are_told(one: Trace) -> None:
    edited = replace(one, metadata=one.metadata | {"edits": ["ablate german"], "dtype": "bfloat16", "base": "another"})
    shown = texts(figures.difference(one, edited, labels=("plain", "k = 4")))
    assert "k = 4 edited: ablate german" in shown and "k = 4 bf16" in shown
    assert any("bases differ: SmolLM2-135M-Instruct | another" in text for text in shown)
    assert "What differs: k = 4 minus plain" in shown
