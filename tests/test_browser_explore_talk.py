"""explore as Jupyter's front end treats it: rendered before it lies in a page, its updates kept back, shown twice.

Run: pytest -m browser tests/test_browser_explore_talk.py
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from browser_page import settle
from explore_page import VIEW, place, readings, until, visible
from test_explore_talk import with_head
from trace_problem import make_trace, small_trace

from workbench import explore
from workbench.instrument.run import open_run
from workbench.instrument.run_writer import RunWriter
from workbench.instrument.trace import Trace

pytestmark = pytest.mark.browser
pytest_plugins = ("browser_page",)
LONG_MS = 30_000
EXACT = "document.querySelector('.lw-reading').innerText.includes('Values exact')"
SHOWS = "Math.abs({view}.geometry.first - {first}) < 0.1 && Math.abs({view}.geometry.last - {last}) < 0.1"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace(6)


def shows(first: float, last: float, view: str = VIEW) -> str:
    return f"{view}.geometry && " + SHOWS.format(view=view, first=first, last=last)


def heard(page, wire, is_it) -> None:
    """Wait until the page has said something."""
    for _ in range(LONG_MS // 50):
        if any(map(is_it, wire.heard)):
            return
        page.wait_for_timeout(50)
    raise AssertionError(wire.heard)


def test_a_view_rendered_where_nothing_is_laid_out_draws_once_it_is(open_widget, trace: Trace) -> None:
    view = explore(trace, visible=(100, 110))
    page, _ = open_widget(view, width=500, is_attached_late=True)
    page.wait_for_timeout(500)
    assert page.evaluate("document.querySelector('.lw-error')") is None and view.visible == (100, 110)
    view.visible = (20, 60)
    page.wait_for_timeout(200)
    page.evaluate("lwAttach()")
    until(page, shows(20, 60), LONG_MS)
    until(page, "document.querySelectorAll('.lw-text [data-token]').length === 40", LONG_MS)
    assert page.locator(".lw-error").count() == 0 and view.visible == pytest.approx((20, 60), abs=0.1)


def test_a_second_view_of_the_same_widget_leaves_the_first_where_it_is(open_widget, trace: Trace) -> None:
    view = explore(trace)
    page, _ = open_widget(view)
    view.visible = (40, 90)
    until(page, shows(40, 90), LONG_MS)
    # so narrow that it cannot show as much at once: neither may pull at the other for ever
    page.evaluate("lwRenderAgain('420px')")
    other = "document.querySelectorAll('.lw-explore')[1].lwView"
    until(page, shows(40, 90, other), LONG_MS)
    page.wait_for_timeout(500)
    assert visible(page) == pytest.approx([40, 90], abs=0.1) and view.visible == pytest.approx((40, 90), abs=0.1)
    view.visible = (100, 103)
    until(page, f"{VIEW}.geometry.first > 95 && {other}.geometry.first > 95", LONG_MS)
    page.wait_for_timeout(500)
    # cells have a greatest width: each shows more, and neither tells it to Python and to the other
    assert view.visible == (100, 103)
    view.visible = ()
    for one in (VIEW, other):
        until(page, shows(0, 135, one), LONG_MS)


def test_a_refused_choice_is_undone_on_the_page_and_values_stay_exact(open_widget) -> None:
    trace = with_head()
    view = explore(trace, layers=(3, 5))
    page, wire = open_widget(view)
    wire.is_busy = True
    page.locator(".lw-choice label", has_text="lm_head").click()
    # nothing that is shown may be called what it is not, however long Python takes
    until(page, f"{VIEW}.filter.where.includes('none is every lm_head, layers 3–5')", LONG_MS)
    wire.go_on()
    page.wait_for_selector(".lw-silent:has-text('no site of this trace is lm_head in layers 3 to 5')", timeout=LONG_MS)
    until(page, f"{VIEW}.filter.where === 'at layers 3–5'", LONG_MS)
    assert page.locator("fieldset:has(legend:text-is('Sites')) input:checked + span").inner_text() == "all"
    page.mouse.move(*place(page, 33, site=7))
    until(page, EXACT, LONG_MS)
    np.testing.assert_allclose([float(one) for one in readings(page, "here")], trace.values[33, 22], atol=0.6e-4)
    page.locator(".lw-choice label", has_text="B german").click()
    until(page, "document.querySelector('.lw-silent').textContent === ''", LONG_MS)


def test_an_exact_value_stands_beside_the_adapter_that_it_is_of(open_widget, trace: Trace) -> None:
    """A question goes out at once; the change of a setting waits until the kernel has taken the one before."""
    view = explore(trace)
    page, wire = open_widget(view, is_throttled=True)
    page.wait_for_timeout(300)
    wire.is_busy, wire.heard = True, []
    page.locator(".lw-explore-map").focus()
    page.keyboard.press("+")
    heard(page, wire, lambda message: "visible" in message.get("state", {}))
    page.get_by_role("checkbox", name="B german").uncheck()
    heard(page, wire, lambda message: message.get("content", {}).get("turn") == 1)
    # the change of the adapters is still with the page
    assert not any("shown_adapters" in message.get("state", {}) for message in wire.heard)
    wire.go_on()
    until(page, EXACT, LONG_MS)
    shown = [float(one) for one in readings(page, "mean")]
    np.testing.assert_allclose(shown, trace.values[0].mean(0)[[0, 2, 3]], atol=0.6e-4)
    for _ in range(LONG_MS // 50):
        if view.shown_adapters == ("python", "spanish", "scripture"):
            return
        page.wait_for_timeout(50)
    raise AssertionError(view.shown_adapters)


def test_a_question_that_was_never_answered_does_not_stop_the_next(open_widget, trace: Trace) -> None:
    page, wire = open_widget(explore(trace))
    page.wait_for_timeout(300)
    wire.is_alive = False
    page.mouse.move(*place(page, 30, site=3))
    page.wait_for_selector(".lw-silent:has-text('The kernel does not answer')", timeout=LONG_MS)
    wire.is_alive = True
    page.mouse.move(*place(page, 90, site=3))
    until(page, EXACT, LONG_MS)
    assert page.locator(".lw-silent").inner_text() == ""


def test_a_request_that_cannot_be_shown_leaves_the_picker_on_what_is(open_widget, tmp_path) -> None:
    none = {"values": np.zeros((4, 0, 0), np.float32), "adapters": (), "sites": (), "source": np.full(4, -1)}
    with RunWriter(tmp_path / "run", meta={}) as writer:
        for name, one in {"req-1": make_trace(2), "req-2": replace(small_trace(), **none)}.items():
            writer.request({"request_id": name, "mixture": "demo", "prompt": "hello"})
            writer.trace(replace(one, metadata={"request_id": name}))
    page, _ = open_widget(explore(open_run(tmp_path / "run")))
    for _ in range(2):
        page.get_by_label("Request").select_option("req-2 · demo · hello")
        page.wait_for_function("document.querySelector('.lw-choice select').value.startsWith('req-1')", timeout=LONG_MS)
        page.wait_for_selector(".lw-silent:has-text('no scalings in this trace')", timeout=LONG_MS)


def test_shift_and_an_arrow_go_on_from_what_the_mouse_selected(open_widget, trace: Trace) -> None:
    view = explore(trace)
    page, _ = open_widget(view)
    page.locator(".lw-explore-map").focus()
    settle(page)
    page.mouse.move(*place(page, 30))
    page.mouse.down()
    page.mouse.move(*place(page, 44), steps=5)
    page.mouse.up()
    page.keyboard.press("Shift+ArrowRight")
    until(page, f"{VIEW}.selection.join() === '30,46'", LONG_MS)
    page.get_by_role("button", name="Clear").click()
    page.locator(".lw-explore-map").focus()
    page.keyboard.press("Shift+ArrowRight")
    until(page, f"{VIEW}.selection.join() === '45,47'", LONG_MS)
    page.keyboard.down("Shift")
    page.mouse.click(*place(page, 50))
    page.keyboard.up("Shift")
    page.keyboard.press("Shift+ArrowRight")
    until(page, f"{VIEW}.selection.join() === '46,52'", LONG_MS)


def test_keys_that_scroll_read_the_cursor_though_the_mouse_rests_on_the_map(open_widget, trace: Trace) -> None:
    page, _ = open_widget(explore(trace, visible=(0, 30)))
    until(page, shows(0, 30), LONG_MS)
    page.locator(".lw-explore-map").focus()
    page.mouse.move(*place(page, 10, site=3))
    page.keyboard.press("PageDown")
    page.keyboard.press("PageDown")
    until(page, f"{VIEW}.geometry.first > 10", LONG_MS)
    settle(page)
    assert page.evaluate(f"[{VIEW}.current().token, {VIEW}.cursor.token, {VIEW}.tip.hidden]") == [54, 54, True]
