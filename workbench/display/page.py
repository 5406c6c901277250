"""The static page of a view: one self-contained piece of HTML that needs no network, no server and no kernel.

It is a PNG until its script runs; the script replaces the PNG. Nothing from the state reaches the markup unescaped.
A view is added here: its scripts and styles in the two lists; its last script has `renderName({model, el})`.
"""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from importlib.resources import files
from typing import Any

from workbench.display.labels import visible
from workbench.display.palette import DARK, LIGHT
from workbench.errors import UserError, names, nearest

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
html {{ color-scheme: light dark; }}
body {{ margin: 0 auto; max-width: 1440px; padding: 16px; background: {light}; }}
@media (prefers-color-scheme: dark) {{ body {{ background: {dark}; }} }}
@media (max-width: 500px) {{ body {{ padding: 8px; }} }}
</style>
</head>
<body>
{fragment}
</body>
</html>
"""
FRAGMENT = """<div class="lw-host" data-lw="{id}"><img alt="{alt}" src="data:image/png;base64,{png}" \
style="max-width:100%;height:auto"></div>
<style>
{css}</style>
<script type="module">
{module}
{host}</script>
"""


# the parts of the one ES module and of the one style sheet; a view is drawn by its function `renderName`
FIRST_PARTS = ("base.js",)
VIEW_PARTS = {
    "scalings": ("canvas.js", "panels.js", "heatmap.js", "scalings.js"),
    "explore": ("canvas.js", "explore_data.js", "explore_map.js", "explore_panels.js", "explore.js"),
    "console": ("live.js", "console.js"),
    "compare_live": ("live.js", "compare_live.js"),
    "sweep": ("sweep_data.js", "sweep_chart.js", "sweep.js"),
}
LAST_PART = "view.js"
FIRST_STYLES = ("base.css",)
VIEW_STYLES = {
    "scalings": ("scalings.css",),
    "explore": ("scalings.css", "explore.css"),
    "console": ("scalings.css", "console.css"),
    "compare_live": ("scalings.css", "console.css"),
    "sweep": ("sweep.css",),
}


def source(name: str) -> str:
    """Return one of the files beside this module: a script or a style sheet."""
    return files("workbench.display").joinpath(name).read_text(encoding="utf-8")


def module(view: str | None = None) -> str:
    """Return the ES module of all views, for anywidget's `_esm`, or of one view alone, for a page."""
    chosen = _views(view)
    # a part that two views share is joined once: a module may declare a name only once
    parts = dict.fromkeys([*FIRST_PARTS, *(part for name in chosen for part in VIEW_PARTS[name])])
    renderers = ", ".join(f"{name}: {renderer(name)}" for name in chosen)
    return "\n".join([*map(source, parts), source(LAST_PART).replace("__VIEWS__", renderers)])


def css(view: str | None = None) -> str:
    """Return the style sheet of all views, for anywidget's `_css`, or of one view alone, for a page."""
    parts = dict.fromkeys([*FIRST_STYLES, *(part for name in _views(view) for part in VIEW_STYLES[name])])
    return "".join(map(source, parts))


def renderer(view: str) -> str:
    """Return the name of the function that draws a view: `renderCompareLive` for `compare_live`."""
    return "render" + "".join(part.capitalize() for part in view.split("_"))


def _views(view: str | None) -> tuple[str, ...]:
    if view is not None and view not in VIEW_PARTS:
        raise ValueError(f"there is no view {view!r}{nearest(view, VIEW_PARTS)}; there are {names(VIEW_PARTS)}")
    return tuple(VIEW_PARTS) if view is None else (view,)


def fragment(state: dict[str, Any], png: bytes, alt: str) -> str:
    """Return the HTML for an output cell. Equal state gives equal HTML, so a notebook run twice does not change."""
    binary = [name for name, value in state.items() if isinstance(value, bytes)]
    encoded = {name: base64.b64encode(state[name]).decode() if name in binary else state[name] for name in state}
    # "<" could close the script element from inside a token's text
    inlined = json.dumps(encoded, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    identity = hashlib.sha256(inlined.encode()).hexdigest()[:16]
    host = source("static_host.js").replace("__ID__", identity).replace("__BINARY__", json.dumps(binary))
    view = state.get("view", "scalings")
    return FRAGMENT.format(
        id=identity,
        alt=escape(visible(alt), quote=True),
        png=base64.b64encode(png).decode(),
        css=css(view),
        module=module(view),
        host=host.replace("__STATE__", inlined),
    )


def heading(title: str | None, usual: str) -> str:
    """Return the title of a view, or the usual one.

    Raises:
        UserError: it is no text.
    """
    if title is not None and not isinstance(title, str):
        raise UserError(f"title must be text, not {title!r}")
    return title or usual


def page(body: str, title: str) -> str:
    """Return a whole HTML document around a fragment."""
    return PAGE.format(title=escape(visible(title)), fragment=body, light=LIGHT.page, dark=DARK.page)
