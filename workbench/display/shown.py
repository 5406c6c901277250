"""`show(x)`: the picture of a trace, a run or a comparison, for a notebook, a file or a README. Self-contained."""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.display import page
from workbench.display.labels import TITLE, description
from workbench.display.payload import state
from workbench.display.report import text_report
from workbench.display.saving import save
from workbench.errors import UserError
from workbench.instrument.trace import Trace

if TYPE_CHECKING:
    from workbench.display.picture import Picture
    from workbench.instrument.comparison import Comparison
    from workbench.instrument.run import Run


class Shown:
    """A trace as a picture. Jupyter shows it as the last value of a cell; `save` writes it to a file.

    Args:
        trace: with scalings.
        title: heading.
        made: returns the state of the view on the page; by default that of the scalings.
    """

    def __init__(self, trace: Trace, title: str | None = None, made: Callable[[], dict[str, Any]] | None = None):
        self.trace = trace
        self.title = page.heading(title, TITLE)
        self._made = made or (lambda: state(trace, self.title))

    def __repr__(self) -> str:
        return text_report(self.trace, colour=False)

    @cached_property
    def png(self) -> bytes:
        """The figure as PNG."""
        return self._figure("png")

    @cached_property
    def html(self) -> str:
        """The interactive view as a self-contained piece of HTML."""
        return page.fragment(self._made(), self.png, description(self.trace, self.title))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {
            "text/plain": repr(self),
            "image/png": base64.b64encode(self.png).decode(),
            "text/html": self.html,
        }

    def save(self, path: str | Path) -> Path:
        """Write a page (.html) or a figure (.png, .svg, .pdf) and return its path.

        Raises:
            UserError: another suffix, or a folder that does not exist.
        """
        return save(path, self._content)

    def _content(self, suffix: str) -> bytes:
        if suffix == ".html":
            return page.page(self.html, self.title).encode()
        return self.png if suffix == ".png" else self._figure(suffix[1:])

    def _figure(self, kind: str) -> bytes:
        from workbench.display.figures import overview, write

        return write(overview(self.trace, self.title), kind)


def show(what: Trace | Run | Comparison, title: str | None = None) -> Shown | Picture:
    """Return the picture of a trace, a run or a comparison.

    A trace without scalings is shown as its text; a run as its timelines and the list of its requests.

    Raises:
        UserError: it is none of them, nothing was recorded that could be shown, or a title that is no text.
    """
    title = page.heading(title, "") or None
    if isinstance(what, Trace):
        if what.has_scalings:
            return Shown(what, title)
        from workbench.display.text_picture import TextPicture

        return TextPicture(what, title)
    from workbench.instrument.comparison import Comparison
    from workbench.instrument.run import Run

    if isinstance(what, Run):
        from workbench.display.run_picture import RunPicture

        return RunPicture(what, title)
    if isinstance(what, Comparison):
        from workbench.display.compare_figure import compare

        return compare(what, title)
    raise UserError(
        "show() takes a Trace (rec.trace(request_id) or Trace.load(path)), a Run (open_run(folder)) or a Comparison "
        f"(compare(engine, prompt, settings)), not {type(what).__name__}"
    )
