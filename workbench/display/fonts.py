"""Which fonts a figure is written in: DejaVu first, then what this machine has for the scripts DejaVu lacks.

Matplotlib picks the font glyph by glyph. A character that no font of the list has becomes a box: drawing never warns.
"""

from __future__ import annotations

import unicodedata
from functools import cache

from matplotlib import font_manager

SANS, MONO = "DejaVu Sans", "DejaVu Sans Mono"
BOX = "□"
# outlines only: bitmap fonts such as Noto Color Emoji cannot be drawn at any size
FALLBACKS = (
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK KR", "Noto Sans SC", "Noto Sans JP", "Noto Sans KR"),
    *("Source Han Sans SC", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei", "Droid Sans Fallback", "IPAexGothic"),
    *("PingFang SC", "Hiragino Sans GB", "Hiragino Sans", "Apple SD Gothic Neo", "Apple Symbols"),
    *("Microsoft YaHei", "SimHei", "Meiryo", "Malgun Gothic", "Nirmala UI", "Segoe UI Symbol", "Segoe UI Emoji"),
    *("Noto Sans", "Noto Sans Arabic", "Noto Sans Hebrew", "Noto Sans Devanagari", "Noto Sans Bengali"),
    *("Noto Sans Tamil", "Noto Sans Thai", "Noto Sans Symbols", "Noto Sans Symbols 2", "Noto Sans Math"),
    *("Noto Emoji", "Symbola", "Arial Unicode MS", "FreeSans", "Unifont"),
)


@cache
def families(first: str = SANS) -> tuple[str, ...]:
    """Return the fonts to look a glyph up in, in order: `first`, then those of `FALLBACKS` that are installed."""
    installed = set(font_manager.get_font_names())
    others = [SANS, *FALLBACKS] if first != SANS else FALLBACKS
    return (first, *(name for name in others if name in installed))


def drawable(text: str, family: str = SANS) -> str:
    """Return `text` with a box for every character that none of the fonts has, or that would act and not show."""
    known = _characters(family)
    return "".join(char if char == "\n" or (ord(char) in known and _shows(char)) else BOX for char in text)


def _shows(char: str) -> bool:
    return unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


@cache
def _characters(family: str) -> frozenset[int]:
    found: set[int] = set()
    for name in families(family):
        found.update(font_manager.get_font(font_manager.findfont(name)).get_charmap())
    return frozenset(found)
