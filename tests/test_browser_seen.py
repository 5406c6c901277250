"""What a close look at the pages found: colours the system forces, errors on any page, clipped and split cells.

Run: pytest -m browser tests/test_browser_seen.py (needs Chromium)
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from live_page import long_engine, long_shelf  # noqa: F401  fixtures
from test_run import STEP, named
from trace_problem import small_trace

from workbench import Comparison, RunWriter, console, explore, open_run, show
from workbench.display.palette import contrast

pytest_plugins = ("browser_page",)
pytestmark = pytest.mark.browser
BACKGROUNDS = """nodes => nodes.map((node) => {
  const style = getComputedStyle(node);
  return style.backgroundImage !== 'none' || style.backgroundColor !== 'rgba(0, 0, 0, 0)';
})"""
COLOURS = """node => {
  const brush = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const hex = (colour) => {
    brush.fillStyle = colour;
    brush.fillRect(0, 0, 1, 1);
    const channels = [...brush.getImageData(0, 0, 1, 1).data].slice(0, 3);
    return '#' + channels.map((channel) => channel.toString(16).padStart(2, '0')).join('');
  };
  const style = getComputedStyle(node);
  return [hex(style.backgroundColor), hex(style.color)];
}"""


def test_with_forced_colours_the_legend_is_there_and_what_is_chosen_is_marked(open_page, tmp_path) -> None:
    page = open_page(explore(small_trace()).save(tmp_path / "view.html"))
    page.emulate_media(forced_colors="active")
    legend = page.locator(".lw-scale-bar, .lw-nan, .lw-solid, .lw-striped")
    assert legend.evaluate_all(BACKGROUNDS) == [True] * 4
    outlines = page.locator(".lw-choice label > span")
    shown = outlines.evaluate_all("nodes => nodes.map((node) => getComputedStyle(node).outlineStyle)")
    chosen = outlines.evaluate_all("nodes => nodes.map((node) => node.previousElementSibling.checked)")
    assert [style != "none" for style in shown] == chosen and sum(chosen) == 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_error_can_be_read_on_whatever_page_it_is(open_page, pages, tmp_path, scheme: str) -> None:
    path = show(small_trace()).save(tmp_path / "broken.html")
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"view":"scalings"', '"view":"scaling"'), encoding="utf-8")
    page = open_page(path, scheme=scheme, ready=".lw-error")
    error = page.locator(".lw-error")
    assert "there is no view scaling" in error.inner_text()
    for behind in ("", "white", "black"):
        page.evaluate("colour => { document.body.style.cssText = `background: ${colour}; color: ${colour}`; }", behind)
        back, ink = error.evaluate(COLOURS)
        assert contrast(back, ink) > 7, (behind, back, ink)


def test_short_cells_of_a_runs_table_stay_whole_and_long_ones_do_not_widen_the_page(open_page, tmp_path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        writer.step(STEP)
        for name in ("req-1", "x" * 300):
            writer.trace(named(name, small_trace()))
            said = {"mixture": "demo", "finish_reason": "length", "text": "so " * 50}
            times = {"ttft_s": 0.58, "total_s": 12.2, "tok_s": 3.4, "prompt_tokens": 3, "completion_tokens": 40}
            writer.request({"request_id": name, **said, **times})
    page = open_page(show(open_run(tmp_path / "run")).save(tmp_path / "run.html"), width=800, ready=".lw-plain-scroll")
    lines = page.locator(".lw-plain-scroll tbody tr").first.locator("td:not(:last-child) bdi")
    assert set(lines.evaluate_all("nodes => nodes.map((node) => node.getClientRects().length)")) == {1}
    assert page.evaluate("document.documentElement.scrollWidth") == 800


def test_a_full_share_does_not_touch_its_neighbour(open_page, tmp_path) -> None:
    trace = small_trace()
    alone = replace(trace, values=np.ones((*trace.values.shape[:2], 1), np.float32), adapters=("only",))
    page = open_page(explore(alone).save(tmp_path / "view.html"))
    cells = page.locator(".lw-adapters tbody tr td:not(.lw-bar-cell)")
    spare = "nodes => nodes.map((node) => node.scrollWidth <= node.clientWidth)"
    assert cells.all_inner_texts() == ["100 %"] * 3 and cells.evaluate_all(spare) == [True] * 3


def test_the_headings_of_a_comparison_begin_with_its_title(open_page, tmp_path) -> None:
    shown = show(Comparison.of({"a": small_trace(), "b": small_trace()}), title="<b>Two")
    page = open_page(shown.save(tmp_path / "compared.html"), ready=".lw-cmp")
    levels = "nodes => nodes.map((node) => [node.ariaLevel, node.textContent])"
    headings = page.locator("[role=heading]").evaluate_all(levels)
    assert headings[0] == ["2", "<b>Two"] and {level for level, _ in headings[1:]} == {"3"}


def test_a_control_keeps_the_focus_when_the_controls_are_made_anew(open_widget, tmp_path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        for name in ("req-1", "req-2"):
            writer.trace(named(name, small_trace()))
    view = explore(open_run(tmp_path / "run"))
    page, _ = open_widget(view)
    focused = "() => [document.activeElement.tagName, document.activeElement.closest('label')?.firstChild.textContent]"
    page.get_by_label("Request").focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_function("document.querySelector('.lw-explore').lwView.model.get('request') === 'req-2'")
    page.wait_for_function("document.querySelector('.lw-facts').textContent.includes('req-2')")
    assert page.evaluate(focused) == ["SELECT", "Request "] and view.request == "req-2"
    view.projection = "v_proj"
    page.wait_for_function("document.querySelector('.lw-explore').lwView.projection === 'v_proj'")
    assert page.evaluate(focused) == ["SELECT", "Request "]


def test_a_console_at_rest_says_what_will_be_where_and_its_strip_ends_in_its_box(open_widget, long_engine) -> None:  # noqa: F811
    widget = console(long_engine, "Hello", max_tokens=8, ignore_eos=True, title="\u202eevil")
    page, _ = open_widget(widget, ready="[data-lw-text]")
    assert page.locator(".lw-title").inner_text() == "‹U+202E›evil"
    empty = "node => getComputedStyle(node, '::before').content"
    assert "appears here" in page.locator("[data-lw-text]").evaluate(empty)
    right = "node => node.getBoundingClientRect().right"
    assert page.locator("[data-lw-strip] canvas").evaluate(right) <= page.locator("[data-lw-strip]").evaluate(right) - 4
    # a fader is a slider, which says its value itself
    assert page.locator("output").evaluate_all("nodes => nodes.map((node) => node.ariaLive)") == ["off", "off"]
    page.emulate_media(forced_colors="active")
    colour = "node => getComputedStyle(node).color"
    stop, run = (page.locator(f"[data-lw-{name}]").evaluate(colour) for name in ("stop", "run"))
    assert stop != run
    widget.run()
    widget.wait(30)
    page.wait_for_selector("[data-lw-state=ended]")
    assert page.locator("[data-lw-text]").evaluate(empty) in ("none", "normal")
    widget.close()
    long_engine.close()
