"""Live: what every widget that holds an engine shares with its front end.

Messages from the page are dicts with a `type`; each is answered with an "ack" at once, so that the page can say when
no kernel listens. A mistake becomes a sentence on the page, never a traceback. They may come from any thread (Jupyter
runs them on the main thread or on one of their own), and news go out from the sender's.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import anywidget
from traitlets import Dict, List, TraitError, Unicode

from workbench.display import page
from workbench.display.labels import visible
from workbench.display.palette import themes
from workbench.errors import UserError, names, nearest

if TYPE_CHECKING:
    from workbench.engine import Engine

GONE_S = 2.0  # a view that is moved to another place leaves and comes back
_THEMES = ("auto", "light", "dark")
# cell -> the execution that made its widgets, and these
_cells: dict[str, tuple[str, list[weakref.ref[Live]]]] = {}


class Live(anywidget.AnyWidget):
    """A widget on an engine.

    Args:
        engine: runs what it asks for; `require_engine` has seen it.
        title: its heading.
        theme: "auto" follows the notebook, "light" and "dark" do not.
    """

    _esm = page.module()
    _css = page.css()
    view = Unicode().tag(sync=True)
    theme = Unicode("auto").tag(sync=True)
    themes = Dict().tag(sync=True)
    title = Unicode().tag(sync=True)
    facts = List().tag(sync=True)

    def __init__(self, engine: Engine, view: str, title: str, theme: str, **traits: Any):
        if theme not in _THEMES:
            raise UserError(f"theme is one of {names(_THEMES)}, not {theme!r}{nearest(theme, _THEMES)}")
        if not isinstance(title, str):
            raise UserError(f"title must be text, not {title!r}")
        self.engine = engine
        self._lock, self._sending = threading.RLock(), threading.RLock()
        self._views: set[str] = set()
        self._is_over, self._done = False, threading.Event()
        facts = [["Base", str(engine.base_id)], ["Dtype", engine.config.dtype], ["Device", engine.device.type]]
        super().__init__(view=view, title=visible(title), theme=theme, themes=themes(), facts=facts, **traits)
        self.on_msg(self._heard)
        _replace(self)
        self._cell_hook = _after_each_cell(self)

    def tell(self, content: dict[str, Any], buffers: Sequence[Any] = ()) -> None:
        """Send a message to the page; a front end that has gone away is no error."""
        with self._sending, contextlib.suppress(Exception):
            self.send(content, buffers=list(buffers))

    def say(self, text: str, is_error: bool = False) -> None:
        """Show a sentence on the page."""
        self.tell({"type": "say", "text": text, "error": is_error})

    def close(self) -> None:
        """End what runs here and the widget; no error if it is closed."""
        if not getattr(self, "_is_over", True):
            self._is_over = True
            self._cell_hook()
            self.stop()
            self.layout.close()
        super().close()

    def stop(self) -> None:
        """End what runs; no error if nothing does."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Look again at what the engine has loaded."""

    def _heard(self, _: Any, content: Any, buffers: Any) -> None:
        kind = content.get("type") if isinstance(content, dict) else None
        answer = getattr(self, f"_on_{kind}", None) if isinstance(kind, str) and kind.isalpha() else None
        if isinstance(content, dict) and "id" in content:
            self.tell({"type": "ack", "id": content["id"]})
        try:
            if answer is None:
                raise UserError(f"the page sent a message that this kernel does not know: {kind!r}; reload the page")
            answer(content)
        except UserError as error:
            self.say(str(error), is_error=True)
        except Exception as error:  # shown where the user looks; a widget has no cell to raise in
            self.say(f"{type(error).__name__}: {error}", is_error=True)

    def _take_typed(self, content: dict[str, Any], fields: Sequence[str]) -> None:
        """Take what was typed from a message: as a trait of its own it may come later."""
        for name in fields:
            if name in content:
                try:
                    setattr(self, name, content[name])
                except TraitError:
                    raise UserError(f"the page sent a {name} that is none: {content[name]!r}") from None

    def _on_hello(self, content: dict[str, Any]) -> None:
        self._views.add(str(content.get("page")))
        self.refresh()

    def _on_gone(self, content: dict[str, Any]) -> None:
        self._views.discard(str(content.get("page")))
        if not self._views:
            timer = threading.Timer(GONE_S, self._stop_if_alone)
            timer.daemon = True
            timer.start()

    def _stop_if_alone(self) -> None:
        if not self._views:
            self.stop()


def text_of(name: str, given: Any) -> str:
    """Return text as it is; a UserError for anything else."""
    if not isinstance(given, str):
        raise UserError(f"{name} must be text, not {given!r}")
    return given


def require_engine(engine: Any) -> None:
    """Raise a UserError unless this is an open engine."""
    from workbench.engine import Engine

    if not isinstance(engine, Engine):
        raise UserError(f"this takes an Engine (Engine.from_mixture('demo')), not {type(engine).__name__}")
    engine.require_open()


def _shell() -> Any:
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None else None


def _replace(widget: Live) -> None:
    """Close the widgets that an earlier run of this cell made: their output is gone, their engine would stay."""
    try:
        parent = _shell().get_parent()
        cell, execution = parent["metadata"]["cellId"], parent["header"]["msg_id"]
    except (AttributeError, KeyError, TypeError):  # no notebook, or one that does not say
        return
    before, made = _cells.get(cell, (execution, []))
    if before != execution:
        for old in filter(None, (each() for each in made)):
            old.close()
        made = []
    _cells[cell] = (execution, [*made, weakref.ref(widget)])


def _after_each_cell(widget: Live) -> Any:
    """Let a widget look again after every cell that ran, and return what ends that."""
    shell, seen = _shell(), weakref.ref(widget)

    def look(*_: object) -> None:
        if (alive := seen()) is not None and not alive._is_over:
            alive.refresh()

    def end() -> None:
        with contextlib.suppress(ValueError):
            shell.events.unregister("post_run_cell", look)

    if not hasattr(shell, "events"):
        return lambda: None
    shell.events.register("post_run_cell", look)
    return end
