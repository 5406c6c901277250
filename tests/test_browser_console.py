"""Console and settings side by side in a real browser. Run: pytest -m browser tests/test_browser_console.py"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from browser_page import settle
from byte_engine import SPEC, VOCAB, engine_on
from models import byte_tokenizer, save_base, tiny_model
from trace_problem import HOSTILE

from workbench import Engine, compare_live, console
from workbench.display.labels import visible
from workbench.display.palette import DARK, LIGHT, contrast
from workbench.live.voices import Voice

pytest_plugins = ("browser_page",)
pytestmark = pytest.mark.browser

MANY = {"max_tokens": 300, "ignore_eos": True}
FEW = {"max_tokens": 24, "ignore_eos": True}
TOKENS = "document.querySelectorAll('[data-token]').length"
CONTRASTS = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const paint = (colour) => { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); };
  const two = (channel) => channel.toString(16).padStart(2, '0');
  const hex = () => '#' + [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map(two).join('');
  const texts = '.lw-token, .lw-fact, .lw-field > span, .lw-field input, .lw-said, .lw-why, .lw-part, .lw-meters dt,'
    + '.lw-meters dd, .lw-fader-value, .lw-level-number, .lw-button, .lw-alert, .lw-verdict, .lw-at, .lw-number';
  return [...document.querySelectorAll(texts)].filter((node) => node.offsetParent).map((node) => {
    const chain = [];
    for (let at = node; at; at = at.parentElement) chain.unshift(getComputedStyle(at).backgroundColor);
    chain.forEach(paint);
    const back = hex();
    paint(getComputedStyle(node).color);
    return [back, hex(), node.className];
  });
}"""
NAMELESS = """() => {
  const named = (node) => [...(node.labels ?? [])].some((label) => label.textContent.trim())
    || node.getAttribute('aria-label') || (node.tagName === 'BUTTON' && node.textContent.trim());
  const controls = document.querySelectorAll('.lw :is(input, select, textarea, button, [tabindex])');
  return [...controls].filter((node) => !named(node)).map((node) => node.outerHTML);
}"""
FOCUSED = """() => {
  const node = document.activeElement, style = getComputedStyle(node);
  return [Object.keys(node.dataset).find((key) => key.startsWith('lw')), style.outlineStyle, style.outlineWidth];
}"""
MOVING = """() => [getComputedStyle(document.querySelector('.lw-caret')).animationName,
  getComputedStyle(document.querySelector('.lw-level-fill')).transitionDuration]"""
SPANS = """nodes => nodes.map((node) => ({ kind: [...node.classList].at(-1), key: node.dataset.key ?? '',
  colour: node.style.getPropertyValue('--lw-c') }))"""
EDGES = "nodes => nodes.map((node) => node.getBoundingClientRect()).map(({ left, right, top }) => [left, right, top])"
MARKS = "nodes => nodes.map((node) => [Number(node.dataset.token), node.dataset.lwMark])"
COUNTS = """nodes => nodes.map((node) => node.querySelectorAll('[data-token]').length)"""


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shelf")
    model = tiny_model("llama", vocab_size=VOCAB, max_position_embeddings=2048)
    byte_tokenizer(save_base(model, folder / "tiny"))
    SPEC.write(folder / "mix", model)
    return folder


@pytest.fixture
def engine(shelf) -> Engine:
    made = engine_on(shelf)
    step = made._step
    made._step = lambda: (time.sleep(0.01), step())[1]
    yield made
    made.close()


def state(page, wanted: str) -> None:
    page.wait_for_selector(f'[data-lw-state="{wanted}"]', timeout=20_000)
    settle(page)


def meter(page, name: str) -> str:
    return page.locator(f'[data-lw-meter="{name}"]').inner_text()


def keep(page, name: str) -> None:
    """Keep a picture of the page where the checks keep theirs."""
    if folder := os.environ.get("WORKBENCH_ARTEFACTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def until(page, holds) -> None:
    for _ in range(400):
        if holds():
            return
        page.wait_for_timeout(20)
    raise AssertionError("it did not come")


def assert_same_texts(drawn, tokens) -> None:
    """Line breaks stand beside the tokens; only at the end is it known that a character stays unfinished."""
    assert len(drawn) == len(tokens)
    assert [text.rstrip("\n") for text in drawn[:-1]] == [visible(token).rstrip("\n") for token in tokens[:-1]]


def test_what_is_typed_runs_and_streams_in_the_colours_of_its_adapters(open_widget, engine) -> None:
    shown = console(engine, **MANY)
    page, wire = open_widget(shown)
    page.locator("[data-lw-prompt]").fill("hello there")
    page.locator('[data-lw-box="max_tokens"]').fill("60")
    page.locator('[data-lw-box="tgt_non_granular_index"]').fill("20")
    page.locator("[data-lw-prompt]").focus()
    page.keyboard.press("Control+Enter")
    state(page, "running")
    seen = set()
    while page.locator('[data-lw-state="ended"]').count() == 0:
        seen.add(page.evaluate(TOKENS))
    state(page, "ended")
    trace, done = shown.trace, shown.completion
    assert len(seen) > 4, "the text came all at once"
    texts = page.locator("[data-token]").all_text_contents()
    assert_same_texts(texts, trace.tokens)
    spans, leading = page.locator("[data-token]").evaluate_all(SPANS), trace.leading()
    kinds = ["lw-computed" if own else "lw-reused" for own in trace.computed[:-1]]
    assert [span["kind"] for span in spans] == [*kinds, "lw-none"] and len(set(kinds)) == 2
    assert [span["colour"] for span in spans[:-1]] == [("#0072b2", "#e69f00")[leader] for leader in leading[:-1]]
    places = (0, trace.prompt_tokens)
    changes = [i for i in range(len(leading) - 1) if i in places or leading[i] != leading[i - 1]]
    assert [i for i, span in enumerate(spans) if span["key"]] == changes and len(changes) > 2
    assert meter(page, "tokens") == "60 / 60" and meter(page, "cached") == "0 of 11"
    assert meter(page, "scalings") == f"{done.scalings_computed} run, {done.scalings_reused} reused"
    assert meter(page, "drafts") == f"{done.drafts_accepted} of {done.drafts_accepted + done.drafts_rejected}"
    assert float(meter(page, "tok_s")) > 0 and float(meter(page, "forwards")) >= 1
    said = page.locator("[data-lw-status]").inner_text()
    assert said == f"Finished: 60 tokens, reached max tokens (length), seed {done.seed}."
    # after the opening state: small increments
    assert max(wire.sent[1:]) < 20_000


def test_faders_send_what_the_keyboard_and_the_mouse_do_and_act(open_widget, engine) -> None:
    shown = console(engine, "hello", **MANY)
    page, _ = open_widget(shown)
    page.locator("[data-lw-run]").click()
    until(page, lambda: page.evaluate(TOKENS) > 20)
    fader = page.locator('[data-lw-fader="1"]')
    fader.focus()
    for _ in range(15):
        page.keyboard.press("ArrowRight")
    until(page, lambda: shown.faders["values"] == [None, 1.5])
    assert page.locator(".lw-channel output").nth(1).inner_text() == fader.get_attribute("aria-valuetext") == "+1.5"
    box = page.locator('[data-lw-fader="0"]').bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + 2, box["y"] + box["height"] / 2, steps=8)
    page.mouse.up()
    until(page, lambda: shown.faders["values"] == [-4.0, 1.5])
    page.locator('[data-lw-mode="force"]').check(force=True)
    until(page, lambda: shown.faders["mode"] == "force" and shown.faders["values"] == [None, None])
    page.locator('[data-lw-fader="0"][max="1"]').focus()
    page.keyboard.press("End")
    until(page, lambda: shown.faders["values"] == [1.0, None])
    until(page, lambda: page.locator('[data-lw-level="0"]').inner_text() == "1.00")
    page.locator('[data-lw-rest="0"]').click()
    until(page, lambda: shown.faders["values"] == [None, None])
    until(page, page.locator("[data-lw-rest-all]").is_disabled)
    page.locator("[data-lw-stop]").click()
    state(page, "ended")
    assert "edited: the faders changed" in page.locator("[data-lw-status]").inner_text()
    moved = shown.history
    assert set(moved["mode"]) == {"bias", "force"} and moved.token.is_monotonic_increasing
    assert np.isnan(moved.value.iloc[-1]) and shown.completion.edits == ("faders",)


def test_stop_stops_and_a_second_run_starts_anew(open_widget, engine) -> None:
    shown = console(engine, "hello", **MANY)
    page, _ = open_widget(shown)
    stop, run = page.locator("[data-lw-stop]"), page.locator("[data-lw-run]")
    assert stop.get_attribute("aria-disabled") == "true"
    run.click()
    until(page, lambda: page.evaluate(TOKENS) > 15)
    assert run.get_attribute("aria-disabled") == "true" and page.locator("[data-lw-voice]").is_disabled()
    run.click(force=True)
    assert "already" in page.locator("[data-lw-error]").inner_text()
    stop.click()
    state(page, "ended")
    assert shown.completion.finish_reason == "cancelled"
    assert "stopped (cancelled)" in page.locator("[data-lw-status]").inner_text()
    page.locator('[data-lw-box="max_tokens"]').fill("3")
    page.locator('[data-lw-box="max_tokens"]').press("Enter")
    until(page, lambda: shown._number == 2 and shown._playing.done.is_set())
    until(page, lambda: page.evaluate(TOKENS) == 8)


def test_without_a_mixture_faders_and_reuse_are_off_with_a_reason(open_widget, engine) -> None:
    shown = console(engine, "hello", tgt_non_granular_index=3, **FEW)
    page, _ = open_widget(shown)
    assert page.locator("[data-lw-why]").is_hidden()
    page.locator("[data-lw-voice]").select_option("adapter:a")
    page.locator('[data-lw-fader="0"]:disabled').wait_for()
    why = page.locator("[data-lw-why]").inner_text()
    assert why == "Faders move the adapters of a mixture; adapter a has none to move."
    assert page.locator('[data-lw-box="tgt_non_granular_index"]').is_disabled()
    page.locator("[data-lw-run]").click()
    state(page, "ended")
    assert shown.completion.error is None and meter(page, "scalings") == "none needed"
    page.locator("[data-lw-voice]").select_option("base")
    page.locator("[data-lw-run]").click()
    until(page, lambda: shown._number == 2 and shown._playing.done.is_set())
    assert page.locator("[data-lw-fader]").count() == 0


def test_mistakes_are_sentences_where_they_were_made(open_widget, engine) -> None:
    shown = console(engine, "hello", **FEW)
    page, _ = open_widget(shown)
    error = page.locator("[data-lw-error]")
    assert error.is_hidden() and error.get_attribute("role") == "alert"
    for name, text, said in (
        ("temperature", "hot", "temperature: 'hot' is not a number, such as 0.7"),
        ("temperature", "", None),
        ("max_tokens", "0", "max_tokens must be a whole number of at least 1, not 0"),
        ("max_tokens", "4", None),
    ):
        page.locator(f'[data-lw-box="{name}"]').fill(text)
        if said:
            page.locator("[data-lw-run]").click()
            until(page, lambda said=said: error.inner_text() == said)
    engine.unload("a")
    page.locator("[data-lw-voice]").focus()
    until(page, lambda: page.locator("[data-lw-voice] option").count() == 2)
    page.locator("[data-lw-run]").click()
    state(page, "ended")
    assert error.is_hidden()
    engine.close()
    page.locator("[data-lw-run]").click()
    until(page, lambda: error.inner_text() == "this engine is closed; make a new one")


def test_a_kernel_that_does_not_answer_is_named_and_forgotten_when_it_does(open_widget, engine) -> None:
    page, wire = open_widget(console(engine, "hello", **FEW))
    wire.is_alive = False
    page.locator("[data-lw-run]").click()
    error = page.locator("[data-lw-error]")
    error.wait_for(state="visible", timeout=6000)
    assert "The kernel does not answer" in error.inner_text() and "run the cell that made this" in error.inner_text()
    wire.is_alive = True
    page.locator("[data-lw-run]").click()
    state(page, "ended")
    assert error.is_hidden()


def test_whatever_a_token_holds_is_text(open_widget, engine) -> None:
    shown = console(engine, "hello")
    page, _ = open_widget(shown)
    texts = [visible(token) for token in HOSTILE]
    voice = {"id": "mixture:<b>", "kind": "mixture", "label": "mixture <img src=x onerror=alert(1)>",
             "adapters": ["<i>one</i>", "‹U+202E›two"], "keys": ["A", "B"], "colours": ["#0072b2", "#e69f00"]}
    shown.tell({"type": "start", "run": 1, "voice": voice, "hidden": 3, "prompt_tokens": 4, "max_tokens": 10})
    means = np.tile(np.array([[0.7, 1.4], [np.nan, np.nan], [-0.5, 0.2]], "<f4"), (4, 1))[: len(texts)]
    counts = "prompt_tokens", "generated", "forwards", "computed", "reused", "accepted", "rejected", "cached"
    stats = {**dict.fromkeys(counts, 6), "tok_s": None, "ttft_s": None}
    more = {"type": "more", "run": 1, "first": 0, "texts": texts, "first_row": 0, "num_rows": len(means)}
    shown.tell({**more, "stats": stats}, [means.tobytes(), np.arange(len(means), dtype="<i4").tobytes()])
    until(page, lambda: page.evaluate(TOKENS) == len(texts))
    assert_same_texts(page.locator("[data-token]").all_text_contents(), HOSTILE)
    assert page.locator(".lw-console :is(script, img, b b, i)").count() == 0
    assert "3 earlier tokens of the prompt" in page.locator("[data-lw-text]").inner_text()
    strip = page.locator("[data-lw-strip]")
    strip.focus()
    page.keyboard.press("Home")
    settle(page)
    said = strip.get_attribute("aria-valuetext")
    assert said.startswith("prompt token 3 “<script>alert(1)</script>”: <i>one</i> 0.70")
    page.keyboard.press("ArrowRight")
    settle(page)
    assert ": <i>one</i> –" in strip.get_attribute("aria-valuetext")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_it_fits_its_theme_and_width_and_every_text_has_contrast(open_widget, engine, width: int, scheme: str) -> None:
    shown = console(engine, "hello <b>there</b>", temperature=0.7, **FEW)
    page, _ = open_widget(shown, width, scheme)
    page.locator("[data-lw-run]").click()
    state(page, "ended")
    shown.say("a sentence that is an error", is_error=True)
    page.locator("[data-lw-error]").wait_for(state="visible")
    keep(page, f"console-{width}-{scheme}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = page.locator(".lw :is(textarea, input, select, button, canvas, .lw-desk, .lw-text)").evaluate_all(EDGES)
    assert all(left >= 0 and right <= width for left, right, _ in boxes)
    pairs = page.evaluate(CONTRASTS)
    assert len(pairs) > 60 and min(contrast(back, ink) for back, ink, _ in pairs) >= 4.5, sorted(
        (contrast(back, ink), name) for back, ink, name in pairs)[:5]
    theme = {"light": LIGHT, "dark": DARK}[scheme]
    rgb = tuple(int(theme.page[at : at + 2], 16) for at in (1, 3, 5))
    assert page.locator(".lw").evaluate("node => getComputedStyle(node).backgroundColor") == f"rgb{rgb}"


def test_the_keyboard_alone_reaches_everything_in_order_and_everything_has_a_name(open_widget, engine) -> None:
    page, _ = open_widget(console(engine, "hello", **FEW))
    assert page.evaluate(NAMELESS) == []
    order = []
    for _ in range(18):
        page.keyboard.press("Tab")
        name, style, width = page.evaluate(FOCUSED)
        assert style == "solid" and width == "3px" or name == "lwMode", name
        order.append(name)
    assert order == ["lwPrompt", "lwVoice", *["lwBox"] * 7, "lwRun", "lwStop", "lwChat", "lwText", "lwStrip", "lwMode",
                     "lwRestAll", "lwRest", "lwFader"]


def test_nothing_moves_for_who_wants_no_motion(open_widget, engine) -> None:
    shown = console(engine, "hello", **MANY)
    page, _ = open_widget(shown)
    page.locator("[data-lw-run]").click()
    page.wait_for_selector(".lw-caret")
    assert page.evaluate(MOVING) == ["lw-blink", "0.12s"]
    page.emulate_media(reduced_motion="reduce")
    assert page.evaluate(MOVING) == ["none", "0s"]
    shown.stop()


def test_a_view_that_opens_in_the_middle_shows_what_was_and_goes_on(open_widget, engine) -> None:
    shown = console(engine, "hello", **MANY)
    shown.run()
    time.sleep(0.5)
    page, _ = open_widget(shown)
    state(page, "running")
    before = page.evaluate(TOKENS)
    until(page, lambda: page.evaluate(TOKENS) > before + 5)
    shown.stop()
    state(page, "ended")
    assert_same_texts(page.locator("[data-token]").all_text_contents(), shown.trace.tokens)


@pytest.mark.parametrize("count", [1, 30, 200])
def test_any_number_of_adapters_fits(open_widget, engine, count: int) -> None:
    shown = console(engine, "hello")
    page, _ = open_widget(shown, 400)
    names = tuple(f"adapter {i}" for i in range(count))
    shown.voices = [Voice("mixture:wide", "mixture", "wide", names, {}, None).to_json()]
    shown._desk.choose(names)
    shown._show_faders()
    shown.voice = "mixture:wide"
    shown._desk.choose(names)
    shown._show_faders()
    start = {"type": "start", "run": 1, "voice": shown.voices[0], "hidden": 0, "prompt_tokens": 1, "max_tokens": 3}
    shown.tell(start)
    means = np.linspace(0, 1, 2 * count, dtype="<f4")
    counts = "prompt_tokens", "generated", "forwards", "computed", "reused", "accepted", "rejected", "cached"
    stats = {**dict.fromkeys(counts, 1), "tok_s": None, "ttft_s": None}
    more = {"type": "more", "run": 1, "first": 0, "texts": ["a", "b"], "first_row": 0, "num_rows": 2, "stats": stats}
    shown.tell(more, [means.tobytes(), np.arange(2, dtype="<i4").tobytes()])
    until(page, lambda: page.locator("[data-lw-fader]").count() == count and page.evaluate(TOKENS) == 2)
    settle(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.locator(".lw-strip canvas").evaluate("node => node.getBoundingClientRect().height") < 700
    page.locator("[data-lw-strip]").focus()
    said = page.locator("[data-lw-strip]").get_attribute("aria-valuetext")
    assert f"adapter {count - 1} 1.00" in said and ("and 192 more" in said) == (count == 200)
    keep(page, f"console-{count}-adapters")


def test_settings_stream_side_by_side_and_the_first_difference_is_marked(open_widget, engine) -> None:
    settings = {"exact": {}, "k = 0": {"tgt_non_granular_index": 0}, "<b>base</b>": {"mixture": None}}
    shown = compare_live(engine, settings, mixture="mix", max_tokens=30, ignore_eos=True)
    page, _ = open_widget(shown)
    page.locator("[data-lw-prompt]").fill("hello")
    page.keyboard.press("Control+Enter")
    state(page, "running")
    columns = page.locator("[data-lw-column]")
    until(page, lambda: min(columns.evaluate_all(COUNTS)) > 8)
    assert max(columns.evaluate_all(COUNTS)) < 35, "one column ran before the others"
    state(page, "ended")
    keep(page, "compare-live")
    comparison = shown.comparison
    for index, label in enumerate(settings):
        column = page.locator(f'[data-lw-column="{index}"]')
        marks = column.locator("[data-lw-mark]").evaluate_all(MARKS)
        at = comparison.divergence(label) if label in comparison.labels else None
        if index and at is not None:
            assert marks == [[at, "≠ 1"]]
        said = column.locator("[data-lw-verdict]").inner_text().lower()
        assert label not in comparison.labels or comparison.says(label).lower() in said
    assert page.locator('[data-lw-column="0"] [data-lw-mark]').count() >= 1
    assert "another batch shape" in page.locator("[data-lw-status]").inner_text()
    assert len({top for _, _, top in columns.evaluate_all(EDGES)}) == 1
    page.set_viewport_size({"width": 400, "height": 900})
    settle(page)
    assert len({top for _, _, top in columns.evaluate_all(EDGES)}) == 3
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    pairs = page.evaluate(CONTRASTS)
    assert min(contrast(back, ink) for back, ink, _ in pairs) >= 4.5
    assert page.evaluate(NAMELESS) == []
