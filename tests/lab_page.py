"""A notebook in JupyterLab in a real browser, for tests: open, run, press, look; nothing may leave this machine.

What a person does is done with the mouse and the keyboard; what a person sees is read from the page. Only whether a
cell still runs is asked of JupyterLab itself (`--expose-app-in-browser`), so that no test has to guess a pause.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nbformat
from lab_server import TOKEN, Lab

# generous: what is waited for takes a fraction of it on a quiet machine
WAIT_MS = 180_000
ARTEFACTS = Path(os.environ.get("WORKBENCH_ARTEFACTS") or Path(__file__).parents[1] / "build" / "artefacts")
_HERE = "const panel = window.jupyterapp?.shell.currentWidget; if (panel?.context?.path !== name) return false;"
READY = f"""(name) => {{ {_HERE}
  return panel.content.widgets.length > 0 && panel.sessionContext.session?.kernel?.status === 'idle'; }}"""
CODE = """() => jupyterapp.shell.currentWidget.content.widgets.map(({ model }, i) => [i, model])
  .filter(([, model]) => model.type === 'code').map(([i]) => i)"""
FORGET = """(cells) => { for (const i of cells)
  jupyterapp.shell.currentWidget.content.widgets[i].model.executionCount = null; }"""
FINISHED = f"""([name, cells]) => {{ {_HERE}
  if (panel.sessionContext.session?.kernel?.status !== 'idle') return false;
  const models = cells.map((i) => panel.content.widgets[i].model);
  const failed = (model) => model.outputs.toJSON().some((output) => output.output_type === 'error');
  // cells after one that failed do not run
  return models.every((model) => model.executionState === 'idle')
    && (models.every((model) => model.executionCount) || models.some((model) => model.executionCount && failed(model)));
}}"""
OUTPUTS = """(i) => jupyterapp.shell.currentWidget.content.widgets[i].model.outputs?.toJSON() ?? []"""
# what JupyterLab says of a kernel that is restarted, and of a slow machine
JUPYTERS_OWN = ("Connection lost, reconnecting", "Could not restore the debugger state", "ms to activate.")
WATCH = """() => { window.lwSeen = [];
  jupyterapp.shell.currentWidget.sessionContext.statusChanged.connect((_, status) => lwSeen.push(status)); }"""
STANDING = """() => { const panel = window.jupyterapp?.shell.currentWidget; return {
  path: panel?.context?.path, kernel: panel?.sessionContext?.session?.kernel?.status,
  theme: document.body.dataset.jpThemeName,
  dialogs: [...document.querySelectorAll('.jp-Dialog')].map((dialog) => dialog.innerText),
  cells: panel?.content?.widgets?.map(({ model }) => [model.executionState, model.executionCount]) }; }"""
THEME = "(theme) => jupyterapp.commands.execute('apputils:change-theme', { theme })"
STATUS = "() => jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status"


def write_notebook(path: Path, cells: Sequence[str]) -> Path:
    """Write a notebook of code cells."""
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in cells])
    made.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(made, path)
    return path


class LabPage:
    """One notebook in one tab. `complaints` holds what must not happen; a test may empty it of what it expects.

    Attributes:
        page: Playwright's.
        complaints: requests that left this machine, errors and warnings of the page.
    """

    def __init__(self, page: Any, lab: Lab, name: str):
        self.page, self.name, self.complaints = page, name, []
        here = urlsplit(lab.url).netloc

        def allowed(url: str) -> bool:
            return urlsplit(url).netloc == here or urlsplit(url).scheme in ("data", "blob")

        page.context.route(lambda url: not allowed(url), lambda route: route.abort())
        page.on("request", lambda request: allowed(request.url) or self._complain(f"request to {request.url}"))
        page.on("websocket", lambda socket: allowed(socket.url) or self._complain(f"socket to {socket.url}"))
        page.on("pageerror", lambda error: self._complain(f"error: {error}"))
        page.on("console", self._heard)
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{lab.url}lab/tree/{name}?token={TOKEN}&reset")
        self._wait("the notebook is open and its kernel idle", READY, name)

    def _complain(self, text: str) -> None:
        self.complaints.append(text)

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning") and not any(known in message.text for known in JUPYTERS_OWN):
            self._complain(f"console {message.type}: {message.text}")

    def run_all(self, timeout_ms: int = WAIT_MS) -> None:
        """Choose Run > Run All Cells and wait for the end; no cell may fail."""
        cells = self.page.evaluate(CODE)
        self.page.evaluate(FORGET, cells)
        self._menu("Run", "Run All Cells")
        self.wait_finished(*cells, timeout_ms=timeout_ms)
        assert not self.errors(), "\n".join(self.errors())

    def start(self, index: int) -> None:
        """Run one cell by Shift+Enter and do not wait."""
        self.page.evaluate(FORGET, [index])
        self.cell(index).locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")

    def run(self, index: int) -> list[dict]:
        """Run one cell, wait for its end and return its outputs."""
        self.start(index)
        self.wait_finished(index)
        return self.outputs(index)

    def wait_finished(self, *cells: int, timeout_ms: int = WAIT_MS) -> None:
        """Wait until these cells, started before, have ended or one of them has failed."""
        self._wait(f"cells {cells} have ended", FINISHED, [self.name, cells], timeout_ms)

    def wait_status(self, status: str) -> None:
        """Wait until the kernel says it is `idle`, `busy`, ..."""
        self._wait(f"the kernel is {status}", f"(status) => ({STATUS})() === status", status)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until what a test asks of the page holds; the page lives on between two looks."""
        for _ in range(WAIT_MS // 100):
            if holds():
                return
            self.page.wait_for_timeout(100)
        raise AssertionError(f"still not so after {WAIT_MS / 1000:.0f} s")

    def interrupt(self) -> None:
        """Press the toolbar's stop button."""
        self.page.get_by_role("button", name="Interrupt the kernel").click()

    def restart(self) -> None:
        """Press the toolbar's restart button, confirm, and wait for the new kernel."""
        self.page.evaluate(WATCH)
        self.page.get_by_role("button", name="Restart the kernel", exact=True).click()
        self.page.get_by_role("button", name="Confirm Kernel Restart").click()
        self._wait("the kernel is back", "() => lwSeen.includes('restarting') && lwSeen.at(-1) === 'idle'")

    def theme(self, name: str) -> None:
        """Choose JupyterLab's "Light" or "Dark" theme; it is kept by the server, so a test puts it back."""
        self.page.evaluate(THEME, f"JupyterLab {name}")
        is_light = str(name == "Light").lower()
        self._wait(f"the theme is {name}", "(wanted) => document.body.dataset.jpThemeLight === wanted", is_light)

    def cell(self, index: int) -> Any:
        """Return the cell, scrolled into view."""
        found = self.page.locator(f'.jp-Notebook [data-windowed-list-index="{index}"]')
        found.scroll_into_view_if_needed()
        return found

    def output(self, index: int) -> Any:
        """Return what stands below a cell."""
        return self.cell(index).locator(".jp-Cell-outputArea")

    def outputs(self, index: int) -> list[dict]:
        """Return a cell's outputs as the notebook's file would hold them."""
        return self.page.evaluate(OUTPUTS, index)

    def errors(self) -> list[str]:
        """Return the errors below all cells."""
        found = [out for index in self.page.evaluate(CODE) for out in self.outputs(index)]
        return ["\n".join(out["traceback"]) for out in found if out["output_type"] == "error"]

    def keep(self, name: str, part: Any = None) -> Path:
        """Keep a picture of the page, or of a part of it, among the artefacts."""
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        (part or self.page).screenshot(path=(path := ARTEFACTS / f"lab-{name}.png"))
        return path

    def _wait(self, what: str, condition: str, arg: Any = None, timeout_ms: int = WAIT_MS) -> None:
        """Wait for a condition; where it does not come, say how things stand."""
        try:
            self.page.wait_for_function(condition, arg=arg, timeout=timeout_ms)
        except Exception as error:
            raise AssertionError(f"waited in vain until {what}; it is so: {self.page.evaluate(STANDING)}") from error

    def _menu(self, menu: str, entry: str) -> None:
        self.page.get_by_role("menuitem", name=menu, exact=True).click()
        self.page.get_by_role("menuitem", name=entry, exact=True).click()


@contextlib.contextmanager
def opened(browser: Any, lab: Lab, name: str, scheme: str = "light") -> Iterator[LabPage]:
    """Open a notebook of the served folder, keep a last picture of it, and fail if anything went wrong in the page."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
    try:
        page = LabPage(context.new_page(), lab, name)
        yield page
        page.keep(f"{Path(name).stem}-end")
        assert not page.complaints, page.complaints
    finally:
        context.close()
        for kernel in lab.api("kernels"):
            lab.api(f"kernels/{kernel['id']}", "DELETE")
