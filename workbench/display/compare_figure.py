"""A comparison as a picture: settings side by side aligned on tokens, what differs, and the null pair in its own row.

Nothing at or below the null pair's floor is drawn as a difference.
"""

from __future__ import annotations

import numpy as np

from workbench.display import compare_blocks as blocks
from workbench.display.compare_lanes import Lane, l1_scale, lanes_of, null_lane, row_values, rows_of
from workbench.display.labels import HALF
from workbench.display.picture import Picture
from workbench.display.scales import SCALINGS
from workbench.display.sheet import MARGIN_IN, WIDTH_IN, Sheet, head, styled
from workbench.errors import UserError
from workbench.instrument.comparison import Comparison

TITLE = "One prompt, several settings: what changes"
LINE_TOKENS = 72  # as many token texts as stay legible side by side on one line
MOST_IN = 22.0  # a figure with token texts may be this high; a longer text is one line without them
TEXTS_IN = 0.62
CONTEXT_TOKENS = 8


class ComparedPicture(Picture):
    """The picture of a comparison; its HTML has the same as tables, with the texts side by side."""

    def __init__(self, comparison: Comparison, title: str):
        with styled():
            figure = _draw(comparison, title)
        super().__init__(figure, title, description(comparison, title))
        self.comparison = comparison

    def __repr__(self) -> str:
        return repr(self.comparison)

    def _html(self, png: bytes) -> str:
        from workbench.display.compare_page import tables

        return super()._html(png) + tables(self.comparison, self.title)


def compare(comparison: Comparison, title: str | None = None) -> ComparedPicture:
    """Draw two to eight settings of one prompt.

    One block of rows per setting: who leads at each token (colour and letter), whether its scalings were computed or
    reused, and each adapter's mean over sites. Then a row per setting with its difference from the first, and the null
    pair's; then the texts from where they part.

    Args:
        comparison: what `compare(engine, …)`, `Comparison.of` or `Comparison.load` gave.
        title: instead of the usual one.

    Raises:
        UserError: something that is no comparison.
    """
    if not isinstance(comparison, Comparison):
        kind = type(comparison).__name__
        raise UserError(f"this figure is drawn from a Comparison (compare(engine, prompt, settings)), not {kind}")
    return ComparedPicture(comparison, title or TITLE)


def description(comparison: Comparison, title: str) -> str:
    """Return the picture in words: the text alternative of the image."""
    said = [f"{label!r}: {comparison.says(label)}." for label in comparison.labels]
    said += [f"{note}."] if (note := comparison.stand_in()) else []
    said += [f"{label!r} failed: {reason}." for label, reason in comparison.failed.items()]
    return (
        f"{title}. {len(comparison.labels)} settings over {comparison.num_tokens} tokens, {comparison.prompt_tokens} "
        f"of them the prompt's, with adapters {', '.join(comparison.adapters) or 'none'}. {' '.join(said)} "
        f"Null pair: {comparison.floor_says()}."
    )


def facts(comparison: Comparison) -> str:
    """Return what all settings share, in one line."""
    trace = comparison.traces[comparison.first]
    parts = [f"{comparison.prompt_tokens} prompt tokens", f"{len(comparison.labels)} settings"]
    for name, key in (("Base", "base"), ("Mixture", "mixture"), ("Dtype", "dtype")):
        if trace.metadata.get(key) is not None:
            parts.append(f"{name}: {trace.metadata[key]}")
    instead = f", as {comparison.was_first!r} failed" if comparison.was_first is not None else ""
    parts.append(f"compared with {comparison.first!r}{instead}")
    return " · ".join(parts)


def badges(comparison: Comparison) -> list[str]:
    """Return what a reader must not miss."""
    traces = comparison.traces.values()
    found = ["edited"] if any(trace.metadata.get("edits") for trace in traces) else []
    half = {HALF[dtype] for trace in traces if (dtype := trace.metadata.get("dtype")) in HALF}
    found += sorted(half)
    found += [f"not compared with {comparison.was_first!r}"] if comparison.was_first is not None else []
    found += ["no null pair"] if comparison.null is None else []
    return found + ([f"{len(comparison.failed)} failed"] if comparison.failed else [])


def spans_of(comparison: Comparison, num_rows: int) -> tuple[list[tuple[int, int]], bool]:
    """Return `(start, stop)` of each line, and whether the token texts are written."""
    num_tokens = comparison.num_tokens
    count = -(-num_tokens // LINE_TOKENS)
    if count * line_in(comparison, num_rows, True) > MOST_IN:
        return [(0, num_tokens)], False
    size = -(-num_tokens // count)
    return [(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)], True


def line_in(comparison: Comparison, num_rows: int, has_texts: bool) -> float:
    """Return the height of one line: all settings' blocks and differences."""
    num_settings = len(comparison.labels)
    differences = num_settings - 1 + (comparison.null is not None)
    height = num_settings * blocks.block_in(num_rows) + 0.17 + differences * blocks.DIFFERENCE_IN + 0.5
    return height + (TEXTS_IN if has_texts else 0.1)


def _draw(comparison: Comparison, title: str):
    sheet = Sheet()
    lanes, null, rows = lanes_of(comparison), null_lane(comparison), rows_of(comparison)
    notes = [facts(comparison), f"Null pair: {comparison.floor_says()}."]
    notes += [f"Failed: {label!r}: {reason}" for label, reason in comparison.failed.items()]
    top = head(sheet, title, notes, badges(comparison))
    scale = _difference_scale(lanes, null)
    means = np.concatenate([row_values(lane.means, rows).reshape(-1) for lane in lanes])
    SCALINGS.bar(sheet, (8.1, top + 0.04, 2.6), means)
    scale.bar(sheet, (8.1, top + 0.5, 2.6), np.concatenate([lane.shown for lane in lanes]))
    top = max(blocks.legend(sheet, comparison.adapters, rows, top), top + 0.9) + 0.08
    spans, has_texts = spans_of(comparison, len(rows))
    widest = max(max(stop - start for start, stop in spans), 10)
    for start, stop in spans:
        width = (WIDTH_IN - blocks.LEFT_IN - blocks.RIGHT_IN) * (stop - start) / widest
        top = _line(sheet, lanes, null, rows, scale, (top, width), (start, stop), has_texts)
    sheet.text(MARGIN_IN, top, "What each setting changed, and the texts from where they part", size=9.5, weight="bold")
    return sheet.close(blocks.texts(sheet, entries(comparison), top + 0.24) + 0.05)


def _line(sheet, lanes, null, rows, scale, place: tuple[float, float], span: tuple[int, int], has_texts: bool) -> float:
    """Draw one line of tokens through all settings and return where it ends."""
    top, width = place
    longest = max(lanes, key=lambda lane: lane.trace.num_tokens)
    if has_texts:
        blocks.token_texts(sheet, lanes[0], (blocks.LEFT_IN, top + TEXTS_IN, width), span)
        top += TEXTS_IN + 0.04
    else:
        top += 0.1
    for lane in lanes:
        blocks.setting_block(sheet, lane, rows, (blocks.LEFT_IN, top, width), span)
        top += blocks.block_in(len(rows))
    sheet.text(MARGIN_IN, top - 0.06, f"difference from {lanes[0].label}"[:60], size=8, weight="bold")
    top += 0.13
    top = blocks.difference_rows(sheet, lanes[1:], null, scale, (blocks.LEFT_IN, top, width), span)
    blocks.token_numbers(sheet, longest, (blocks.LEFT_IN, top - 0.02, width), span)
    return top + 0.42


def _difference_scale(lanes: list[Lane], null: Lane | None):
    values = np.concatenate([lane.shown for lane in lanes] + ([null.l1] if null is not None else []))
    return l1_scale(0.0 if np.isnan(values).all() else float(np.nanmax(values)))


def entries(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Return label, sentence and text of each setting: its text from where it parts, with a few tokens before."""
    partings = [at for label in comparison.labels if (at := comparison.divergence(label)) is not None]
    found = []
    for label in comparison.labels:
        at = comparison.divergence(label)
        if label == comparison.first:
            at = min(partings, default=comparison.prompt_tokens)
        text = ""
        if at is not None:
            tokens = comparison.traces[label].tokens
            before = "".join(tokens[max(0, at - CONTEXT_TOKENS) : at])
            sign = blocks.PARTS if partings else "▸"
            text = f"… {before} {sign} {''.join(tokens[at:])}"
        found.append((label, comparison.says(label), text))
    return found
