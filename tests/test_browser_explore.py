"""explore in a real browser, static and live. Run: pytest -m browser tests/test_browser_explore.py

The live view talks to its widget through `open_widget`'s host. Times are measured in the page and printed (`-s`).
"""

from __future__ import annotations

import base64
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from browser_page import settle
from trace_problem import HOSTILE, make_trace, small_trace, with_outliers

from workbench import Explore, explore
from workbench.display.palette import DARK, LIGHT, contrast
from workbench.instrument.trace import Trace, nan_mean

pytestmark = pytest.mark.browser
pytest_plugins = ("browser_page",)
VIEW = "document.querySelector('.lw-explore').lwView"
GEOMETRY = f"() => {{ const g = {VIEW}.geometry; return {{ ...g, x: undefined }}; }}"
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
# draws at several zooms and places, each time to the end: reading a pixel waits for the canvas
REDRAWS = """([mode, rounds]) => {
  const view = VIEW, { fit } = view.geometry, times = [];
  const probe = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  view.mode = mode;
  const places = [1, 3, 12, 100].flatMap((zoom) => [0.05, 0.4, 0.9].map((part) => [zoom, part]));
  for (let round = 0; round <= rounds; round++) for (const [zoom, part] of places) {
    Object.assign(view, { cell: fit * zoom, first: (part + round * 0.003) * view.data.numTokens });
    const start = performance.now();
    view.drawNow();
    probe.drawImage(view.canvas, 0, 0, 1, 1, 0, 0, 1, 1);
    probe.getImageData(0, 0, 1, 1);
    if (round) times.push(performance.now() - start);
  }
  return times;
}""".replace("VIEW", VIEW)
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="
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


def saved(view: Explore, path: Path) -> Path:
    """Save the page with a dot for the figure: drawing that takes longer than the test, and test_explore.py does."""
    shown = view.show()
    shown.png = base64.b64decode(DOT)
    return shown.save(path)


def place(page, token: float, site: int | None = None, mean: int | None = None) -> tuple[float, float]:
    """Return the middle of a cell in css pixels of the page: a site's, an adapter's mean, or the strip of leads."""
    g = page.evaluate(GEOMETRY)
    box = page.locator(".lw-over").bounding_box()
    x = box["x"] + g["gutter"] + (token + 0.5 - g["first"]) * g["cell"]
    y = g["lead"] + 6
    if mean is not None:
        y = g["means"] + (mean + 0.5) * g["rowA"]
    if site is not None:
        y = g["map"] + (site + 0.5) * g["rowB"]
    return x, box["y"] + y


def visible(page) -> list[float]:
    return page.evaluate(f"() => [{VIEW}.geometry.first, {VIEW}.geometry.last]")


def readings(page, name: str) -> list[str]:
    return page.locator(f".lw-reading [data-{name}]").all_inner_texts()


def until(page, expression: str, timeout: float = 5000) -> None:
    page.wait_for_function(expression, timeout=timeout)


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
    np.testing.assert_allclose([float(one) for one in readings(page, "mean")], trace.token_means()[33], atol=0.0026)
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
    np.testing.assert_allclose(means, nan_mean(trace.values[30:45], (0, 1)), atol=0.0026)
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


def test_python_and_the_page_share_the_settings(open_widget, trace: Trace) -> None:
    view = explore(trace)
    page, _ = open_widget(view)
    page.mouse.move(*place(page, 30))
    page.mouse.down()
    page.mouse.move(*place(page, 44), steps=5)
    page.mouse.up()
    until(page, "document.querySelector('.lw-selection').innerText.includes('site, exact.')")
    assert view.selection == (30, 45) and len(view.selected()) == 15 * 150 * 4
    means = [float(one) for one in page.locator(".lw-selection [data-mean]").all_inner_texts()]
    np.testing.assert_allclose(means, nan_mean(trace.values[30:45], (0, 1)), atol=0.6e-4)
    page.mouse.move(*place(page, 33, site=77))
    until(page, "document.querySelector('.lw-reading').innerText.includes('Values exact')")
    np.testing.assert_allclose([float(one) for one in readings(page, "here")], trace.values[33, 77], atol=0.6e-4)
    page.get_by_role("checkbox", name="A python").uncheck()
    page.locator(".lw-choice label", has_text="C spanish").click()
    settle(page)
    page.wait_for_timeout(50)
    assert view.shown_adapters == ("german", "spanish", "scripture") and view.mode == "spanish"
    view.selection, view.mode, view.visible, view.projection = (3, 5), "who leads", (0, 20), "q_proj"
    until(page, "document.querySelector('.lw-selection').innerText.includes('Selected: 2 tokens, 3 to 4')")
    until(page, f"Math.abs({VIEW}.geometry.last - 20) < 0.1")
    assert page.locator(".lw-choice input:checked + span").all_inner_texts() == ["who leads", "q_proj"]
    view.theme = "dark"
    until(page, "document.querySelector('.lw').dataset.theme === 'dark'")
    back = page.locator(".lw").evaluate("node => getComputedStyle(node).backgroundColor")
    assert back == f"rgb({', '.join(str(int(DARK.page[at : at + 2], 16)) for at in (1, 3, 5))})"
    page.evaluate("lwLeave()")
    view.selection = ()


def large(num_tokens: int, num_sites: int, num_adapters: int) -> Trace:
    rng = np.random.default_rng(0)
    positions = np.arange(num_tokens)
    drift = np.sin(positions[:, None, None] / 90 + np.arange(num_adapters) * 2.1)
    values = np.exp(2 * drift + rng.normal(0, 0.5, (num_tokens, num_sites, num_adapters)).astype(np.float32))
    values /= values.sum(2, keepdims=True)
    values[-1] = np.nan
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return Trace(
        values=values.astype(np.float32),
        adapters=tuple(f"adapter {i}" for i in range(num_adapters)),
        sites=tuple(f"model.layers.{i // 7}.{kinds[i % 7]}" for i in range(num_sites)),
        token_ids=positions,
        tokens=tuple(f" word{i % 997}" for i in positions),
        positions=positions,
        generated=positions >= num_tokens // 3,
        source=np.where(positions < num_tokens - 1, positions, -1),
        draft=np.full(num_tokens, -1),
        time_s=positions * 0.01,
    )


@pytest.fixture(scope="module")
def huge() -> Trace:
    return large(8000, 224, 9)


def test_sixteen_million_cells_are_redrawn_in_fifty_milliseconds(open_widget, huge: Trace) -> None:
    """Live, where finer windows come as they are asked for; the machine may be shared, so the best of five counts."""
    page, _ = open_widget(explore(huge))
    for mode in ("who leads", "every adapter", "adapter 3"):
        medians = []
        while len(medians) < 5 and (not medians or min(medians) > 50):
            medians.append(statistics.median(page.evaluate(REDRAWS, [mode, 2])))
        print(f"redraw of 8,000 × 224 × 9, {mode}: median {min(medians):.1f} ms")
        assert min(medians) <= 50


def test_zooming_in_brings_every_token_and_site(open_widget, huge: Trace) -> None:
    view = explore(huge)
    page, wire = open_widget(view)
    assert "each column is the mean of 4 tokens; zooming in" in page.locator(".lw-scale").inner_text()
    view.visible = (5000, 5060)
    until(page, f"{VIEW}.data.windows.some((slab) => slab.exact)")
    view.mode = "adapter 2"
    page.mouse.move(*place(page, 5030, site=101))
    until(page, "document.querySelector('.lw-reading').innerText.includes('exact')")
    name, _, value = page.locator(".lw-tip").inner_text().rpartition(" ")
    assert name.endswith("model.layers.14.o_proj: adapter 2")
    assert abs(float(value) - huge.values[5030, 101, 2]) <= 0.0026
    assert all(sent <= 5_000_000 for sent in wire.sent)


def test_millions_of_cells_open_in_a_second_and_five_megabytes(open_widget) -> None:
    trace = large(2048, 224, 8)
    best = np.inf
    for _ in range(4):
        start = time.perf_counter()
        view = explore(trace)
        python_s = time.perf_counter() - start
        page, wire = open_widget(view)
        page_s = page.evaluate("lwTook / 1000")
        best = min(best, python_s + page_s)
        sent = sum(wire.sent[:1]) + len(view._esm) + len(view._css)
        print(f"{trace.values.size:,} cells, {sent:,} bytes: {python_s:.2f} s in Python, {page_s:.2f} s to the picture")
        assert sent <= 5_000_000
        if best <= 1:
            break
    assert best <= 1


def test_a_kernel_that_does_not_answer_is_said_and_the_overview_stays(open_widget, huge: Trace) -> None:
    view = explore(huge)
    page, wire = open_widget(view)
    wire.is_alive = False
    page.locator(".lw-explore-map").focus()
    for _ in range(8):
        page.keyboard.press("+")
    page.wait_for_selector(".lw-silent:not(:empty)", timeout=8000)
    said = page.locator(".lw-silent").inner_text()
    assert "The kernel does not answer: showing the overview" in said and "run the cell again" in said
    page.mouse.move(*place(page, visible(page)[0] + 3, site=5))
    assert "mean of 4 tokens" in page.locator(".lw-reading").inner_text() and "." in readings(page, "here")[0]
    assert page.locator(".lw-error").count() == 0


def test_another_request_of_a_run_is_picked_in_the_page(open_widget, tmp_path) -> None:
    from workbench.instrument.run import open_run
    from workbench.instrument.run_writer import RunWriter

    with RunWriter(tmp_path / "run", meta={}) as writer:
        base = replace(small_trace(), values=np.zeros((4, 0, 0), np.float32), adapters=(), sites=(), source=np.full(4, -1))
        for name, trace in {"req-1": make_trace(2), "req-2": small_trace(adapters=3), "req-3": base}.items():
            writer.request({"request_id": name, "mixture": "demo", "prompt": "<b>Wer</b>"})
            writer.trace(replace(trace, metadata={"request_id": name}))
    view = explore(open_run(tmp_path / "run"))
    page, _ = open_widget(view)
    assert page.get_by_label("Request").locator("option").all_inner_texts()[1] == "req-2 · demo · <b>Wer</b>"
    page.get_by_label("Request").select_option("req-2 · demo · <b>Wer</b>")
    until(page, f"{VIEW}.data.numTokens === 4")
    assert view.request == "req-2" and page.locator(".lw-adapters tbody tr").count() == 3
    assert page.locator(".lw").count() == 1
    page.get_by_label("Request").select_option("req-3 · demo · <b>Wer</b>")
    page.wait_for_selector(".lw-silent:not(:empty)")
    assert "no scalings in this trace to explore" in page.locator(".lw-silent").inner_text()
    assert page.get_by_label("Request").input_value().startswith("req-2") and view.request == "req-2"


def test_a_view_that_fails_says_so(open_page, static: Path, tmp_path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(static.read_text(encoding="utf-8").replace('"parts":[', '"prts":[', 1), encoding="utf-8")
    page = open_page(broken, ready=".lw-error")
    assert "could not be drawn" in page.locator(".lw-error").inner_text() and page.locator("img").is_visible()
