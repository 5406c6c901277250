"""Sites in groups: by layer, and by projection in the order in which a model applies them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from workbench.display.labels import layer_of
from workbench.instrument.trace import Trace, nan_mean

# attention in, attention out, MLP in, MLP out: names of the common architectures
PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", "o_proj", "out_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "fc1", "c_fc", "down_proj", "w2", "fc2"),
)
OUTSIDE = "outside"  # the layer of a site that is in none
_BLOCK_CELLS = 1 << 22  # values taken at once


@dataclass(frozen=True)
class Groups:
    """Sites that are drawn as one.

    Attributes:
        name: what a group is: "layer" or "projection".
        labels: of each group.
        columns: of each group, its places on the site axis.
    """

    name: str
    labels: tuple[str, ...]
    columns: tuple[np.ndarray, ...]

    def means(self, trace: Trace) -> np.ndarray:
        """Return the mean over each group's sites, float64 `[token, group, adapter]`; NaN where there is no value."""
        rows = max(1, _BLOCK_CELLS * trace.num_tokens // max(1, trace.values.size))
        parts = []
        for start in range(0, trace.num_tokens, rows):
            values = np.asarray(trace.values[start : start + rows])
            parts.append(np.stack([nan_mean(values[:, column], 1) for column in self.columns], 1))
        return np.concatenate(parts)


def by_layer(sites: tuple[str, ...]) -> Groups:
    """Return one group per layer, in order; sites outside the layers are the last group."""
    layers = [layer_of(site) for site in sites]
    order: list[int | None] = sorted({layer for layer in layers if layer is not None})
    if None in layers:
        order.append(None)
    columns = tuple(np.array([i for i, layer in enumerate(layers) if layer == one]) for one in order)
    return Groups("layer", tuple(OUTSIDE if one is None else str(one) for one in order), columns)


def by_projection(sites: tuple[str, ...]) -> Groups:
    """Return one group per projection: q, k, v, o, gate, up, down where a model has them, else in the sites' order."""
    paths = [projection_of(site) for site in sites]
    order = list(dict.fromkeys(paths))
    lasts = [path.rpartition(".")[2] for path in order]
    is_unique = len(set(lasts)) == len(lasts)
    if is_unique:
        rank = {name: place for place, name in enumerate(PROJECTIONS)}
        # what is not known keeps its place behind them
        order.sort(key=lambda path: rank.get(path.rpartition(".")[2], len(rank)))
    labels = tuple(path.rpartition(".")[2] if is_unique else path for path in order)
    columns = tuple(np.array([i for i, path in enumerate(paths) if path == one]) for one in order)
    return Groups("projection", labels, columns)


def projection_of(site: str) -> str:
    """Return a site's path inside its layer, without numbers: `self_attn.q_proj`, `block_sparse_moe.experts.w1`."""
    found = re.search(r"(?:^|\.)\d+\.(.+)$", site)
    path = found.group(1) if found else site.rpartition(".")[2]
    return ".".join(part for part in path.split(".") if not part.isdigit()) or site
