"""The notebooks in JupyterLab itself. Run: pytest -m browser tests/test_browser_lab.py (Chromium and Playwright)."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from byte_engine import SPEC
from lab_page import LabPage, opened, write_notebook
from lab_server import Lab, serve
from models import byte_tokenizer, save_base, tiny_model

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


@pytest.mark.demo
def test_notebook_00_runs_and_its_pictures_are_live(browser, lab) -> None:
    with opened(browser, lab, "00_start_here.ipynb") as page:
        page.run_all(timeout_ms=600_000)
        assert page.errors() == []


def test_a_users_mistake_is_one_sentence_below_its_cell(open_notebook) -> None:
    page = open_notebook('engine.generate("x", adapter="germn")')
    page.run_all()
    (error,) = page.outputs(1)
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
    page.run(2)
    assert page.outputs(2)[0]["text"] == "0 5\n"
