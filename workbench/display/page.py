"""The static page of a trace: one self-contained piece of HTML that needs no network, no server and no kernel.

It is a PNG until its script runs; the script replaces the PNG. Nothing from the trace reaches the markup unescaped.
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
from workbench.display.payload import BINARY

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
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


def source(name: str) -> str:
    """Return one of the files beside this module: a script or a style sheet."""
    return files("workbench.display").joinpath(name).read_text(encoding="utf-8")


def module() -> str:
    """Return the ES module that draws a trace, for a page or for anywidget's `_esm`."""
    return "\n".join(source(name) for name in ("panels.js", "heatmap.js", "scalings.js"))


def fragment(state: dict[str, Any], png: bytes, alt: str) -> str:
    """Return the HTML for an output cell. Equal state gives equal HTML, so a notebook run twice does not change."""
    encoded = {name: base64.b64encode(value).decode() if name in BINARY else value for name, value in state.items()}
    # "<" could close the script element from inside a token's text
    inlined = json.dumps(encoded, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    identity = hashlib.sha256(inlined.encode()).hexdigest()[:16]
    host = source("static_host.js").replace("__ID__", identity).replace("__BINARY__", json.dumps(BINARY))
    return FRAGMENT.format(
        id=identity,
        alt=escape(visible(alt), quote=True),
        png=base64.b64encode(png).decode(),
        css=source("scalings.css"),
        module=module(),
        host=host.replace("__STATE__", inlined),
    )


def page(body: str, title: str) -> str:
    """Return a whole HTML document around a fragment."""
    return PAGE.format(title=escape(visible(title)), fragment=body, light=LIGHT.page, dark=DARK.page)
