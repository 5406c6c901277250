"""explore: a live view of traces. Zoom into tokens, sites and adapters; select a span; read its exact values in Python.

The page draws what it is sent: an overview of bytes at first, finer windows when it asks for them. What it asks is
answered by id, so that it can drop what comes too late. Exact values stay here: `selected()` returns them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
from traitlets import Any as AnyTrait
from traitlets import Bool, Bytes, Dict, Unicode, observe, validate

from workbench.display import explore_answers, page
from workbench.display.explore_settings import QUIET, SETTINGS, SPANS, Settings, require_quantity
from workbench.display.explore_source import Source, source_of
from workbench.display.explore_state import BUDGET_BYTES, SCALINGS, quantities, state
from workbench.display.labels import TITLE
from workbench.display.palette import themes
from workbench.display.report import text_report
from workbench.display.shown import Shown
from workbench.errors import UserError, names, nearest
from workbench.instrument.trace import Trace

if TYPE_CHECKING:
    import pandas

    from workbench.instrument.run import Run


MOST_TOLD = 400  # tokens


class Explore(anywidget.AnyWidget):
    """A view of one trace at a time, drawn in the notebook; made by `explore`.

    The settings can be read and set from Python, and change with what is done in the view:

    Attributes:
        selection: `(start, stop)` of the selected tokens, or `()`.
        shown_adapters: names of the adapters that are drawn and counted.
        projection: the last part of the names of the shown sites (`"q_proj"`), or `""` for all.
        layers: `(first, last)` of the shown layers, or `()` for all.
        mode: what the map shows: `"who leads"`, `"every adapter"`, or an adapter's name.
        visible: `(first, last)` token in view, as fractions, or `()` for all. A page that is too wide for few tokens
            shows more than was set.
        request: id of the request that is shown.
        quantity: `"scalings"`, or `"delta_norm"` where it was recorded.
        theme: `"auto"`, `"light"` or `"dark"`.

    Raises:
        UserError: a setting that does not exist or does not fit; the message names the nearest that does.
    """

    _esm = page.module()
    _css = page.css()
    view = Unicode("explore").tag(sync=True)
    live = Bool(True).tag(sync=True)
    themes = Dict().tag(sync=True)
    problem = Unicode().tag(sync=True)
    labels = Dict().tag(sync=True)
    codes = Bytes().tag(sync=True)
    leaders = Bytes().tag(sync=True)
    row_of = Bytes().tag(sync=True)
    source = Bytes().tag(sync=True)
    positions = Bytes().tag(sync=True)
    draft = Bytes().tag(sync=True)
    time_s = Bytes().tag(sync=True)

    # of any type, so that what does not fit is refused in our words
    selection = AnyTrait(()).tag(sync=True)
    shown_adapters = AnyTrait(()).tag(sync=True)
    projection = AnyTrait("").tag(sync=True)
    layers = AnyTrait(()).tag(sync=True)
    mode = AnyTrait("").tag(sync=True)
    visible = AnyTrait(()).tag(sync=True)
    request = AnyTrait("").tag(sync=True)
    quantity = AnyTrait("").tag(sync=True)
    theme = AnyTrait("auto").tag(sync=True)

    def __init__(self, source: Source, title: str | None = None, max_bytes: int = BUDGET_BYTES, **settings: Any):
        for name in settings:
            if name not in SETTINGS:
                hint = nearest(name, SETTINGS)
                raise UserError(f"explore() has no setting {name!r}{hint}; it has {names(SETTINGS, 9)}")
        self._sources, self._title = source, page.heading(title, TITLE)
        self._max_bytes, self._serial = max_bytes, 0
        self._is_from_page, self._is_switching = False, True
        request = source.require(settings.pop("request")) if "request" in settings else source.first()
        self._trace = source.load(request)
        loaded = self._load(settings.pop("quantity", SCALINGS))
        super().__init__(themes=themes(), request=request, **loaded, **self._limits.completed(settings))
        self._is_switching = False
        self.on_msg(self._heard)

    def __repr__(self) -> str:
        # all that is left of the view in a notebook that was exported, or executed without a front end
        total = self._trace.num_tokens
        told = f"the first {MOST_TOLD} of {total} tokens; " if total > MOST_TOLD else ""
        report = text_report(self._trace.select(tokens=slice(0, MOST_TOLD)), colour=False)
        return f"{report}\n\n({told}the view itself needs a kernel: show(trace) and .save(path) make a picture)"

    @property
    def trace(self) -> Trace:
        """The trace that is shown, whole."""
        return self._trace

    def selected_trace(self) -> Trace:
        """Return the selected tokens, of the shown sites and adapters, as a trace.

        Raises:
            UserError: nothing is selected.
        """
        if not self.selection:
            how = "drag over the strip above the map, or set view.selection = (start, stop)"
            raise UserError(f"nothing is selected: {how}")
        sites = self._limits.sites(self.projection, self.layers)
        tokens = self._trace.select(tokens=slice(*self.selection))
        return tokens.select(sites=[self._quantity.sites[i] for i in sites], adapters=self.shown_adapters)

    def selected(self) -> pandas.DataFrame:
        """Return the exact scalings of the selected tokens at the shown sites and adapters, one per line.

        Columns: token (counted from the start of the selection), position, text, generated, computed, site, adapter,
        scaling.

        Raises:
            UserError: nothing is selected.
        """
        return self.selected_trace().to_frame()

    def show(self) -> Shown:
        """Return the static twin: this view as it is now, for a file or where no kernel runs."""
        made = {name: getattr(self, name) for name in SETTINGS}
        trace, quantity, heading, max_bytes = self._trace, self._quantity, self._heading, self._max_bytes

        def static() -> dict[str, Any]:
            fresh = state(trace, heading, quantity, max_bytes, is_live=False)
            fresh["labels"] |= {"requests": [], "quantities": [], "serial": 0}
            return {"view": "explore", "themes": themes(), **made, **fresh}

        return Shown(trace, heading, static)

    def save(self, path: str | Path) -> Path:
        """Write this view as a page (.html), or the trace's figure (.png, .svg, .pdf), and return the path.

        Raises:
            UserError: another suffix, or a folder that does not exist.
        """
        return self.show().save(path)

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """Take what the page has set (ipywidgets calls this); what does not fit is taken back on both sides."""
        before = {name: getattr(self, name) for name in SETTINGS}
        late = [name for name in SPANS if name in sync_data and not self._limits.fits(name, sync_data[name], before)]
        # where the map is zoomed to is told by the page of itself, and is no answer to a problem
        if self.problem and set(sync_data) - {"visible"}:
            self.problem = ""
        self._is_from_page = True
        try:
            super().set_state({name: value for name, value in sync_data.items() if name not in late})
        except UserError as error:
            self._take_back(before, [name for name in SETTINGS if name in sync_data])
            self.problem = str(error)
        finally:
            self._is_from_page = False
        # the page only sends spans of what it shows: these are of a trace that has gone
        if late:
            self.send_state(late)

    def _take_back(self, before: dict[str, Any], asked: list[str]) -> None:
        """Set what the page asked for to what it was; unlike a TraitError, ours leaves it set."""
        kept = self._limits.fitting(before, is_same_trace=True)
        with self.hold_sync(), self.hold_trait_notifications():
            for name in asked:
                # another request or quantity, _switch has undone
                if name in kept and name not in ("request", "quantity"):
                    self.set_trait(name, kept[name])
        self.send_state(asked)

    @validate(*SETTINGS)
    def _valid(self, proposal: dict[str, Any]) -> Any:
        name, value = proposal["trait"].name, proposal["value"]
        if name == "request":
            return self._sources.require(value)
        return self._limits.checked(name, value, {one: getattr(self, one) for one in SETTINGS})

    @observe("request", "quantity")
    def _switch(self, change: dict[str, Any]) -> None:
        """Show another trace, or another quantity of this one; keep the settings that still fit."""
        if self._is_switching:
            return
        self._is_switching = True
        before = self._trace
        try:
            if change["name"] == "request":
                self._trace = self._sources.load(self.request)
            known = quantities(self._trace)
            self._show(self._load(self.quantity if self.quantity in known else SCALINGS), self._trace is before)
        except UserError as error:
            self._trace = before
            self.set_trait(change["name"], change["old"])
            self.problem = str(error)
            # the page shows the sentence; a traceback in Jupyter's log would be seen by nobody
            if not self._is_from_page:
                raise
        finally:
            self._is_switching = False

    def _load(self, quantity: str) -> dict[str, Any]:
        """Return what is sent about a quantity of the trace, and keep what the settings are checked against."""
        found = quantities(self._trace)
        self._quantity = found[require_quantity(quantity, found)]
        self._limits = Settings(self._trace.num_tokens, self._quantity.sites, self._quantity.adapters, tuple(found))
        self._heading = self._title
        self._serial += 1
        made = state(self._trace, self._heading, self._quantity, self._max_bytes, is_live=True)
        texts = [{"value": request, "text": text} for request, text in self._sources.texts.items()]
        choices = [{"value": name, "text": QUIET[name]} for name in found]
        made["labels"] |= {"serial": self._serial, "requests": texts, "quantities": choices}
        return {**made, "quantity": quantity}

    def _show(self, made: dict[str, Any], is_same: bool) -> None:
        settings = self._limits.fitting({name: getattr(self, name) for name in SETTINGS}, is_same)
        # the page rebuilds when it sees new labels: all of it must have arrived by then
        with self.hold_sync():
            self.problem = ""
            for name, value in (settings | made).items():
                setattr(self, name, value)

    def _heard(self, _: Any, content: Any, buffers: Any) -> None:
        if not isinstance(content, dict):
            return
        # a page that gets no answer must take the kernel for silent
        reply, parts = self._answer(content) or ({"is_refused": True}, [])
        self.send({**reply, **{name: content.get(name) for name in ("type", "id", "serial", "turn")}}, parts)

    def _answer(self, content: dict[str, Any]) -> explore_answers.Answer | None:
        if content.get("serial") != self._serial:
            return None
        sites, adapters = [], []
        try:
            # the settings here may be older or newer than the question
            if content.get("type") != "window":
                adapters = [self._quantity.adapters.index(name) for name in content["adapters"]]
                layers = self._limits.checked("layers", content["layers"], {"projection": ""})
                sites = self._limits.sites(
                    self._limits.checked("projection", content["projection"], {"layers": layers}), layers
                )
        except (KeyError, TypeError, ValueError):
            return None
        return explore_answers.answer(content, self._quantity, sites, adapters)


def explore(what: Trace | Run | str | Path, title: str | None = None, **settings: Any) -> Explore:
    """Return a live view of a trace, of the traces of a run, or of what lies at a path.

    Args:
        what: a trace with scalings, a run, or the path of either.
        title: heading of the view.
        settings: what the view begins with; see `Explore`. `max_bytes` is how much may be sent before the first
            picture: what does not fit comes as means at first and exactly when zoomed into.

    Raises:
        UserError: nothing to explore there, or a setting that does not exist or fit.
    """
    return Explore(source_of(what), title, **settings)
