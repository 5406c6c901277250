"""Turn the streams of a run that has ended into Parquet files. Done twice, or stopped half-way, it harms nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import UserError
from workbench.instrument import run_columns, run_files, run_lock
from workbench.instrument.trace import Trace

if TYPE_CHECKING:
    import pyarrow as pa


def compact(folder: Path) -> None:
    """Make each table one Parquet file and remove its stream, if all of it was read. Nobody may be writing.

    Raises:
        UserError: a stream is damaged, or the disk is full or failed; the streams stay.
    """
    with run_files.sentences(folder, "write in"):
        for table in run_columns.TABLES:
            stream, parquet = folder / f"{table}.arrow", folder / f"{table}.parquet"
            if stream.is_file() and not parquet.is_file():
                schema, batches, unread = run_files.read_stream(stream)
                schema = schema or run_columns.schema(run_columns.TABLES[table])
                if table == "tokens":
                    batches += lacking(folder, batches)
                run_files.write_parquet(parquet, schema, iter(batches))
                if unread:
                    stream.replace(folder / f"{table}.cut")
            if parquet.is_file():
                stream.unlink(missing_ok=True)


def compact_dead(folder: Path) -> None:
    """Compact a run whose writer is dead, if that is possible here; reading does not need it."""
    if not any((folder / f"{table}.arrow").exists() for table in run_columns.TABLES):
        return
    with contextlib.suppress(OSError, UserError):
        lock = run_lock.take(folder / run_files.COMPACT_LOCK)
        if lock is None:
            return
        try:
            if lock.is_supported:
                compact(folder)
                (folder / run_files.WRITER_LOCK).unlink(missing_ok=True)
                for left in run_files.unfinished(folder):
                    left.unlink()
        finally:
            lock.release()


def lacking(folder: Path, batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the traces that were written, but whose rows of the table of tokens were not."""
    present: set[str] = set()
    for batch in batches:
        present.update(batch.column("request_id").unique().to_pylist())
    for request_id, name in run_files.read_index(folder).items():
        if request_id not in present:
            # one that cannot be read is missed when it is asked for
            with contextlib.suppress(UserError):
                trace = Trace.load(folder / run_files.TRACES / name, lazy=True)
                yield run_columns.token_batch(request_id, trace)
