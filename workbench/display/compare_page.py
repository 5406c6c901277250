"""A comparison as HTML without scripts: what each setting changed, the texts side by side, and a table of tokens.

Everything from a trace is escaped, and shown as visible text. Colours follow the reader's theme by style alone.
"""

from __future__ import annotations

from html import escape

import numpy as np

from workbench.display.compare_lanes import Lane, lanes_of
from workbench.display.palette import adapter_colour, adapter_key
from workbench.display.static_html import HINT, box, safe
from workbench.instrument.comparison import Comparison

MOST_TOKENS = 2000  # of a text, and in the table; longer ones are read from to_frame()
MOST_SHARES = 12
FITTING_SHARES = 4  # in the table, at the width of a screen


def tables(comparison: Comparison, title: str) -> str:
    """Return the HTML that goes below the figure; the title is seen in the figure, and heard here."""
    lanes = lanes_of(comparison)
    parts = [
        f'<div class="lw-sr" role="heading" aria-level="2">{safe(title)}</div>',
        _summary(comparison, lanes),
        _texts(comparison, lanes),
        _token_table(comparison, lanes),
    ]
    return box(parts, "lw-cmp", ("compare.css",))


def _cell(content: object, tag: str = "td", **attributes: str) -> str:
    given = "".join(f' {name}="{escape(value, quote=True)}"' for name, value in attributes.items())
    return f"<{tag}{given}>{content}</{tag}>"


def _number(value: float, digits: int = 3) -> str:
    return "–" if value is None or np.isnan(value) else f"{value:.{digits}g}"


def _summary(comparison: Comparison, lanes: list[Lane]) -> str:
    chosen = range(min(len(comparison.adapters), MOST_SHARES))
    heads = ["setting", "what it changed", "tokens", "computed", "reused", "text parts at token", "tokens that differ"]
    heads += ["mean difference", "largest"]
    shares = [f"{_chip(i)} <bdi>{safe(comparison.adapters[i])}</bdi>" for i in chosen]
    lines = [_summary_line(comparison, lane, chosen) for lane in lanes]
    if comparison.floor is not None:
        floor = comparison.floor
        at = "–" if floor.divergence is None else str(floor.divergence)
        cells = [comparison.null.num_tokens, int(comparison.null.computed.sum()), int(comparison.null.reused.sum()), at]
        cells += ["–", _number(_mean(floor.l1)), _number(floor.level)]
        lines.append(_line("null pair", comparison.floor_says(), cells, ["–"] * len(chosen)))
    elif comparison.null is None:
        lines.append(_line("null pair", comparison.floor_says(), ["–"] * 7, ["–"] * len(chosen)))
    failed = comparison.failed.items()
    lines += [_line(label, f"failed: {reason}", ["–"] * 7, ["–"] * len(chosen)) for label, reason in failed]
    head = "".join(_cell(safe(text), "th", scope="col") for text in heads)
    head += "".join(_cell(text, "th", scope="col", **{"class": "lw-cmp-who"}) for text in shares)
    many = ' class="lw-cmp-many"' if len(chosen) > FITTING_SHARES else ""
    return (
        '<p class="lw-cmp-marks">Differences are L1 distances of the scalings from the first setting’s, mean over '
        "sites, where they are above what the null pair shows. On the right, each adapter’s share.</p>"
        f'<section{many}><div class="lw-label">What each setting changed {HINT}</div>'
        '<div class="lw-plain-scroll lw-cmp-scroll" tabindex="0" role="region" aria-label="What each setting changed">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></section>"
    )


def _summary_line(comparison: Comparison, lane: Lane, chosen: range) -> str:
    counts, at = comparison.counts(lane.label), lane.divergence
    where = "–" if at is None else str(at) if lane.is_attributed else f"{at}, not attributed"
    cells = [lane.trace.num_tokens, counts["computed"], counts["reused"], where, int((~np.isnan(lane.shown)).sum())]
    cells += [_number(_mean(lane.shown)), _number(_largest(lane.shown))]
    shares = list(comparison.shares(lane.label).values())
    percents = ["–" if np.isnan(shares[i]) else f"{100 * shares[i]:.0f} %" for i in chosen]
    return _line(lane.label, comparison.says(lane.label), cells, percents)


def _line(label: str, sentence: str, cells: list, shares: list) -> str:
    head = _cell(f"<bdi>{safe(label)}</bdi>", "th", scope="row")
    said = _cell(f"<bdi>{safe(sentence)}</bdi>", **{"class": "lw-cmp-said"})
    return f"<tr>{head}{said}{''.join(_cell(safe(cell)) for cell in [*cells, *shares])}</tr>"


def _mean(values: np.ndarray) -> float:
    return float("nan") if np.isnan(values).all() else float(np.nanmean(values))


def _largest(values: np.ndarray) -> float:
    return float("nan") if np.isnan(values).all() else float(np.nanmax(values))


def _chip(index: int) -> str:
    return f'<span class="lw-swatch" style="background:{adapter_colour(index)}"></span><b>{adapter_key(index)}</b>'


def _texts(comparison: Comparison, lanes: list[Lane]) -> str:
    prompt = comparison.prompt_tokens
    marks = (
        '<p class="lw-cmp-marks">A letter where the leading adapter changes; '
        '<span class="lw-cmp-token lw-cmp-reused">reused</span> scalings have a dashed line, '
        '<span class="lw-cmp-token lw-cmp-differs">differing</span> ones a line above; '
        '<b class="lw-cmp-parts">≠</b> where a text parts from the first one’s.</p>'
    )
    columns = "".join(
        f'<section aria-label="Text of {safe(lane.label)}"><div class="lw-label" role="heading" aria-level="3"><bdi>'
        f'{safe(lane.label)}</bdi></div><div class="lw-cmp-text">{_tokens(lane, prompt, lane.trace.num_tokens)}</div>'
        "</section>"
        for lane in lanes
    )
    shared = f'<div class="lw-cmp-text">{_tokens(lanes[0], 0, prompt, shared=True)}</div>'
    return (
        f'{marks}<section aria-label="The prompt"><div class="lw-label" role="heading" aria-level="3">The prompt, as '
        f"<bdi>{safe(lanes[0].label)}</bdi> reads it</div>{shared}</section>"
        f'<div class="lw-cmp-texts">{columns}</div>'
    )


def _tokens(lane: Lane, start: int, stop: int, shared: bool = False) -> str:
    if start >= stop:
        return '<span class="lw-fact">no tokens</span>'
    found, last = [], None
    for at in range(start, min(stop, start + MOST_TOKENS)):
        if at == lane.divergence and not shared:
            kind = "" if lane.is_attributed else " not attributed: the null pair’s text parts by then, too"
            found.append(f'<b class="lw-cmp-parts" title="token {at}">≠ token {at}{kind}</b>')
        leader = int(lane.leading[at])
        classes = ["lw-cmp-token"]
        classes += ["lw-cmp-reused"] if lane.trace.reused[at] else []
        classes += ["lw-cmp-differs"] if not shared and not np.isnan(lane.shown[at]) else []
        style = f' style="--c:{adapter_colour(leader)}"' if leader >= 0 else ""
        letter = f' data-key="{adapter_key(leader)}"' if leader >= 0 and leader != last else ""
        last = leader
        found.append(f'<bdi class="{" ".join(classes)}"{letter}{style}>{safe(lane.trace.tokens[at])}</bdi>')
    if stop - start > MOST_TOKENS:
        found.append(f'<span class="lw-fact"> … and {stop - start - MOST_TOKENS} more tokens</span>')
    return "".join(found)


def _token_table(comparison: Comparison, lanes: list[Lane]) -> str:
    first, others = lanes[0], lanes[1:]
    count = min(comparison.num_tokens, MOST_TOKENS)
    heads = ["token", *(lane.label for lane in lanes)]
    rows = []
    for at in range(count):
        text = _text_cell(first, at)
        cells = [_cell(text)] + [_cell(_text_cell(lane, at) + _difference(lane, at)) for lane in others]
        rows.append(f"<tr>{_cell(at, 'th', scope='row')}{''.join(cells)}</tr>")
    more = f" The first {count} of {comparison.num_tokens} tokens." if count < comparison.num_tokens else ""
    head = "".join(_cell(f"<bdi>{safe(text)}</bdi>", "th", scope="col") for text in heads)
    return (
        '<details><summary>Token by token, as a table</summary><p class="lw-cmp-marks">Each setting’s token, and the '
        f"difference of its scalings from the first’s where it is above the floor.{more}</p>"
        '<div class="lw-plain-scroll lw-cmp-scroll" tabindex="0" role="region" aria-label="Token by token">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _text_cell(lane: Lane, at: int) -> str:
    if at >= lane.trace.num_tokens:
        return ""
    parts = '<b class="lw-cmp-parts">≠</b> ' if at == lane.divergence else ""
    return f'{parts}<bdi class="lw-cmp-plain">{safe(lane.trace.tokens[at])}</bdi>'


def _difference(lane: Lane, at: int) -> str:
    if at >= len(lane.shown) or np.isnan(lane.shown[at]):
        return ""
    return f' <span class="lw-fact">{lane.shown[at]:.2g}</span>'
