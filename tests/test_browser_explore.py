"""The static page of explore in a real browser. Run: pytest -m browser tests/test_browser_explore.py"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from browser_page import settle
from explore_page import GEOMETRY, VIEW, place, readings, saved, until, visible
from trace_problem import HOSTILE, make_trace, small_trace, with_outliers

from workbench import explore
from workbench.display.palette import LIGHT, contrast
from workbench.instrument.trace import Trace, nan_mean

pytestmark = pytest.mark.browser
pytest_plugins = ("browser_page",)
CONTRASTS = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const paint = (colour) => { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); };
  const hex = () => '#' + [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3)
    .map((channel) => channel.toString(16).padStart(2, '0')).join('');
  const texts = '.lw-token, .lw-fact, .lw-status, .lw-site, .lw-scale, .lw-part, .lw-label, .lw-button, .lw-more, th';
  return [...document.querySelectorAll(texts)].filter((node) => node.checkVisibility()).map((node) => {
    const chain = [];
    for (let at = node; at; at = at.parentElement) chain.unshift(getComputedStyle(at).backgroundColor);
    chain.forEach(paint);
    const back = hex();
    paint(getComputedStyle(node).color);
    return [back, hex()];
  });
}"""
PIXEL = """([x, y]) => {
  const copy = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  copy.drawImage(document.querySelector('.lw-stack canvas'), -x * devicePixelRatio, -y * devicePixelRatio);
  return [...copy.getImageData(0, 0, 1, 1).data].slice(0, 3);
}"""
AT_ONCE = """([kind, events]) => {
  const target = document.querySelector(kind === 'wheel' ? '.lw-over' : '.lw-explore-map');
  const Kind = kind === 'wheel' ? WheelEvent : KeyboardEvent;
  for (const event of events) target.dispatchEvent(new Kind(kind, { ...event, bubbles: true, cancelable: true }));
}"""
FOCUSED = """() => {
  const node = document.activeElement, name = node.className || node.type || node.tagName;
  return [name, node.getAttribute('aria-label') ?? node.textContent, getComputedStyle(node).outlineWidth];
}"""


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace(30)


@pytest.fixture(scope="module")
def static(trace: Trace, tmp_path_factory) -> Path:
    return saved(explore(trace), tmp_path_factory.mktemp("explore") / "view.html")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_overflows_and_every_text_can_be_read(open_page, static: Path, width: int, scheme: str) -> None:
    page = open_page(static, width, scheme)
    page.locator(".lw-help summary").click()
    page.locator(".lw-explore-map").focus()
    page.keyboard.press("Shift+ArrowRight")
    settle(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = page.locator(".lw-text, .lw-card, .lw-explore-map, .lw-controls, .lw-mini").evaluate_all(
        "nodes => nodes.map((node) => [node.getBoundingClientRect().left, node.getBoundingClientRect().right])"
    )
    assert all(left >= 0 and right <= width for left, right in boxes)
    pairs = page.evaluate(CONTRASTS)
    assert len(pairs) > 140 and min(contrast(back, ink) for back, ink in pairs) >= 4.5
    assert page.locator(".lw-reading-text .lw-more").is_visible()
    page.locator(".lw-text").evaluate("box => { box.scrollTop = box.scrollHeight; }")
    until(page, "document.querySelector('.lw-reading-text .lw-more').hidden")


def test_pointing_reads_out_the_cell_and_its_colour_is_its_value(open_page, static: Path, trace: Trace) -> None:
    page = open_page(static)
    page.mouse.move(*place(page, 33, site=77))
    assert trace.sites[77] in page.locator(".lw-site").first.inner_text()
    np.testing.assert_allclose([float(one) for one in readings(page, "here")], trace.values[33, 77], atol=0.0026)
    np.testing.assert_allclose([float(one) for one in readings(page, "mean")], trace.token_means()[33], atol=0.0006)
    leader = int(trace.values[33, 77].argmax())
    tip = page.locator(".lw-tip").inner_text()
    assert f"{trace.sites[77]}: {trace.adapters[leader]} " in tip and trace.tokens[33].strip() in tip
    assert "rounded to ±0.002" in page.locator(".lw-reading").inner_text()
    page.mouse.move(*place(page, 60, mean=2))
    name, _, mean = page.locator(".lw-tip").inner_text().rpartition(", mean ")
    assert name.endswith("spanish") and abs(float(mean) - trace.token_means()[60, 2]) <= 0.0026
    page.locator(".lw-choice label", has_text="B german").click()
    settle(page)
    box = page.locator(".lw-over").bounding_box()
    stops = np.array([[int(stop[at : at + 2], 16) for at in (1, 3, 5)] for stop in LIGHT.scale])
    for token, site in ((30, 10), (30, 120), (90, 75)):
        x, y = place(page, token, site=site)
        drawn = page.evaluate(PIXEL, [x - box["x"], y - box["y"]])
        part = trace.values[token, site, 1] * (len(stops) - 1)
        expected = [np.interp(part, range(len(stops)), stops[:, channel]) for channel in range(3)]
        assert np.abs(np.array(drawn) - expected).max() <= 4
    page.mouse.move(2, 2)
    assert page.locator(".lw-tip").is_hidden()


def test_keys_and_turns_of_the_wheel_within_one_frame_all_count(open_page, static: Path) -> None:
    page = open_page(static)
    page.locator(".lw-explore-map").focus()
    first, last = visible(page)
    page.evaluate(AT_ONCE, ["keydown", [{"key": "+"}] * 3])
    settle(page)
    zoomed = visible(page)
    assert zoomed[1] - zoomed[0] == pytest.approx((last - first) / 1.6**3)
    cell = page.evaluate(GEOMETRY)["cell"]
    page.evaluate(AT_ONCE, ["wheel", [{"deltaX": 20}] * 3])
    settle(page)
    assert visible(page)[0] - zoomed[0] == pytest.approx(60 / cell)
    x, y = place(page, zoomed[0] + 10)
    before = page.evaluate(GEOMETRY)
    page.evaluate(AT_ONCE, ["wheel", [{"deltaY": 100, "clientX": x, "clientY": y}] * 3])
    settle(page)
    after = page.evaluate(GEOMETRY)
    assert after["cell"] == pytest.approx(before["cell"] * np.exp(-0.6))
    assert place(page, zoomed[0] + 10)[0] == pytest.approx(x, abs=after["cell"])


def test_the_wheel_zooms_about_the_pointer_once_the_map_has_the_focus(open_page, static: Path) -> None:
    page = open_page(static, scheme="dark")
    before = visible(page)
    x, y = place(page, 100, site=20)
    page.mouse.move(x, y)
    page.mouse.wheel(0, -300)
    settle(page)
    assert visible(page) == before
    page.mouse.click(x, y)
    page.evaluate("scrollTo(0, 0)")
    for _ in range(4):
        page.mouse.wheel(0, -300)
    until(page, f"{VIEW}.geometry.last - {VIEW}.geometry.first < 40")
    settle(page)
    assert abs(place(page, 100)[0] - x) <= page.evaluate(GEOMETRY)["cell"]
    first, last = visible(page)
    page.mouse.move(x - 40, y)
    page.mouse.down()
    page.mouse.move(x + 160, y, steps=4)
    page.mouse.up()
    settle(page)
    moved = visible(page)
    assert moved[0] < first - 3 and abs((moved[1] - moved[0]) - (last - first)) < 0.01
    page.mouse.wheel(240, 0)
    settle(page)
    assert visible(page)[0] > moved[0]
    mini = page.locator(".lw-mini").bounding_box()
    page.mouse.click(mini["x"] + 2, mini["y"] + 10)
    settle(page)
    assert visible(page)[0] == 0
    page.get_by_role("button", name="Show all tokens").click()
    settle(page)
    assert visible(page) == before


def test_a_span_is_selected_by_dragging_and_by_keys(open_page, static: Path, trace: Trace) -> None:
    page = open_page(static)
    page.mouse.move(*place(page, 30))
    page.mouse.down()
    page.mouse.move(*place(page, 44), steps=5)
    page.mouse.up()
    panel = page.locator(".lw-selection")
    assert "Selected: 15 tokens, 30 to 44" in panel.inner_text()
    assert page.locator(".lw-span").text_content().replace("↵", "") == "".join(trace.tokens[30:45])
    means = [float(one) for one in panel.locator("[data-mean]").all_inner_texts()]
    np.testing.assert_allclose(means, nan_mean(trace.values[30:45], (0, 1)), atol=0.0006)
    assert page.locator(".lw-chosen").count() == 15
    page.mouse.move(*place(page, 50, site=9))
    page.keyboard.down("Shift")
    page.mouse.down()
    page.mouse.move(*place(page, 52, site=40), steps=3)
    page.mouse.up()
    page.keyboard.up("Shift")
    assert "Selected: 3 tokens, 50 to 52" in panel.inner_text()
    page.get_by_role("button", name="Zoom to it").click()
    settle(page)
    first, last = visible(page)
    assert first <= 50 and last >= 53 and last - first < 30
    page.locator(".lw-explore-map").focus()
    for key in ("Escape", "Home", "ArrowRight", "Shift+ArrowRight", "Shift+ArrowRight", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    assert "Selected: 3 tokens, 1 to 3" in panel.inner_text()
    assert trace.sites[1] in page.locator(".lw-site").first.inner_text()
    until(page, "document.querySelector('.lw-sr').textContent.includes('3 tokens selected')")
    assert trace.sites[1] in page.locator(".lw-sr").inner_text()
    for key in ("0", "End", "Shift+PageUp"):
        page.keyboard.press(key)
    assert f"{trace.num_tokens - 1}" in panel.inner_text()
    page.keyboard.press("Escape")
    assert "No selection" in panel.inner_text()
    for key, factor in (("+", 1), ("-", -1)):
        before = page.evaluate(GEOMETRY)["cell"]
        page.keyboard.press(key)
        settle(page)
        assert (page.evaluate(GEOMETRY)["cell"] - before) * factor > 0


def test_adapters_and_sites_that_are_not_shown_count_nowhere(open_page, static: Path, trace: Trace) -> None:
    page = open_page(static)
    page.get_by_role("checkbox", name="D scripture").uncheck()
    page.locator(".lw-choice label", has_text="gate_proj").click()
    page.get_by_label("First layer").select_option("3")
    page.get_by_label("Last layer").select_option("7")
    settle(page)
    layers = [int(site.split(".")[2]) for site in trace.sites]
    sites = [i for i, site in enumerate(trace.sites) if site.endswith("gate_proj") and 3 <= layers[i] <= 7]
    page.mouse.move(*place(page, 100, site=2))
    assert trace.sites[sites[2]] in page.locator(".lw-site").first.inner_text()
    means = nan_mean(trace.values[100, sites], 0)[:3]
    np.testing.assert_allclose([float(one) for one in readings(page, "mean")], means, atol=0.0026)
    for name in ("A python", "B german"):
        page.get_by_role("checkbox", name=name).uncheck()
    # the last one stays
    page.get_by_role("checkbox", name="C spanish").click()
    assert page.get_by_role("checkbox", name="C spanish").is_checked()
    keys = set(page.locator(".lw-token[data-key]").evaluate_all("nodes => nodes.map((node) => node.dataset.key)"))
    assert keys <= {"C"}
    page.locator(".lw-choice label", has_text="every adapter").click()
    settle(page)
    assert page.evaluate(f"{VIEW}.geometry.panels.length") == 1


def test_the_keyboard_reaches_everything_in_order(open_page, static: Path) -> None:
    page = open_page(static)
    seen = []
    for _ in range(24):
        page.keyboard.press("Tab")
        seen.append(page.evaluate(FOCUSED))
    names = [name for name, _, _ in seen]
    assert names.index("lw-explore-map") < names.index("checkbox") < names.index("lw-text")
    assert [label for name, label, _ in seen if name == "lw-button"][:3] == ["Zoom out", "Zoom in", "Show all tokens"]
    assert all(ring == "3px" for name, _, ring in seen if name not in ("radio", "BODY", "HTML"))


def test_hostile_text_is_inert_and_odd_values_are_marked(open_page, tmp_path) -> None:
    names = ("<img src=x onerror=alert(1)>", "\u202etwo", "three")
    odd = with_outliers(replace(small_trace(HOSTILE, adapters=3), adapters=names))
    values = odd.values.copy()
    values[6] = np.nan
    edits = {"edits": ["force(<b>german</b>=1.0)"], "base": "<img src=x>"}
    view = explore(replace(odd, values=values, metadata=edits), title="<script>alert(4)</script>")
    page = open_page(saved(view, tmp_path / "x.html"))
    assert page.locator(".lw-text [data-token='0']").inner_text() == "<script>alert(1)</script>"
    assert page.locator(".lw-text [data-token='2']").inner_text() == " ‹ESC›[31mred"
    assert page.locator(".lw img, .lw script").count() == 0
    isolated = "node => [node.tagName, getComputedStyle(node).unicodeBidi]"
    assert page.locator(".lw-text [data-token='5']").evaluate(isolated) == ["BDI", "isolate"]
    assert "Edited run: force(<b>german</b>=1.0)" in page.locator(".lw-edited").inner_text()
    page.mouse.move(*place(page, 3, site=1))
    assert readings(page, "here") == ["▲ > 1"] * 3
    page.mouse.move(*place(page, 4, site=2))
    assert readings(page, "here")[1] == "▼ < 0"
    page.mouse.move(*place(page, 6, site=1))
    assert readings(page, "here") == ["–"] * 3 and "no value" in page.locator(".lw-tip").inner_text()
    page.locator(".lw-explore-map").focus()
    page.keyboard.press("End")
    page.keyboard.press("Shift+Home")
    assert "<script>alert(1)</script>" in page.locator(".lw-span").inner_text()


@pytest.mark.parametrize("adapters", [1, 200])
def test_one_adapter_and_two_hundred(open_page, tmp_path, adapters: int) -> None:
    path = saved(explore(small_trace(("a",) * 60, adapters=adapters)), tmp_path / "view.html")
    page = open_page(path, width=400)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.get_by_role("checkbox").count() == adapters
    page.mouse.move(*place(page, 3, site=2))
    assert len(readings(page, "here")) == min(adapters, 12)
    assert page.locator(".lw-adapters .lw-more").is_visible() == (adapters > 1)
    if adapters > 1:
        page.get_by_label("Map", exact=True).select_option("every adapter")
        settle(page)
        assert page.evaluate(f"{VIEW}.geometry.panels.length") == 16 and page.evaluate(f"{VIEW}.geometry.height") < 3000


def test_a_view_that_fails_says_so(open_page, static: Path, tmp_path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(static.read_text(encoding="utf-8").replace('"parts":[', '"prts":[', 1), encoding="utf-8")
    page = open_page(broken, ready=".lw-error")
    assert "could not be drawn" in page.locator(".lw-error").inner_text() and page.locator("img").is_visible()
