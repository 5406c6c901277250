"""What else the model could have said: the likeliest next tokens after each token, as a grid to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from workbench.display.fonts import MONO, drawable, families
from workbench.display.labels import short
from workbench.display.marks import ink_on
from workbench.display.palette import LIGHT, mix
from workbench.display.picture import Picture
from workbench.display.scales import PROBABILITIES
from workbench.display.sheet import MARGIN_IN, Sheet, plain, styled
from workbench.display.trace_head import require_trace, trace_head
from workbench.errors import UserError
from workbench.instrument.trace import TokenIndex, Trace
from workbench.instrument.trace_checks import token_index

IDS, LOGPROBS = "logits:top.ids", "logits:top.logprobs"
ROWS_IN_COLUMN, MOST_ROWS = 40, 80
MOST_RANKS = 5
ROW_IN = 0.2
AFTER_IN, CAME_IN = 0.75, 0.7
SIDE_CHARS = 11
CHAR_IN = 0.051


def top_tokens(
    trace: Trace, texts: Mapping[int, str] | Callable[[int], str] | None = None, tokens: TokenIndex = None,
    title: str | None = None,
) -> Picture:
    """Draw, after each token, the likeliest next ones with their probabilities; the one that came is framed.

    Args:
        trace: with "logits:top" recorded.
        texts: token id -> text, for ids that are not in the trace itself; without it they show as `#id`.
        tokens: after which tokens (a slice, a mask or indices); None takes the first 80 that have values.
        title: above the figure.

    Raises:
        UserError: nothing was recorded, or no token is selected.
    """
    require_trace(trace)
    ids, logprobs = np.asarray(trace.extra(IDS).values), np.asarray(trace.extra(LOGPROBS).values, np.float64)
    if ids.ndim != 2 or ids.shape != logprobs.shape or not ids.shape[1]:
        shapes = f"{list(ids.shape)} and {list(logprobs.shape)}"
        raise UserError(f"{IDS!r} and {LOGPROBS!r} must both be [token, rank]; they have the shapes {shapes}")
    rows = np.flatnonzero((ids >= 0).any(1))
    if tokens is not None:
        rows = np.intersect1d(rows, token_index(tokens, trace.num_tokens))
    if not rows.size:
        raise UserError(f"no token here has values of {IDS!r}: of a prompt only the last token's logits are computed")
    drawn = rows[:MOST_ROWS]
    title = title or "What else could have come next"
    speller = _speller(trace, texts)
    with styled():
        sheet = Sheet()
        top = trace_head(sheet, trace, title, [_note(ids, rows, drawn)])
        PROBABILITIES.bar(sheet, (MARGIN_IN + 0.1, top + 0.06, 2.6), np.exp(logprobs[drawn]))
        top += 0.75
        top = _columns(sheet, top, trace, drawn, ids, logprobs, speller)
        return Picture(sheet.close(top), title, _words(trace, title, ids, logprobs, drawn, speller))


def _columns(
    sheet: Sheet, top: float, trace: Trace, rows: np.ndarray, ids: np.ndarray, logprobs: np.ndarray,
    spell: Callable[..., str],
) -> float:
    """Draw the rows in one column, or in two; return where they end."""
    columns = 2 if len(rows) > 12 else 1
    per_column = -(-len(rows) // columns)
    width = (sheet.width_in - 2 * MARGIN_IN - 0.4) / 2 if columns == 2 else 8.0
    for column in range(columns):
        part = rows[column * per_column : (column + 1) * per_column]
        axes = sheet.axes(MARGIN_IN + column * (width + 0.4), top, width, ROW_IN * (len(part) + 1))
        _grid(axes, trace, part, ids, logprobs, spell, width)
    return top + ROW_IN * (per_column + 1) + 0.2


def _speller(trace: Trace, texts: Mapping[int, str] | Callable[[int], str] | None) -> Callable[[int], str]:
    """Return how a token id is written: as the caller knows it, as the trace has it, or as its number."""
    # a token that adds no text of its own is part of a character
    own = {int(i): text for i, text in zip(trace.token_ids, trace.tokens, strict=True) if text}
    if texts is not None and not callable(texts) and not isinstance(texts, Mapping):
        raise UserError(f"texts must map token ids to texts, or be a function of an id, not {type(texts).__name__}")

    def spell(token_id: int, limit: int) -> str:
        known = texts(token_id) if callable(texts) else (texts or {}).get(token_id)
        if known is None:
            known = own.get(token_id)
        return f"#{token_id}" if known is None else short(str(known), limit)

    return spell


def _note(ids: np.ndarray, rows: np.ndarray, drawn: np.ndarray) -> str:
    ranks = min(ids.shape[1], MOST_RANKS)
    note = f"Each row: after this token, the {ranks} likeliest next ones, and what came; framed: the same."
    if len(drawn) < len(rows):
        note += f" The first {len(drawn)} of {len(rows)} rows; tokens= selects others."
    return note + " #number: a token whose text the trace does not know (texts= gives it)."


def _grid(
    axes: Axes, trace: Trace, rows: np.ndarray, ids: np.ndarray, logprobs: np.ndarray,
    spell: Callable[..., str], width: float,
) -> None:
    """Draw one column of rows; lengths are inches."""
    ranks = min(ids.shape[1], MOST_RANKS)
    cell = (width - AFTER_IN - CAME_IN) / ranks
    limit = max(4, int((cell - 0.3) / CHAR_IN))
    axes.set(xlim=(0, width), ylim=(ROW_IN * (len(rows) + 1), 0))
    axes.set_axis_off()
    heads = [(AFTER_IN - 0.08, "after", "right"), (width - CAME_IN + 0.08, "came", "left")]
    heads += [(AFTER_IN + (rank + 0.5) * cell, str(rank + 1), "center") for rank in range(ranks)]
    for x, text, ha in heads:
        axes.text(x, ROW_IN / 2, text, ha=ha, va="center", fontsize=7, color=LIGHT.muted)
    for number, token in enumerate(rows, start=1):
        y = ROW_IN * number
        _text(axes, AFTER_IN - 0.08, y, short(trace.tokens[token], SIDE_CHARS), "right")
        came = int(trace.token_ids[token + 1]) if token + 1 < trace.num_tokens else None
        for rank in range(ranks):
            if ids[token, rank] >= 0:
                chosen = int(ids[token, rank])
                box = (AFTER_IN + rank * cell, y, cell)
                _cell(axes, box, spell(chosen, limit), logprobs[token, rank], chosen == came)
        if came is not None:
            _text(axes, width - CAME_IN + 0.08, y, short(trace.tokens[token + 1], SIDE_CHARS), "left", weight="bold")


def _cell(axes: Axes, box: tuple[float, float, float], text: str, logprob: float, is_chosen: bool) -> None:
    x, y, width = box
    probability = float(np.exp(logprob)) if np.isfinite(logprob) else 0.0
    shade = PROBABILITIES.colour_of(probability)
    axes.add_patch(Rectangle((x + 0.01, y + 0.01), width - 0.02, ROW_IN - 0.02, facecolor=shade, lw=0))
    if is_chosen:
        frame = {"fill": False, "edgecolor": LIGHT.above, "lw": 1.2}
        axes.add_patch(Rectangle((x + 0.015, y + 0.015), width - 0.03, ROW_IN - 0.03, **frame))
    weight = "bold" if is_chosen else "normal"
    ink = ink_on(shade)
    _text(axes, x + 0.04, y, text, "left", color=ink, weight=weight, clip_on=True)
    faint = ink if ink != LIGHT.ink else mix(shade, LIGHT.ink, 0.75)
    share = f"{probability:.0%}" if probability >= 0.005 else "<1%"
    plain(axes.text(x + width - 0.03, y + ROW_IN / 2, share, ha="right", va="center", fontsize=5.2, color=faint))


def _text(axes: Axes, x: float, y: float, text: str, ha: str, **style: object) -> None:
    style = {"family": list(families(MONO)), "fontsize": 6, "va": "center_baseline", **style}
    plain(axes.text(x, y + ROW_IN / 2, drawable(text, MONO), ha=ha, **style))


def _words(
    trace: Trace, title: str, ids: np.ndarray, logprobs: np.ndarray, rows: np.ndarray, spell: Callable[..., str]
) -> str:
    came = [token for token in rows if token + 1 < trace.num_tokens]
    first = sum(int(ids[token, 0] == trace.token_ids[token + 1]) for token in came)
    parts = [
        f"after {short(trace.tokens[token], 14)!r}: {spell(int(ids[token, 0]), 14)!r} {np.exp(logprobs[token, 0]):.0%}"
        for token in rows[:6]
    ]
    return f"{title}. {len(rows)} rows; in {first} of {len(came)} the likeliest token came. {'; '.join(parts)}."
