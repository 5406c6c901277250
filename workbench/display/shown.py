"""`show(trace)`: the picture of a trace, for a notebook, a file or a README. Static and self-contained."""

from __future__ import annotations

import base64
import os
from functools import cached_property
from pathlib import Path
from typing import Any

from workbench.display import page
from workbench.display.labels import TITLE, description
from workbench.display.payload import state
from workbench.display.report import text_report
from workbench.errors import UserError, nearest
from workbench.instrument.trace import Trace

SUFFIXES = (".html", ".png", ".svg", ".pdf")


class Shown:
    """A trace as a picture. Jupyter shows it as the last value of a cell; `save` writes it to a file."""

    def __init__(self, trace: Trace, title: str | None = None):
        self.trace = trace
        self.title = title or TITLE

    def __repr__(self) -> str:
        return text_report(self.trace, colour=False)

    @cached_property
    def png(self) -> bytes:
        """The figure as PNG."""
        return self._figure("png")

    @cached_property
    def html(self) -> str:
        """The interactive view as a self-contained piece of HTML."""
        return page.fragment(state(self.trace, self.title), self.png, description(self.trace, self.title))

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
        path = Path(path)
        if path.suffix not in SUFFIXES:
            hint = nearest(path.suffix, SUFFIXES)
            raise UserError(f"cannot save {path}: a picture of a trace is one of {', '.join(SUFFIXES)}{hint}")
        if path.suffix == ".html":
            content = page.page(self.html, self.title).encode()
        else:
            content = self.png if path.suffix == ".png" else self._figure(path.suffix[1:])
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_bytes(content)
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise UserError(f"cannot save {path}: {error.strerror or error}") from None
        return path

    def _figure(self, kind: str) -> bytes:
        from workbench.display.figures import overview, write

        return write(overview(self.trace, self.title), kind)


def show(trace: Trace, title: str | None = None) -> Shown:
    """Return the picture of a trace.

    Raises:
        UserError: `trace` is not a Trace.
    """
    if not isinstance(trace, Trace):
        raise UserError(f"show() takes a Trace (rec.trace(request_id) or Trace.load(path)), not {type(trace).__name__}")
    return Shown(trace, title)
