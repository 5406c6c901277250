"""Picture: a figure with its text alternative. Jupyter shows it as the last value of a cell; `save` writes it.

Every figure function of the workbench returns one. `figure` is Matplotlib's own, for those who want to change it.
"""

from __future__ import annotations

import base64
import io
import textwrap
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from workbench.display.labels import visible
from workbench.display.palette import LIGHT
from workbench.display.saving import save
from workbench.display.sheet import DPI, styled

CSS_PIXELS = 96  # to an inch
# on a narrow screen it is scrolled sideways rather than made too small to read
FRAGMENT = """<figure class="lw-picture" style="margin:0;overflow-x:auto">
<img alt="{alt}" width="{width}" src="data:image/png;base64,{png}"
style="max-width:max(100%,720px);height:auto;background:{page}">
</figure>
"""


class Picture:
    """A figure, what it shows in words, and its files.

    Args:
        figure: the finished figure.
        title: what is seen.
        description: the text alternative: what the picture says, with its numbers.
    """

    def __init__(self, figure: Figure, title: str, description: str):
        self.figure, self.title, self.description = figure, visible(title), visible(description)

    def __repr__(self) -> str:
        return textwrap.fill(self.description, 100)

    @property
    def png(self) -> bytes:
        """The figure, as it is now, as PNG."""
        return self.write("png")

    @property
    def html(self) -> str:
        """The PNG and its text alternative as a self-contained piece of HTML."""
        return self._html(self.png)

    def _html(self, png: bytes) -> str:
        width = round(self.figure.get_figwidth() * CSS_PIXELS)
        alt = escape(self.description, quote=True)
        return FRAGMENT.format(alt=alt, width=width, png=base64.b64encode(png).decode(), page=LIGHT.page)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        png = self.png
        return {
            "text/plain": repr(self),
            "image/png": base64.b64encode(png).decode(),
            "text/html": self._html(png),
        }

    def write(self, kind: str) -> bytes:
        """Return the figure as `png`, `svg` or `pdf` bytes with its words in the metadata; equal ones are equal."""
        words = {"Title": self.title}
        metadata = {
            "png": {"Software": None, **words, "Description": self.description},
            "svg": {"Date": None, **words, "Description": self.description},
            "pdf": {"CreationDate": None, **words, "Subject": self.description},
        }[kind]
        stream = io.BytesIO()
        with styled():
            self.figure.savefig(stream, format=kind, dpi=DPI, metadata=metadata)
        made = stream.getvalue()
        return _readable(made, self.description) if kind == "svg" else made

    def save(self, path: str | Path) -> Path:
        """Write a page (.html) or a figure (.png, .svg, .pdf) and return its path.

        Raises:
            UserError: another suffix, or a folder that does not exist.
        """
        return save(path, self._content)

    def _content(self, suffix: str) -> bytes:
        if suffix == ".html":
            from workbench.display import page

            return page.page(self.html, self.title).encode()
        return self.png if suffix == ".png" else self.write(suffix[1:])


def _readable(svg: bytes, description: str) -> bytes:
    """Return an SVG that screen readers announce as one image with a description."""
    words = f"</title>\n <desc>{escape(description)}</desc>".encode()
    return svg.replace(b"<svg ", b'<svg role="img" ', 1).replace(b"</title>", words, 1)
