"""Run: a run folder, read. It may still be being written, and then every look sees what is there by then."""

from __future__ import annotations

import contextlib
import html
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError, names, nearest
from workbench.instrument import run_columns, run_files, run_lock, run_sql
from workbench.instrument.files import path_of
from workbench.instrument.run_compact import compact_dead, lacking
from workbench.instrument.trace import Trace

if TYPE_CHECKING:
    import pandas
    import pyarrow as pa


class Run:
    """One run folder; `open_run` makes it.

    Attributes:
        path: the folder.
        meta: what `run.json` says: name, created, environment, base, dtype, device, seed, config, mixtures, adapters,
            and whatever its maker added.
    """

    def __init__(self, path: Path, meta: dict[str, Any]):
        self.path, self.meta = path, meta
        self._tables: dict[str, pa.Table] = {}

    @property
    def name(self) -> str:
        """What the run is called."""
        return str(self.meta.get("name") or self.path.name)

    @property
    def status(self) -> str:
        """ "complete", "running" while it is being written, or "interrupted" when its writer ended before its end."""
        if not self._is_closed and run_lock.is_held(self.path / run_files.WRITER_LOCK):
            return "running"
        if not self._is_closed:
            # it may have been closed since the last look
            self.meta = run_files.read_run_file(self.path)
        return "complete" if self._is_closed and not self.meta.get("ended_by") else "interrupted"

    @property
    def steps(self) -> pandas.DataFrame:
        """One row per forward."""
        return self.table("steps").to_pandas()

    @property
    def requests(self) -> pandas.DataFrame:
        """One row per request that has ended."""
        return self.table("requests").to_pandas()

    @property
    def tokens(self) -> pandas.DataFrame:
        """One row per token of every trace: the adapter that leads there, and its share."""
        return self.table("tokens").to_pandas()

    @property
    def trace_ids(self) -> tuple[str, ...]:
        """The requests that have a trace, in the order in which they ended."""
        return tuple(run_files.read_index(self.path))

    def trace(self, request_id: str | None = None, lazy: bool = True) -> Trace:
        """Return a request's trace; without an id, the only one.

        Args:
            request_id: of `trace_ids`.
            lazy: map its values into memory and read what is looked at; otherwise read and check all of them.

        Raises:
            UserError: no such trace, no id where there are several, or a file that is missing or damaged.
        """
        index = run_files.read_index(self.path)
        if request_id is None:
            if len(index) != 1:
                found = f"has {len(index)} traces ({names(list(index))}); name one" if index else "has no traces"
                raise UserError(f"run {self.name!r} {found}")
            request_id = next(iter(index))
        if request_id not in index:
            hint = nearest(request_id, index)
            raise UserError(f"no trace of request {request_id!r} in run {self.name!r}{hint}; it has "
                            f"{names(list(index))}")
        path = self.path / run_files.TRACES / index[request_id]
        if not path.exists():
            raise UserError(f"run {self.name!r} is damaged: the trace of {request_id!r}, {str(path)!r}, is missing")
        return Trace.load(path, lazy=lazy)

    def sql(self, query: str) -> pandas.DataFrame:
        """Return what a DuckDB query gives; its tables are steps, requests and tokens.

        Raises:
            UserError: the query is wrong; DuckDB's reason is in the message.
        """
        return run_sql.query(query, {table: lambda table=table: self.table(table) for table in run_columns.TABLES})

    def table(self, table: str) -> pa.Table:
        """Return steps, requests or tokens as an Arrow table; kept, once the run has ended."""
        if table in self._tables:
            return self._tables[table]
        has_ended = self.status != "running"
        found = run_files.read_table(self.path, table, self._is_closed)
        if table == "tokens" and not self._is_closed:
            found = run_columns.arrow().Table.from_batches(
                [*found.to_batches(), *lacking(self.path, found.to_batches())], found.schema
            )
        if has_ended:
            self._tables[table] = found
        return found

    def __repr__(self) -> str:
        return f"Run({', '.join(f'{key}: {value}' for key, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(key)}</th>"
            f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
            for key, value in self._facts().items()
        )
        return f"<table>{rows}</table>"

    @property
    def _is_closed(self) -> bool:
        return "closed" in self.meta

    def _facts(self) -> dict[str, str]:
        """Return a short summary; a part that cannot be read says so."""
        try:
            facts = {"run": self.name, "status": self.status, "created": str(self.meta.get("created", "not said"))}
        except UserError as error:  # the folder has gone
            return {"run": self.name, "status": str(error)}
        if self.meta.get("ended_by"):
            facts["ended by"] = str(self.meta["ended_by"])
        for key in ("base", "dtype", "device"):
            if self.meta.get(key) is not None:
                facts[key] = str(self.meta[key])
        for table in ("requests", "steps"):
            try:
                facts[table] = str(self.table(table).num_rows)
            except UserError as error:
                facts[table] = str(error)
        ids = self.trace_ids
        facts["traces"] = f"{len(ids)} ({names(ids, 4)})" if ids else "0"
        return facts


def open_run(path: str | Path) -> Run:
    """Open a run folder. One whose writer died is tidied (its streams become Parquet files); all of it is there.

    Raises:
        UserError: no run there, one of another format or a newer version, or a damaged one.
    """
    # the working folder may change while the run is looked at
    folder = path_of(path, "the folder of a run").absolute()
    if folder.name == run_files.RUN_FILE and folder.is_file():
        folder = folder.parent
    run = Run(folder, run_files.read_run_file(folder))
    if run.status == "interrupted":
        compact_dead(folder)
    return run


def remove_run(path: str | Path) -> None:
    """Delete a run folder.

    Raises:
        UserError: it is no run, is being written, holds anything that a run does not, or cannot be deleted.
    """
    import shutil

    folder = path_of(path, "the folder of a run")
    run = Run(folder, run_files.read_run_file(folder))
    if run.status == "running":
        raise UserError(f"run {str(folder)!r} is being written; it cannot be deleted")
    known = {run_files.RUN_FILE, run_files.TRACES, run_files.WRITER_LOCK, run_files.COMPACT_LOCK}
    known |= {f"{table}.{suffix}" for table in run_columns.TABLES for suffix in ("arrow", "parquet", "cut")}
    unfinished = run_files.unfinished(folder)
    foreign = sorted(each.name for each in folder.iterdir() if each.name not in known and each.name[0] != ".")
    foreign += sorted(
        each.name for each in (folder / run_files.TRACES).glob("*")
        if each.suffix != run_files.SUFFIX and each.name != run_files.INDEX and each not in unfinished
    )
    if foreign:
        raise UserError(f"run {str(folder)!r} is not deleted: it holds {names(foreign, 4)}, which is not of the run")
    with run_files.sentences(folder, "delete"), contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
