"""The view of a sweep in a real browser. Run: pytest -m browser tests/test_browser_sweep.py (needs Chromium)."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from browser_page import settle
from test_sweep_view import grid

from workbench.display.palette import contrast
from workbench.display.sweep_points import spelled
from workbench.display.sweep_view import sweep_view

pytest_plugins = ("browser_page",)
pytestmark = pytest.mark.browser
CELLS = """() => [...document.querySelectorAll('.lw-sweep-table tbody tr')]
  .map((row) => [...row.children].map((cell) => cell.textContent))"""
COLOURS = """() => {
  const brush = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const hex = (colour, over) => {
    for (const paint of [over, colour]) { brush.fillStyle = paint; brush.fillRect(0, 0, 1, 1); }
    const channels = [...brush.getImageData(0, 0, 1, 1).data].slice(0, 3);
    return '#' + channels.map((channel) => channel.toString(16).padStart(2, '0')).join('');
  };
  const page = getComputedStyle(document.querySelector('.lw')).backgroundColor;
  const of = (query, name) => [...document.querySelectorAll(query)]
    .map((node) => hex(getComputedStyle(node)[name], page));
  const texts = '.lw-sweep-note, .lw-sweep th, .lw-sweep td, .lw-choice';
  return { page: hex(page, page), texts: [...of('.lw-sweep-tick, .lw-sweep-name', 'fill'), ...of(texts, 'color')] };
}"""
SERIES = """() => [...document.querySelectorAll('.lw-sweep-sample')].map((sample) => {
  const [line, mark] = [sample.querySelector('path[stroke]'), sample.querySelector('path.lw-sweep-mark')];
  return [line.getAttribute('stroke-dasharray') ?? '', mark.getAttribute('d'), line.getAttribute('stroke')];
})"""
READY = ".lw-sweep-point, .lw-sweep-empty:not(:empty)"


def table_of(view) -> list[list[str]]:
    """Return Python's table as the page writes it, but with numbers for the numbers."""
    keys = [name for name in ("facet", "series", "x") if name in view.table()]
    return [
        [*(spelled(row[key]) for key in keys), row["median"], row["low"], row["high"], row["n"]]
        for row in view.table().to_dict("records")
    ]


def assert_same_table(page, view) -> None:
    shown, expected = page.evaluate(CELLS), table_of(view)
    assert len(shown) == len(expected)
    for mine, theirs in zip(shown, expected, strict=True):
        for text, value in zip(mine, theirs, strict=False):
            if isinstance(value, str):
                assert text == value
            elif np.isnan(value):
                assert text == "–"
            else:
                assert float(text) == pytest.approx(value, rel=6e-4)


@pytest.fixture
def saved(tmp_path):
    return lambda view: view.save(tmp_path / "sweep.html")


def test_the_page_says_what_python_says(open_page, saved):
    view = sweep_view(grid(7), x="k", y="tok_s", series="mode")
    page = open_page(saved(view), ready=READY)
    assert_same_table(page, view)
    page.locator("select[data-choice=y]").select_option("kl")
    page.locator("select[data-choice=facet]").select_option("mode")
    page.locator("select[data-choice=series]").select_option("")
    view.y, view.facet, view.series = "kl", "mode", ""
    assert_same_table(page, view)
    assert page.locator(".lw-sweep-chart").count() == 2
    page.locator(".lw-sweep-filter summary").click()
    page.locator("[data-filter=k] input[value='8']").uncheck()
    view.filters = {"k": [0, 1, 2, None]}
    assert_same_table(page, view)
    assert page.locator(".lw-sweep-filter summary").inner_text() == "Filter (1 active)"


def test_points_are_walked_and_read_with_the_keyboard(open_page, saved):
    view = sweep_view(grid(), x="k", y="tok_s", series="mode")
    page = open_page(saved(view), ready=READY)
    said = lambda: page.evaluate("() => document.activeElement.getAttribute('aria-label')")  # noqa: E731
    table = view.table()

    def sentence(row) -> str:
        return f"mode {row['series']}, k {spelled(row['x'])}: tok_s "

    page.locator(".lw-sweep-point[tabindex='0']").focus()
    assert page.locator(".lw-sweep-point[tabindex='0']").count() == 1
    assert said().startswith(sentence(table.iloc[0])) and said().endswith("n = 4")
    page.keyboard.press("ArrowRight")
    assert said().startswith(sentence(table.iloc[1]))
    assert page.locator("tr.lw-current").get_attribute("data-point") == "1"
    assert page.locator(".lw-tip").inner_text() == said()
    page.keyboard.press("ArrowDown")
    assert said().startswith(sentence(table.iloc[6]))
    page.keyboard.press("End")
    assert said().startswith(sentence(table.iloc[9])) and "k none" in said()
    page.keyboard.press("ArrowRight")
    assert said().startswith(sentence(table.iloc[9]))
    ring = page.evaluate("() => getComputedStyle(document.activeElement.querySelector('.lw-sweep-hit')).strokeWidth")
    assert ring == "3px"


def test_every_control_has_a_label_and_every_series_more_than_a_colour(open_page, saved):
    many = pd.DataFrame([{"who": f"w{i}", "n": n, "y": i + n / 7} for i in range(40) for n in (1, 2, 3)])
    page = open_page(saved(sweep_view(many, x="n", series="who")), ready=READY)
    unnamed = page.evaluate(
        "() => [...document.querySelectorAll('.lw select, .lw input, .lw button')]"
        ".filter((node) => !(node.labels?.length || node.textContent.trim() || node.ariaLabel)).length"
    )
    assert unnamed == 0
    looks = [tuple(look) for look in page.evaluate(SERIES)]
    assert len({look[:2] for look in looks}) == 40 and len({look[2] for look in looks}) == 40
    assert "12 of 40 series are drawn" in page.locator(".lw-sweep-key").inner_text()
    assert page.locator(".lw-sweep-point").count() == 36
    page.get_by_role("button", name="all").click()
    assert page.locator(".lw-sweep-point").count() == 120
    page.get_by_role("button", name="none").click()
    assert page.locator(".lw-sweep-point").count() == 0 and len(page.evaluate(CELLS)) == 120
    page.locator(".lw-sweep-key").get_by_label("w17").check()
    assert page.locator(".lw-sweep-point").count() == 3


def test_axes_and_intervals_are_called_what_they_are(open_page, saved):
    page = open_page(saved(sweep_view(grid(), x="k", y="tok_s", series="mode")), ready=READY)
    assert "tokens per second" in page.locator(".lw-sweep-name").all_text_contents()
    text = page.locator(".lw-sweep-table").inner_text()
    assert "Medians over repeats; low to high: range of 4 repeats" in text and "95 %" not in text
    more = open_page(saved(sweep_view(grid(9), x="k", y="tok_s", series="mode")), ready=READY)
    assert "low to high: 95 % interval" in more.locator(".lw-sweep-table").inner_text()


@pytest.mark.parametrize("repeats", [6, 9, 64, 65, 100])
def test_the_page_has_pythons_intervals_of_many_repeats(open_page, saved, repeats):
    view = sweep_view(grid(repeats), x="k", y="tok_s", series="mode")
    assert_same_table(open_page(saved(view), ready=READY), view)


def test_log_axes_and_missing_intervals(open_page, saved):
    page = open_page(saved(sweep_view(grid(1), x="k", y="tok_s", series="mode")), ready=READY)
    assert "One repeat per point (n = 1)" in page.locator(".lw-sweep").inner_text()
    assert page.locator(".lw-sweep-bar").count() == 0 and page.locator(".lw-sweep-point").count() == 10
    page.get_by_label("log x").check()
    assert "2 points at or below 0" in page.locator(".lw-sweep").inner_text()
    assert page.locator(".lw-sweep-point").count() == 8
    ticks = page.locator(".lw-sweep-tick").all_text_contents()
    assert "none" in ticks and "8" in ticks and "0" not in ticks


@pytest.mark.parametrize(
    "frame, said",
    [
        (pd.DataFrame(), "the table is empty"),
        (pd.DataFrame({"a": ["x", "y"]}), "no column holds numbers"),
    ],
)
def test_nothing_to_draw_is_said(open_page, saved, frame, said):
    page = open_page(saved(sweep_view(frame)), ready=".lw-sweep-empty")
    assert said in page.locator(".lw-sweep-empty").inner_text() and not page.locator(".lw-error").count()


def test_one_point_all_missing_and_any_text(open_page, saved):
    one = open_page(saved(sweep_view(pd.DataFrame([{"k": 1, "y": 2.5}]), x="k", y="y")), ready=READY)
    assert one.locator(".lw-sweep-point").count() == 1 and not one.locator(".lw-error").count()
    frame = pd.DataFrame({"k": [0, 0, 1, 1], "y": [np.nan] * 4})
    none = open_page(saved(sweep_view(frame, x="k", y="y", metrics=["y"])), ready=".lw-sweep-table tr")
    assert "4 rows have no y" in none.locator(".lw-sweep").inner_text()
    labels = ["<script>alert(1)</script>", "‮evil\n", "</style><b>x"]
    hostile = pd.DataFrame({"<i>who</i>": labels * 2, "y": np.arange(6.0)})
    page = open_page(saved(sweep_view(hostile, x="<i>who</i>", y="y")), ready=READY)
    assert page.locator(".lw-sweep b, .lw-sweep i, .lw-sweep script").count() == 0
    text = page.locator(".lw-sweep").inner_text()
    assert "<script>alert(1)</script>" in text and "‹U+202E›evil" in text


@pytest.mark.parametrize("scheme, width", [("light", 400), ("dark", 1280)])
def test_both_themes_and_a_phone(open_page, saved, scheme, width):
    page = open_page(saved(sweep_view(grid(), x="k", series="mode")), width=width, scheme=scheme, ready=READY)
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    found = page.evaluate(COLOURS)
    assert len(found["texts"]) > 20
    assert min(contrast(text, found["page"]) for text in found["texts"]) >= 4.5


def test_choices_reach_python_and_come_back(open_widget):
    view = sweep_view(grid(), x="k", y="tok_s", series="mode")
    page, _ = open_widget(view, ready=READY)
    page.locator("select[data-choice=y]").select_option("kl")
    page.get_by_label("log y").check()
    page.locator(".lw-sweep-filter summary").click()
    page.locator("[data-filter=mode] input[value='lora']").uncheck()
    page.wait_for_timeout(100)
    assert (view.y, view.log_y, view.filters) == ("kl", True, {"mode": ["xlora"]})
    assert_same_table(page, view)
    view.series, view.filters, view.x = "", {}, "mode"
    page.wait_for_function("() => document.querySelectorAll('.lw-sweep-table tbody tr').length === 2")
    settle(page)
    assert page.locator("select[data-choice=x]").input_value() == "mode"
    assert_same_table(page, view)


def test_curves_that_were_merged_for_a_while_are_all_drawn_again(open_page, saved):
    page = open_page(saved(sweep_view(grid(2), x="k", y="tok_s", series="mode")), ready=READY)
    points = "document.querySelectorAll('.lw-sweep-point').length"
    before = page.evaluate(points)
    for series in ("", "mode"):
        page.locator("select[data-choice=series]").select_option(series)
    settle(page)
    assert page.evaluate(points) == before
    assert page.locator(".lw-sweep-legend input:checked").count() == 2


def test_a_view_that_is_drawn_anew_takes_neither_focus_nor_place_from_its_reader(open_widget):
    view = sweep_view(grid(2), x="k", y="tok_s", series="mode")
    page, _ = open_widget(view, ready=READY)
    page.evaluate("lwRenderAgain('900px')")
    page.wait_for_function("document.querySelectorAll('.lw-sweep').length === 2")
    held = page.locator(".lw-sweep >> nth=1 >> .lw-sweep-point").nth(3)
    held.focus()
    name = held.get_attribute("data-point")
    # the reader goes on above; both views are drawn anew, the first of them too
    page.evaluate("scrollTo(0, 0)")
    view.theme = "dark"
    page.wait_for_function("[...document.querySelectorAll('.lw')].every((one) => one.dataset.theme === 'dark')")
    settle(page)
    where = "[...document.querySelectorAll('.lw-sweep')].findIndex((one) => one.contains(document.activeElement))"
    assert page.evaluate(where) == 1 and page.evaluate("document.activeElement.dataset.point") == name
    assert page.evaluate("scrollY") == 0
    widths = "document.querySelectorAll('.lw-sweep-chart')[0].getAttribute('width')"
    before = page.evaluate(widths)
    page.evaluate("document.querySelector('#view > div').style.width = '700px'")
    page.wait_for_function(f"{widths} !== '{before}'")
    assert page.evaluate(where) == 1
