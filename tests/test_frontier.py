"""The frontier of reuse policies and KL by place: the numbers are the table's, and no label lies on another.

Run: pytest tests/test_frontier.py
"""

from __future__ import annotations

import matplotlib.text
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from workbench.display.frontier_figure import PANELS, frontier, number_text, panels_of
from workbench.display.places_figure import curves_of, kl_by_place, smoothed
from workbench.display.placing import label_boxes, spread
from workbench.display.policies import family_of, ordered, short_label
from workbench.errors import UserError
from workbench.sweep.point import SETTINGS

pytestmark = pytest.mark.filterwarnings("error")
POLICIES = {
    "exact": (2e-9, 1.42), "non_granular(0)": (3e-2, 1.0), "non_granular(4)": (2e-2, 1.02),
    "non_granular(32)": (6e-3, 1.14), "periodic(2)": (4e-3, 1.5), "periodic(16)": (1.8e-2, 1.06),
    "lagged(1)": (4.2e-3, 1.01), "lagged(4)": (8e-3, 1.01),
}  # fmt: skip


def table(policies=None, texts=("single", "switching")) -> pd.DataFrame:
    rows = []
    for number, kind in enumerate(texts):
        for policy, (kl, cost) in (policies or POLICIES).items():
            for repeat in range(3):
                kl_here = kl * (number * 5 + 1)
                rows.append({"texts": kind, "policy": policy, "kl": kl_here, "kl_low": 0.7 * kl_here,
                             "kl_high": 1.4 * kl_here, "forwards_per_token": cost, "repeat": repeat, "status": "done",
                             "tok_s": 40 / cost + repeat, "mixture": "demo"})
    return pd.DataFrame(rows)


def test_a_panel_has_the_kl_the_median_cost_and_the_floor():
    single, switching = panels_of(table(), "tok_s")
    assert (single.name, switching.name) == ("texts: single", "texts: switching")
    assert [spot.policy for spot in single.spots] == ordered(POLICIES) and single.floor == 2e-9
    spot = next(spot for spot in switching.spots if spot.policy == "lagged(1)")
    assert (spot.kl, spot.low, spot.high) == pytest.approx((6 * 4.2e-3, 6 * 0.7 * 4.2e-3, 6 * 1.4 * 4.2e-3))
    assert spot.cost == pytest.approx(40 / 1.01 + 1)


def test_the_frontier_is_what_nothing_cheaper_is_closer_than():
    best = {spot.policy for spot in panels_of(table())[0].spots if spot.is_best}
    assert best == {"exact", "lagged(1)", "non_granular(0)"}
    # below the floor nobody is closer than exact: the cheapest of them is
    cheap = {**POLICIES, "lagged(1)": (1e-9, 1.01)}
    found = {spot.policy for spot in panels_of(table(cheap))[0].spots if spot.is_best}
    assert found == {"lagged(1)", "non_granular(0)"}
    assert {spot.policy for spot in panels_of(table(), "tok_s")[0].spots if spot.is_best} == best


def failed_and_other(frame):
    """Add a row that failed, and rows of another mixture."""
    return pd.concat([frame, frame.iloc[:1].assign(status="failed", kl=9.0), frame.assign(mixture="other")])


def test_what_differs_beside_the_texts_has_panels_of_its_own():
    panels = panels_of(failed_and_other(table(texts=("single",))))
    assert [panel.name for panel in panels] == ["mixture: demo texts: single", "mixture: other texts: single"]
    assert max(spot.kl for panel in panels for spot in panel.spots) < 1


def test_every_setting_but_the_policy_has_panels():
    assert {*PANELS, "policy"} == set(SETTINGS)
    frame = table(texts=("single",)).assign(prefix_tokens=32, passage_tokens=128)
    longer = frame.assign(prefix_tokens=96, kl=frame.kl * 10, tok_s=frame.tok_s * 3)
    short, long = panels_of(pd.concat([frame, longer]), "tok_s")
    assert [short.name, long.name] == ["texts: single prefix_tokens: 32", "texts: single prefix_tokens: 96"]
    for panel, factor, speed in ((short, 1, 1), (long, 10, 3)):
        spot = next(each for each in panel.spots if each.policy == "lagged(1)")
        assert (spot.kl, spot.cost) == pytest.approx((4.2e-3 * factor, speed * (40 / 1.01 + 1)))
    # what follows from the texts is not named
    frame = table().assign(passages=lambda rows: rows.texts.map({"single": 12, "switching": 4}))
    assert [panel.name for panel in panels_of(frame)] == ["texts: single", "texts: switching"]


def test_the_interval_says_how_many_texts_it_rests_on():
    def said(frame):
        return " ".join(text.get_text() for text in frontier(frame).figure.texts)

    assert "95 %" not in said(table())
    assert "95 % bootstrap interval over 4 distinct texts" in said(table().assign(num_texts=4))


def spots_of(axes) -> list:
    """Return the markers of the policies."""
    return [line for line in axes.lines if line.get_marker() != "None"]


@pytest.mark.parametrize("x", ["forwards_per_token", "tok_s"])
@pytest.mark.parametrize(
    "policies",
    [POLICIES, {"exact": (0.0, 1.4), "lagged(1)": (0.0, 1.0)}, {"lagged(2)": (1e-3, 1.0)}, {"exact": (2e-3, 1.4)},
     {"mine": (1e-2, 1.0), "other(3)": (2e-2, 1.0), "exact": (1e-8, 1.0)},
     {f"non_granular({k})": (0.03 / (k + 1), 1 + k / 300) for k in range(12)} | {"exact": (1e-8, 1.4)}],
    ids=["usual", "zero", "alone", "floor", "unknown", "many"],
)
def test_labels_lie_on_no_label_no_point_and_inside_the_panel(policies, x):
    picture = frontier(table(policies), x)
    figure = picture.figure
    figure.canvas.draw()
    assert set(policies) <= set(picture.description.replace(":", " ").split())
    for axes in figure.axes[1:]:
        texts = [text for text in axes.texts if isinstance(text, matplotlib.text.Annotation)]
        assert sorted(text.get_text() for text in texts) == sorted(map(short_label, policies))
        # of the words alone: an annotation's own extent has the line to its point too
        boxes = [matplotlib.text.Text.get_window_extent(text) for text in texts]
        for number, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[:number]), texts[number]
        inside = axes.get_window_extent().expanded(1.02, 1.02)
        assert all(inside.containsx(box.x0) and inside.containsx(box.x1) for box in boxes)
        points = [axes.transData.transform(line.get_xydata()[0]) for line in spots_of(axes)]
        assert len(points) == len(policies)
        assert not any(box.shrunk(0.98, 0.8).contains(*point) for box in boxes for point in points)


@pytest.mark.parametrize(("floor", "height", "note"), [(5e-4, 5e-4, ""), (1e-5, 1e-3 / 6, " (not to scale)")])
def test_values_at_the_floor_are_drawn_at_the_floor(floor, height, note):
    policies = {"exact": (floor, 1.4), "lagged(1)": (floor / 100, 1.0), "non_granular(0)": (1e-3, 1.0)}
    axes = frontier(table(policies, texts=("single",))).figure.axes[-1]
    assert sorted(line.get_ydata()[0] for line in spots_of(axes)) == pytest.approx([height, height, 1e-3])
    words = f"null floor: exact against itself differs by {number_text(floor)}{note}"
    assert words in [text.get_text() for text in axes.texts]


def test_the_words_say_every_number():
    picture = frontier(table())
    assert "lagged(1): KL 0.0042 (0.0029 to 0.0059), forwards_per_token 1.01, on the frontier" in picture.description
    assert picture.write("svg") == frontier(table()).write("svg")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda frame: frame.drop(columns="kl"), "'kl' are missing"),
        (lambda frame: frame.assign(status="failed"), "no row has both a KL and a cost"),
        (lambda frame: frame.assign(kl=np.nan), "no row has both"), (lambda frame: frame.iloc[:0], "no row has both"),
    ],
)  # fmt: skip
def test_a_table_without_a_frontier_says_so(change, said):
    with pytest.raises(UserError, match=said):
        frontier(change(table()))
    with pytest.raises(UserError, match="did you mean 'tok_s'"):
        frontier(table(), x="toks")


@given(arrays.arrays(np.float64, st.tuples(st.integers(1, 9), st.just(2)), elements=st.floats(0.2, 3.8)))
def test_labels_find_room(points):
    sizes = np.full((len(points), 2), (0.35, 0.12))
    corners = label_boxes(points, sizes, (4.0, 4.0))
    assert (corners >= -1e-9).all() and (corners + sizes <= 4.0 + 1e-9).all()
    for one in range(len(points)):
        for other in range(one):
            apart = np.abs(corners[one] - corners[other])
            assert apart[0] >= 0.35 - 1e-9 or apart[1] >= 0.12 - 1e-9


@given(st.lists(st.floats(-5, 5), max_size=12), st.floats(0.01, 1))
def test_spread_keeps_the_order_and_the_gaps(places, gap):
    found = spread(places, gap, -5, 5)
    order = np.argsort(places, kind="stable")
    gaps = np.diff(np.array(found)[order]) if places else np.array([])
    assert (gaps >= gap - 1e-9).all() and all(place >= -5 - 1e-9 for place in found)
    if len(places) * gap < 10:
        assert all(place <= 5 + 1e-9 for place in found)
    far = [10.0 * number for number in range(len(places))]
    assert spread(far, gap, -1, 1000) == pytest.approx(far)


def places(switch=None, texts="switching") -> pd.DataFrame:
    rows = [
        {"policy": policy, "texts": texts, "place": place, "passage": passage, "switch_at": switch,
         "kl": 0.0 if policy == "exact" or place < first else (5e-2 if place >= 12 else 2e-3) * (1 + passage)}
        for policy, first in (("exact", 0), ("non_granular(3)", 4), ("periodic(8)", 1), ("lagged(1)", 1))
        for place in range(24) for passage in range(2)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_a_curve_is_the_mean_over_passages_at_each_place():
    (curves,) = curves_of(places()).values()
    assert list(curves) == ["exact", "non_granular(3)", "periodic(8)", "lagged(1)"]
    assert (curves["non_granular(3)"][:4] == 0).all()
    assert curves["non_granular(3)"][4:12] == pytest.approx(3e-3) and curves["lagged(1)"][12:] == pytest.approx(7.5e-2)


def test_curves_of_mixtures_bases_and_dtypes_are_not_averaged():
    one = places().assign(mixture="a", base="demo", dtype="float32", point="p")
    other = one.assign(mixture="b", point="q", kl=one.kl * 100)
    found = curves_of(pd.concat([one, other]))
    assert list(found) == ["mixture: a texts: switching", "mixture: b texts: switching"]
    assert found["mixture: b texts: switching"]["periodic(8)"][2:12] == pytest.approx(0.3)
    # without such columns it is said that curves are means over points
    both = pd.concat([one, other]).drop(columns=["mixture", "base", "dtype"])
    said = " ".join(text.get_text() for text in kl_by_place(both).figure.texts)
    assert "means over up to 2 points that differ in other settings" in said
    assert "up to" not in " ".join(text.get_text() for text in kl_by_place(pd.concat([one, other])).figure.texts)


def test_smoothing_crosses_no_switch_and_counts_no_nothing():
    curve = np.array([0.0, 0, 2, 4, 6, 10, 20, 30])
    assert smoothed(curve, width=3) == pytest.approx([np.nan, np.nan, 3, 4, 20 / 3, 12, 20, 25], nan_ok=True)
    assert smoothed(curve, switch=5, width=3)[4:6] == pytest.approx([5, 15])
    assert len(smoothed(np.array([1.0]))) == 1


def test_the_switch_is_shown_and_said():
    picture = kl_by_place(places(12.0))
    figure = picture.figure
    figure.canvas.draw()
    assert len(figure.axes) == 3
    for axes, name in zip(figure.axes, ("non_granular(k)", "periodic(n)", "lagged(d)"), strict=True):
        assert axes.get_title(loc="left") == f"texts: switching, {name}"
        assert any(text.get_text() == "the topic switches" for text in axes.texts)
        assert any(len(set(line.get_xdata())) == 1 and line.get_xdata()[0] == 11.5 for line in axes.lines)
    assert "before and after the switch at place 12: exact: 0 before, 0 after" in picture.description
    assert "lagged(1): 0.0028 before, 0.075 after" in picture.description
    assert not any(text.get_text() == "the topic switches" for axes in kl_by_place(places(None, "single")).figure.axes
                   for text in axes.texts)


def test_places_of_nothing_say_so():
    with pytest.raises(UserError, match="'kl' are missing"):
        kl_by_place(places().drop(columns="kl"))
    with pytest.raises(UserError, match="the table is empty"):
        kl_by_place(places().iloc[:0])
    # exact alone, and nothing that differs, is a picture too
    assert "exact: 0 before" in kl_by_place(places()[places().policy == "exact"]).description


def test_policies_are_ordered_and_named():
    assert ordered(["lagged(2)", "non_granular(16)", "exact", "non_granular(4)", "zzz", "lagged(1)"]) == [
        "exact", "non_granular(4)", "non_granular(16)", "lagged(1)", "lagged(2)", "zzz",
    ]  # fmt: skip
    assert [short_label(name) for name in ("exact", "non_granular(4)", "periodic(8)", "mine(2)")] == [
        "exact", "k=4", "n=8", "mine(2)",
    ]  # fmt: skip
    assert len({(family_of(name).marker, family_of(name).colour) for name in
                ("exact", "non_granular(1)", "periodic(1)", "lagged(1)", "other")}) == 5
    assert [number_text(value) for value in (0, 0.002, 1.23e-5, 12.3)] == ["0", "0.002", "1.2·10⁻⁵", "12"]
