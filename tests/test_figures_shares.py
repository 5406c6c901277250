"""Shares by depth, projection and time, and entropy, are the trace's. Run: pytest tests/test_figures_shares.py"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from figure_parts import heatmaps, lines, panel, recorded, texts, without_scalings
from trace_problem import make_trace, small_trace, with_outliers

from workbench.display import figures, palette
from workbench.display.leading import with_others
from workbench.display.site_groups import by_layer, by_projection
from workbench.errors import UserError
from workbench.instrument.trace import Trace

pytestmark = pytest.mark.filterwarnings("error")
LLAMA = [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace(6, reuse_after=10)


def many(count: int) -> Trace:
    rng = np.random.default_rng(0)
    trace = make_trace(2, None)
    values = rng.dirichlet(np.full(count, 0.05), trace.values.shape[:2]).astype(np.float32)
    values[-1] = np.nan
    return replace(trace, values=values, adapters=tuple(f"adapter_{i}" for i in range(count)))


def test_layers_and_projections_are_grouped_in_model_order() -> None:
    sites = tuple(f"model.layers.{layer}.{name}" for layer in (1, 0) for name in reversed(LLAMA)) + ("lm_head",)
    assert by_layer(sites).labels == ("0", "1", "outside")
    assert by_layer(sites).columns[0].tolist() == list(range(7, 14))
    assert by_projection(sites).labels == (*LLAMA, "lm_head")
    experts = ("model.layers.0.mlp.experts.0.w1", "model.layers.0.mlp.experts.1.w1", "model.layers.0.mlp.experts.1.w2")
    assert by_projection(experts).labels == ("w1", "w2") and by_projection(experts).columns[0].tolist() == [0, 1]
    gpt2 = ("h.0.attn.c_attn", "h.0.attn.c_proj", "h.0.mlp.c_fc", "h.0.mlp.c_proj")
    assert by_projection(gpt2).labels == ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


@pytest.mark.parametrize("name", ["by_depth", "by_projection"])
def test_stacked_shares_are_means_over_tokens_and_a_groups_sites(trace: Trace, name: str) -> None:
    picture = getattr(figures, name)(trace)
    stacked = next(axes for axes in picture.figure.axes if len(axes.containers) == 4)
    for adapter, bars in enumerate(stacked.containers):
        for group, bar in enumerate(bars):
            columns = range(5 * group, 5 * group + 5) if name == "by_depth" else range(group, 30, 5)
            expected = np.nanmean([trace.values[:-1, column, adapter] for column in columns])
            assert bar.get_height() == pytest.approx(expected, abs=1e-6)
            colour = np.array(palette.rgb(palette.adapter_colour(adapter))) / 255
            assert bar.get_facecolor()[:3] == pytest.approx(colour)
    assert stacked.get_ylim() == (0, 1)
    letters = [text.get_text()[0] for text in stacked.texts]
    assert {letter: letters.count(letter) for letter in "ABCD"} == dict.fromkeys("ABCD", 6 if name == "by_depth" else 5)


def test_each_adapters_panel_shows_its_spread_over_tokens(trace: Trace) -> None:
    picture = figures.by_depth(trace)
    axes = panel(picture, "german")
    layer_means = trace.values[:-1, :, 1].reshape(-1, 6, 5).mean(2)
    np.testing.assert_allclose(lines(axes, "mean")[0], layer_means.mean(0), rtol=1e-5)
    low, high = axes.collections[0].get_datalim(axes.transData).intervaly
    assert low == pytest.approx(np.percentile(layer_means, 10, 0).min(), rel=1e-4)
    assert high == pytest.approx(np.percentile(layer_means, 90, 0).max(), rel=1e-4)
    assert axes.get_ylim() == (-0.02, 1.02)


def test_shares_that_are_no_parts_of_one_are_not_stacked(trace: Trace) -> None:
    picture = figures.by_depth(replace(trace, values=np.clip(trace.values * 3, 0, 1)))
    assert all(len(axes.containers) < 4 for axes in picture.figure.axes)
    assert "they are not stacked" in " ".join(texts(picture))


def test_the_grid_has_every_layer_and_projection_and_hatches_what_the_model_lacks(trace: Trace) -> None:
    part = trace.select(sites=[site for site in trace.sites if site != "model.layers.2.self_attn.k_proj"])
    picture = figures.depth_projection(part, "german")
    ((drawn, axes),) = heatmaps(picture)
    expected = np.nanmean(trace.values[:-1, :, 1], 0).reshape(6, 5).T
    assert np.isnan(drawn[1, 2])
    expected[1, 2] = np.nan
    np.testing.assert_allclose(drawn, expected, rtol=1e-5)
    assert axes.images[0].get_clim() == (0, 1)
    written = {(text.get_position()): text.get_text() for text in axes.texts}
    assert written[(3, 0)] == f"{expected[0, 3]:.2f}".lstrip("0") and (2, 1) not in written
    assert len(heatmaps(figures.depth_projection(trace))) == 4
    with pytest.raises(UserError, match="did you mean 'german'"):
        figures.depth_projection(trace, "germn")


def test_lines_over_time_are_the_means_over_sites_and_the_strip_says_what_was_reused(trace: Trace) -> None:
    picture = figures.over_time(trace)
    axes = next(axes for axes in picture.figure.axes if lines(axes, "3"))
    for adapter in range(4):
        np.testing.assert_allclose(lines(axes, str(adapter))[0], trace.token_means()[:, adapter])
    assert axes.get_ylim() == (-0.02, 1.02)
    assert trace.prompt_tokens - 0.5 in [line.get_xdata()[0] for line in axes.lines]
    striped = [p for axes in picture.figure.axes for p in axes.patches if p.get_hatch() == "||||||"]
    reused = [patch for patch in striped if patch.get_width() > 1]
    assert [(patch.get_x(), patch.get_width()) for patch in reused] == [(91.5, 42)] and trace.reused.sum() == 42
    assert {"A", "B", "C", "D"} <= {text.get_text() for text in axes.texts}
    styles = {(line.get_linestyle(), line.get_marker()) for line in axes.lines if line.get_label() in "0123"}
    assert len(styles) == 4


def test_smoothing_is_a_centred_mean_and_is_stated(trace: Trace) -> None:
    picture = figures.over_time(trace, smooth=5)
    axes = next(axes for axes in picture.figure.axes if lines(axes, "0"))
    means = trace.token_means()[:, 0]
    drawn = lines(axes, "0")[0]
    assert drawn[40] == pytest.approx(means[38:43].mean()) and drawn[0] == pytest.approx(means[:3].mean())
    assert np.isnan(drawn[-1]) and drawn[-2] == pytest.approx(means[-4:-1].mean())
    assert any("mean of 5 neighbouring tokens" in text for text in texts(picture))
    even = figures.over_time(trace, smooth=2)
    drawn = lines(next(axes for axes in even.figure.axes if lines(axes, "0")), "0")[0]
    assert drawn[40] == pytest.approx(means[39:41].mean())
    for wrong in (0, -3, 2.5, "5", True):
        with pytest.raises(UserError, match="smooth="):
            figures.over_time(trace, smooth=wrong)


def test_values_beyond_the_scale_are_marked_at_its_ends(trace: Trace) -> None:
    picture = figures.over_time(with_outliers(trace))
    axes = next(axes for axes in picture.figure.axes if lines(axes, "0"))
    marks = [line for line in axes.lines if line.get_label() == "_outside" and len(line.get_xdata())]
    assert [(mark.get_xdata()[0], mark.get_ydata()[0], mark.get_marker()) for mark in marks] == [(3, 1.0, "^")] * 4


def test_of_many_adapters_the_leading_are_drawn_and_the_others_together() -> None:
    trace = many(200)
    shares = np.array(list(trace.share().values()))
    shown, values = with_others(trace.token_means(), shares, 8)
    assert sorted(shown[:-1]) == sorted(np.argsort(-shares)[:7].tolist()) and shown[-1] == -1
    np.testing.assert_allclose(values[:-1].sum(1), trace.token_means()[:-1].sum(1))
    _, largest = with_others(trace.token_means(), shares, 8, largest=True)
    rest = [i for i in range(200) if i not in shown]
    np.testing.assert_allclose(largest[:-1, -1], trace.token_means()[:-1, rest].max(1))
    picture = figures.by_depth(trace)
    found = texts(picture)
    assert any("193 others" in text for text in found) and panel(picture, "all others together")
    tall = figures.token_adapter(trace)
    assert all(drawn.shape[0] == 24 for drawn, _ in heatmaps(tall)) and "… 177 others (sum)" in texts(tall)


def test_entropy_is_drawn_against_all_alike(trace: Trace) -> None:
    picture = figures.entropy(recorded(trace))
    top, bottom = (panel(picture, words) for words in ("scalings: 0", "next token"))
    np.testing.assert_allclose(top.lines[0].get_ydata(), trace.scaling_entropy())
    np.testing.assert_allclose(bottom.lines[0].get_ydata(), recorded(trace).extra("entropy").values)
    assert any(np.allclose(line.get_ydata(), np.log(4)) for line in top.lines)
    assert top.get_ylim()[1] == pytest.approx(1.06 * np.log(4))
    assert "nats" in top.get_ylabel() and "mean" in picture.description
    only = figures.entropy(recorded(without_scalings(small_trace())))
    assert panel(only, "next token") and "scalings: 0" not in " ".join(texts(only))
    with pytest.raises(UserError, match="engine.record"):
        figures.entropy(without_scalings(trace))


@pytest.mark.parametrize("name", ["by_depth", "by_projection", "depth_projection", "over_time", "entropy"])
@pytest.mark.parametrize("kind", ["one adapter", "one token", "nothing", "no generated"])
def test_small_and_empty_traces_are_drawn(name: str, kind: str) -> None:
    trace = {
        "one adapter": small_trace(adapters=1),
        "one token": small_trace(("Hi",)),
        "nothing": replace(small_trace(), values=np.full((4, 10, 2), np.nan, np.float32), source=np.full(4, -1)),
        "no generated": small_trace().select(tokens=slice(0, 2)),
    }[kind]
    picture = getattr(figures, name)(trace)
    assert picture.description and picture.figure.get_figheight() < 8
    if kind == "nothing":
        hatches = [p for axes in picture.figure.axes for p in axes.patches if p.get_hatch() == "////"]
        assert hatches


@pytest.mark.parametrize(
    "name", ["token_adapter", "site_token", "overview", "by_depth", "by_projection", "depth_projection", "over_time"]
)
def test_a_trace_without_scalings_says_what_to_record(name: str, trace: Trace) -> None:
    with pytest.raises(UserError, match="no scalings to draw: record 'scalings'"):
        getattr(figures, name)(without_scalings(trace))
    with pytest.raises(UserError, match="drawn from a Trace"):
        getattr(figures, name)("run/trace.safetensors")
