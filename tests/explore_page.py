"""What the tests of explore in a browser share: where its cells lie on the page, and how its parts are read."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from workbench import Explore

VIEW = "document.querySelector('.lw-explore').lwView"
GEOMETRY = f"() => {{ const g = {VIEW}.geometry; return {{ ...g, x: undefined }}; }}"
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="


def saved(view: Explore, path: Path) -> Path:
    """Save the page with a dot for the figure: drawing that takes longer than the test, and test_explore.py does."""
    shown = view.show()
    shown.png = base64.b64decode(DOT)
    return shown.save(path)


def place(page: Any, token: float, site: int | None = None, mean: int | None = None) -> tuple[float, float]:
    """Return the middle of a cell in css pixels of the page: a site's, an adapter's mean, or the strip of leads."""
    g = page.evaluate(GEOMETRY)
    box = page.locator(".lw-over").bounding_box()
    x = box["x"] + g["gutter"] + (token + 0.5 - g["first"]) * g["cell"]
    y = g["lead"] + 6
    if mean is not None:
        y = g["means"] + (mean + 0.5) * g["rowA"]
    if site is not None:
        y = g["map"] + (site + 0.5) * g["rowB"]
    return x, box["y"] + y


def visible(page: Any) -> list[float]:
    return page.evaluate(f"() => [{VIEW}.geometry.first, {VIEW}.geometry.last]")


def readings(page: Any, name: str) -> list[str]:
    return page.locator(f".lw-reading [data-{name}]").all_inner_texts()


def until(page: Any, expression: str, timeout: float = 5000) -> None:
    page.wait_for_function(expression, timeout=timeout)
