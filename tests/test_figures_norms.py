"""Norms lie on decades that are stated, likeliest tokens in their rank. Run: pytest tests/test_figures_norms.py"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from figure_parts import heatmaps, panel, recorded, texts, without_scalings
from matplotlib.colors import LogNorm
from trace_problem import HOSTILE, make_trace, small_trace

from workbench.display import figures
from workbench.display.scales import decade_scale, decades_of
from workbench.errors import UserError
from workbench.instrument.recorded import Recorded
from workbench.instrument.trace import Trace

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module")
def trace() -> Trace:
    return recorded(make_trace(2, None).select(tokens=slice(60, 110)))


def test_decades_hold_every_value_and_are_spelled_out() -> None:
    assert decades_of(np.array([0.02, 3, np.nan, 0, -1, np.inf])) == (-2, 1)
    assert decades_of(np.array([10.0])) == (1, 2) and decades_of(np.array([np.nan, 0])) == (0, 1)
    scale = decade_scale("norm", (-3, 4))
    assert (scale.low, scale.high) == (1e-3, 1e4) and scale.is_log
    assert [scale.tick_text(value) for value in (1e-3, 0.1, 100, 1e4)] == ["10⁻³", "0.1", "100", "10⁴"]
    for wrong in ((1, 1), (2, -1), (0.5, 2), (1,), "ab", 3, (0, 100)):
        with pytest.raises(UserError, match="decades must be two whole numbers"):
            decade_scale("norm", wrong)


def test_delta_norms_are_means_over_sites_and_over_a_layers_tokens(trace: Trace) -> None:
    picture = figures.delta_norms(trace)
    values = trace.extra("delta_norm").values.astype(float)
    by_token, by_layer = (drawn for drawn, _ in heatmaps(picture))
    assert np.isnan(by_token[:, 0]).all()
    np.testing.assert_allclose(by_token[:, 1:], values[1:].mean(1).T, rtol=1e-5)
    np.testing.assert_allclose(by_layer, values[1:].reshape(-1, 2, 5, 4).mean((0, 2)).T, rtol=1e-5)
    for _, axes in heatmaps(picture):
        assert isinstance(axes.images[0].norm, LogNorm) and axes.images[0].get_clim() == (1e-4, 1)
    shown = texts(picture)
    assert any("from 10⁻⁴ to 1" in text for text in shown) and "‖w·BAx‖ / ‖Wx‖ (ratio)" in shown


def test_a_norm_of_zero_is_below_the_scale_and_not_missing(trace: Trace) -> None:
    values = trace.extra("delta_norm").values.copy()
    values[1:, :, 2] = 0
    values[5] = 7
    extra = replace(trace.extra("delta_norm"), values=values)
    picture = figures.delta_norms(replace(trace, extras={"delta_norm": extra}))
    by_token, by_layer = (drawn for drawn, _ in heatmaps(picture))
    # a logarithmic norm leaves out what is not above 0
    assert (by_token[2, 6:] > 0).all() and (by_token[2, 6:] < 1e-4).all() and not np.isnan(by_layer).any()
    assert any("40 lie above" in text and "480 are 0" in text for text in texts(picture))


def test_delta_norms_keep_the_letters_of_the_traces_axis(trace: Trace) -> None:
    part = trace.extra("delta_norm").keep("adapter", ["spanish", "german"])
    shown = texts(figures.delta_norms(replace(trace, extras={"delta_norm": part})))
    assert "C spanish" in shown and "B german" in shown and "A spanish" not in shown


def test_hidden_norms_show_every_layer_and_their_spread(trace: Trace) -> None:
    picture = figures.hidden_norms(trace)
    values = trace.extra("hidden_norm").values
    ((drawn, axes),) = heatmaps(picture)
    np.testing.assert_allclose(drawn, values.T)
    low, high = axes.images[0].get_clim()
    assert low <= np.nanmin(values) and high >= np.nanmax(values) and np.log10(low).is_integer()
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["0", "1", "final norm"]
    spread = panel(picture, "over all tokens")
    np.testing.assert_allclose(spread.lines[0].get_xdata(), np.nanmedian(values, 0))
    assert spread.get_xlim() == (low, high) and spread.get_ylim() == axes.get_ylim()
    assert heatmaps(figures.hidden_norms(trace, decades=(0, 3)))[0][1].images[0].get_clim() == (1, 1000)


def test_the_likeliest_tokens_are_in_rank_order_and_what_came_is_framed(trace: Trace) -> None:
    known = {int(i): f"w{i}" for i in np.unique(trace.extra("logits:top.ids").values) if i >= 0}
    picture = figures.top_tokens(trace, texts=known, tokens=slice(10, 14))
    ids, logprobs = (trace.extra(f"logits:top.{name}").values for name in ("ids", "logprobs"))
    axes = picture.figure.axes[-1]
    cells = [text.get_text() for text in axes.texts if text.get_text().startswith("w")]
    assert cells == [f"w{i}" for row in ids[10:14] for i in row]
    shares = [text.get_text() for text in axes.texts if text.get_text().endswith("%")]
    assert shares == [f"{p:.0%}" if p >= 0.005 else "<1%" for p in np.exp(logprobs[10:14]).ravel()]
    framed = [patch for patch in axes.patches if not patch.get_fill()]
    assert len(framed) == int((ids[10:14] == trace.token_ids[11:15, None]).sum()) == 4
    assert {round(patch.get_x(), 2) for patch in framed} == {round(framed[0].get_x(), 2)}


def test_a_token_is_spelled_by_the_caller_by_the_trace_or_by_its_number(trace: Trace) -> None:
    shown = texts(figures.top_tokens(trace, tokens=[20]))
    ids = trace.extra("logits:top.ids").values[20]
    assert f"#{ids[1]}" in shown
    assert f"#{ids[1]}" not in texts(figures.top_tokens(trace, tokens=[20], texts=lambda one: f"<{one}>"))
    with pytest.raises(UserError, match="texts must map"):
        figures.top_tokens(trace, texts=["a"])
    with pytest.raises(UserError, match="no token here has values"):
        figures.top_tokens(trace, tokens=[0])


def test_many_rows_are_cut_and_say_so(trace: Trace) -> None:
    long = recorded(make_trace(1, None))
    picture = figures.top_tokens(long)
    assert any("The first 80 of 134 rows" in text for text in texts(picture)) and picture.figure.get_figheight() < 12


@pytest.mark.parametrize("name", ["delta_norms", "hidden_norms", "top_tokens"])
def test_what_was_not_recorded_is_named_with_how_to(name: str) -> None:
    kind = {"delta_norms": "delta_norm", "hidden_norms": "hidden_norm", "top_tokens": "logits:top"}[name]
    with pytest.raises(UserError, match=rf"engine\.record\('scalings', '{kind}'\)"):
        getattr(figures, name)(small_trace())
    with pytest.raises(UserError, match="drawn from a Trace"):
        getattr(figures, name)(3)


def test_a_quantity_of_other_axes_is_refused() -> None:
    wrong = Recorded(np.zeros(4), ("token",), {}, "norm", "x")
    with pytest.raises(UserError, match="has the axes 'token'; this figure needs 'token', 'layer'"):
        figures.hidden_norms(replace(small_trace(), extras={"hidden_norm": wrong}))


@pytest.mark.parametrize("name", ["delta_norms", "hidden_norms", "top_tokens"])
def test_norms_of_a_base_request_hostile_texts_and_few_tokens_are_drawn(name: str) -> None:
    draw = getattr(figures, name)
    assert draw(recorded(small_trace(HOSTILE, adapters=1))).png
    assert draw(recorded(without_scalings(small_trace()))).png
    assert draw(recorded(small_trace(("Hi", " there"), adapters=1))).png
    empty = recorded(small_trace())
    nothing = {
        key: replace(one, values=np.full_like(one.values, -1 if "ids" in key else np.nan))
        for key, one in empty.extras.items()
    }
    if name == "top_tokens":
        with pytest.raises(UserError, match="no token here has values"):
            draw(replace(empty, extras=nothing))
    else:
        assert draw(replace(empty, extras=nothing)).png
