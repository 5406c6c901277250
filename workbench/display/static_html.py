"""HTML without scripts, for pictures whose page is text and tables; the theme follows the reader's by style alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from workbench.display.labels import visible
from workbench.display.page import source
from workbench.display.palette import DARK, LIGHT, Theme

SHORT = 24  # characters of a cell that is not broken into lines
_NAMES = ("page", "ink", "muted", "line", "card", "focus", "missing", "above", "below")


HINT = '<span class="lw-plain-hint">(scrolls sideways →)</span>'


def box(parts: Iterable[str], kind: str = "", styles: Sequence[str] = ()) -> str:
    """Return the parts in a box that has both themes: the system's choice, unless JupyterLab has made one.

    Args:
        parts: HTML.
        kind: a class of the box, which the rules of `styles` begin with.
        styles: names of further style files.
    """
    light, dark = _variables(LIGHT), _variables(DARK)
    themed = (
        f".lw-plain {{ {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ body:not([data-jp-theme-light]) .lw-plain {{ {dark} }} }}\n"
        f'body[data-jp-theme-light="false"] .lw-plain {{ {dark} }}\n'
    )
    body = "\n".join(parts)
    rules = "".join(map(source, ("base.css", "static.css", *styles)))
    style = f"<style>\n{rules}{themed}</style>"
    return f'<div class="lw-host"><div class="{f"lw lw-plain {kind}".strip()}">\n{body}\n</div></div>\n{style}\n'


def safe(text: object) -> str:
    """Return text for HTML: escaped, and what a reader could miss spelled out."""
    return escape(visible(str(text)), quote=True)


def head(title: str, facts: Iterable[tuple[str, str]]) -> str:
    """Return the title and the facts under it."""
    pairs = "".join(
        f'<span><span class="lw-fact">{safe(name)}</span> <bdi>{safe(text)}</bdi></span>' for name, text in facts
    )
    heading = f'<div class="lw-title" role="heading" aria-level="2">{safe(title)}</div>'
    return f'<div class="lw-head">{heading}<div class="lw-facts">{pairs}</div></div>'


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in a box that scrolls; what is None is a dash."""
    heads = "".join(f'<th scope="col">{safe(name)}</th>' for name in columns)
    lines = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>\n" for row in rows)
    return (
        f'<section><div class="lw-label">{safe(caption)} {HINT}</div>'
        f'<div class="lw-plain-scroll" tabindex="0" role="group" aria-label="{safe(caption)}">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>\n{lines}</tbody></table></div></section>"
    )


def _cell(content: object) -> str:
    text = "–" if content is None or content != content else safe(content)
    kept = ' class="lw-plain-short"' if len(text) <= SHORT else ""
    return f"<td{kept}><bdi>{text}</bdi></td>"


def _variables(theme: Theme) -> str:
    scheme = "dark" if theme is DARK else "light"
    return " ".join(f"--lw-{name}: {getattr(theme, name)};" for name in _NAMES) + f" color-scheme: {scheme};"
