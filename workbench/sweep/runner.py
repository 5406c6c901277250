"""Run a sweep: what is missing of a grid, unit by unit, wherever it is told to.

Contract: a unit that fails is recorded with its error, and the others run. Ctrl-C stops after the units that are
running; what is finished stays, and the same command goes on from there. So does one after a kill. Whatever ends a
sweep short of a kill, its tables are written.
"""

from __future__ import annotations

import errno
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from workbench.errors import UserError
from workbench.sweep.grid import Grid
from workbench.sweep.inputs import Inputs
from workbench.sweep.others import Watch
from workbench.sweep.places import require_tables, write_tables
from workbench.sweep.point import PointSettings
from workbench.sweep.store import DONE, FAILED, Session, Store, Unit, units_of, write_result

# a disk that takes nothing more: no point's fault
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class Backend(Protocol):
    """Where units run.

    Attributes:
        name: as a reader may know it: "in process", "joblib 4", "ray".
        is_alone: no two units run at once.
    """

    name: str
    is_alone: bool

    def run(
        self, store: Store, units: Sequence[Unit], stop: threading.Event
    ) -> Iterator[tuple[Unit, dict[str, Any]]]:
        """Yield each unit and its result as it ends, in any order; begin none once `stop` is set."""
        ...


@dataclass
class Report:
    """What a sweep did.

    Attributes:
        done, failed, skipped: names of units that ran, that failed, and that had a result before.
        failed_before: those of `skipped` whose result is a failure.
        left: how many were not begun, after Ctrl-C.
        errors: unit -> why it failed.
        table: the Parquet file, None when nothing is finished.
    """

    done: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed_before: list[str] = field(default_factory=list)
    left: int = 0
    errors: dict[str, str] = field(default_factory=dict)
    table: Any = None


def wanted_units(
    grid: Grid, *, only: Sequence[str] = (), limit: int | None = None, shard: tuple[int, int] | None = None
) -> list[Unit]:
    """Return the units that a command asks for.

    Args:
        grid: of all.
        only: filters, see `Grid.only`; a point that any of them fits is in.
        limit: so many points at most, the first.
        shard: (i, n): the i-th of n parts, i from 1; the parts are disjoint and together everything.
    """
    chosen: Sequence[PointSettings] = grid.points
    if only:
        fitting = {point for each in only for point in grid.only(each)}
        chosen = [point for point in grid.points if point in fitting]
    if limit is not None:
        chosen = chosen[:limit]
    if shard is not None:
        index, count = shard
        chosen = [point for number, point in enumerate(chosen) if number % count == index - 1]
    return units_of(grid, chosen)


def sweep(
    store: Store, units: Sequence[Unit], backend: Backend, *, retry_failed: bool = False,
    progress: Callable[[Unit, dict[str, Any]], None] = lambda unit, result: None,
) -> Report:
    """Run the units that have no result, and write the tables.

    Args:
        store: where results go.
        units: in the order they are to run.
        backend: see `workbench.sweep.backends`.
        retry_failed: run those again that failed.
        progress: called with each unit that has ended, and its result.

    Raises:
        UserError: results cannot be written; what is finished is kept.
    """
    store.begin()
    require_tables(store)
    store.session = Session(backend.name, backend.is_alone)
    missing = store.missing(units, retry_failed)
    known = set(units) - set(missing)
    report = Report(skipped=[unit.name for unit in units if unit in known])
    report.failed_before = [unit.name for unit in units if unit in known and store.result(unit)["status"] == FAILED]
    try:
        with stoppable() as stop:
            for unit, result in backend.run(store, missing, stop):
                (report.done if result["status"] == DONE else report.failed).append(unit.name)
                if result["status"] == FAILED:
                    report.errors[unit.name] = result["error"]
                progress(unit, result)
    except BaseException:
        # whatever ended it, the table has what is finished; and a disk that is full has said so already
        with suppress(UserError):
            write_tables(store)
        raise
    report.left = len(missing) - len(report.done) - len(report.failed)
    report.table = write_tables(store)
    return report


def execute(store: Store, unit: Unit, measure: Callable[[PointSettings, int, Any], dict[str, Any]]) -> dict[str, Any]:
    """Run one unit, write its result, and return it.

    Args:
        store: where it goes.
        unit: what runs.
        measure: (point, repeat, folder) -> its figures, plain numbers.

    Raises:
        UserError: the result cannot be written.
    """
    from workbench.sweep.machine import load_average

    read = Inputs().of(unit.point)
    # figures of a clock that cannot jump; the date is for the reader
    started, before, watch = time.perf_counter(), load_average(), Watch()
    with store.making(unit) as folder:
        result = {**_said(store, unit), **_measured(unit, measure, folder)}
        others = watch.others_cores() if store.session.is_alone else None
        found = _environment(unit.point)
        # what was there before it was read; what had to be fetched is known only now
        inputs = {**Inputs().of(unit.point), **read}
        result |= {"seconds": time.perf_counter() - started, "load_before": before, "load_after": load_average(),
                   "others_cores": others, "inputs": inputs, "created": found["created"], "environment": found}
        write_result(folder, result)
    return result


def record_failure(store: Store, unit: Unit, error: str) -> dict[str, Any]:
    """Record a unit that failed outside of itself, and return its result."""
    result = {**_said(store, unit), "status": FAILED, "error": error, "figures": None,
              "inputs": Inputs().of(unit.point)}
    with store.making(unit) as folder:
        write_result(folder, result)
    return result


def _said(store: Store, unit: Unit) -> dict[str, Any]:
    return {"point": unit.point.id, "repeat": unit.repeat, "settings": unit.point.settings, **store.session.facts()}


def _measured(unit: Unit, measure: Callable[[PointSettings, int, Any], dict[str, Any]], folder: Any) -> dict[str, Any]:
    try:
        return {"status": DONE, "error": None, "figures": plain(measure(unit.point, unit.repeat, folder))}
    except Exception as error:  # a point's failure is its own
        if isinstance(error, OSError) and error.errno in _DISK:
            raise UserError(f"cannot write results at {str(folder)!r}: {error.strerror or error}; what is finished "
                            "is kept, and the same command goes on from there") from error
        said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        return {"status": FAILED, "error": said, "figures": None}


def plain(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures as JSON has them: Python's numbers, None for what is no number or endless.

    Raises:
        TypeError: a figure that is neither a number nor a word.
    """
    found = {}
    for key, value in figures.items():
        number = value.item() if hasattr(value, "item") else value
        if not isinstance(number, int | float | str | None):
            raise TypeError(f"figure {key!r} is a {type(value).__name__}")
        found[key] = None if isinstance(number, float) and not math.isfinite(number) else number
    return found


def _environment(point: PointSettings) -> dict[str, Any]:
    """Return what a reader needs of the machine; of its processor where the point's device is not there."""
    import torch

    from workbench.sweep.machine import environment

    device = point.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return environment(device)
    except (RuntimeError, AssertionError):
        return environment("cpu")


@contextmanager
def stoppable() -> Iterator[threading.Event]:
    """Give an event that the first Ctrl-C sets; a second one interrupts at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGINT)

    def heard(*arguments: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        print("\nstopping after what is running; Ctrl-C again stops at once", file=sys.stderr)

    signal.signal(signal.SIGINT, heard)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
