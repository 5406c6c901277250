"""Pictures of traces: figures, the static page, the text report. Reads data only: no torch, no engine.

Names are loaded when first used, so importing this costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.display.report import text_report
    from workbench.display.shown import Shown, show

__all__ = ["Shown", "show", "text_report"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "report" if name == "text_report" else "shown"
    return getattr(import_module(f"workbench.display.{module}"), name)
