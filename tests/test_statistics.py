"""Intervals: of medians, of means over texts that are not as many as their passages, of ratios within and across days.

Run: pytest tests/test_statistics.py
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.sweep.statistics import _widened, estimate, mean_over, ratio, ratio_apart

TEXTS = ("a", "b", "c", "d")


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=5))
def test_few_values_have_their_range(values):
    found = estimate(values)
    assert (found.low, found.value, found.high) == (min(values), np.median(values), max(values)) and found.is_range


def test_six_and_nine_values_have_the_interval_of_the_binomial_distribution():
    six, nine = estimate([6.0, 1, 5, 2, 4, 3]), estimate(list(range(1, 10)))
    assert (six.low, six.high, six.is_range) == (1, 6, False) and (nine.low, nine.high) == (2, 8)


def test_intervals_cover_the_true_median_about_as_often_as_they_say():
    draw = np.random.default_rng(0)
    found = [estimate(draw.exponential(size=40)) for _ in range(400)]
    assert 375 <= sum(each.low <= np.log(2) <= each.high for each in found) <= 399


def test_passages_of_one_text_are_no_independent_ones():
    # three passages of each of four texts, alike within a text: as much is known as of four values
    values, sources = np.repeat([0.0, 1, 5, 8], 3).tolist(), [(name,) for name in np.repeat(TEXTS, 3)]
    found = mean_over(values, sources)
    # one of 256 resamples has the least of them four times; of 4 values 95 % needs all of what may come
    assert (found.value, found.low, found.high) == (3.5, 0.0, 8.0)
    alone = mean_over(values, [(number,) for number in range(12)])
    assert alone.low > 0.8 and alone.high < 6.2


def test_percentiles_of_few_values_reach_as_far_as_students_interval():
    # 2 (1 - cdf of the normal) at sqrt(n / (n - 1)) times the tabled quantile of Student's distribution, 0.975
    for count, quantile in ((5, 2.776), (8, 2.365), (20, 2.093), (100, 1.984)):
        expected = math.erf(quantile * (count / (count - 1)) ** 0.5 / 2**0.5)
        assert _widened(0.95, count) == pytest.approx(expected, abs=4e-4)
    draw, covered = np.random.default_rng(5), 0
    for trial in range(200):
        found = mean_over(draw.normal(size=8).tolist(), [(each,) for each in range(8)], seed=trial)
        covered += found.low <= 0 <= found.high
    assert 180 <= covered <= 199


def test_a_passage_of_two_texts_counts_as_often_as_both_were_drawn():
    pairs = list(itertools.permutations(TEXTS, 2))
    effect = dict(zip(TEXTS, (0.0, 1, 5, 8), strict=True))
    values = [effect[one] + 2 * effect[other] for one, other in pairs]
    found = mean_over(values, pairs)
    drawn = []
    for texts in itertools.product(TEXTS, repeat=4):
        weights = [texts.count(one) * texts.count(other) for one, other in pairs]
        if sum(weights):
            drawn.append(np.average(values, weights=weights))
    assert (found.low, found.high) == pytest.approx((min(drawn), max(drawn)))
    alone = mean_over(values, [(number,) for number in range(12)])
    assert found.width > 1.3 * alone.width


def test_intervals_over_texts_cover_where_those_over_passages_do_not():
    draw, pairs, covered, by_passage = np.random.default_rng(3), list(itertools.permutations(range(8), 2)), 0, 0
    for trial in range(80):
        effect = draw.normal(size=8)
        values = [effect[one] + effect[other] + 0.1 * draw.normal() for one, other in pairs]
        found = mean_over(values, pairs, seed=trial)
        alone = mean_over(values, [(number,) for number in range(len(values))], seed=trial)
        covered += found.low <= 0 <= found.high
        by_passage += alone.low <= 0 <= alone.high
    assert covered >= 70 and by_passage < 60


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=9))
def test_one_text_alone_has_the_interval_of_its_passages(values):
    one = mean_over(values, [("only",)] * len(values))
    each = mean_over(values, [(number,) for number in range(len(values))])
    assert (one.low, one.high) == pytest.approx((each.low, each.high))
    # the two texts of one switch, there and back
    two = mean_over(values, [("a", "b") if number % 2 else ("b", "a") for number in range(len(values))])
    assert (two.low, two.high) == pytest.approx((each.low, each.high))


def test_a_ratio_of_few_rounds_is_their_range():
    found = ratio([2.0, 3, 2], [10.0, 20, 12])
    assert (found.low, found.high) == (0.15, 0.2) and found.value == pytest.approx(1 / 6) and found.is_paired


def test_rounds_that_are_not_shared_are_resampled_apart():
    # both double from round to round: in each round one is half the other, but apart nobody knows
    own, base = [1.0, 2, 4], [2.0, 4, 8]
    together, apart = ratio(own, base), ratio_apart(own, base)
    assert (together.low, together.high) == (0.5, 0.5)
    assert (apart.value, apart.low, apart.high) == (0.5, 1 / 8, 2.0) and not apart.is_paired
    assert ratio_apart([1.0, 2, 3, 4], [1.0] * 7).n == 4
    draw = np.random.default_rng(0)
    several = [ratio_apart(draw.normal(10, 1, 20), draw.normal(5, 1, 12), seed=each) for each in range(60)]
    assert 51 <= sum(each.low <= 2 <= each.high for each in several) <= 60


@pytest.mark.parametrize(("given", "wrong"), [
    (lambda: mean_over([], []), "at least one number"), (lambda: mean_over([1.0], []), "the sources of each"),
    (lambda: mean_over([1.0], [()]), "the sources of each"), (lambda: ratio_apart([1.0], [0.0]), "above 0"),
])  # fmt: skip
def test_statistics_of_nothing_are_refused(given, wrong):
    with pytest.raises(ValueError, match=wrong):
        given()
