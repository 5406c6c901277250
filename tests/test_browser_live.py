"""Console and settings side by side while the kernel is busy, and for the keyboard.

Run: pytest -m browser tests/test_browser_live.py
"""

from __future__ import annotations

import live_page
import pytest
from live_page import LONG, slowed

from workbench import compare_live, console

pytest_plugins = ("browser_page",)
pytestmark = pytest.mark.browser
LONG_MS = 30_000
long_shelf, long_engine = live_page.long_shelf, live_page.long_engine


def until(page, holds) -> None:
    for _ in range(LONG_MS // 50):
        if holds():
            return
        page.wait_for_timeout(50)
    raise AssertionError("it did not come")


def test_a_silent_kernel_is_said_again_after_run_took_the_sentence_away(open_widget, long_engine) -> None:
    page, wire = open_widget(console(long_engine, "hello"))
    wire.is_alive = False
    error = page.locator("[data-lw-error]:has-text('The kernel does not answer')")
    page.locator("[data-lw-run]").click()
    error.wait_for(timeout=LONG_MS)
    page.locator("[data-lw-run]").click()
    assert page.locator("[data-lw-error]").is_hidden()
    error.wait_for(timeout=LONG_MS)


@pytest.mark.parametrize("kind", ["console", "compare"])
def test_a_view_made_while_the_kernel_is_busy_asks_once_however_much_streams_by(open_widget, long_engine, kind) -> None:
    options = {"mixture": "mix", **LONG}
    slow = slowed(long_engine, 0.02)
    shown = console(slow, "hello", **options)
    if kind == "compare":
        shown = compare_live(slow, {"one": {}, "two": {}}, "hello", null=False, **options)
    shown.run()
    page, wire = open_widget(shown, is_attached_late=True)
    wire.is_busy = True
    page.evaluate("lwAttach()")
    before = len(asked(wire))
    page.evaluate("lwRenderAgain('800px')")
    page.wait_for_timeout(1500)
    # the other asks again only once its patience is over
    assert 1 <= len(asked(wire)) - before <= 2, "every message of the stream asks for all of it"
    wire.go_on()
    until(page, lambda: page.evaluate("document.querySelectorAll('[data-lw-state=\"running\"]').length") == 2)
    texts = "[...document.querySelectorAll('.lw')].map((one) => one.querySelectorAll('[data-token]').length)"
    until(page, lambda: min(page.evaluate(texts)) > 10)
    shown.stop()


def asked(wire) -> list[dict]:
    return [message for message in wire.heard if message.get("content", {}).get("type") == "hello"]


def test_all_to_rest_keeps_the_focus_of_whoever_pressed_it(open_widget, long_engine) -> None:
    shown = console(long_engine, "hello", mixture="mix")
    page, wire = open_widget(shown)
    rest = page.locator("[data-lw-rest-all]")
    assert rest.get_attribute("aria-disabled") == "true"
    rest.focus()
    page.keyboard.press("Enter")
    shown.set_fader("a", 2.0)
    until(page, lambda: rest.get_attribute("aria-disabled") == "false")
    assert not [message for message in wire.heard if message.get("content", {}).get("type") == "clear"]
    page.keyboard.press("Enter")
    until(page, lambda: rest.get_attribute("aria-disabled") == "true" and shown.faders["values"] == [None, None])
    assert rest.evaluate("node => node === document.activeElement")
