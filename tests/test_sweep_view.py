"""Points of a sweep: which columns are what, medians with intervals, the widget's state and its picture.

Run: pytest tests/test_sweep_view.py
"""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.display.medians import interval_words, median_interval, num_outside
from workbench.display.sweep_figure import log_ticks
from workbench.display.sweep_points import aggregate, points_of, spelled
from workbench.display.sweep_view import SweepView, sweep_view
from workbench.display.sweep_words import axis_words
from workbench.errors import UserError

pytestmark = pytest.mark.filterwarnings("error")


def grid(repeats: int = 4) -> pd.DataFrame:
    """Return xlora and lora at five k, one of them none, with two metrics."""
    rng = np.random.default_rng(0)
    places = [(mode, k, r) for mode in ("xlora", "lora") for k in (None, 8, 0, 1, 2) for r in range(repeats)]
    frame = pd.DataFrame(places, columns=["mode", "k", "repeat"])
    cost = frame["k"].fillna(20)
    return frame.assign(tok_s=60 - cost + rng.normal(size=len(frame)), kl=0.1 + rng.random(len(frame)))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=80))
def test_an_interval_holds_its_median_and_ends_at_two_of_the_values(values):
    found = median_interval(np.array(values))
    assert found.n == len(values) and found.value == np.median(values)
    if found.n == 1:
        assert np.isnan(found.low) and np.isnan(found.high)
        return
    assert found.low <= found.value <= found.high and found.low in values and found.high in values
    if found.n < 6:
        assert (found.low, found.high) == (min(values), max(values))


@pytest.mark.parametrize("count", [6, 9, 17, 30, 64, 65, 200])
def test_an_interval_has_the_coverage_it_says(count):
    # of a skewed distribution whose median is known
    samples = np.random.default_rng(1).exponential(size=(2000, count))
    inside = [found.low <= np.log(2) <= found.high for found in map(median_interval, samples)]
    assert 0.94 <= np.mean(inside) <= 0.985
    # one value less on each side would hold it too seldom
    outside = num_outside(count)
    narrower = sum(math.comb(count, k) for k in range(outside + 2)) / 2 ** (count - 1)
    assert narrower > 0.05 > sum(math.comb(count, k) for k in range(outside + 1)) / 2 ** (count - 1)


def test_few_repeats_have_a_range_and_no_interval():
    said = [interval_words(counts) for counts in ([1], [3, 3], [2, 5], [6, 40], [3, 8], [1, 3], [])]
    mixed = "95 % interval, or the range of repeats where there are fewer than 6"
    assert said == ["", "range of 3 repeats", "range of 2 to 5 repeats", "95 % interval", mixed,
                    "range of 3 repeats", ""]  # fmt: skip
    # the range of 5 holds the median in 15 of 16 cases, that of 6 in 31 of 32
    samples = np.random.default_rng(2).normal(size=(4000, 5))
    assert np.mean([s.min() <= 0 <= s.max() for s in samples]) < 0.95


def test_values_that_are_not_finite_have_no_part():
    found = median_interval(np.array([1.0, np.nan, np.inf, 3.0]))
    assert (found.value, found.n) == (2.0, 2)
    assert median_interval(np.array([np.nan])).n == 0


def test_axes_say_what_they_show_with_units():
    assert axis_words("tok_s") == "tokens per second" and axis_words("mine") == "mine"
    assert axis_words("ttft_ms_p95") == "time to the first token, 95th percentile, milliseconds"
    picture = sweep_view(grid(), x="k", y="tok_s", series="mode").show()
    assert "tokens per second" in [axes.get_ylabel() for axes in picture.figure.axes]
    said = " ".join(text.get_text() for text in picture.figure.texts)
    assert "medians over repeats (n = 4), bars: range of 4 repeats" in said and "95 %" not in said
    columns = {entry["name"]: entry for entry in sweep_view(grid()).columns}
    assert columns["tok_s"]["axis"] == "tokens per second" and columns["tok_s"]["title"] == "tok_s"


def test_numbers_are_metrics_and_the_rest_are_axes():
    points = points_of(grid())
    assert points.axes == ("mode", "k", "repeat") and points.metrics == ("tok_s", "kl")
    assert (points.default_x(), points.default_y()) == ("k", "tok_s")
    assert points.labels("k") == [0, 1, 2, 8, None] and points.labels("mode") == ["xlora", "lora"]
    named = points_of(grid(), axes=["kl"], metrics=["k"])
    assert "kl" in named.axes and named.metrics[0] == "k" and "k" not in named.axes
    flags = points_of(pd.DataFrame({"cached": [True, False, True], "t": [1.5, 2, 3]}))
    assert flags.axes == ("cached",) and flags.labels("cached") == ["yes", "no"]


def test_a_long_table_is_the_wide_one():
    wide = grid()
    long = wide.melt(id_vars=["mode", "k", "repeat"], var_name="metric", value_name="value")
    for y in ("tok_s", "kl"):
        one, other = (aggregate(points_of(frame), "k", y, "mode") for frame in (wide, long))
        pd.testing.assert_frame_equal(one, other)
    without = long.drop(columns="repeat")
    pd.testing.assert_frame_equal(aggregate(points_of(without), "k", "kl"), aggregate(points_of(wide), "k", "kl"))


def test_each_point_is_the_median_of_its_repeats():
    frame = grid()
    frame.loc[(frame["mode"] == "lora") & (frame["k"] == 8), "tok_s"] = [1.0, np.nan, 3.0, 9.0]
    table = aggregate(points_of(frame), "k", "tok_s", "mode")
    assert len(table) == 10 and table["series"].tolist()[:5] == ["xlora"] * 5
    assert [spelled(x) for x in table["x"][:5]] == ["0", "1", "2", "8", "none"]
    lost = table[(table["series"] == "lora") & (table["x"] == 8)].iloc[0]
    assert (lost["median"], lost["low"], lost["high"], lost["n"], lost["lost"]) == (3.0, 1.0, 9.0, 3, 1)
    by_hand = frame[(frame["mode"] == "xlora") & frame["k"].isna()]["tok_s"].median()
    assert table.iloc[4]["median"] == pytest.approx(by_hand)
    only = aggregate(points_of(frame), "k", "tok_s", "mode", where={"mode": ["lora"], "k": [None, 1]})
    assert len(only) == 2 and set(only["series"]) == {"lora"}


def test_a_median_over_another_axis_is_said():
    view = sweep_view(grid(), x="k", series=None)
    assert view.warnings() == ["Each point is a median over mode (2 values) as well: split or filter by it."]
    assert sweep_view(grid(), x="k", series=None, where={"mode": "lora"}).warnings() == []
    assert sweep_view(grid()).series == "mode"


def test_what_the_page_is_sent():
    view = sweep_view(grid(), x="k", y="tok_s", series="mode", where={"k": [0, None]}, log_x=True, title="Cost")
    columns = {entry["name"]: entry for entry in view.columns}
    codes = np.frombuffer(view.codes, "<i4").reshape(-1, view.num_rows)
    numbers = np.frombuffer(view.numbers, "<f8").reshape(-1, view.num_rows)
    assert columns["k"]["labels"] == ["0", "1", "2", "8", "none"]
    assert columns["k"]["label_values"] == [0, 1, 2, 8, None] and columns["mode"]["label_values"] is None
    assert [columns["mode"]["labels"][i] for i in codes[columns["mode"]["codes_at"]][:20:4]] == ["xlora"] * 5
    assert np.array_equal(numbers[columns["tok_s"]["numbers_at"]], view.points.frame["tok_s"])
    assert (view.x, view.y, view.series, view.filters) == ("k", "tok_s", "mode", {"k": ["0", "none"]})
    json.dumps([view.columns, view.notes, view.filters, view.themes], allow_nan=False)


def test_what_is_chosen_on_the_page_is_what_python_tabulates():
    view = sweep_view(grid())
    view.set_state({"y": "kl", "series": "", "filters": {"mode": ["lora"]}})
    assert list(view.table().columns) == ["x", "median", "low", "high", "n", "lost"] and view.table()["n"].sum() == 20
    with pytest.raises(UserError, match="did you mean 'tok_s'"):
        view.y = "toks"
    assert view.y == "kl"


@pytest.mark.parametrize(
    "given, said",
    [
        ({"x": "kk"}, "did you mean 'k'"),
        ({"y": "mode"}, "holds no numbers"),
        ({"series": "mod"}, "did you mean 'mode'"),
        ({"facet": "modes"}, "did you mean 'mode'"),
        ({"where": {"mode": "loras"}}, "did you mean 'lora'"),
        ({"where": {"mod": "lora"}}, "did you mean 'mode'"),
        ({"where": "lora"}, "where maps an axis"),
        ({"axes": ["kx"]}, "axes names 'kx'"),
        ({"metrics": ["mode"]}, "holds no numbers"),
        ({"theme": "drak"}, "did you mean 'dark'"),
    ],
)
def test_unknown_names_give_the_nearest(given, said):
    with pytest.raises(UserError, match=said):
        sweep_view(grid(), **given)


def test_what_has_too_many_values_to_split_is_a_sentence():
    """The page has no labels of such a column, and would fail in words of its own."""
    names = [f"run {i}" for i in range(600)]
    many = pd.DataFrame({"k": np.arange(600) % 3, "name": names, "kl": np.linspace(0, 1, 600)})
    said = "'name' has 600 different values, and a view is split or filtered by at most 500"
    for chosen in ({"series": "name"}, {"facet": "name"}, {"where": {"name": "run 3"}}):
        with pytest.raises(UserError, match=said):
            sweep_view(many, x="k", y="kl", **chosen)
    view = sweep_view(many, x="k", y="kl")
    for setting, value in (("series", "name"), ("facet", "name"), ("filters", {"name": ["run 3"]})):
        before = getattr(view, setting)
        with pytest.raises(UserError, match=said):
            setattr(view, setting, value)
        assert getattr(view, setting) == before


@pytest.mark.parametrize("source", [3, None, {"a": 1}, [1, 2], "no/such/folder"])
def test_what_is_no_sweep_is_a_sentence(source):
    with pytest.raises(UserError, match="a sweep is a DataFrame|no runs at"):
        sweep_view(source)


def test_tables_come_from_files_and_lists(tmp_path):
    frame = grid()
    frame.to_parquet(tmp_path / "points.parquet")
    frame.to_csv(tmp_path / "points.csv", index=False)
    for source in (str(tmp_path / "points.parquet"), tmp_path / "points.csv", [frame[:20], frame[20:]]):
        pd.testing.assert_frame_equal(sweep_view(source).table(), sweep_view(frame).table())
    (tmp_path / "bad.parquet").write_bytes(b"nothing")
    with pytest.raises(UserError, match="cannot be read as a table"):
        sweep_view(tmp_path / "bad.parquet")
    indexed = frame.set_index(["mode", "k"])
    assert sweep_view(indexed).points.axes[:2] == ("mode", "k")
    with pytest.raises(UserError, match="repeated: 'k'"):
        sweep_view(pd.concat([frame, frame["k"]], axis=1))


def test_runs_are_points(tmp_path):
    from workbench.instrument.run_writer import RunWriter

    for number, k in enumerate([None, None, 0, 0]):
        meta = {"settings": {"k": k, "engine": {"dtype": "float32"}}, "seed": number}
        with RunWriter(tmp_path / f"run-{number}", meta=meta) as writer:
            drafts = {"drafts_accepted": 1, "drafts_rejected": 3}
            writer.step({"step": 0, "duration_ms": 100.0, "tokens": 2 + number, **drafts})
            writer.request({"request_id": "a", "ttft_s": 0.5, "prompt_tokens": 4, "cached_tokens": 1})
    view = sweep_view(tmp_path, x="k", y="tok_s")
    table = view.table()
    assert table["median"].tolist() == [45, 25] and table["n"].tolist() == [2, 2]
    frame = view.points.frame
    assert frame["ttft_ms"].tolist() == [500.0] * 4 and frame["accepted_share"].tolist() == [0.25] * 4
    assert frame["cached_share"].tolist() == [0.25] * 4 and "requests" not in view.points.axes
    assert "engine.dtype" in view.points.axes and np.isnan(frame["reused_share"]).all()
    with RunWriter(tmp_path / "open", meta={"settings": {"k": 3}}) as writer:
        writer.step({"step": 0, "duration_ms": 100.0, "tokens": 1})
        assert "Not complete: 'open (running)'." in sweep_view(tmp_path).notes


def lines_of(picture) -> list:
    return [line for axes in picture.figure.axes for line in axes.lines if len(line.get_xdata()) > 2]


def test_the_picture_has_the_tables_numbers():
    view = sweep_view(grid(), log_y=False)
    picture = view.show()
    table = view.table()
    xlora = table[table["series"] == "xlora"]
    drawn = [line.get_ydata() for line in lines_of(picture)]
    assert any(len(y) == 4 and np.allclose(y, xlora["median"][:4]) for y in drawn)
    middle, low = (f"{xlora[key].iloc[4]:.4g}" for key in ("median", "low"))
    assert f"k none: {middle}, range of 4 repeats {low}" in picture.description
    texts = [text.get_text() for axes in picture.figure.axes for text in (*axes.texts, *axes.get_xticklabels())]
    assert {"xlora", "lora", "none", "8"} <= set(texts)


def test_forty_series_one_repeat_one_point_and_nothing():
    many = pd.DataFrame([{"who": f"w{i}", "n": n, "y": i + n / 7} for i in range(40) for n in (1, 2, 3)])
    view = sweep_view(many, x="n", series="who")
    assert "12 of 40 series are drawn" in " ".join(text.get_text() for text in view.show().figure.texts)
    assert "One repeat per point (n = 1)" in " ".join(text.get_text() for text in view.show().figure.texts)
    one = sweep_view(pd.DataFrame([{"k": 1, "y": 2.5}]), x="k", y="y")
    assert len(one.table()) == 1 and "one repeat, no interval" in one.show().description
    empty = sweep_view(pd.DataFrame())
    assert "the table is empty" in empty.show().description
    with pytest.raises(UserError, match="nothing to tabulate"):
        empty.table()
    assert "no column holds numbers" in sweep_view(pd.DataFrame({"a": ["x", "y"]})).show().description
    nobody = sweep_view(grid())
    nobody.filters = {"mode": []}
    assert "filters exclude all 40" in nobody.show().description
    missing = sweep_view(pd.DataFrame({"k": [0, 0, 1, 1], "y": [np.nan] * 4}), x="k", y="y", metrics=["y"])
    assert missing.show().png and "4 rows have no y" in " ".join(missing.warnings())


def test_logarithmic_axes_leave_out_what_they_cannot_show():
    view = sweep_view(grid(), log_x=True, log_y=True)
    said = " ".join(text.get_text() for text in view.show().figure.texts)
    assert "2 points at or below 0 have no place" in said
    assert log_ticks(0.5, 2000) == [1, 10, 100, 1000] and log_ticks(2, 30) == [2, 5, 10, 20]
    assert log_ticks(1.2, 3.5) == [1.5, 2, 3]


@pytest.mark.parametrize(
    "frame, x, y, points",
    [
        ({"k": [0, np.inf, 1, 1], "y": [1.0, np.inf, 2, 3]}, "k", "y", 3),
        ({"k": pd.array([0, None, 2, 0], dtype="Int64"), "y": [1.0, 2, 3, 4]}, "k", "y", 3),
        ({"k": np.array([None, 0, 4, 0], dtype=object), "y": [1.0, 2, 3, 4]}, "k", "y", 3),
        ({"k": pd.Categorical(["b", "a", "b"]), "y": [1.0, 2, 3]}, "k", "y", 2),
        ({"k": [[1], [2], [1]], "y": [1.0, 2, 3]}, "k", "y", 2),
        ({"day": pd.to_datetime(["2026-01-01", "2026-01-02", None]), "y": [1.0, 2, 3]}, "day", "y", 3),
        ({"p": [f"p{i}" for i in range(600)], "x": [0, 1] * 300, "y": np.arange(600.0)}, "x", "y", 2),
        ({"x": np.arange(600) / 7, "y": np.arange(600.0)}, "x", "y", 600),
        ({("a", "b"): [1, 2], ("c", ""): [1.5, 2]}, "a_b", "c", 2),
        ({0: [1, 2, 1, 2], 1: [0.1, 0.2, 0.3, 0.4]}, "0", "1", 2),
    ],
)
def test_columns_of_any_kind(frame, x, y, points):
    view = sweep_view(pd.DataFrame(frame))
    assert (view.x, view.y) == (x, y) and len(view.table()) == points
    assert view.show().description and b"renderSweep" in view._content(".html")
    if "p" in view.points.frame:
        assert view.notes == ["p has 600 different values: it splits nothing."] and len(view.warnings()) == 1


def test_panels_and_labels_of_any_text():
    frame = grid().replace({"mode": {"lora": "<script>$x^2$\n", "xlora": "שלום"}})
    view = sweep_view(frame, series=None, facet="mode")
    picture = view.show()
    titles = [axes.get_title(loc="left") for axes in picture.figure.axes]
    assert any("<script>$x^2$" in title for title in titles) and picture.png


def test_without_a_front_end_the_view_is_its_table_in_words():
    view = sweep_view(grid())
    said = view._repr_mimebundle_()[0]["text/plain"]
    assert "median tok_s by k" in said and said.count("\n") >= len(view.table())
    assert all(f"{median:.6f}"[:6] in said for median in view.table()["median"]) and "object at 0x" not in said
    assert "no points" in repr(sweep_view(grid()[:0])) or "A sweep: 0 rows" in repr(sweep_view(grid()[:0]))


def test_files(tmp_path):
    view = sweep_view(grid())
    for suffix in (".png", ".svg", ".pdf", ".html"):
        assert view.save(tmp_path / f"sweep{suffix}").stat().st_size > 5000
    html = (tmp_path / "sweep.html").read_text()
    assert "renderSweep" in html and "renderConsole" not in html
    with pytest.raises(UserError, match="a picture is one of"):
        view.save(tmp_path / "sweep.jpeg")
    assert isinstance(view, SweepView) and "sweep" in SweepView._esm.__str__()
