"""Shipped: the grids that come with the workbench and what they measured, in a checkout or in the installed package."""

from __future__ import annotations

from pathlib import Path

import workbench


def results_folder() -> Path:
    """Return the folder of the tables that were measured with the workbench's own grids."""
    return _experiments() / "results"


def shipped_grids() -> dict[str, Path]:
    """Return the workbench's own grids: TOML files by name."""
    return {path.stem: path for path in sorted((_experiments() / "grids").glob("*.toml"))}


def _experiments() -> Path:
    package = Path(workbench.__file__).resolve().parent
    beside = package.parent / "experiments"
    return beside if (beside / "grids").is_dir() else package / "experiments"
