"""Colours, labels and figures say what the trace says. Content, not pixels. Run: pytest tests/test_figures.py"""

from __future__ import annotations

import itertools
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
from trace_problem import HOSTILE, make_trace, small_trace, with_outliers

from workbench.display import figures, labels, palette
from workbench.display.drawing import line_spans, pooled
from workbench.display.trace_figures import MAX_SITE_PANELS
from workbench.errors import UserError
from workbench.instrument.trace import Trace

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace(6, reuse_after=10)


@pytest.mark.parametrize("theme", [palette.LIGHT, palette.DARK])
def test_text_is_readable_on_every_tint(theme: palette.Theme) -> None:
    for index in range(60):
        tinted = palette.mix(theme.page, palette.adapter_colour(index), theme.tint)
        assert palette.contrast(theme.ink, tinted) >= 4.5, index
    for colour in (theme.ink, theme.muted, theme.focus, theme.above, theme.below):
        assert palette.contrast(colour, theme.page) >= 4.5 and palette.contrast(colour, theme.card) >= 4.5


def test_contrast_is_the_known_one() -> None:
    assert palette.contrast("#ffffff", "#000000") == pytest.approx(21)
    assert palette.contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


def oklab(colour: str, seen: np.ndarray) -> np.ndarray:
    channels = np.array(palette.rgb(colour)) / 255
    linear = seen @ np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    cones = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]) @ linear.clip(0)
    lab = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
    return lab @ np.cbrt(cones)


# Machado, Oliveira, Fernandes 2009, severity 1: normal, protanopia, deuteranopia, tritanopia
SEEN = [
    np.eye(3),
    np.array([[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]]),
    np.array([[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]),
    np.array([[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]]),
]


@pytest.mark.parametrize("seen", SEEN)
def test_the_first_ten_adapters_differ_for_colour_blind_eyes(seen: np.ndarray) -> None:
    places = [oklab(colour, seen) for colour in palette.ADAPTER_COLOURS]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(places, 2)) > 0.05


@pytest.mark.parametrize("theme", [palette.LIGHT, palette.DARK])
def test_the_scale_runs_one_way_in_lightness(theme: palette.Theme) -> None:
    steps = np.diff([oklab(colour, np.eye(3))[0] for colour in theme.scale])
    assert (steps < -0.03).all() or (steps > 0.03).all()


def test_letters_and_colours_never_repeat() -> None:
    assert [palette.adapter_key(i) for i in (0, 25, 26, 51, 52)] == ["A", "Z", "AA", "AZ", "BA"]
    assert len({palette.adapter_key(i) for i in range(800)}) == 800
    assert len({palette.adapter_colour(i) for i in range(60)}) == 60


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the", " the"),
        ("", "▫"),
        ("\n", "↵\n"),
        ("\t", "→\t"),
        ("\x1b[0m", "‹ESC›[0m"),
        ("\x00\x7f\x85", "‹NUL›‹U+007F›‹U+0085›"),
        ("\u202e\u200b\ufeff", "‹U+202E›‹U+200B›‹U+FEFF›"),
        ("\u2028", "‹U+2028›"),
        ("\u00a0", "␣"),
        ("é漢👩\u200d👧\ufffd", "é漢👩\u200d👧\ufffd"),
    ],
)
def test_every_character_is_visible(text: str, shown: str) -> None:
    assert labels.visible(text) == shown


def test_short_labels_stay_on_one_line() -> None:
    assert labels.short(" a\n\tb") == "·a↵→b"
    assert labels.short("abcdefghijklmnop", 10) == "abcdefghi…"


def test_layers_are_read_from_site_paths() -> None:
    paths = ["model.layers.11.mlp.up_proj", "transformer.h.2.attn.c_attn", "lm_head", "model.layers.3.experts.7.w1"]
    assert [labels.layer_of(path) for path in paths] == [11, 2, None, 3]
    assert labels.layer_runs([0, 0, 1, None, 0]) == [(0, 0, 2), (1, 2, 3), (None, 3, 4), (0, 4, 5)]
    assert len(labels.layer_ticks(list(range(200)))) <= 13
    assert labels.layer_ticks([0, 0, None]) == [(0.5, "0"), (2.0, "-")]


def test_the_note_says_what_one_means_and_counts_what_lies_outside(trace: Trace) -> None:
    assert "sum to 1" in labels.scale_note(trace) and "Outside" not in labels.scale_note(trace)
    note = labels.scale_note(with_outliers(trace))
    assert "sum to 1" not in note
    assert f"{trace.values[3].size} values above 1, 1 below 0" in note


def test_the_summary_names_counts_policy_and_edits(trace: Trace) -> None:
    edited = replace(trace, metadata=trace.metadata | {"edits": ["ablate german"], "tgt_non_granular_index": 0})
    found = dict(labels.facts(edited))
    assert found["Tokens"] == "82 prompt + 53 generated"
    assert found["Scalings"] == "92 computed, 42 reused"
    assert found["Edited run"] == "ablate german" and found["tgt_non_granular_index"] == "0"
    assert "python" in labels.description(trace, "T") and "tokens 0-" in labels.description(trace, "T")


def scalar_images(figure) -> list[tuple[np.ndarray, object]]:
    found = [(axes.images[0], axes) for axes in figure.axes if axes.images]
    return [(image.get_array(), axes) for image, axes in found if image.get_array().ndim == 2]


def all_text(figure) -> list[str]:
    figure.canvas.draw()
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_visible()]


def test_token_lines_show_the_mean_over_sites_and_wrap_the_whole_text(trace: Trace) -> None:
    figure = figures.token_adapter(trace).figure
    images = scalar_images(figure)
    drawn = np.concatenate([np.ma.filled(image, np.nan) for image, _ in images], 1)
    np.testing.assert_allclose(drawn, trace.token_means().T, rtol=1e-5)
    ticks = [tick.get_text() for _, axes in images for tick in axes.get_xticklabels()]
    assert ticks == [labels.short(text, 10) for text in trace.tokens]
    assert [tick.get_text() for tick in images[0][1].get_yticklabels()] == labels.keyed(trace.adapters)


def test_site_panels_show_every_value_of_every_adapter(trace: Trace) -> None:
    figure = figures.site_token(trace).figure
    for (drawn, axes), adapter in zip(scalar_images(figure), range(4), strict=True):
        np.testing.assert_array_equal(np.ma.filled(drawn, np.nan), trace.values[:, :, adapter].T)
        assert trace.adapters[adapter] in axes.get_title(loc="left")
        assert [tick.get_text() for tick in axes.get_yticklabels()] == [str(layer) for layer in range(6)]
    only = figures.site_token(trace, adapters=["spanish"]).figure
    assert len(scalar_images(only)) == 1
    with pytest.raises(UserError, match="did you mean 'spanish'"):
        figures.site_token(trace, adapters=["spansh"])


@pytest.mark.parametrize("scale", [1, 0.01])
def test_every_panel_has_the_same_scale_whatever_the_data(trace: Trace, scale: float) -> None:
    figure = figures.overview(replace(trace, values=(trace.values * scale).astype(np.float32))).figure
    limits = {axes.images[0].get_clim() for _, axes in scalar_images(figure)}
    assert limits == {(0, 1)} and len(scalar_images(figure)) == 6


def test_the_leader_panel_has_the_colour_of_the_largest_scaling(trace: Trace) -> None:
    figure = figures.site_token(trace).figure
    arrays = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    image = next(array for array in arrays if array.ndim == 3)
    token, site = 20, 7
    leader = int(trace.values[token, site].argmax())
    strength = 0.06 + 0.94 * trace.values[token, site, leader]
    expected = palette.mix(palette.LIGHT.page, palette.adapter_colour(leader), strength)
    np.testing.assert_allclose(image[site, token, :3] * 255, palette.rgb(expected), atol=1)
    assert (image[:, -1, 3] == 0).all() and (image[:, :-1, 3] == 1).all()


def test_the_boundary_and_reused_scalings_are_drawn(trace: Trace) -> None:
    figure = figures.token_adapter(trace).figure
    boundaries = [line.get_xdata()[0] for axes in figure.axes for line in axes.lines]
    assert trace.prompt_tokens - 0.5 in boundaries
    striped = [p for axes in figure.axes for p in axes.patches if p.get_hatch() == "||||||" and p.get_width() > 1]
    first, last = np.flatnonzero(trace.reused)[[0, -1]]
    assert [(patch.get_x(), patch.get_width()) for patch in striped] == [(first - 0.5, last - first + 1)]
    text = " ".join(all_text(figure))
    assert "▸ generated" in text and "reused from an earlier token" in text and "1.0 = " in text


def test_missing_values_lie_over_a_hatch_and_outliers_are_marked(trace: Trace) -> None:
    figure = figures.token_adapter(with_outliers(trace)).figure
    drawn, axes = scalar_images(figure)[-1]
    assert np.ma.getmaskarray(drawn)[:, -1].all()
    assert any(patch.get_hatch() == "////" and patch.get_zorder() < 0 for patch in axes.patches)
    above = [c for axes in figure.axes for c in axes.collections if len(c.get_offsets()) == 4]
    assert above and above[0].get_offsets()[0][0] == 3
    colour_map = axes.images[0].get_cmap()
    over = matplotlib.colors.to_hex(colour_map(2.0))
    assert over == palette.LIGHT.above and over not in palette.LIGHT.scale
    assert matplotlib.colors.to_hex(colour_map(-1.0)) == palette.LIGHT.below


def test_token_text_is_drawn_literally_and_without_warnings() -> None:
    figure = figures.overview(small_trace(HOSTILE, adapters=3), title="$x$ <b> \x1b").figure
    text = all_text(figure)
    assert "$\\frac{$" in text and any("$x$" in one for one in text)


def test_the_users_settings_do_not_change_the_figure(trace: Trace) -> None:
    plain = figures.write(figures.token_adapter(trace), "png")
    with matplotlib.rc_context({"text.usetex": True, "axes.grid": True, "font.family": "serif", "savefig.dpi": 40}):
        assert figures.write(figures.token_adapter(trace), "png") == plain


def test_many_adapters_and_long_texts_stay_of_bounded_size() -> None:
    rng = np.random.default_rng(0)
    trace = replace(
        make_trace(2),
        values=rng.random((135, 10, 200)).astype(np.float32) / 200,
        adapters=tuple(f"adapter_{i}" for i in range(200)),
        source=np.arange(135),
    )
    figure = figures.overview(trace).figure
    assert figure.get_figheight() < 40 and len(scalar_images(figure)) == 2 + MAX_SITE_PANELS
    assert any("10 with the largest share of 200" in text for text in all_text(figure))
    assert line_spans(1000) == [(0, 1000)]
    assert line_spans(100) == [(0, 50), (50, 100)]


def test_columns_of_a_long_text_are_means_of_tokens_and_say_so() -> None:
    values = np.arange(10, dtype=np.float32)[:, None, None] * np.ones((1, 2, 1), np.float32)
    values[3] = np.nan
    made, size = pooled(values, most=4)
    assert size == 3 and made[:, 0, 0].tolist() == [1, 4.5, 7, 9] and pooled(values, most=10) == (values, 1)
    trace, length = make_trace(1, None), 5000
    index = np.arange(length) % 134
    long = replace(
        trace, values=trace.values[index], token_ids=trace.token_ids[index], tokens=("x",) * length,
        positions=np.arange(length), generated=np.arange(length) >= 4000, source=np.arange(length),
        draft=np.full(length, -1), time_s=np.zeros(length),
    )  # fmt: skip
    figure = figures.site_token(long).figure
    drawn, axes = scalar_images(figure)[0]
    np.testing.assert_allclose(drawn[:, 7], long.values[14:16, :, 0].mean(0), rtol=1e-6)
    assert drawn.shape[1] == 2500 and axes.get_xlim() == (-0.5, 4999.5)
    assert any("a column is the mean of 2 tokens" in text for text in all_text(figure))


def test_rounding_and_single_adapters_are_told(trace: Trace) -> None:
    assert "Stored values are float16" in labels.scale_note(replace(trace, values=trace.values.astype(np.float16)))
    alone = replace(trace, metadata={"mixture": None, "adapter": "german"})
    assert dict(labels.facts(alone))["Adapter"] == "german" and "Mixture" not in dict(labels.facts(alone))
