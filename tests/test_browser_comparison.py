"""The page of a comparison in a real browser. Run: pytest -m browser tests/test_browser_comparison.py (Chromium)."""

from __future__ import annotations

import pytest
from test_comparison_figure import PROMPT, nudged, parted
from trace_problem import HOSTILE, make_trace, small_trace

from workbench.display import show
from workbench.display.palette import contrast
from workbench.instrument.comparison import Comparison

pytest_plugins = ("browser_page",)
pytestmark = pytest.mark.browser
CONTRASTS = """() => {
  const brush = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const paint = (colour) => { brush.fillStyle = colour; brush.fillRect(0, 0, 1, 1); };
  const hex = () => {
    const channels = [...brush.getImageData(0, 0, 1, 1).data].slice(0, 3);
    return '#' + channels.map((channel) => channel.toString(16).padStart(2, '0')).join('');
  };
  const texts = '.lw-cmp-token, .lw-cmp-parts, .lw-cmp-marks, .lw-cmp th, .lw-cmp td, .lw-cmp summary, .lw-fact';
  return [...document.querySelectorAll(texts)].map((node) => {
    const chain = [];
    for (let at = node; at; at = at.parentElement) chain.unshift(getComputedStyle(at).backgroundColor);
    chain.forEach(paint);
    const back = hex();
    paint(getComputedStyle(node).color);
    return [back, hex()];
  });
}"""


@pytest.mark.parametrize("scheme, width", [("light", 1280), ("dark", 400)])
def test_the_page_is_read_in_both_themes_without_a_script(open_page, tmp_path, scheme, width):
    exact = make_trace(2, None)
    traces = {"exact": exact, "k = 4": make_trace(2, 4), "k = 16": parted(make_trace(2, 16), PROMPT + 20)}
    path = show(Comparison.of(traces, nudged(exact, 1e-6))).save(tmp_path / "compared.html")
    page = open_page(path, width=width, scheme=scheme, scripts=False)
    assert page.locator("img").get_attribute("alt").startswith("One prompt, several settings")
    assert page.locator(".lw-cmp-parts").filter(has_text="≠ token").count() == 1
    page.locator(".lw-cmp summary").focus()
    page.keyboard.press("Enter")
    assert page.get_by_role("region", name="Token by token").is_visible()


@pytest.mark.parametrize("scheme, width", [("light", 400), ("dark", 1280)])
def test_contrast_width_and_hostile_text(open_page, tmp_path, scheme, width):
    trace = small_trace(HOSTILE)
    other = parted(trace, trace.prompt_tokens)
    found = Comparison.of({"<script>alert(1)</script>": trace, "b": other}, trace, {"c": "<b>no</b>"})
    page = open_page(
        show(found).save(tmp_path / "hostile.html"), width=width, scheme=scheme, ready=".lw-cmp-token"
    )
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    pairs = page.evaluate(CONTRASTS)
    assert len(pairs) > 40 and min(contrast(*pair) for pair in pairs) >= 4.5
    text = page.locator(".lw-cmp").inner_text()
    assert "<script>alert(1)</script>" in text and "failed: <b>no</b>" in text
