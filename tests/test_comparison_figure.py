"""The picture of a comparison: what is drawn, from which numbers, and what is left out.

Run: pytest tests/test_comparison_figure.py
"""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from trace_problem import HOSTILE, make_trace, small_trace

from workbench.display.compare_figure import compare, spans_of
from workbench.display.compare_lanes import l1_scale
from workbench.display.marks import HATCH
from workbench.errors import UserError
from workbench.instrument.comparison import Comparison

pytestmark = pytest.mark.filterwarnings("error")
PROMPT = make_trace(2).prompt_tokens


def cut(trace, stop):
    """Return the first tokens of a trace, with the last one no input."""
    part = trace.select(tokens=slice(0, stop))
    values, source = part.values.copy(), part.source.copy()
    values[-1], source[-1] = np.nan, -1
    return replace(part, values=values, source=source)


def parted(trace, at, seed=5):
    """Return the trace with other tokens from `at` on."""
    ids, texts = trace.token_ids.copy(), list(trace.tokens)
    ids[at:] += 1
    texts[at:] = [f" other{i}" for i in range(len(texts) - at)]
    return replace(trace, token_ids=ids, tokens=tuple(texts))


def nudged(trace, amount):
    return replace(trace, values=trace.values + np.float32(amount))


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    exact, reusing = make_trace(2, None), make_trace(2, 4)
    third = parted(make_trace(2, 16), PROMPT + 20)
    settings = {"exact": exact, "k = 4": reusing, "k = 16": third}
    return Comparison.of(settings, nudged(exact, 1e-6), {"adapter law": "it is not loaded"})


@pytest.fixture(scope="module")
def picture(comparison):
    return compare(comparison)


def texts(picture) -> list[str]:
    found = [text.get_text() for text in picture.figure.texts]
    for axes in picture.figure.axes:
        found += [text.get_text() for text in axes.texts]
    return found


def images(picture, height: int) -> list:
    """Return the arrays of the images with that many rows, in the order of drawing."""
    return [im.get_array() for axes in picture.figure.axes for im in axes.images if len(im.get_array()) == height]


def test_each_setting_has_a_block_with_its_means(picture, comparison):
    lines, _ = spans_of(comparison, 4)
    blocks = images(picture, 4)
    assert len(blocks) == 3 * len(lines)
    for number, label in enumerate(comparison.labels):
        joined = np.concatenate([np.ma.filled(blocks[3 * line + number], np.nan) for line in range(len(lines))], 1)
        assert np.allclose(joined, comparison.token_means(label).T, equal_nan=True)
        assert label in texts(picture)


def test_the_rows_of_differences_show_what_is_above_the_floor_and_nothing_else(picture, comparison):
    lines, _ = spans_of(comparison, 4)
    rows = images(picture, 1)
    assert len(rows) == 3 * len(lines)  # two settings and the null pair
    for number, label in enumerate(comparison.labels[1:]):
        joined = np.concatenate([np.ma.filled(rows[3 * line + number][0], np.nan) for line in range(len(lines))])
        assert np.allclose(joined, comparison.shown_difference(label), equal_nan=True)
    null = np.concatenate([np.ma.filled(rows[3 * line + 2][0], np.nan) for line in range(len(lines))])
    assert np.isnan(null).all() and "at most 4e-06" in " ".join(texts(picture))


def test_a_null_pair_that_is_loud_is_drawn_and_masks_the_others():
    exact = make_trace(2, None)
    loud = compare(Comparison.of({"exact": exact, "k = 4": make_trace(2, 4)}, nudged(exact, 0.2)))
    rows = images(loud, 1)
    assert np.ma.getmaskarray(rows[0]).all() and not np.ma.getmaskarray(rows[1])[0, :-1].any()
    assert np.allclose(rows[1][0, :10], 0.8, atol=1e-4)


def test_divergences_are_marked_where_they_are(picture, comparison):
    at = comparison.divergence("k = 16")
    lines = [
        line.get_xdata()[0] for axes in picture.figure.axes for line in axes.lines if line.get_color() == "#d1006c"
    ]
    assert lines and set(lines) == {at - 0.5} and "≠" in texts(picture)
    assert "(≠)" not in texts(picture)


def test_what_the_null_pair_does_too_is_marked_as_not_attributed():
    exact = make_trace(2, None)
    at = PROMPT + 10
    both = Comparison.of({"exact": exact, "k = 4": parted(make_trace(2, 4), at + 5)}, parted(exact, at))
    drawn = compare(both)
    assert "(≠)" in texts(drawn) and "not attributed" in drawn.description
    hatches = {patch.get_hatch() for axes in drawn.figure.axes for patch in axes.patches}
    assert {HATCH, "xxxx"} <= hatches


def test_the_texts_follow_from_where_they_part(picture, comparison):
    said = " ".join(texts(picture))
    assert "≠ " in said and "other0 other1" in said
    assert comparison.says("k = 4")[:60] in said and "the same text" in said
    assert "adapter law" in picture.description and "it is not loaded" in said
    assert "1 failed" in said and "Null pair" in said


def test_the_alternative_text_says_every_settings_sentence(picture, comparison):
    for label in comparison.labels:
        assert f"{label!r}: {comparison.says(label)}" in picture.description
    assert comparison.floor_says() in picture.description
    assert f'alt="{picture.description[:30]}' in picture.html


def test_without_a_null_pair_a_badge_says_so():
    said = texts(compare(Comparison.of({"a": make_trace(2, None), "b": make_trace(2, 4)})))
    assert "no null pair" in said and any("none is proven" in text for text in said)


@pytest.mark.parametrize("settings, tokens", [(2, 10), (8, 72), (2, 140), (8, 400)])
def test_two_to_eight_settings_over_ten_to_four_hundred_tokens_stay_readable(settings, tokens):
    exact = make_trace(1, None)
    times = -(-tokens // exact.num_tokens)
    picked = np.tile(np.arange(exact.num_tokens), times)[:tokens]
    long = replace(
        exact, values=exact.values[picked], tokens=tuple(exact.tokens[i] for i in picked), token_ids=picked,
        positions=np.arange(tokens), generated=np.arange(tokens) >= tokens // 2,
        source=np.where(np.isnan(exact.values[picked]).all((1, 2)), -1, np.arange(tokens)),
        draft=np.full(tokens, -1), time_s=np.zeros(tokens),
    )  # fmt: skip
    drawn = compare(Comparison.of({f"k = {i}": long for i in range(settings)}, long))
    width, height = drawn.figure.get_size_inches()
    assert width == 11 and height < 32
    drawn.figure.draw_without_rendering()
    for axes in drawn.figure.axes:
        left, bottom, wide, high = axes.get_position().bounds
        assert left >= 0 and left + wide <= 1.001 and bottom >= -0.001 and bottom + high <= 1.001


def test_many_adapters_are_drawn_as_those_that_speak_most_and_the_rest():
    trace = small_trace(adapters=40)
    drawn = compare(Comparison.of({"a": trace, "b": trace}))
    blocks = images(drawn, 9)
    assert len(blocks) == 2 and any("32 others, summed" in text for text in texts(drawn))
    assert np.allclose(blocks[0].sum(0), trace.token_means().sum(1))


def test_one_adapter_no_adapter_and_no_generated_token():
    one = small_trace(adapters=1)
    assert compare(Comparison.of({"a": one, "b": one})).png
    values = np.zeros((4, 0, 0), np.float32)
    base = replace(one, values=values, adapters=(), sites=(), source=np.full(4, -1), metadata={"mixture": None})
    assert "no token with scalings" in compare(Comparison.of({"a": base, "b": base}, base)).description
    prompt = replace(one, generated=np.zeros(4, bool))
    assert compare(Comparison.of({"a": prompt, "b": prompt})).png


def test_a_setting_of_one_adapter_keeps_its_colour_in_the_mixture():
    mixture = make_trace(2, None)
    ones = np.where(np.isnan(mixture.values[:, :, :1]), np.nan, 1).astype(np.float32)
    alone = replace(mixture, values=ones, adapters=("spanish",), metadata={**mixture.metadata, "mixture": None})
    letters = texts(compare(Comparison.of({"mix": mixture, "spanish": alone})))
    blocks = letters.count("C")
    assert blocks >= 2  # the mixture's own, and the adapter's that leads throughout


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.seen += [f"on:{name}" for name, _ in attrs if name.startswith("on")]


def test_tokens_and_labels_are_text_in_the_page():
    trace = small_trace(HOSTILE)
    other = replace(trace, token_ids=np.where(trace.generated, 99, trace.token_ids))
    labelled = {"<img src=x onerror=alert(1)>": trace, "<b>": other}
    drawn = compare(Comparison.of(labelled, trace, {"</style>": "<i>no</i>"}))
    tags = Tags()
    tags.feed(drawn.html)
    assert not {"script", "b onerror", "i"} & set(tags.seen) and not [tag for tag in tags.seen if tag.startswith("on:")]
    assert tags.seen.count("img") == 1 and "&lt;script&gt;alert(1)&lt;/script&gt;" in drawn.html
    assert "‹U+202E›evil" in drawn.html and "\u202e" not in drawn.html


def test_the_page_has_the_same_numbers(picture, comparison):
    html = picture.html
    assert html.count('<th scope="row">') >= 4 + comparison.num_tokens
    assert f"≠ token {comparison.divergence('k = 16')}" in html
    shown = comparison.shown_difference("k = 4")
    assert html.count("lw-cmp-differs") > int((~np.isnan(shown)).sum())
    assert f'<span class="lw-fact">{np.nanmax(shown):.2g}</span>' in html
    assert "http" not in html.replace("http://www.w3.org", "")


def test_files_and_cells(picture, tmp_path):
    for suffix in (".png", ".svg", ".html"):
        assert picture.save(tmp_path / f"compared{suffix}").stat().st_size > 10_000
    bundle = picture._repr_mimebundle_()
    assert bundle["text/plain"] == repr(picture.comparison) and "lw-cmp" in bundle["text/html"]
    with pytest.raises(UserError, match="drawn from a Comparison"):
        compare(make_trace(1))


def test_the_scale_of_differences_is_one_of_a_few():
    assert [l1_scale(value).high for value in (0.0, 0.01, 0.011, 0.4, 1.9, 5)] == [0.01, 0.01, 0.03, 1.0, 2.0, 2.0]
    assert l1_scale(0.5).colour_of(0.0) != "#ffffff"


def test_it_is_among_the_figures():
    from workbench import figures

    assert figures.compare is compare and "compare" in figures.__all__
