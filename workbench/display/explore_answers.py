"""What an explore view answers its page: a finer window, the exact values of a cell, the exact means of a span."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from workbench.display.explore_state import Quantity, slab_bytes
from workbench.display.labels import layer_of
from workbench.display.slabs import CHUNK_CELLS, Slab, pooling, slab

WINDOW_BYTES = 4_000_000

Answer = tuple[dict[str, Any], list[bytes]]


def answer(
    asked: Mapping[str, Any], quantity: Quantity, sites: Sequence[int], adapters: Sequence[int]
) -> Answer | None:
    """Return the answer to a page's question and its buffers; None for a question that makes no sense.

    Args:
        asked: `type` "window" (start, stop, block), "cell" (token, site or None) or "span" (start, stop).
        quantity: what the page shows.
        sites: indices of the sites that means are taken over.
        adapters: indices of the adapters that are read out.
    """
    try:
        if asked["type"] == "window":
            part = window(quantity, int(asked["start"]), int(asked["stop"]), int(asked["block"]))
            sent = slab_bytes(part)
            place = {"start": part.start, "stop": part.stop, "block": part.block}
            return place, [sent["codes"], sent["leaders"], sent["row_of"]]
        if asked["type"] == "cell":
            return _cell(quantity, int(asked["token"]), asked["site"], sites, adapters), []
        if asked["type"] == "span":
            start, stop = _clipped(int(asked["start"]), int(asked["stop"]), len(quantity.values))
            means = span_means(quantity.values, start, stop, sites)[list(adapters)]
            return {"start": start, "stop": stop, "means": _plain(means)}, []
    except (KeyError, TypeError, ValueError, IndexError):
        return None
    return None


def window(quantity: Quantity, start: int, stop: int, block: int) -> Slab:
    """Return the tokens from `start` to `stop`, as fine as asked or as WINDOW_BYTES allow."""
    num_tokens, _, num_adapters = quantity.values.shape
    start, stop = _clipped(start, stop, num_tokens)
    layers = [layer_of(site) for site in quantity.sites]
    row_of, block = pooling(stop - start, layers, num_adapters, WINDOW_BYTES, max(1, block))
    # blocks of a window are blocks of the whole trace
    return slab(quantity.values, start - start % block, stop, row_of, block, quantity.scale)


def span_means(values: np.ndarray, start: int, stop: int, sites: Sequence[int]) -> np.ndarray:
    """Return the float64 mean over the tokens of a span and over `sites`, per adapter; NaN without any value."""
    num_sites, num_adapters = values.shape[1:]
    tokens = max(1, CHUNK_CELLS // max(1, num_sites * num_adapters))
    chosen = slice(None) if len(sites) == num_sites else list(sites)
    total, count = np.zeros(num_adapters), np.zeros(num_adapters)
    for first in range(start, stop, tokens):
        part = values[first : min(first + tokens, stop)][:, chosen]
        missing = np.isnan(part)
        total += np.where(missing, 0, part).sum((0, 1), dtype=np.float64)
        count += (~missing).sum((0, 1))
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


def _cell(quantity: Quantity, token: int, site: Any, sites: Sequence[int], adapters: Sequence[int]) -> dict[str, Any]:
    means = span_means(quantity.values, token, token + 1, sites)[list(adapters)]
    values = [] if site is None else _plain(quantity.values[token, int(site)][list(adapters)])
    return {"token": token, "site": site, "means": _plain(means), "values": values}


def _clipped(start: int, stop: int, num_tokens: int) -> tuple[int, int]:
    start = min(max(start, 0), num_tokens - 1)
    return start, min(max(stop, start + 1), num_tokens)


def _plain(values: np.ndarray) -> list[float | None]:
    """Return numbers as JSON has them: NaN and what has no end become None."""
    return [float(value) if np.isfinite(value) else None for value in values]
