"""What worker processes of the sweeps' tests run: they must be able to import it, which a test file is not."""

from __future__ import annotations

import os
import signal
from typing import Any

from workbench.sweep.runner import execute


def figures(point: Any, repeat: int, folder: Any) -> dict[str, float]:
    """Measure nothing real."""
    (folder / "kept.txt").write_text(f"{point.seed}")
    return {"tok_s": 10.0 * point.seed + repeat}


def killed_once(store: Any, unit: Any, threads: int | None, workers: int) -> tuple:
    """Run a unit; the first worker that meets seed 1 dies."""
    if unit.point.seed == 1 and not (store.out / "killed").exists():
        (store.out / "killed").write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return unit, execute(store, unit, figures)


def deadly(store: Any, unit: Any, threads: int | None, workers: int) -> tuple:
    """Run a unit; seed 1 kills every worker."""
    if unit.point.seed == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return unit, execute(store, unit, figures)
