"""Pages in a real browser, for every test marked `browser`: `pytest_plugins = ("browser_page",)` gives the fixtures.

`open_page` opens a static file; `open_widget` a live widget, through a host that stands for Jupyter's front end: what
the widget sends reaches the page as it would over the wire, and the other way round. Any request that leaves the page,
console message, error or dialog fails the test when it ends. PYTEST_DONT_REWRITE: the tests import it first.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from workbench.display import page as page_parts

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
SETTLE = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
# the parts of ipywidgets' front end that anywidget's model offers a view; the page asks for news, because only one
# thread may talk to the browser
FRONT_END = """
const decode = (text) => new DataView(Uint8Array.from(atob(text), (char) => char.charCodeAt(0)).buffer);
const encode = (view) => {
  const bytes = new Uint8Array(view.buffer ?? view, view.byteOffset ?? 0, view.byteLength);
  let text = "";
  for (let i = 0; i < bytes.length; i += 32768) text += String.fromCharCode(...bytes.subarray(i, i + 32768));
  return btoa(text);
};
const { isAttachedLate, isThrottled } = JSON.parse(document.querySelector("#options").textContent);
const own = {}, heard = {}, dirty = new Set();
let pending = false;
const tell = (event, ...args) => { for (const call of [...heard[event] ?? []]) call(...args); };
const take = ({ state, buffers, paths }) => {
  paths.forEach((path, i) => {
    let at = state;
    for (const key of path.slice(0, -1)) at = at[key];
    at[path.at(-1)] = decode(buffers[i]);
  });
  return state;
};
const model = {
  get: (name) => own[name],
  set: (name, value) => { own[name] = value; dirty.add(name); tell(`change:${name}`, model, value); },
  on: (event, call) => (heard[event] ??= new Set()).add(call),
  off: (event, call) => (call ? heard[event]?.delete(call) : delete heard[event]),
  save_changes: () => {
    // as ipywidgets: while the kernel has not taken one update, the next waits, and messages overtake it
    if (!dirty.size || (isThrottled && pending)) return;
    const state = Object.fromEntries([...dirty].map((name) => [name, own[name]]));
    dirty.clear();
    pending = true;
    window.lwToPython({ method: "update", state, buffers: [] });
  },
  send: (content, callbacks, buffers = []) => {
    window.lwToPython({ method: "custom", content, buffers: buffers.map(encode) });
  },
};
Object.assign(own, take(JSON.parse(document.querySelector("#state").textContent)));
window.lwModel = model;
const began = performance.now(), el = document.createElement("div");
const attach = () => document.querySelector("#view").append(el);
if (!isAttachedLate) attach();
window.lwLeave = render({ model, el });
// Jupyter renders first; in a cell that is not shown yet, much later than it
window.lwAttach = attach;
// the same widget in another place
window.lwRenderAgain = (width) => {
  const other = document.createElement("div");
  other.style.width = width;
  document.querySelector("#view").append(other);
  render({ model, el: other });
};
// how long the first picture took, in milliseconds
window.lwTook = performance.now() - began;
const listen = async () => {
  for (const message of await window.lwFromPython()) {
    if (message.method === "taken") { pending = false; model.save_changes(); }
    else if (message.method === "custom") tell("msg:custom", message.content, message.buffers.map(decode));
    else {
      const news = Object.entries(take(message)).filter(([name, value]) => own[name] !== value);
      // as in Backbone: all of it is there before anyone is told
      Object.assign(own, Object.fromEntries(news));
      for (const [name, value] of news) tell(`change:${name}`, model, value);
    }
  }
  setTimeout(listen, 15);
};
listen();
"""
HOST_PAGE = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">
<style>body {{ margin: 0; }}\n{css}</style>
<body><div id="view"></div><script type="application/json" id="state">{state}</script>
<script type="application/json" id="options">{options}</script>
<script type="module">{module}\n{front_end}</script></body>"""


@pytest.fixture(scope="module")
def browser() -> Iterator:
    missing = None if CHROMIUM else "no chromium on the PATH"
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing = "playwright is not installed"
    if missing and os.environ.get("CI"):
        pytest.fail(f"the browser tests must run in CI, but {missing}")
    if missing:
        pytest.skip(missing)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


class Pages:
    """Opens pages in contexts of their own and keeps what went wrong in them; `complaints` may be emptied by a test."""

    def __init__(self, browser: Any):
        self.browser = browser
        self.contexts: list[Any] = []
        self.complaints: list[str] = []

    def blank(self, url: str, width: int, scheme: str, scripts: bool = True, height: int = 900) -> Any:
        context = self.browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, java_script_enabled=scripts
        )
        self.contexts.append(context)
        page = context.new_page()

        def asked(request: Any) -> None:
            if request.url != url and not request.url.startswith("data:"):
                self.complaints.append(f"request to {request.url}")

        page.on("request", asked)
        page.on("console", lambda message: self.complaints.append(f"console {message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (self.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        return page

    def close(self) -> None:
        for context in self.contexts:
            context.close()
        assert not self.complaints, self.complaints


@pytest.fixture
def pages(browser: Any) -> Iterator[Pages]:
    opened = Pages(browser)
    yield opened
    opened.close()


@pytest.fixture
def open_page(pages: Pages):
    """Return `open(path, width=1280, scheme="light", scripts=True, ready=".lw canvas") -> page` for a static file."""

    def open_file(
        path: Path, width: int = 1280, scheme: str = "light", scripts: bool = True, ready: str = ".lw canvas"
    ) -> Any:
        page = pages.blank(path.as_uri(), width, scheme, scripts)
        page.goto(path.as_uri())
        if scripts:
            page.wait_for_selector(ready)
            settle(page)
        return page

    return open_file


class Wire:
    """What a widget says to its front end, kept until the page asks, and what the page says to the widget.

    `sent` holds the bytes of every message: JSON and buffers. `is_alive = False` makes the kernel deaf and mute;
    `is_busy = True` lets what the page says wait until `go_on()`, and `heard` holds all of it.
    """

    def __init__(self, widget: Any):
        self.widget = widget
        self.is_alive, self.is_busy = True, False
        self.heard: list[dict] = []
        self._queue: list[dict] = []
        self.sent: list[int] = []
        self._waiting: list[dict] = []
        self._lock = threading.Lock()
        widget.comm.publish_msg = self._published
        self.opening = self._packed({"state": widget.get_state()})

    def to_python(self, message: dict) -> None:
        """Give the widget a message of the page."""
        self.heard.append(message)
        if self.is_busy:
            self._queue.append(message)
        elif self.is_alive:
            self._take(message)

    def go_on(self) -> None:
        """Give the widget what has waited, in its order: the cell that kept the kernel busy has ended."""
        self.is_busy = False
        while self._queue:
            self._take(self._queue.pop(0))

    def _take(self, message: dict) -> None:
        buffers = [base64.b64decode(one) for one in message["buffers"]]
        said = {name: value for name, value in message.items() if name != "buffers"}
        is_update = said["method"] == "update"
        paths = {"buffer_paths": []} if is_update else {}
        self.widget.comm.handle_msg({"content": {"data": {**said, **paths}}, "buffers": buffers})
        if is_update:
            with self._lock:
                self._waiting.append({"method": "taken"})

    def from_python(self) -> list[dict]:
        """Return what the widget has said since the page last asked."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        return waiting if self.is_alive else []

    def said(self) -> list[dict]:
        """Return the contents of the messages, apart from updates, since the last time anyone asked."""
        return [message["content"] for message in self.from_python() if message["method"] == "custom"]

    def _published(self, kind: str, data: Any = None, metadata: Any = None, buffers: Any = None, **more: Any) -> None:
        if not data or data.get("method") not in ("update", "custom"):
            return
        if data["method"] == "update":
            message = {"method": "update", **self._packed(data, buffers)}
        else:
            encoded = [base64.b64encode(one).decode() for one in buffers or []]
            message = {"method": "custom", "content": data["content"], "buffers": encoded}
            self.sent.append(len(json.dumps(data["content"])) + sum(memoryview(one).nbytes for one in buffers or []))
        with self._lock:
            self._waiting.append(message)

    def _packed(self, data: dict, buffers: Any = None) -> dict:
        """Return a state as JSON, its binary parts apart, and count its bytes."""
        from ipywidgets.widgets.widget import _remove_buffers

        state, paths = data["state"], data.get("buffer_paths", [])
        if buffers is None:
            hidden = ("_esm", "_css", "layout", "tabbable", "tooltip")
            state = {name: value for name, value in state.items() if name not in hidden}
            state, paths, buffers = _remove_buffers(state)
        self.sent.append(len(json.dumps(state)) + sum(memoryview(one).nbytes for one in buffers))
        encoded = [base64.b64encode(one).decode() for one in buffers]
        return {"state": state, "paths": [list(path) for path in paths], "buffers": encoded}


@pytest.fixture
def open_widget(pages: Pages, tmp_path: Path):
    """Return `open(widget, width=1280, scheme="light", ready=".lw canvas") -> (page, wire)` for a live widget.

    `is_attached_late` renders into an element that lies in no page, until the page's `lwAttach()`; `is_throttled` keeps
    an update back while the kernel has not taken the one before. Jupyter does both.
    """

    def open_live(
        widget: Any, width: int = 1280, scheme: str = "light", ready: str = ".lw canvas",
        is_attached_late: bool = False, is_throttled: bool = False,
    ) -> tuple[Any, Wire]:  # fmt: skip
        wire = Wire(widget)
        options = json.dumps({"isAttachedLate": is_attached_late, "isThrottled": is_throttled})
        state = json.dumps(wire.opening).replace("<", "\\u003c")
        parts = {"css": page_parts.css(), "module": page_parts.module(), "front_end": FRONT_END}
        html = HOST_PAGE.format(**parts, state=state, options=options)
        path = tmp_path / f"widget-{len(pages.contexts)}.html"
        path.write_text(html, encoding="utf-8")
        page = pages.blank(path.as_uri(), width, scheme)
        page.expose_function("lwToPython", wire.to_python)
        page.expose_function("lwFromPython", wire.from_python)
        page.goto(path.as_uri())
        if is_attached_late:
            page.wait_for_function("typeof window.lwAttach === 'function'")
            return page, wire
        page.wait_for_selector(ready)
        settle(page)
        return page, wire

    return open_live


def settle(page: Any) -> None:
    """Wait until what was asked for is drawn."""
    page.evaluate(SETTLE)
