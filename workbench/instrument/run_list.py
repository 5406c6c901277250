"""Many runs: a table of those in a folder, and queries over all of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError, names
from workbench.instrument import run_columns, run_files, run_sql
from workbench.instrument.files import path_of
from workbench.instrument.run import Run, open_run

if TYPE_CHECKING:
    import pandas
    import pyarrow as pa

COLUMNS = (
    "run", "name", "created", "status", "base", "dtype", "device", "seed", "steps", "requests", "traces", "tokens",
    "problem",
)  # fmt: skip
_NUMBERS = ("seed", "steps", "requests", "traces", "tokens")


class Runs(Mapping[str, Run]):
    """Several runs by name; `open_runs` makes it."""

    def __init__(self, runs: Mapping[str, Run]):
        self._runs = dict(runs)

    def __getitem__(self, name: str) -> Run:
        return self._runs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        return f"Runs({names(list(self._runs))})"

    def _repr_html_(self) -> str:
        return self.frame._repr_html_()

    @property
    def frame(self) -> pandas.DataFrame:
        """A row per run, as `list_runs` gives."""
        return _frame([_row(name, run) for name, run in self._runs.items()])

    def sql(self, query: str) -> pandas.DataFrame:
        """Return what a DuckDB query gives over all of them.

        Its tables are steps, requests and tokens, each with a first column `run`, and runs: a row per run with its
        name, status, base, dtype, device, seed, and all of its metadata as JSON (`meta`).

        Raises:
            UserError: the query is wrong.
        """
        tables = {table: lambda table=table: self._table(table) for table in run_columns.TABLES}
        return run_sql.query(query, {**tables, "runs": self._about})

    def _table(self, table: str) -> pa.Table:
        pa = run_columns.arrow()
        parts = []
        for name, run in self._runs.items():
            part = run.table(table)
            parts.append(part.add_column(0, "run", pa.array([name] * part.num_rows, pa.string())))
        if not parts:
            return run_columns.schema({"run": str, **run_columns.TABLES[table]}).empty_table()
        return pa.concat_tables(parts, promote_options="permissive")

    def _about(self) -> pa.Table:
        frame = self.frame.drop(columns="problem")
        # a column in which nothing is said is text all the same
        frame = frame.astype({column: "string" for column in frame if frame[column].dtype == object})
        frame["meta"] = [json.dumps(run.meta) for run in self._runs.values()]
        return run_columns.arrow().Table.from_pandas(frame, preserve_index=False)


def list_runs(folder: str | Path) -> pandas.DataFrame:
    """Return a table of the runs in a folder, oldest first.

    Columns: run (its folder), name, created, status, base, dtype, device, seed, how many steps, requests, traces and
    tokens it has, and problem: why a run cannot be read (its status is "unreadable").

    Raises:
        UserError: no such folder, or a folder that is a run itself.
    """
    rows = []
    for path in _run_folders(path_of(folder, "a folder of runs")):
        try:
            rows.append(_row(path.name, open_run(path)))
        except UserError as error:
            rows.append({"run": path.name, "name": path.name, "status": "unreadable", "problem": str(error)})
    return _frame(rows).sort_values(["created", "run"], na_position="last", ignore_index=True)


def open_runs(runs: str | Path | Iterable[str | Path | Run]) -> Runs:
    """Open every run in a folder, or those given.

    Raises:
        UserError: none there, or one that cannot be read; `list_runs` tells which can.
    """
    if isinstance(runs, str | Path):
        found = [open_run(path) for path in _run_folders(path_of(runs, "a folder of runs"))]
        if not found:
            raise UserError(f"no run in {str(runs)!r}")
        return Runs({run.path.name: run for run in sorted(found, key=lambda run: str(run.meta.get("created")))})
    if not isinstance(runs, Iterable):
        raise UserError(f"open_runs takes a folder of runs, or a list of runs and their folders, not {runs!r}")
    found = [run if isinstance(run, Run) else open_run(run) for run in runs]
    return Runs(dict(zip(_distinct([run.path for run in found]), found, strict=True)))


def _run_folders(folder: Path) -> list[Path]:
    if (folder / run_files.RUN_FILE).is_file():
        raise UserError(f"{str(folder)!r} is a run itself; open it with open_run, or list the folder that it is in")
    if not folder.is_dir():
        raise UserError(f"no runs at {str(folder)!r}: " + ("it is a file" if folder.exists() else "no such folder"))
    with run_files.sentences(folder, "list"):
        return sorted(path.parent for path in folder.glob(f"*/{run_files.RUN_FILE}"))


def _distinct(paths: list[Path]) -> list[str]:
    """Return the folders' names; where two are alike, with the folders that they are in."""
    plain = [path.name for path in paths]
    wanted = [str(path) if plain.count(path.name) > 1 else path.name for path in paths]
    if repeated := sorted({name for name in wanted if wanted.count(name) > 1}):
        raise UserError(f"a run is given twice: {names(repeated)}")
    return wanted


def _frame(rows: list[dict[str, Any]]) -> pandas.DataFrame:
    """Return the table, every column of one type whatever the runs' metadata holds."""
    import pandas as pd

    frame = pd.DataFrame(rows, columns=list(COLUMNS), dtype=object)
    for column in COLUMNS:
        is_whole = column in _NUMBERS and all(isinstance(each, int) for each in frame[column].dropna())
        if is_whole:
            frame[column] = frame[column].astype("Int64")
        else:
            # what is missing stays missing, and text is of the dtype that this pandas has for it
            frame[column] = frame[column].map(str, na_action="ignore").astype(pd.Series(["text"]).dtype)
    return frame


def _row(folder: str, run: Run) -> dict[str, Any]:
    """Return what the table says of a run; a part that cannot be read is its problem."""
    row: dict[str, Any] = {"run": folder, "name": run.name, "status": run.status, "traces": len(run.trace_ids)}
    row |= {key: run.meta.get(key) for key in ("created", "base", "dtype", "device", "seed")}
    for table in run_columns.TABLES:
        try:
            row[table] = run_files.num_rows(run.path, table)
        except UserError as error:
            row["problem"] = str(error)
    return row
