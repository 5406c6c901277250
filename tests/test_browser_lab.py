"""The notebooks in JupyterLab itself. Run: pytest -m browser tests/test_browser_lab.py (Chromium and Playwright)."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
from byte_engine import SPEC
from lab_page import LabPage, opened, write_notebook
from lab_server import Lab, serve
from models import byte_tokenizer, save_base, tiny_model
from trace_problem import small_trace

from workbench.display.palette import DARK, LIGHT

pytestmark = pytest.mark.browser
pytest_plugins = ("browser_page",)
NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Path:
    """A tiny mixture on disk whose tokens are bytes and whose texts may be thousands of tokens long."""
    folder = tmp_path_factory.mktemp("shelf")
    model = tiny_model("llama", vocab_size=259, max_position_embeddings=8192)
    byte_tokenizer(save_base(model, folder / "tiny"))
    SPEC.write(folder / "mix", model)
    return folder


@pytest.fixture(scope="module")
def lab(tmp_path_factory, browser) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("notebooks")
    for notebook in NOTEBOOKS.glob("*.ipynb"):
        shutil.copyfile(notebook, folder / notebook.name)
    with serve(tmp_path_factory.mktemp("home"), folder) as server:
        yield server


@pytest.fixture
def open_notebook(browser, lab, shelf, request) -> Iterator:
    """Return `open(*cells) -> LabPage`; the cells follow one that makes the tiny `engine` and its mixture "mix"."""
    first = f"""
from workbench import Engine
engine = Engine({str(shelf / "tiny")!r}, max_len=8192)
mixture = engine.load_mixture({str(shelf / "mix")!r}, "mix")
"""
    name = f"{request.node.name.removeprefix('test_')}.ipynb"
    with contextlib.ExitStack() as stack:

        def open_cells(*cells: str) -> LabPage:
            write_notebook(lab.folder / name, [first, *cells])
            return stack.enter_context(opened(browser, lab, name))

        yield open_cells


def sources(name: str) -> list[str]:
    return [cell.source for cell in nbformat.read(NOTEBOOKS / name, as_version=4).cells]


@pytest.mark.demo
def test_notebook_00_runs_and_its_views_are_alive(browser, lab) -> None:
    name = "00_start_here.ipynb"
    cells = sources(name)
    shown, explored, played = (
        next(i for i, cell in enumerate(cells) if start in cell) for start in ("show(trace)", "explore(", "console(")
    )
    with opened(browser, lab, name) as page:
        page.run_all(timeout_ms=600_000)
        page.output(shown).locator(".lw canvas").wait_for()
        page.keep("00-show")
        view = page.output(explored)
        view.locator(".lw-explore-map").focus()
        page.page.keyboard.press("Enter")
        page.until(lambda: "token" in view.locator(".lw-reading").inner_text())
        page.keep("00-explore")
        desk = page.output(played).locator("[data-lw-console]")
        desk.locator("[data-lw-run]").click()
        desk.locator("[data-lw-text] [data-token]").nth(30).wait_for()
        desk.locator("label", has=page.page.locator('[data-lw-mode="force"]')).click()
        page.until(lambda: float(desk.locator('[data-lw-fader="0"]').get_attribute("max")) == 1)
        adapters = desk.locator("[data-lw-fader]").evaluate_all("faders => faders.map((fader) => fader.ariaLabel)")
        german, spanish = (next(i for i, label in enumerate(adapters) if n in label) for n in ("german", "spanish"))
        slide(page, desk, spanish, 1.0)
        slide(page, desk, german, 0.0)
        page.until(lambda: level(desk, spanish) == 1.0 and level(desk, german) == 0.0)
        assert desk.get_attribute("data-lw-state") == "running"
        page.keep("00-console")
        desk.locator("[data-lw-stop]").click()
        page.until(lambda: desk.get_attribute("data-lw-state") == "ended")
        assert "edited" in desk.locator("[data-lw-status]").inner_text()


def test_a_users_mistake_is_one_sentence_below_its_cell(open_notebook) -> None:
    page = open_notebook('engine.generate("x", adapter="germn")')
    page.run(0)
    (error,) = page.run(1)
    assert error["ename"] == "UserError" and len(error["traceback"]) == 1
    shown = page.output(1).inner_text()
    assert "'germn'" in shown and "Traceback" not in shown and len(shown.strip().splitlines()) == 1


def test_a_stream_that_is_stopped_leaves_the_engine_usable(open_notebook) -> None:
    page = open_notebook(
        """
for piece in engine.stream("Who speaks", mixture="mix", max_tokens=8000, ignore_eos=True):
    print(ascii(piece), end="")
""",
        'print(engine.counters()["kv_bytes"], len(engine.generate("again", mixture="mix", max_tokens=5).token_ids))',
    )
    page.run(0)
    page.start(1)
    page.wait_status("busy")
    page.page.wait_for_function("() => jupyterapp.shell.currentWidget.content.widgets[1].model.outputs.length > 0")
    page.interrupt()
    page.wait_status("idle")
    stopped = page.outputs(1)[-1]
    assert stopped["ename"] == "KeyboardInterrupt"
    assert page.run(2)[0]["text"] == "0 5\n"


def test_a_console_streams_its_faders_act_and_stop_stops(open_notebook) -> None:
    page = open_notebook(
        """
import time
from workbench import console
step = engine.step  # slowed down: a slow page must not come too late to stop it
engine.step = lambda: (time.sleep(0.01), step())[1]
desk = console(engine, "Who speaks at which token?", mixture="mix", max_tokens=8000, ignore_eos=True)
desk
""",
        """
done = desk.completion
print(done.finish_reason, 0 < len(done.token_ids) < 8000, len(done.edits), engine.counters()["kv_bytes"])
print(list(desk.history["adapter"].unique()))
""",
    )
    page.run(0)
    page.run(1)
    desk = page.output(1).locator("[data-lw-console]")
    assert desk.get_attribute("data-lw-state") == "idle"
    desk.locator("[data-lw-run]").click()
    tokens = desk.locator("[data-lw-text] [data-token]")
    tokens.nth(60).wait_for()
    assert desk.get_attribute("data-lw-state") == "running"
    slide(page, desk, 0, 4.0)
    page.until(lambda: level(desk, 0) > 0.9)
    page.keep("console-running")
    slide(page, desk, 0, -4.0)
    page.until(lambda: level(desk, 0) < 0.1)
    assert desk.get_attribute("data-lw-state") == "running"
    desk.locator("[data-lw-stop]").click()
    page.until(lambda: desk.get_attribute("data-lw-state") == "ended")
    page.keep("console-ended")
    assert page.run(2)[0]["text"] == "cancelled True 1 0\n['a']\n"


def slide(page: LabPage, desk, index: int, to: float) -> None:
    """Move a fader by its keys, from one end."""
    fader = desk.locator(f'[data-lw-fader="{index}"]')
    fader.focus()
    page.page.keyboard.press("End" if to > 0 else "Home")
    page.until(lambda: float(fader.input_value()) == to)


def level(desk, index: int) -> float:
    """Return the mean weight of an adapter at the token that is looked at."""
    said = desk.locator(f'[data-lw-level="{index}"]').inner_text().replace("−", "-")
    return float(said) if said[-1].isdigit() else float("nan")


def test_explore_zooms_selects_and_tells_python(open_notebook) -> None:
    page = open_notebook(
        """
from workbench import explore
with engine.record("scalings") as recorder:
    done = engine.generate("Who speaks at which token, and where?", mixture="mix", max_tokens=200, ignore_eos=True)
view = explore(recorder.trace(done.request_id))
view
""",
        'print(view.selection, len(view.selected()), view.mode, view.shown_adapters, len(view.visible) == 2)',
    )
    page.run(0)
    page.run(1)
    box = page.output(1).locator(".lw-explore-map")
    page.keep("explore")
    box.focus()
    for key in ["ArrowRight"] * 3 + ["Shift+ArrowRight"] * 4 + ["+"] * 3:
        page.page.keyboard.press(key)
    page.keep("explore-selected")
    assert page.run(2)[0]["text"] == "(3, 8) 40 who leads ('a', 'b') True\n"
    chosen = page.output(1).locator(".lw-choice label", has_text="q_proj")
    chosen.click()
    assert page.run(2)[0]["text"] == "(3, 8) 20 who leads ('a', 'b') True\n"


def test_a_kernel_that_is_restarted_or_dies_is_told_on_the_page(open_notebook) -> None:
    page = open_notebook(
        """
from workbench import explore
from workbench import console
with engine.record("scalings") as recorder:
    done = engine.generate("Who?", mixture="mix", max_tokens=20, ignore_eos=True)
explore(recorder.trace(done.request_id))
""",
        'console(engine, "Who?", mixture="mix", max_tokens=8000, ignore_eos=True)',
        "import os; os._exit(1)",
    )
    for index in (0, 1, 2):
        page.run(index)
    desk = page.output(2).locator("[data-lw-console]")
    desk.locator("[data-lw-run]").click()
    desk.locator("[data-lw-text] [data-token]").nth(20).wait_for()
    page.restart()
    for index in (1, 2):
        notice = page.output(index).locator("[data-lw-gone]")
        assert "was restarted" in notice.inner_text()
        notice.scroll_into_view_if_needed()
        page.keep(f"restarted-{index}")
    desk.locator("[data-lw-stop]").click()
    page.until(lambda: "does not answer" in desk.locator("[data-lw-error]").inner_text())
    for index in (0, 1, 2):
        page.run(index)
    assert page.page.locator("[data-lw-gone]").count() == 0
    page.start(3)
    page.page.get_by_role("dialog").get_by_role("button", name="Ok").click()
    for index in (1, 2):
        page.output(index).locator("[data-lw-gone]").wait_for()


def test_two_widgets_run_on_one_engine_at_once(open_notebook) -> None:
    page = open_notebook(
        """
from workbench import console
one, two = (console(engine, name, mixture="mix", max_tokens=8000, ignore_eos=True) for name in ("One?", "Two?"))
one
""",
        "two",
        "print(one.is_running, two.is_running, len(engine.generate('Three?', mixture='mix', max_tokens=4).token_ids))",
        "print(one.completion.finish_reason, two.is_running)",
    )
    page.run(0)
    page.run(1)
    page.run(2)
    desks = [page.output(index).locator("[data-lw-console]") for index in (1, 2)]
    for desk in desks:
        desk.locator("[data-lw-run]").click()
    for desk in desks:
        desk.locator("[data-lw-text] [data-token]").nth(30).wait_for()
    assert page.run(3)[0]["text"] == "True True 4\n"
    desks[0].locator("[data-lw-stop]").click()
    page.until(lambda: desks[0].get_attribute("data-lw-state") == "ended")
    assert page.run(4)[0]["text"] == "cancelled True\n"
    desks[1].locator("[data-lw-stop]").click()
    page.until(lambda: desks[1].get_attribute("data-lw-state") == "ended")


def test_settings_run_side_by_side_and_stop_together(open_notebook) -> None:
    page = open_notebook(
        """
from workbench import compare_live
settings = [{}, {"tgt_non_granular_index": 1}]
sides = compare_live(engine, settings, "Who?", mixture="mix", max_tokens=8000, ignore_eos=True)
sides
""",
        "print([done.finish_reason for done in sides.completions.values()])",
    )
    page.run(0)
    page.run(1)
    view = page.output(1).locator("[data-lw-compare-live]")
    view.locator("[data-lw-run]").click()
    for column in range(2):
        view.locator(f'[data-lw-column="{column}"] [data-token]').nth(30).wait_for()
    page.keep("compare-live")
    view.locator("[data-lw-stop]").click()
    page.until(lambda: view.get_attribute("data-lw-state") == "ended")
    assert page.run(2)[0]["text"] == "['cancelled', 'cancelled']\n"


# a canvas of its own, because Chromium complains of reading one that is drawn to
CORNER = """(canvas) => {
  const copy = document.createElement('canvas').getContext('2d');
  copy.drawImage(canvas, 0, 0);
  return '#' + [...copy.getImageData(2, 2, 1, 1).data].slice(0, 3).map((c) => c.toString(16).padStart(2, '0')).join('');
}"""
PAGES = {"Light": LIGHT.page, "Dark": DARK.page}


def test_every_picture_stands_in_jupyterlabs_own_styles_light_and_dark(open_notebook) -> None:
    page = open_notebook(
        """
from workbench import compare, explore, figures, show
with engine.record("scalings", "entropy", "throughput", "cache") as recorder:
    done = engine.generate("Who speaks at which token?", mixture="mix", max_tokens=60, ignore_eos=True)
trace = recorder.trace(done.request_id)
show(trace)
""",
        "explore(trace)",
        """
both = compare(engine, "Who?", mixture="mix", tgt_non_granular_index=[None, 1], max_tokens=40, ignore_eos=True)
show(both)
""",
        "figures.by_depth(trace)",
        "figures.timeline(recorder.steps())",
        """
import pandas as pd
from workbench import sweep_view
sweep_view(pd.DataFrame({"k": [1, 1, 2, 2, 4, 4], "nll": [3.0, 3.2, 2.5, 2.4, 2.2, 2.3], "seed": [0, 1] * 3}))
""",
    )
    page.run_all()
    # room for the tallest: what is scrolled away is not painted
    page.page.set_viewport_size({"width": 1280, "height": 1700})
    for scheme in ("Light", "Dark"):
        page.theme(scheme)
        for index in range(1, 7):
            out = page.output(index)
            out.locator(".lw, img, svg").first.wait_for()
            page.keep(f"gallery-{index}-{scheme.lower()}", out)
            for view in out.locator(".lw[data-theme]").all():
                assert view.get_attribute("data-theme") == scheme.lower()
            for canvas in out.locator(":is(.lw-map, .lw-explore-map) canvas:first-child").all():
                page.until(lambda canvas=canvas, scheme=scheme: canvas.evaluate(CORNER) == PAGES[scheme])
            assert out.locator(".lw-error").count() == 0
    page.theme("Light")


HOSTILE = (
    *("<script>alert(1)</script>", "<img src=x onerror=alert(2)>", "\x1b[31m", "\u202eevil", "שלום"),
    *("\U0001f469\u200d\U0001f467", "`${x}`", "</pre>"),
)


@pytest.mark.parametrize("view", ["show", "explore"])
def test_hostile_tokens_are_text_in_a_live_widget(open_notebook, tmp_path, view) -> None:
    trace = small_trace(HOSTILE, adapters=2)
    path = replace(trace, adapters=("<b>one</b>", "two")).save(tmp_path / "hostile.trace.safetensors")
    page = open_notebook(f"""
from workbench import Trace
from workbench.display import {view}
{view}(Trace.load({str(path)!r}), title="<script>alert(4)</script>")
""")
    page.run(1)
    out = page.output(1)
    out.locator('[data-token="0"]').wait_for()
    assert out.locator('[data-token="0"]').inner_text() == HOSTILE[0]
    assert out.locator('[data-token="1"]').inner_text() == HOSTILE[1]
    assert out.locator('[data-token="3"]').inner_text() == "‹U+202E›evil"
    assert out.locator(".lw img, .lw b:text-is('one')").count() == 0
    assert "<b>one</b>" in out.inner_text() and "<script>alert(4)</script>" in out.inner_text()
    page.keep(f"hostile-{view}")
