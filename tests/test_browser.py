"""The static page in a real browser. Run: pytest -m browser tests/test_browser.py (needs Chromium and Playwright)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from browser_page import settle
from trace_problem import make_trace, small_trace

from workbench.display import show
from workbench.display.palette import DARK, LIGHT, contrast
from workbench.instrument.trace import Trace

pytestmark = pytest.mark.browser
pytest_plugins = ("browser_page",)
PIXEL = """([x, y]) => {
  const copy = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  copy.drawImage(document.querySelector('.lw canvas'), -x * devicePixelRatio, -y * devicePixelRatio);
  return [...copy.getImageData(0, 0, 1, 1).data].slice(0, 3);
}"""
PLACE = """map => ({ shown: map.clientWidth, left: map.scrollLeft,
  all: map.firstChild.offsetWidth, height: map.firstChild.offsetHeight })"""
CONTRASTS = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const paint = (colour) => { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); };
  const hex = () => {
    const channels = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    return '#' + channels.map((channel) => channel.toString(16).padStart(2, '0')).join('');
  };
  const texts = '.lw-token, .lw-fact, .lw-marks, .lw-status, .lw-scale p, .lw-part';
  return [...document.querySelectorAll(texts)].map((node) => {
    const chain = [];
    for (let at = node; at; at = at.parentElement) chain.unshift(getComputedStyle(at).backgroundColor);
    chain.forEach(paint);
    const back = hex();
    paint(getComputedStyle(node).color);
    return [back, hex()];
  });
}"""
RING = "() => { const s = getComputedStyle(document.activeElement); return [s.outlineStyle, s.outlineWidth]; }"
KEYS = "nodes => nodes.map((node) => [Number(node.dataset.token), node.dataset.key])"
UNDERLINES = "nodes => nodes.map((node) => getComputedStyle(node).borderBottomStyle)"
WHOLE_TEXT = """box => [...box.childNodes].filter((node) => node.className !== 'lw-part')
  .map((node) => node.textContent).join('')"""
BOXES = "nodes => nodes.map((node) => Object.values(node.getBoundingClientRect().toJSON()))"
IS_RED = """nodes => nodes.map((node) => getComputedStyle(node))
  .filter((style) => (style.backgroundColor + style.border).includes('rgb(255, 0, 0)')).length"""
ISOLATION = "node => [node.tagName, getComputedStyle(node).unicodeBidi]"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace(30)


@pytest.fixture(scope="module")
def demo(trace: Trace, tmp_path_factory) -> Path:
    return show(trace).save(tmp_path_factory.mktemp("page") / "demo.html")


def numbers(page, name: str) -> list[float]:
    return [float(text) for text in page.locator(f".lw-readout [data-{name}]").all_inner_texts()]


def pixel(page, x: float, y: float) -> list[int]:
    """Return red, green, blue of the canvas at css pixels x, y."""
    return page.evaluate(PIXEL, [x, y])


def cell(page, token: int, site: int | None = None, adapter: int | None = None, num_sites: int = 150) -> tuple:
    """Return the middle of a cell in css pixels of the canvas, from the marks the page itself draws."""
    box = page.locator(".lw-map").evaluate(PLACE)
    gutter = 112 if box["shown"] >= 560 else 78
    tokens = page.locator("[data-token]").count()
    width = (box["all"] - gutter) / tokens
    x = gutter + (token + 0.5) * width - box["left"]
    labelled = 82 if width >= 10 else 18
    if adapter is not None:
        return x, labelled + 26 + (adapter + 0.5) * 20
    row = (box["height"] - 18 - (labelled + 26 + 80 + 28)) / num_sites
    return x, labelled + 26 + 80 + 28 + (site + 0.5) * row


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_overflows_and_the_theme_follows(open_page, demo: Path, width: int, scheme: str) -> None:
    page = open_page(demo, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = page.locator(".lw-text, .lw-legend, .lw-readout, .lw-map, .lw-controls").evaluate_all(
        "nodes => nodes.map((node) => [node.getBoundingClientRect().left, node.getBoundingClientRect().right])"
    )
    assert all(left >= 0 and right <= width for left, right in boxes)
    if width == 400:
        assert page.locator(".lw-map").evaluate("map => map.scrollWidth > map.clientWidth")
    theme = {"light": LIGHT, "dark": DARK}[scheme]
    expected = tuple(int(theme.page[at : at + 2], 16) for at in (1, 3, 5))
    for selector in ("body", ".lw"):
        colour = page.locator(selector).evaluate("node => getComputedStyle(node).backgroundColor")
        assert tuple(map(int, re.findall(r"\d+", colour)[:3])) == expected
    assert pixel(page, 2, 2) == list(expected)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast_as_drawn(open_page, demo: Path, scheme: str) -> None:
    page = open_page(demo, scheme=scheme)
    pairs = page.evaluate(CONTRASTS)
    assert len(pairs) > 140 and len({back for back, _ in pairs}) > 20
    assert min(contrast(back, ink) for back, ink in pairs) >= 4.5


def test_pointing_at_a_token_reads_out_its_means(open_page, demo: Path, trace: Trace) -> None:
    page = open_page(demo)
    for token in (5, 60, trace.num_tokens - 2):
        page.locator(f'[data-token="{token}"]').hover()
        np.testing.assert_allclose(numbers(page, "mean"), trace.token_means()[token], atol=0.0006)
        assert f"token {token}" in page.locator(".lw-readout").inner_text()
    status = page.locator(".lw-status").inner_text()
    assert "generated" in status and f"reused from position {trace.source[-2]}" in status
    page.locator(f'[data-token="{trace.num_tokens - 1}"]').hover()
    assert "never an input" in page.locator(".lw-status").inner_text()
    assert page.locator(".lw-readout [data-mean]").all_inner_texts() == ["–"] * 4
    page.mouse.move(1, 1)
    np.testing.assert_allclose(numbers(page, "mean"), trace.token_means()[0], atol=0.0006)


def test_pointing_at_a_cell_reads_out_site_token_and_adapter(open_page, demo: Path, trace: Trace) -> None:
    page = open_page(demo)
    canvas = page.locator(".lw canvas")
    token, site = 33, 77
    x, y = cell(page, token, site)
    canvas.hover(position={"x": x, "y": y})
    assert trace.sites[site] in page.locator(".lw-site").inner_text()
    assert f"token {token}" in page.locator(".lw-readout").inner_text()
    np.testing.assert_allclose(numbers(page, "here"), trace.values[token, site], atol=0.0071)
    leader = int(trace.values[token, site].argmax())
    shown = f"{trace.sites[site]}: {trace.adapters[leader]} {numbers(page, 'here')[leader]:.2f}"
    assert page.locator(".lw-tip").inner_text() == shown
    x, y = cell(page, token, adapter=2)
    canvas.hover(position={"x": x, "y": y})
    assert page.locator(".lw-tip").inner_text() == f"spanish, mean {trace.token_means()[token, 2]:.3f}"
    page.mouse.move(1, 1)
    assert page.locator(".lw-tip").is_hidden()


def expected_colour(value: float, theme) -> np.ndarray:
    stops = np.array([[int(stop[at : at + 2], 16) for at in (1, 3, 5)] for stop in theme.scale])
    return np.array([np.interp(value * (len(stops) - 1), range(len(stops)), stops[:, c]) for c in range(3)])


@pytest.mark.parametrize(("scheme", "theme"), [("light", LIGHT), ("dark", DARK)])
def test_cells_have_the_colour_of_their_value_on_the_fixed_scale(open_page, demo, trace, scheme, theme) -> None:
    page = open_page(demo, scheme=scheme)
    for adapter, token in ((0, 12), (1, 12), (3, 90)):
        drawn = pixel(page, *cell(page, token, adapter=adapter))
        assert np.abs(np.array(drawn) - expected_colour(trace.token_means()[token, adapter], theme)).max() <= 4
    page.locator(".lw-choice label", has_text="B german").click()
    settle(page)
    for token, site in ((30, 10), (30, 120), (90, 75)):
        drawn = pixel(page, *cell(page, token, site))
        assert np.abs(np.array(drawn) - expected_colour(trace.values[token, site, 1], theme)).max() <= 4


def test_the_picked_projection_is_the_one_that_is_drawn(open_page, demo: Path, trace: Trace) -> None:
    page = open_page(demo)
    page.locator(".lw-choice label", has_text="C spanish").click()
    page.locator(".lw-choice label", has_text="gate_proj").click()
    sites = [site for site in trace.sites if site.endswith("gate_proj")]
    settle(page)
    x, y = cell(page, 50, 17, num_sites=len(sites))
    page.locator(".lw canvas").hover(position={"x": x, "y": y})
    value = trace.values[50, trace.sites.index(sites[17]), 2]
    said = page.locator(".lw-tip").inner_text()
    assert said.startswith(f"{sites[17]}: spanish ") and abs(float(said.split()[-1]) - value) <= 0.0071


def test_the_keyboard_alone_reaches_every_token_and_site(open_page, demo: Path, trace: Trace) -> None:
    page = open_page(demo)
    focused = "document.activeElement.dataset.token"
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "0"
    ring = page.evaluate(RING)
    assert ring == ["solid", "3px"]
    steps = {"ArrowRight": 1, "ArrowLeft": 0, "End": trace.num_tokens - 1, "Home": 0}
    for key, token in steps.items():
        page.keyboard.press(key)
        assert page.evaluate(focused) == str(token)
    page.keyboard.press("ArrowDown")
    lower = int(page.evaluate(focused))
    assert trace.tokens[:lower].count("\n") == 1
    page.keyboard.press("ArrowUp")
    assert page.evaluate(focused) == "0"
    page.locator(".lw-map").focus()
    for key in ["ArrowRight"] * 3 + ["ArrowDown"] * 2:
        page.keyboard.press(key)
    assert "token 3" in page.locator(".lw-readout").inner_text()
    assert trace.sites[1] in page.locator(".lw-site").inner_text()
    np.testing.assert_allclose(numbers(page, "here"), trace.values[3, 1], atol=0.0071)
    assert page.locator('[aria-selected="true"]').get_attribute("data-token") == "3"
    page.locator('input[type="radio"]').first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".lw-choice input:checked + span").first.inner_text() == "A python"


def test_zoom_shows_fewer_tokens_and_keeps_the_cursor_in_view(open_page, demo: Path) -> None:
    page = open_page(demo)
    page.locator('[data-token="100"]').click()
    before = page.locator(".lw-map").evaluate(PLACE)["all"]
    page.locator('input[type="range"]').fill("1")
    settle(page)
    box = page.locator(".lw-map").evaluate(PLACE)
    assert box["all"] > 3 * before
    assert box["left"] <= 100 * 28 <= box["left"] + box["shown"] - 112
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_lead_changes_and_sources_are_marked_without_colour(open_page, demo: Path, trace: Trace) -> None:
    page = open_page(demo)
    keys = page.locator("[data-token][data-key]").evaluate_all(KEYS)
    leading = trace.leading()
    starts = [t for t in range(trace.num_tokens) if t in (0, trace.prompt_tokens) or leading[t] != leading[t - 1]]
    assert keys == [[t, "ABCD"[leading[t]]] for t in starts if leading[t] >= 0]
    styles = page.locator("[data-token]").evaluate_all(UNDERLINES)
    expected = np.where(trace.source < 0, "dotted", np.where(trace.reused, "dashed", "solid"))
    assert styles == expected.tolist()
    assert page.locator(".lw-part").all_inner_texts() == ["prompt", "generated"]


def test_the_text_is_shown_whole_and_in_order(open_page, demo: Path, trace: Trace) -> None:
    page = open_page(demo)
    text = page.locator(".lw-text").evaluate(WHOLE_TEXT)
    assert text.replace("↵", "") == trace.text


def test_hostile_text_is_inert(open_page, tmp_path) -> None:
    markup = ("<script>alert(1)</script>", "</script><img src=x onerror=alert(2)>")
    tokens = (*markup, " \x1b[31m", "שלום", "\u202eevil", "")
    values = small_trace(tokens, adapters=3).values.copy()
    values[2], values[3, 0, 1], values[4, :, :] = 1.37, -0.25, np.nan
    trace = replace(
        small_trace(tokens, adapters=3),
        values=values,
        adapters=("<b>bold</b>", "two", "three"),
        metadata={"base": "<img src=x onerror=alert(3)>"},
    )
    page = open_page(show(trace, title="<script>alert(4)</script>").save(tmp_path / "hostile.html"))
    assert page.locator('[data-token="0"]').inner_text() == "<script>alert(1)</script>"
    assert page.locator('[data-token="2"]').inner_text() == " ‹ESC›[31m"
    assert page.locator('[data-token="4"]').inner_text() == "‹U+202E›evil"
    assert page.locator(".lw img, .lw script, .lw b:text('bold')").count() == 0
    assert page.locator('[data-token="3"]').evaluate(ISOLATION) == ["BDI", "isolate"]
    page.locator(".lw-map").focus()
    for key in ["ArrowRight"] * 2 + ["ArrowDown"]:
        page.keyboard.press(key)
    assert page.locator(".lw-readout [data-here]").all_inner_texts() == ["1.37 ▲"] * 3
    page.keyboard.press("ArrowRight")
    assert page.locator(".lw-readout [data-here]").nth(1).inner_text() == "-0.25 ▼"
    page.keyboard.press("ArrowRight")
    assert page.locator(".lw-readout [data-here]").all_inner_texts() == ["–"] * 3
    assert "above 1" in page.locator(".lw-scale").inner_text()


def test_an_edited_run_says_so_and_a_text_that_scrolls_too(open_page, trace: Trace, tmp_path) -> None:
    edited = replace(trace, metadata={**trace.metadata, "edits": ["ablate('german')", "force(<b>)"]})
    page = open_page(show(edited).save(tmp_path / "edited.html"), width=400)
    assert page.locator(".lw-edited").inner_text() == "✎ Edited run: ablate('german'); force(<b>)"
    more = page.locator(".lw-text-box .lw-more")
    assert more.is_visible() and "scroll for more" in more.inner_text()
    page.locator(".lw-text").evaluate("box => { box.scrollTop = box.scrollHeight; }")
    settle(page)
    assert more.is_hidden()


def test_without_scripts_there_is_the_picture(open_page, demo: Path) -> None:
    page = open_page(demo, scripts=False)
    assert page.locator("img").evaluate("image => image.complete && image.naturalWidth > 1000")
    assert "scripture" in page.locator("img").get_attribute("alt")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_several_pictures_in_one_document_do_not_meet(open_page, trace: Trace, tmp_path) -> None:
    one, other = show(trace).html, show(small_trace()).html
    path = tmp_path / "two.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><body>{one}{other}{one}</body>", encoding="utf-8")
    page = open_page(path)
    page.wait_for_function("document.querySelectorAll('.lw').length === 3")
    assert page.locator("img").count() == 0
    views = page.locator(".lw")
    views.nth(0).locator(".lw-choice label", has_text="B german").click()
    views.nth(0).locator('[data-token="7"]').click()
    picked = [views.nth(i).locator(".lw-choice input:checked + span").first.inner_text() for i in range(3)]
    assert picked == ["B german", "who leads", "who leads"]
    places = [views.nth(i).locator(".lw-readout").inner_text().split("\n")[0] for i in range(3)]
    assert ["token 7" in place for place in places] == [True, False, False]
    assert page.evaluate("Object.keys(window).filter((name) => /^(render|state|model|lw)/.test(name))") == []


def test_jupyters_theme_wins_over_the_systems(open_page, demo: Path) -> None:
    page = open_page(demo, scheme="light")
    for said, theme in (("false", DARK), ("true", LIGHT)):
        page.evaluate("(said) => { document.body.dataset.jpThemeLight = said; }", said)
        settle(page)
        expected = [int(theme.page[at : at + 2], 16) for at in (1, 3, 5)]
        assert pixel(page, 2, 2) == expected
    page.emulate_media(color_scheme="dark")
    page.evaluate("() => { delete document.body.dataset.jpThemeLight; }")
    settle(page)
    assert page.locator(".lw").get_attribute("data-theme") == "dark"


def test_a_view_that_fails_says_so_and_keeps_the_picture(browser, demo: Path, tmp_path) -> None:
    broken = tmp_path / "broken.html"
    html = demo.read_text(encoding="utf-8").replace('"positions":[', '"postions":[', 1)
    broken.write_text(html, encoding="utf-8")
    page = browser.new_page()
    page.goto(broken.as_uri())
    page.wait_for_selector(".lw-error")
    assert "could not be drawn" in page.locator(".lw-error").inner_text()
    assert page.locator("img").is_visible()
    page.close()


JUPYTER_CSS = """
.jp-RenderedHTMLCommon dl dt { float: left; width: 20%; } .jp-RenderedHTMLCommon dl dd { float: left; width: 70%; }
.jp-RenderedHTMLCommon table { margin-left: auto; table-layout: fixed; border: 5px solid red; font-size: 30px; }
.jp-RenderedHTMLCommon thead { border-bottom: 5px solid red; }
.jp-RenderedHTMLCommon tbody tr:nth-child(odd) { background: red; }
.jp-RenderedHTMLCommon tbody tr:hover { background: red; }
.jp-RenderedHTMLCommon :is(td, th, tr) { text-align: left; vertical-align: top; padding: 40px; line-height: 3; }
"""


def test_the_styles_of_jupyters_output_cells_do_not_change_it(open_page, trace: Trace, tmp_path) -> None:
    fragment = show(trace).html
    sizes = []
    for name, css in (("plain", ""), ("jupyter", JUPYTER_CSS)):
        path = tmp_path / f"{name}.html"
        body = f"<style>{css}</style><body class=jp-RenderedHTMLCommon>{fragment}</body>"
        path.write_text(f"<!doctype html><meta charset=utf-8>{body}", encoding="utf-8")
        page = open_page(path)
        page.locator(".lw-shares tbody tr").nth(1).hover()
        parts = page.locator(".lw-facts > span, .lw-shares th, .lw-shares td, .lw-readout, .lw-map")
        sizes.append(parts.evaluate_all(BOXES))
        assert page.locator(".lw-shares, .lw-shares *").evaluate_all(IS_RED) == 0
    assert sizes[0] == sizes[1]
