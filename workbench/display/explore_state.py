"""What the explore view is sent about a trace: labels as JSON, tokens as small arrays, an overview as one slab.

`explore_data.js` reads exactly these names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from workbench.display.labels import facts, layer_of, runs, visible
from workbench.display.palette import adapter_colour, adapter_key
from workbench.display.payload import ABOVE, BELOW, MISSING, STEPS, sources
from workbench.display.slabs import CHUNK_CELLS, Scale, Slab, pooling, slab
from workbench.errors import UserError
from workbench.instrument.trace import Trace, nan_mean

BUDGET_BYTES = 5_000_000  # all that is sent before the first picture
MIN_OVERVIEW_BYTES = 500_000
SCALINGS, DELTA_NORM = "scalings", "delta_norm"
DELTA_SCALE = Scale(1e-3, 1.0, is_log=True)


@dataclass(frozen=True)
class Quantity:
    """One `[token, site, adapter]` of a trace that the map can show; its sites may be some of the trace's."""

    name: str
    values: np.ndarray
    sites: tuple[str, ...]
    adapters: tuple[str, ...]
    scale: Scale
    meaning: str


@dataclass(frozen=True)
class Survey:
    """What one pass over all values tells: `means[token, adapter]`, of `counts[token, adapter]` values; extremes."""

    means: np.ndarray
    counts: np.ndarray
    num_above: int
    num_below: int
    sum_error: float  # largest distance from 1 of the sum over the adapters of one site and token; NaN without any

    def shares(self, mask: np.ndarray) -> list[float | None]:
        """Return each adapter's mean over these tokens and all sites; None without any value, or without an end."""
        counts = self.counts[mask].sum(0)
        total = np.nansum(self.means[mask] * self.counts[mask], 0)
        found = zip(total, counts, strict=True)
        # JSON has no infinity
        return [round(float(one / count), 4) if count and np.isfinite(one) else None for one, count in found]


def quantities(trace: Trace) -> dict[str, Quantity]:
    """Return what the map can show of a trace, by name; scalings first.

    Raises:
        UserError: the trace has no scalings.
    """
    if not trace.has_scalings:
        has = f"; it has {', '.join(trace.extras)}, which show(trace) draws" if trace.extras else ""
        raise UserError(
            "there are no scalings in this trace to explore: record the request with engine.record('scalings'), and "
            f"run it with a mixture or an adapter (the base model alone has none){has}"
        )
    meaning = "1.0 = the adapter's full change is added at that site and token; 0 = none of it."
    found = {SCALINGS: Quantity(SCALINGS, trace.values, trace.sites, trace.adapters, Scale(), meaning)}
    extra = trace.extras.get(DELTA_NORM)
    if extra is not None and extra.axes == ("token", "site", "adapter"):
        labels = extra.labels
        meaning = "‖w·BAx‖ / ‖Wx‖: how much the adapter's change moves the output of the site; 1.0 = as much as it is."
        found[DELTA_NORM] = Quantity(DELTA_NORM, extra.values, labels["site"], labels["adapter"], DELTA_SCALE, meaning)
    return found


def survey(values: np.ndarray, scale: Scale) -> Survey:
    """Look at every value once, a few tokens at a time (they may lie in a file)."""
    num_tokens, num_sites, num_adapters = values.shape
    means = np.empty((num_tokens, num_adapters))
    counts = np.full((num_tokens, num_adapters), num_sites)
    above = below = 0
    errors = [np.nan]
    for at, part in _chunks(values):
        least, most = part.min(), part.max()
        if np.isnan(least):
            means[at], counts[at] = nan_mean(part, 1), (~np.isnan(part)).sum(1)
        else:
            # a product with a row of 1/sites: ten times as fast as a mean over the middle axis
            means[at] = np.matmul(np.full((1, num_sites), 1 / num_sites, np.float32), part)[:, 0]
        if not (least >= scale.low and most <= scale.high):
            above, below = above + int((part > scale.high).sum()), below + int((part < scale.low).sum())
        sums = part.reshape(-1, num_adapters) @ np.ones(num_adapters, np.float32)
        errors += [np.abs(sums[~np.isnan(sums)] - 1).max()] if not np.isnan(sums).all() else []
    return Survey(means, counts, above, below, float(np.nanmax(errors)) if len(errors) > 1 else np.nan)


def _chunks(values: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    tokens = max(1, CHUNK_CELLS // max(1, values[0].size))
    for first in range(0, len(values), tokens):
        at = slice(first, first + tokens)
        yield at, np.asarray(values[at], np.float32)


def state(trace: Trace, title: str, quantity: Quantity, max_bytes: int, is_live: bool) -> dict[str, Any]:
    """Return the state of a view of one quantity: `labels`, JSON-able, and bytes under other names.

    At most `max_bytes` in all, as long as the text and labels leave MIN_OVERVIEW_BYTES of them.
    """
    seen = survey(quantity.values, quantity.scale)
    labels = _labels(trace, title, quantity, seen)
    arrays = _token_arrays(trace)
    if not is_live and seen.means.size * 4 <= max_bytes // 4:
        # no kernel answers for exact means there; with them they are as exact as on the page of scalings
        arrays["means"] = seen.means.astype("<f4").tobytes()
    used = sum(map(len, arrays.values())) + sum(len(text) + 8 for text in labels["tokens"]) + 40 * len(quantity.sites)
    row_of, block = pooling(
        trace.num_tokens,
        labels["rows"]["layers"],
        len(quantity.adapters),
        max(max_bytes - 2 * used, MIN_OVERVIEW_BYTES),
    )
    overview = slab(quantity.values, 0, trace.num_tokens, row_of, block, quantity.scale)
    labels["block"] = block
    labels["notes"] += _pooling_note(overview, is_live)
    return {"labels": labels, **arrays, **slab_bytes(overview)}


def slab_bytes(part: Slab) -> dict[str, bytes]:
    """Return the arrays of a slab as they are sent."""
    return {"codes": part.codes.tobytes(), "leaders": part.leaders.tobytes(), "row_of": part.row_of.tobytes()}


def _labels(trace: Trace, title: str, quantity: Quantity, seen: Survey) -> dict[str, Any]:
    adapters = [trace.adapters.index(name) for name in quantity.adapters]
    layers = [layer_of(site) for site in quantity.sites]
    parts = {"all": np.full(trace.num_tokens, True), "prompt": ~trace.generated, "generated": trace.generated}
    shown = lru_cache(maxsize=4096)(visible)
    return {
        "title": visible(title),
        "facts": [[name, visible(value)] for name, value in facts(trace)],
        "edits": [visible(str(edit)) for edit in np.atleast_1d(trace.metadata.get("edits") or [])],
        "shape": list(quantity.values.shape),
        "codes": {"steps": STEPS, "below": BELOW, "above": ABOVE, "missing": MISSING},
        "scale": quantity.scale.facts(),
        "quantity": quantity.name,
        "meaning": _meaning(quantity, seen),
        "notes": _outside(quantity, seen),
        "outside": [seen.num_above, 0 if quantity.scale.is_log else seen.num_below],
        "names": list(quantity.adapters),
        "adapters": [visible(name) for name in quantity.adapters],
        "keys": [adapter_key(i) for i in adapters],
        "colours": [adapter_colour(i) for i in adapters],
        "rows": {
            "labels": [visible(site) for site in quantity.sites],
            "layers": layers,
            "kinds": [site.rpartition(".")[2] for site in quantity.sites],
        },
        "tokens": [shown(text) for text in trace.tokens],
        "parts": [[start, bool(trace.generated[start])] for start, _ in runs(trace.generated)],
        "first_position": int(trace.positions[0]),
        "shares": {name: seen.shares(mask) if mask.any() else None for name, mask in parts.items()},
    }


def _meaning(quantity: Quantity, seen: Survey) -> str:
    if quantity.name == SCALINGS and seen.sum_error < 0.01 and len(quantity.adapters) > 1:
        return f"{quantity.meaning[:-1]}. The adapters of one site and token sum to 1, so 1.0 = this adapter alone."
    return quantity.meaning


def _outside(quantity: Quantity, seen: Survey) -> list[str]:
    scale, notes = quantity.scale, []
    if scale.is_log:
        notes.append(f"The scale is logarithmic, from {scale.low:g} (and below) to {scale.high:g}.")
    if seen.num_above or (seen.num_below and not scale.is_log):
        below = "" if scale.is_log else f", {seen.num_below} below {scale.low:g}"
        notes.append(
            f"Outside the scale and marked: {seen.num_above} values above {scale.high:g}{below}; "
            "in means that are drawn they count as the end of the scale."
        )
    return notes


def _token_arrays(trace: Trace) -> dict[str, bytes]:
    """Return what is known of each token; what is the same for all of them is left out."""
    positions, time_s = trace.positions, trace.time_s
    is_plain = bool((np.diff(positions) == 1).all())
    return {
        "source": sources(trace).tobytes(),
        "positions": b"" if is_plain else positions.astype("<i4").tobytes(),
        "draft": trace.draft.tobytes() if (trace.draft >= 0).any() else b"",
        "time_s": time_s.astype("<f4").tobytes() if time_s.any() else b"",
    }


def _pooling_note(overview: Slab, is_live: bool) -> list[str]:
    num_rows, num_sites = overview.codes.shape[1], len(overview.row_of)
    if overview.is_exact:
        return []
    columns = f"each column is the mean of {overview.block} tokens" if overview.block > 1 else ""
    rows = f"each row is the mean of several sites ({num_sites} sites in {num_rows} rows)"
    what = " and ".join(filter(None, (columns, rows if num_rows < num_sites else "")))
    if is_live:
        return [f"In the overview {what}; zooming in fetches every token and site."]
    return [f"To keep this page small, {what}."]
