"""The picture of a trace without scalings: its text, and how undecided the model was at each token, if recorded."""

from __future__ import annotations

import textwrap

import numpy as np

from workbench.display.fonts import MONO, drawable, families
from workbench.display.labels import badges, facts, runs, visible
from workbench.display.picture import Picture
from workbench.display.sheet import Sheet, head, styled
from workbench.display.static_html import box, safe
from workbench.display.static_html import head as html_head
from workbench.instrument.trace import Trace

TITLE = "What was said, token by token"
COLUMNS, MOST_LINES, LINE_IN = 118, 60, 0.17
FULL_NATS = 6.0  # drawn at full strength; as undecided as between 400 tokens that are alike
HIGH_NATS = 2.0  # marked with a line as well: undecided as between 7 tokens


class TextPicture(Picture):
    """A figure of the text or of the entropy, and a page of the text with both."""

    def __init__(self, trace: Trace, title: str | None = None):
        title = title or TITLE
        self.trace, self.entropy = trace, _entropy(trace)
        if self.entropy is None:
            super().__init__(_figure(trace, title), title, _words(trace, title))
        else:
            from workbench.display.time_figures import entropy

            made = entropy(trace)
            super().__init__(made.figure, title, f"{title}: {made.description}")

    def __repr__(self) -> str:
        return f"{self.trace!r}\n{textwrap.fill(self.description, 100)}"

    def _html(self, png: bytes) -> str:
        drawn = super()._html(png) if self.entropy is not None else ""
        edits = self.trace.metadata.get("edits") or ()
        warning = f'<div class="lw-edited"><b>✎ Edited run:</b> <bdi>{safe("; ".join(map(str, edits)))}</bdi></div>'
        said = [pair for pair in facts(self.trace) if pair[0] not in ("Scalings", "Edited run")]
        parts = [html_head(self.title, said), warning if edits else "", self._text(), _note(self.entropy)]
        return box([*parts, drawn])

    def _text(self) -> str:
        """Return the text, a piece per token, tinted by its entropy."""
        pieces = []
        generated = self.trace.generated
        starts = {start: "generated" if generated[start] else "prompt" for start, _ in runs(generated)}
        for token, text in enumerate(self.trace.tokens):
            if token in starts:
                pieces.append(f'<span class="lw-plain-part">{starts[token]}</span>')
            nats = np.nan if self.entropy is None else self.entropy[token]
            mark, style, said = "", "", f"token {self.trace.positions[token]}"
            if np.isfinite(nats):
                mark = " lw-plain-high" if nats >= HIGH_NATS else ""
                style = f' style="--o:{min(nats / FULL_NATS, 1):.2f}"'
                said += f": {nats:.2f} nats before the next"
            pieces.append(f'<bdi class="lw-plain-token{mark}"{style} title="{said}">{safe(text)}</bdi>')
        label = "The text, one piece per token"
        return f'<div class="lw-plain-text" tabindex="0" role="group" aria-label="{label}">{"".join(pieces)}</div>'


def _entropy(trace: Trace) -> np.ndarray | None:
    if "entropy" not in trace.extras:
        return None
    return np.asarray(trace.extra("entropy").values, np.float64)


def _note(entropy: np.ndarray | None) -> str:
    said = "No scalings were recorded: the base model ran alone, or other things were asked for."
    if entropy is not None:
        said += (
            f" The stronger the tint, the less decided what comes next (full at {FULL_NATS:g} nats); a line under a "
            f"token marks {HIGH_NATS:g} nats or more. The figure has the same as numbers."
        )
    return f'<p class="lw-plain-note">{said}</p>'


def _figure(trace: Trace, title: str):
    """Draw the text in lines, the prompt and what was generated apart."""
    with styled():
        sheet = Sheet()
        summary = " · ".join(f"{name}: {text}" for name, text in facts(trace) if name not in ("Scalings", "Created"))
        top = head(sheet, title, [summary, "No scalings were recorded."], badges(trace)) + 0.2
        left = MOST_LINES
        for name, mask in (("prompt", ~trace.generated), ("generated", trace.generated)):
            text = "".join(visible(text) for text, chosen in zip(trace.tokens, mask, strict=True) if chosen)
            if not text or left <= 0:
                continue
            sheet.text(0.2, top, name, size=8, weight="bold")
            lines = [part for line in text.split("\n") for part in textwrap.wrap(line, COLUMNS) or [""]]
            shown = lines[:left] + (["…"] if len(lines) > left else [])
            for number, line in enumerate(shown):
                place = top + LINE_IN * (number + 1.1)
                drawn = drawable(line.replace("\t", "    "), MONO)
                sheet.text(0.2, place, drawn, size=8).set_family(list(families(MONO)))
            left -= len(shown)
            top += LINE_IN * (len(shown) + 1.8)
        return sheet.close(top + 0.1)


def _words(trace: Trace, title: str) -> str:
    counts = f"{trace.num_tokens} tokens, {trace.prompt_tokens} of them the prompt's"
    return f"{title}. {counts}; no scalings. {trace.text[:400]}"
