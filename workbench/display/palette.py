"""The colours of every picture, defined once: adapters, the one scale for scalings, and the page in light and dark.

An adapter keeps its colour and its letter in figures, pages, reports and widgets. Colour never stands alone.
"""

from __future__ import annotations

import colorsys
from dataclasses import asdict, dataclass

# Okabe and Ito's seven, then three that stay apart from them under simulated protanopia, deuteranopia, tritanopia
ADAPTER_COLOURS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#f0e442",
    "#781ee1",
    "#a51e1e",
    "#a5d2b4",
)

# from −1 over nothing to +1: orange and blue stay apart for colour-blind eyes, and both ends are equally dark
DIFFERENCE = ("#7a2f00", "#c2651a", "#efb27a", "#f8f7f3", "#92bfe0", "#3479b3", "#0b3a6e")
OTHERS = "#8c959f"  # adapters that are drawn together


@dataclass(frozen=True)
class Theme:
    """One look of the page; `scale` are evenly spaced stops from scaling 0 to scaling 1."""

    page: str
    ink: str
    muted: str
    line: str
    card: str
    focus: str
    missing: str
    above: str
    below: str
    tint: float  # largest opacity of an adapter's colour behind text
    scale: tuple[str, ...]


LIGHT = Theme(
    page="#ffffff",
    ink="#1b1f24",
    muted="#57606a",
    line="#d0d7de",
    card="#f6f8fa",
    focus="#0a3069",
    missing="#8c959f",
    above="#d1006c",
    below="#a34700",
    tint=0.5,
    scale=("#fbfcf4", "#dcefdb", "#a9d9cd", "#62b6c4", "#2b86b6", "#1f559c", "#0e1f5b"),
)
DARK = Theme(
    page="#0d1117",
    ink="#e6edf3",
    muted="#9198a1",
    line="#343b44",
    card="#161b22",
    focus="#79c0ff",
    missing="#6e7681",
    above="#ff5ca8",
    below="#ff9d4d",
    tint=0.36,
    scale=("#121820", "#17324c", "#1c5379", "#23799b", "#45a5a8", "#93d0ad", "#f4f8cf"),
)


def adapter_colour(index: int) -> str:
    """Return the colour of the adapter at `index` of the trace's adapter axis, as `#rrggbb`."""
    if index < len(ADAPTER_COLOURS):
        return ADAPTER_COLOURS[index]
    extra = index - len(ADAPTER_COLOURS)
    # steps of the golden angle never meet again; three lightnesses keep neighbours in hue apart
    hue = (0.07 + extra * 0.618034) % 1
    red, green, blue = colorsys.hls_to_rgb(hue, (0.42, 0.58, 0.5)[extra % 3], 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def adapter_key(index: int) -> str:
    """Return the letter that stands for an adapter where colour may not: A, B, … Z, AA, AB, …"""
    letters = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        letters = chr(ord("A") + rest) + letters
    return letters


def rgb(colour: str) -> tuple[int, int, int]:
    """Return `#rrggbb` as three numbers from 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def mix(below: str, above: str, opacity: float) -> str:
    """Return the colour seen when `above` lies with `opacity` over `below`."""
    mixed = (round(b + (a - b) * opacity) for b, a in zip(rgb(below), rgb(above), strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, from 1 to 21, as WCAG defines it (4.5 is enough for text)."""
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def themes() -> dict[str, dict]:
    """Return both themes as JSON-able dicts, for the page and the widget."""
    return {"light": asdict(LIGHT), "dark": asdict(DARK)}


def _luminance(colour: str) -> float:
    channels = [c / 255 for c in rgb(colour)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
