"""How tokens, sites and metadata are spelled in pictures. Whatever a token holds, it shows as visible, inert text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

import numpy as np

from workbench.display.palette import adapter_key
from workbench.instrument.trace import Trace

TITLE = "Which adapter speaks, token by token"
EMPTY = "▫"  # a token that adds no text of its own: part of a character
NEWLINE = "↵"
TAB = "→"
CONTROLS = (
    *("NUL", "SOH", "STX", "ETX", "EOT", "ENQ", "ACK", "BEL", "BS", "HT", "LF", "VT", "FF", "CR", "SO", "SI"),
    *("DLE", "DC1", "DC2", "DC3", "DC4", "NAK", "SYN", "ETB", "CAN", "EM", "SUB", "ESC", "FS", "GS", "RS", "US"),
)
FACTS = {
    "base": "Base",
    "mixture": "Mixture",
    "adapter": "Adapter",
    "policy": "Scalings policy",
    "tgt_non_granular_index": "tgt_non_granular_index",
    "dtype": "Dtype",
    "created": "Created",
    "request_id": "Request",
}
HALF = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "half": "fp16"}


def visible(text: str) -> str:
    """Return `text` with every character a reader could miss spelled out; newlines and tabs also keep their effect."""
    return "".join(_visible_char(char) for char in text) if text else EMPTY


def short(text: str, limit: int = 14) -> str:
    """Return `text` on one line, at most `limit` columns wide, for ticks and readouts."""
    line = visible(text).replace("\n", "").replace("\t", "").replace(" ", "·")
    if columns(line) <= limit:
        return line
    room = limit - 1
    while columns(line[:room]) > limit - 1:
        room -= 1
    return line[:room] + "…"


def columns(text: str) -> int:
    """Return how many terminal columns `text` takes: two for a wide character, none for a combining one."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(unicodedata.category(char) in ("Mn", "Me", "Cf") for char in text)


def _visible_char(char: str) -> str:
    if char == "\n":
        return NEWLINE + "\n"
    if char == "\t":
        return TAB + "\t"
    # names, because few fonts have the control pictures
    if ord(char) < 0x20:
        return f"‹{CONTROLS[ord(char)]}›"
    # format characters are invisible or turn the text around; combining ones that make emoji must stay
    category = unicodedata.category(char)
    if category in ("Cc", "Cs", "Co", "Cn", "Zl", "Zp") or (category == "Cf" and char != "\u200d"):
        return f"‹U+{ord(char):04X}›"
    return "␣" if category == "Zs" and char != " " else char


def counted(count: int, what: str) -> str:
    """Return a count with its noun: `1 step`, `2 steps`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def layer_of(site: str) -> int | None:
    """Return the layer number in a site's path, None for a site outside the layers (`lm_head`)."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", site)
    return int(found.group(1)) if found else None


def layer_runs(layers: Sequence[int | None]) -> list[tuple[int | None, int, int]]:
    """Return `(layer, start, stop)` for each run of neighbouring sites of one layer."""
    runs: list[tuple[int | None, int, int]] = []
    for index, layer in enumerate(layers):
        if runs and runs[-1][0] == layer:
            runs[-1] = (layer, runs[-1][1], index + 1)
        else:
            runs.append((layer, index, index + 1))
    return runs


def layer_ticks(layers: Sequence[int | None], most: int = 12) -> list[tuple[float, str]]:
    """Return `(row, label)` for the middles of layers, so few that at most `most` labels fill the axis."""
    ticks: list[tuple[float, str]] = []
    for layer, start, stop in layer_runs(layers):
        middle = (start + stop - 1) / 2
        if not ticks or middle - ticks[-1][0] >= len(layers) / most:
            ticks.append((middle, "-" if layer is None else str(layer)))
    return ticks


def without_value(trace: Trace) -> np.ndarray:
    """Return bool `[token]`: whether a token that was an input has no scaling at all that is a number."""
    found = np.zeros(trace.num_tokens, bool)
    if trace.has_scalings:
        found[:] = np.isnan(trace.values[:, 0, 0]) & (trace.source >= 0)
        # only the doubtful ones are read whole: the values may lie in a file
        for token in np.flatnonzero(found):
            found[token] = np.isnan(trace.values[token]).all()
    return found


def facts(trace: Trace) -> list[tuple[str, str]]:
    """Return the summary of a trace as `(name, value)` pairs, counts first, then what the metadata says."""
    none = without_value(trace)
    counts = [f"{int((trace.computed & ~none).sum())} computed", f"{int((trace.reused & ~none).sum())} reused"]
    counts += [f"{int(none.sum())} without a value"] if none.any() else []
    tokens = f"{trace.prompt_tokens} prompt + {trace.num_tokens - trace.prompt_tokens} generated"
    pairs = [("Tokens", tokens), ("Scalings", ", ".join(counts))]
    pairs += [(label, str(trace.metadata[key])) for key, label in FACTS.items() if trace.metadata.get(key) is not None]
    if trace.metadata.get("edits"):
        pairs.append(("Edited run", ", ".join(map(str, np.atleast_1d(trace.metadata["edits"])))))
    return pairs


def badges(trace: Trace) -> list[str]:
    """Return what nobody may miss about a trace: that the run was edited, that it was computed in half precision."""
    found = []
    if trace.metadata.get("edits"):
        found.append("edited: " + ", ".join(map(str, np.atleast_1d(trace.metadata["edits"]))))
    dtype = str(trace.metadata.get("dtype") or "").removeprefix("torch.")
    if dtype in HALF:
        found.append(HALF[dtype])
    return found


def scale_note(trace: Trace) -> str:
    """Return what 1.0 means in this trace, and how many values lie outside 0 … 1."""
    sums = trace.values.sum(2, dtype=np.float64)
    sums = sums[~np.isnan(sums)]
    note = "1.0 = the adapter's full change is added at that site and token; 0 = none of it."
    if sums.size and np.abs(sums - 1).max() < 0.01:
        note = note[:-1] + ". The adapters of one site and token sum to 1, so 1.0 = this adapter alone."
    above, below = int((trace.values > 1).sum()), int((trace.values < 0).sum())
    if above or below:
        note += f" Outside the scale and marked: {above} values above 1, {below} below 0."
    if trace.metadata.get("rounding"):
        note += f" Stored {trace.metadata['rounding']}."
    return note


def description(trace: Trace, title: str) -> str:
    """Return the picture in words: the text alternative of the image."""
    shares = ", ".join(f"{name} {share:.0%}" for name, share in trace.share().items())
    leading, spans = trace.leading(), []
    for start, stop in runs(leading):
        if leading[start] >= 0 and len(spans) < 12:
            spans.append(f"tokens {start}-{stop - 1} {trace.adapters[leading[start]]}")
    return (
        f"{title}. Heatmaps of the scalings of {len(trace.adapters)} adapters over {trace.num_tokens} tokens and "
        f"{len(trace.sites)} sites. Mean share: {shares}. Leading adapter: {'; '.join(spans) or 'none'}."
    )


def runs(values: np.ndarray) -> list[tuple[int, int]]:
    """Return `(start, stop)` of each run of equal neighbours in a 1-d array."""
    edges = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    return list(zip(edges[:-1], edges[1:], strict=True))


def keyed(adapters: Sequence[str]) -> list[str]:
    """Return the adapters' names, each after its letter: `A python`."""
    return [f"{adapter_key(index)} {name}" for index, name in enumerate(adapters)]
