"""A trace in a terminal: the text marked by its leading adapter, and a table of shares.

A letter marks every change of the leading adapter, so nothing is said by colour alone.
"""

from __future__ import annotations

import os
import shutil
import sys

import numpy as np

from workbench.display.labels import NEWLINE, TAB, columns, facts, keyed, scale_note, visible
from workbench.display.palette import LIGHT, adapter_colour, adapter_key, contrast, rgb
from workbench.instrument.trace import Trace

MAX_WIDTH = 100
BAR_CELLS = 20
RESET = "\x1b[0m"


def text_report(trace: Trace, colour: bool | None = None, width: int | None = None) -> str:
    """Return the report. `colour` None means: only on a terminal that can, and not under NO_COLOR."""
    paint = _painter() if (_wants_colour() if colour is None else colour) else None
    width = max(20, width or min(MAX_WIDTH, shutil.get_terminal_size((MAX_WIDTH, 24)).columns))
    parts = [f"{name}: {value}" for name, value in facts(trace)]
    note = "[A] marks where adapter A takes the lead; [-] no scalings. " + scale_note(trace)
    blocks = [
        _wrap_words(" · ".join(parts), width),
        _text(trace, width, paint),
        _table(trace, paint),
        _wrap_words(note, width),
    ]
    return "\n\n".join("\n".join(block) for block in blocks)


def _wants_colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _painter():
    """Return `(text, adapter, underline) -> text` for the terminal: 24-bit colour, or the 256-colour cube."""
    true_colour = os.environ.get("COLORTERM", "").lower() in ("truecolor", "24bit")

    def code(colour: str) -> str:
        if true_colour:
            return "2;" + ";".join(map(str, rgb(colour)))
        # the cube's levels are 0, 95, 135, 175, 215, 255
        red, green, blue = (0 if c < 48 else 1 if c < 115 else (c - 35) // 40 for c in rgb(colour))
        return f"5;{16 + 36 * red + 6 * green + blue}"

    def paint(text: str, adapter: int, underline: bool = False) -> str:
        back = adapter_colour(adapter)
        ink = max((LIGHT.ink, "#ffffff"), key=lambda one: contrast(one, back))
        return f"\x1b[{'4;' if underline else ''}38;{code(ink)};48;{code(back)}m{text}{RESET}"

    return paint


def _text(trace: Trace, width: int, paint) -> list[str]:
    """Return the text in lines of at most `width` columns; reused scalings are underlined where there is colour."""
    leading, reused = trace.leading(), trace.reused
    lines, column, last = [""], 0, None
    for token, text in enumerate(trace.tokens):
        if token == trace.prompt_tokens and trace.generated.any():
            lines += ["── generated ──", ""]
            column, last = 0, None
        adapter = int(leading[token])
        if adapter != last:
            mark = f"[{adapter_key(adapter) if adapter >= 0 else '-'}]"
            pieces, last = [mark], adapter
        else:
            pieces = []
        pieces += _pieces(visible(text))
        for piece in pieces:
            cells = columns(piece.rstrip("\n"))
            if column + cells > width:
                lines.append("")
                column = 0
            shown = piece.rstrip("\n")
            lines[-1] += paint(shown, adapter, bool(reused[token])) if paint and adapter >= 0 and shown else shown
            column += cells
            if piece.endswith("\n"):
                lines.append("")
                column = 0
    return ["── prompt ──", *lines] if trace.prompt_tokens else lines


def _pieces(text: str) -> list[str]:
    """Cut a token where a line may break: after a newline, and every few characters of a long one."""
    text = text.replace(TAB + "\t", TAB + "   ")
    pieces = text.replace(NEWLINE + "\n", NEWLINE + "\n\0").split("\0")
    return [piece[i : i + 16] for piece in pieces for i in range(0, len(piece), 16)]


def _table(trace: Trace, paint) -> list[str]:
    """Return a line per adapter: letter, name, share of all tokens with a bar, of the prompt, of the generated."""
    everything, labels = trace.share(), keyed(tuple(map(visible, trace.adapters)))
    parts = {"prompt": ~trace.generated, "generated": trace.generated}
    shares = {name: list(trace.share(mask).values()) for name, mask in parts.items() if mask.any()}
    pad = max(columns(label) for label in [*labels, "adapter"])
    lines = [f"{'adapter':<{pad}}  {'share':>6} {'':<{BAR_CELLS}}" + "".join(f"  {name:>9}" for name in shares)]
    for index, label in enumerate(labels):
        share = everything[trace.adapters[index]]
        filled = 0 if np.isnan(share) else round(min(max(share, 0), 1) * BAR_CELLS)
        bar = "█" * filled + "·" * (BAR_CELLS - filled)
        cells = "".join(f"  {_percent(values[index]):>9}" for values in shares.values())
        gap = " " * (pad - columns(label))
        name = paint(label, index) if paint else label
        lines.append(f"{name}{gap}  {_percent(share):>6} {bar}{cells}")
    return lines


def _percent(share: float) -> str:
    return "–" if np.isnan(share) else f"{share:.1%}"


def _wrap_words(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(visible(text), width, break_on_hyphens=False) or [""]
