"""What the tests of figures look for in one: heatmaps, texts, lines, and traces with everything recorded."""

from __future__ import annotations

from dataclasses import replace

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from workbench.display import Picture
from workbench.instrument.recorded import Recorded
from workbench.instrument.trace import Trace


def heatmaps(picture: Picture) -> list[tuple[np.ndarray, Axes]]:
    """Return `(values with NaN where masked, axes)` of every heatmap of numbers."""
    found = [(axes.images[0], axes) for axes in picture.figure.axes if axes.images]
    return [(np.ma.filled(image.get_array(), np.nan), axes) for image, axes in found if image.get_array().ndim == 2]


def texts(picture: Picture) -> list[str]:
    picture.figure.canvas.draw()
    return [text.get_text() for text in picture.figure.findobj(matplotlib.text.Text) if text.get_visible()]


def lines(axes: Axes, label: str) -> list[np.ndarray]:
    """Return the y values of the lines of this label."""
    return [np.asarray(line.get_ydata(), float) for line in axes.lines if line.get_label() == label]


def panel(picture: Picture, words: str) -> Axes:
    """Return the axes whose heading has these words."""
    return next(axes for axes in picture.figure.axes if words in axes.get_title(loc="left"))


def recorded(trace: Trace, ranks: int = 3, seed: int = 0) -> Trace:
    """Return the trace with every kind of extra; the first token lacks them."""
    rng = np.random.default_rng(seed)
    tokens, layers = trace.num_tokens, ("layer 0", "layer 1", "final norm")
    names = tuple(str(rank + 1) for rank in range(ranks))
    sites, adapters = trace.sites or ("model.layers.0.q_proj",), trace.adapters or ("one",)
    delta = np.exp(rng.normal(-3, 1, (tokens, len(sites), len(adapters)))).astype(np.float32)
    hidden, entropy = np.exp(rng.normal(3, 1, (tokens, 3))), np.abs(rng.normal(1.5, 1, tokens))
    ids = rng.integers(40_000, 49_000, (tokens, ranks))
    ids[:-1, 0] = trace.token_ids[1:]
    logprobs = np.log(np.sort(rng.dirichlet(np.ones(ranks + 1), tokens)[:, :ranks], 1)[:, ::-1])
    delta[0], hidden[0], entropy[0], ids[0], logprobs[0] = np.nan, np.nan, np.nan, -1, np.nan
    site_adapter = {"site": sites, "adapter": adapters}
    return replace(
        trace,
        extras={
            "delta_norm": Recorded(delta, ("token", "site", "adapter"), site_adapter, "ratio", "how much it moves"),
            "hidden_norm": Recorded(hidden, ("token", "layer"), {"layer": layers}, "norm", "L2 norm"),
            "entropy": Recorded(entropy, ("token",), {}, "nats", "of the next token"),
            "logits:top.ids": Recorded(ids, ("token", "rank"), {"rank": names}, "token id", "likeliest"),
            "logits:top.logprobs": Recorded(logprobs, ("token", "rank"), {"rank": names}, "nats", "theirs"),
        },
    )


def without_scalings(trace: Trace) -> Trace:
    """Return what a request of the base model records: the tokens, and no scalings."""
    nothing = np.zeros((trace.num_tokens, 0, 0), np.float32)
    return replace(trace, values=nothing, adapters=(), sites=())
