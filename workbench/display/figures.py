"""Figures for paper and for places where scripts do not run; each function returns a `Picture`.

A picture shows itself in a notebook, has its text alternative with it, and is written by `save(path)` as .png, .svg,
.pdf or .html; `picture.figure` is Matplotlib's. Scalings are drawn on one scale from 0 to 1, whatever the data.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from workbench.display.cache_figure import cache_hits
from workbench.display.compare_figure import compare
from workbench.display.difference_figure import difference
from workbench.display.frontier_figure import frontier
from workbench.display.grid_figure import depth_projection
from workbench.display.latency_figure import latency
from workbench.display.memory_figure import memory_map
from workbench.display.norm_figures import delta_norms, hidden_norms
from workbench.display.picture import Picture
from workbench.display.places_figure import kl_by_place
from workbench.display.run_figures import timeline
from workbench.display.share_figures import by_depth, by_projection
from workbench.display.time_figures import entropy, over_time
from workbench.display.top_tokens_figure import top_tokens
from workbench.display.trace_figures import overview, site_token, token_adapter
from workbench.instrument.memory_state import MemoryState, memory_state

__all__ = [
    "by_depth",
    "by_projection",
    "cache_hits",
    "compare",
    "delta_norms",
    "depth_projection",
    "difference",
    "entropy",
    "frontier",
    "hidden_norms",
    "kl_by_place",
    "latency",
    "memory_map",
    "memory_state",
    "MemoryState",
    "over_time",
    "overview",
    "Picture",
    "site_token",
    "timeline",
    "token_adapter",
    "top_tokens",
    "write",
]


def write(picture: Picture | Figure, kind: str) -> bytes:
    """Return a picture, or a bare figure, as `png`, `svg` or `pdf` bytes; equal figures give equal bytes."""
    made = picture if isinstance(picture, Picture) else Picture(picture, "", "")
    return made.write(kind)
