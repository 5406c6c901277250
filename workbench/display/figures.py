"""Figures for paper and for places where scripts do not run; each function returns a `Picture`.

A picture shows itself in a notebook, has its text alternative with it, and is written by `save(path)` as .png, .svg,
.pdf or .html; `picture.figure` is Matplotlib's. Scalings are drawn on one scale from 0 to 1, whatever the data.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from workbench.display.grid_figure import depth_projection
from workbench.display.picture import Picture
from workbench.display.share_figures import by_depth, by_projection
from workbench.display.time_figures import entropy, over_time
from workbench.display.trace_figures import overview, site_token, token_adapter

__all__ = [
    "by_depth",
    "by_projection",
    "depth_projection",
    "entropy",
    "over_time",
    "overview",
    "Picture",
    "site_token",
    "token_adapter",
    "write",
]


def write(picture: Picture | Figure, kind: str) -> bytes:
    """Return a picture, or a bare figure, as `png`, `svg` or `pdf` bytes; equal figures give equal bytes."""
    made = picture if isinstance(picture, Picture) else Picture(picture, "", "")
    return made.write(kind)
