"""`workbench report`: a sweep's results as Markdown and a page, with tables, figures and how to make them again."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

_EXAMPLE = """examples:
  workbench report experiments/grids/smoke.toml
  workbench report experiments/grids/frontier.toml --results /shared/results --out /tmp/report
"""
_RESULTS = "experiments/results"
_SLACK_S = 5  # a table is written soon after the last of its units


def add_parser(commands: Any, formatter: type) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "report", help="a sweep's tables and figures", epilog=_EXAMPLE, formatter_class=formatter,
        description="Write what a sweep found: tables with intervals, figures, the commands and the machine, and what "
        "to beware of, as Markdown and as one HTML page.",
    )
    parser.add_argument("grid", metavar="GRID",
                        help="the sweep's TOML file, or the name of a grid that comes with the workbench")
    parser.add_argument("--results", default=_RESULTS, metavar="DIR",
                        help=f"where the sweep wrote (default {_RESULTS})")
    parser.add_argument("--out", metavar="DIR", help="where the report goes (default: beside the results)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the report and say where."""
    from workbench.sweep.grid import Grid
    from workbench.sweep.places import read_places
    from workbench.sweep.report import read_table, report_of

    grid, results = Grid.load(arguments.grid), Path(arguments.results)
    table = results / f"{grid.name}.parquet"
    frame = read_table(table)
    newer = [path for path in (results / grid.name).glob("units/*/result.json")
             if path.stat().st_mtime > table.stat().st_mtime + _SLACK_S]
    if newer:
        print(f"{len(newer)} units are newer than {str(table)!r} and not in this report: `workbench sweep` writes the "
              "table anew", file=sys.stderr)
    places = read_places(results / f"{grid.name}-places.parquet")
    for path in report_of(grid, frame, places).save(arguments.out or results, grid.name):
        print(path)
    return 0
