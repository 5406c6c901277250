"""What the page and the widget are sent about a trace: labels as JSON, scalings as one byte each.

`scalings.js` reads exactly these names. A byte is round(scaling * STEPS); codes above STEPS are marks, not values.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.display.labels import facts, layer_of, scale_note, short, visible, without_value
from workbench.display.palette import adapter_colour, adapter_key, themes
from workbench.instrument.trace import Trace, nan_mean

STEPS = 250  # one step is 0.004, so a shown value is within 0.002 of the recorded one
BELOW, ABOVE, MISSING = 253, 254, 255
MISSING_LEADER = 65535
NO_VALUE = -2  # in the place of a source: the token was an input, and nothing of its scalings is a number
MAX_VALUE_BYTES = 8_000_000
MAX_OUTLIERS = 100_000


def state(trace: Trace, title: str) -> dict[str, Any]:
    """Return the state of a view of `trace`: JSON-able values and bytes."""
    values, rows, notes = pooled(trace)
    tokens, _, adapters = values.shape
    outliers = np.flatnonzero((values < 0) | (values > 1))
    if len(outliers) > MAX_OUTLIERS:
        notes.append(f"Only the first {MAX_OUTLIERS} values outside 0 … 1 are kept exactly; the others show as marks.")
        outliers = outliers[:MAX_OUTLIERS]
    return {
        "view": "scalings",
        "title": visible(title),
        "facts": facts(trace),
        "edits": [visible(str(edit)) for edit in np.atleast_1d(trace.metadata.get("edits") or [])],
        "note": scale_note(trace),
        "notes": notes,
        "shape": [tokens, len(rows["labels"]), adapters],
        "codes": {"steps": STEPS, "below": BELOW, "above": ABOVE, "missing": MISSING},
        "adapters": list(map(visible, trace.adapters)),
        "keys": [adapter_key(i) for i in range(adapters)],
        "colours": [adapter_colour(i) for i in range(adapters)],
        "themes": themes(),
        "tokens": list(map(visible, trace.tokens)),
        "labels": [short(text, 10) for text in trace.tokens],
        "rows": rows,
        "generated": trace.generated.astype(int).tolist(),
        "positions": trace.positions.tolist(),
        "source": sources(trace).tolist(),
        "draft": trace.draft.tolist(),
        "time_s": np.round(trace.time_s, 3).tolist(),
        "shares": _shares(trace),
        "values": quantised(values).tobytes(),
        "leaders": leaders(values).tobytes(),
        "means": trace.token_means().astype("<f4").tobytes(),
        "outlier_at": outliers.astype("<u4").tobytes(),
        "outlier_value": values.reshape(-1)[outliers].astype("<f4").tobytes(),
    }


def sources(trace: Trace) -> np.ndarray:
    """Return int32 `[token]`: the trace's sources, with NO_VALUE where none of the scalings is a number."""
    return np.where(without_value(trace), NO_VALUE, trace.source).astype("<i4")


def quantised(values: np.ndarray) -> np.ndarray:
    """Return `values` as uint8 codes of the same shape: steps of 1/STEPS, or BELOW, ABOVE, MISSING."""
    codes = np.rint(np.nan_to_num(values.astype(np.float32).clip(0, 1)) * STEPS).astype(np.uint8)
    codes[values < 0] = BELOW
    codes[values > 1] = ABOVE
    codes[np.isnan(values)] = MISSING
    return codes


def leaders(values: np.ndarray) -> np.ndarray:
    """Return `[token, row]` uint16: the adapter with the largest scaling, MISSING_LEADER where there is none.

    Sent beside the codes, because values that round to one code would tie.
    """
    missing = np.isnan(values)
    best = np.where(missing, -np.inf, values).argmax(2).astype("<u2")
    return np.where(missing.all(2), np.uint16(MISSING_LEADER), best).astype("<u2")


def pooled(trace: Trace, max_bytes: int = MAX_VALUE_BYTES) -> tuple[np.ndarray, dict[str, list], list[str]]:
    """Return `values[token, row, adapter]` of at most `max_bytes` codes, the rows' labels, and notes for the reader.

    A row is a site; where that is too much it is the mean over the sites of a layer, then of several layers.
    """
    layers = [layer_of(site) for site in trace.sites]
    if trace.values.size <= max_bytes:
        kinds = [site.rpartition(".")[2] for site in trace.sites]
        return trace.values, {"labels": list(trace.sites), "layers": layers, "kinds": kinds}, []
    order = list(dict.fromkeys(layers))
    per_row = trace.num_tokens * len(trace.adapters)
    merged = max(1, -(-len(order) * per_row // max_bytes))
    groups = [order[i : i + merged] for i in range(0, len(order), merged)]
    columns = [[i for i, layer in enumerate(layers) if layer in group] for group in groups]
    values = np.stack([nan_mean(trace.values[:, column], 1) for column in columns], 1).astype(np.float32)
    labels = [_group_label(group, len(column)) for group, column in zip(groups, columns, strict=True)]
    what = "the sites of a layer" if merged == 1 else f"the sites of {merged} layers"
    note = f"To keep this page small each row is the mean over {what} ({len(trace.sites)} sites in {len(groups)} rows)."
    return values, {"labels": labels, "layers": [group[0] for group in groups], "kinds": [""] * len(groups)}, [note]


def _group_label(group: list[int | None], num_sites: int) -> str:
    numbers = [layer for layer in group if layer is not None]
    where = "outside the layers" if not numbers else f"layer {numbers[0]}"
    if len(numbers) > 1:
        where = f"layers {numbers[0]}-{numbers[-1]}"
    return f"{where} (mean of {num_sites} sites)"


def _shares(trace: Trace) -> dict[str, list[float | None] | None]:
    """Return the share of each adapter over all tokens, the prompt and the generated ones; None without any.

    None as well for a share without an end, which JSON does not have.
    """
    parts = {"all": None, "prompt": ~trace.generated, "generated": trace.generated}
    shares: dict[str, list[float | None] | None] = {}
    for name, mask in parts.items():
        if mask is not None and not mask.any():
            shares[name] = None
            continue
        shares[name] = [round(share, 4) if np.isfinite(share) else None for share in trace.share(mask).values()]
    return shares
