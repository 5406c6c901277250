"""Pictures of traces: figures, the static page, the text report. Reads data only: no torch, no engine.

Names are loaded when first used, so importing this costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.display import figures
    from workbench.display.explorer import Explore, explore
    from workbench.display.picture import Picture
    from workbench.display.report import text_report
    from workbench.display.shown import Shown, show

# a function and its module differ in name: importing a module would put it where the function is looked for
_MODULES = {
    "Explore": "explorer",
    "explore": "explorer",
    "Picture": "picture",
    "Shown": "shown",
    "show": "shown",
    "text_report": "report",
}
__all__ = ["Explore", "explore", "figures", "Picture", "Shown", "show", "text_report"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "figures":
        return import_module("workbench.display.figures")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"workbench.display.{_MODULES[name]}"), name)
