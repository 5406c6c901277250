"""`workbench sweep`: run the points of a grid, here, in processes, or on a Ray cluster; and merge results."""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from workbench.errors import UserError, names

_EXAMPLE = """examples:
  workbench sweep smoke --dry-run                              (smoke: one of the workbench's own grids)
  workbench sweep experiments/grids/smoke.toml
  workbench sweep experiments/grids/frontier.toml --only policy=exact --limit 3
  workbench sweep GRID --shard 1/4 --out /shared/part-1        (one SLURM task each, then merge)
  workbench sweep merge GRID /shared/part-* --out experiments/results
"""
_OUT = "experiments/results"
_WIDTH = 100


def add_parser(commands: Any, formatter: type) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "sweep", help="run a grid of experiments, resumable", epilog=_EXAMPLE, formatter_class=formatter,
        description="Run every point of a grid (a TOML file) as often as it says, each into a folder of its own, and "
        "write one table. Finished points are skipped, so the same command goes on after Ctrl-C or a kill; one that "
        "fails is recorded with its error, and the others run. `workbench sweep merge GRID FOLDER ...` joins the "
        "results of shards.",
    )
    add = parser.add_argument
    add("grid", metavar="GRID", help="TOML file, the name of a grid that comes with the workbench, or the word merge")
    add("sources", nargs="*", metavar="FOLDER", help="for merge: the grid, then result folders")
    add("--out", default=_OUT, metavar="DIR", help=f"where results go (default {_OUT})")
    add("--dry-run", action="store_true", help="list the points, and what is finished, and run nothing")
    add("--only", action="append", default=[], metavar="FILTER",
        help="points that fit: the beginning of an id, or KEY=VALUE,KEY=VALUE; may be given again")
    add("--limit", type=int, metavar="N", help="the first N points only")
    add("--shard", metavar="I/N", help="the I-th of N disjoint parts")
    add("--retry-failed", action="store_true", help="run points again that failed")
    add("--jobs", type=int, metavar="N", help="run in N processes (joblib); their timings disturb each other")
    add("--ray", nargs="?", const="local", metavar="ADDRESS", help="run on a Ray cluster: local, auto or HOST:PORT")
    add("--cpus", type=float, metavar="N", help="with --ray: cores a point asks for (default 1)")
    add("--gpus", type=float, metavar="N", help="with --ray: cards a point asks for (default 0)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run, list or merge."""
    from workbench.sweep.grid import Grid

    if arguments.grid == "merge":
        return _merge(arguments)
    if arguments.sources:
        raise UserError(f"one grid at a time, not {arguments.sources[0]!r} too; `workbench sweep merge` takes folders")
    grid = Grid.load(arguments.grid)
    from workbench.sweep.places import notes_of
    from workbench.sweep.runner import sweep, wanted_units
    from workbench.sweep.store import Store

    if arguments.limit is not None and arguments.limit < 1:
        raise UserError(f"--limit must be at least 1, not {arguments.limit}")
    _require_read(arguments)
    units = wanted_units(grid, only=arguments.only, limit=arguments.limit, shard=shard_of(arguments.shard))
    store = Store(arguments.out, grid)
    if arguments.dry_run:
        _say_notes(notes_of(store), grid)
        _list(grid, units, store)
        return 0
    backend = _backend(arguments)
    _say_notes(notes_of(store), grid)
    with _bar(len(units), len(units) - len(store.missing(units, arguments.retry_failed))) as bar:
        def progress(unit: Any, result: dict[str, Any]) -> None:
            if result["status"] == "failed":
                which = f"{grid.label(unit.point)} (repeat {unit.repeat})"
                bar.write(f"failed: {which}: {result['error']}", file=sys.stderr)
            bar.set_postfix_str(grid.label(unit.point)[-40:], refresh=False)
            bar.update()

        try:
            report = sweep(store, units, backend, retry_failed=arguments.retry_failed, progress=progress)
        finally:
            _close()
    return _say(grid, store, report)


def shard_of(text: str | None) -> tuple[int, int] | None:
    """Return (i, n) of "i/n".

    Raises:
        UserError: it does not say that.
    """
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", text, re.ASCII)
    index, count = (int(part) for part in found.groups()) if found else (0, 0)
    if not 1 <= index <= count:
        raise UserError(f"--shard is written I/N with 1 ≤ I ≤ N, such as 2/4, not {text!r}")
    return index, count


def _require_read(arguments: argparse.Namespace) -> None:
    """Raise for an option that another one makes meaningless."""
    if arguments.ray is None and (given := [f"--{key}" for key in ("cpus", "gpus") if getattr(arguments, key)]):
        raise UserError(f"{names(given)}: read with --ray only")
    if arguments.dry_run and (arguments.jobs is not None or arguments.ray is not None):
        raise UserError("--dry-run runs nothing: leave --jobs and --ray out")


def _backend(arguments: argparse.Namespace) -> Any:
    from workbench.sweep import backends

    if arguments.jobs is not None and arguments.ray is not None:
        raise UserError("give --jobs (processes of this machine) or --ray (a cluster), not both")
    if arguments.ray is not None:
        asked = {key: value for key in ("cpus", "gpus") if (value := getattr(arguments, key)) is not None}
        return backends.RayCluster(arguments.ray, **asked)
    return backends.Here() if arguments.jobs is None else backends.Processes(arguments.jobs)


def _bar(total: int, done: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, initial=done, desc="sweep", unit="run", ncols=_WIDTH, smoothing=0.1)


def _close() -> None:
    if "workbench.sweep.tasks" in sys.modules:
        sys.modules["workbench.sweep.tasks"].close_engines()


def _say(grid: Any, store: Any, report: Any) -> int:
    parts = [f"{len(report.done)} run", f"{len(report.skipped)} finished before", f"{len(report.failed)} failed"]
    if report.failed_before:
        parts.append(f"{len(report.failed_before)} failed before: --retry-failed runs them again")
    if report.left:
        parts.append(f"{report.left} left: the same command goes on with them")
    print(f"{grid.name}: {', '.join(parts)}")
    for error, count in _counted(report.errors.values()):
        print(f"  {count} × {error}")
    if report.table is not None:
        print(f"table: {report.table} (workbench report {grid.path or grid.name})")
    return 130 if report.left else 1 if report.failed or report.failed_before else 0


def _say_notes(notes: list[str], grid: Any) -> None:
    for note in notes:
        print(f"{grid.name}: {note}")


def _counted(errors: Any) -> list[tuple[str, int]]:
    return Counter(errors).most_common(5)


def _list(grid: Any, units: Any, store: Any) -> None:
    stale = store.stale(units)
    results = [(unit.point, None if unit in stale else store.result(unit)) for unit in units]
    done, failed = (Counter(point for point, result in results if result is not None and result["status"] == status)
                    for status in ("done", "failed"))
    if grid.question:
        print(grid.question)
    for point in dict.fromkeys(unit.point for unit in units):
        errors = f"  ({failed[point]} failed)" if failed[point] else ""
        print(f"{point.id}  {done[point]}/{grid.repeats}  {grid.label(point)}{errors}")
    print(f"{len(units) // grid.repeats} points × {grid.repeats} repeats; {done.total()} of {len(units)} finished in "
          f"{store.folder}" + (f", {failed.total()} failed" if failed else ""))


def _merge(arguments: argparse.Namespace) -> int:
    from workbench.sweep.grid import Grid
    from workbench.sweep.merging import merge
    from workbench.sweep.places import notes_of, notes_of_rows
    from workbench.sweep.store import Store, units_of

    options = {"--dry-run": arguments.dry_run, "--only": arguments.only, "--limit": arguments.limit,
               "--shard": arguments.shard, "--retry-failed": arguments.retry_failed, "--jobs": arguments.jobs,
               "--ray": arguments.ray, "--cpus": arguments.cpus, "--gpus": arguments.gpus}
    if given := [option for option, value in options.items() if value]:
        raise UserError(f"merge copies every result there is: it does not read {names(given)}")
    if len(arguments.sources) < 2:
        raise UserError("merge takes a grid and at least one results folder: workbench sweep merge GRID FOLDER ...")
    path, *sources = arguments.sources
    grid = Grid.load(path)
    for source in sources:
        if not Path(source).is_dir():
            raise UserError(f"merge: there is no folder {source!r}")
    notes = notes_of_rows(Store(arguments.out, grid))
    store = merge(grid, sources, arguments.out)
    _say_notes([*notes, *notes_of(store)], grid)
    units = units_of(grid)
    num_missing = len(store.missing(units))
    print(f"{grid.name}: {len(units) - num_missing} of {len(units)} runs in {store.table}")
    return 0
