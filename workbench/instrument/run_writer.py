"""RunWriter: writes a run folder as it goes.

Contract: rows cost their caller a few microseconds; a thread of the writer's own puts them on disk, at most half a
second later. A process killed at any moment leaves a run that opens with everything that was on disk by then.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import warnings
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import TransientError, UserError, names
from workbench.instrument import run_columns, run_files, run_lock, run_meta
from workbench.instrument.files import path_of
from workbench.instrument.run_compact import compact
from workbench.instrument.trace import Trace

if TYPE_CHECKING:
    import pyarrow as pa

FLUSH_S = 0.5
_OURS = ("format", "version", "workbench", "name", "created", "closed", "ended_by")


class RunWriter:
    """Writes one run; a context manager. Safe to use from several threads.

    Args:
        folder: made, with its parents; must not exist or be empty.
        name: what the run is called; the folder's name by default.
        meta: what made it, JSON-able: see `run_meta.meta_of`. Keys that are called like secrets are not stored.
        step_columns, request_columns: columns beside the usual ones, name -> int, float, str or bool.

    Raises:
        UserError: a folder that is not empty or cannot be written, or metadata that JSON cannot hold.
    """

    def __init__(
        self, folder: str | Path, *, name: str | None = None, meta: Mapping[str, Any] | None = None,
        step_columns: Mapping[str, type] | None = None, request_columns: Mapping[str, type] | None = None,
    ):
        # the working folder may change while the run is written
        self.path = path_of(folder, "the folder of a run").absolute()
        self.error: TransientError | UserError | None = None  # the first that the writing thread met
        self._columns = {
            "steps": run_columns.with_extra("steps", step_columns),
            "requests": run_columns.with_extra("requests", request_columns), "tokens": run_columns.TOKENS,
        }  # fmt: skip
        self._known = {table: frozenset(columns) for table, columns in self._columns.items()}
        self._facts = _facts(name or self.path.resolve().name, meta or {})
        # with one row each: what pyarrow imports at its first use is imported here, not in a step or at exit
        schemas = {table: run_columns.batch(table, columns, [{}]).schema for table, columns in self._columns.items()}
        self._streams: dict[str, run_files.Stream] = {}
        self._waiting: dict[str, deque[dict]] = {"steps": deque(), "requests": deque()}
        self._pending: dict[str, list[dict]] = {"steps": [], "requests": []}
        self._traces: dict[str, str] = {}
        self._busy = threading.RLock()  # taken to touch the files
        self._news, self._ends, self._has_ended = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._flush_often, name="run-writer", daemon=True)
        self._lock = _begin(self.path)
        try:
            run_files.write_json(self.path / run_files.RUN_FILE, self._facts)
            for table, schema in schemas.items():
                self._streams[table] = run_files.Stream(self.path / f"{table}.arrow", schema)
            self._thread.start()
            atexit.register(self._flush_quietly)
        except BaseException:
            self.abandon()
            raise

    def __repr__(self) -> str:
        return f"RunWriter({str(self.path)!r}, {'closed' if self._ends.is_set() else 'open'})"

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, kind: type | None, error: object = None, *_: object) -> None:
        said = str(error) if isinstance(error, UserError) else ""
        self._end((said or kind.__name__) if kind is not None else None)

    def step(self, row: Mapping[str, Any]) -> None:
        """Add a row to the steps.

        Raises:
            UserError: a column that the steps do not have, or a run that is closed. A value that does not fit its
                column is found when the row is written: `close` says so.
        """
        self._add("steps", row)

    def request(self, row: Mapping[str, Any]) -> None:
        """Add a row to the requests; errors as for `step`."""
        self._add("requests", row)

    def trace(self, trace: Trace) -> Path:
        """Write a finished request's trace, named by `metadata["request_id"]`, and return its file.

        A second one of the same id is kept as "ID#2".

        Raises:
            UserError: the disk is full or failed, or the run is closed.
        """
        with self._busy:
            self._require_open()
            number = len(self._traces) + 1
            wanted = str(trace.metadata.get("request_id") or f"trace-{number}")
            request_id = run_files.unused(wanted, self._traces)
            name = run_files.trace_name(number, request_id)
            path = self.path / run_files.TRACES / name
            trace.save(path)
            self._traces[request_id] = name
            line = {"request_id": request_id, "file": name, "tokens": trace.num_tokens}
            index = self.path / run_files.TRACES / run_files.INDEX
            with run_files.sentences(index, "write"), index.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self._streams["tokens"].append(run_columns.token_batch(request_id, trace))
            return path

    def flush(self) -> None:
        """Put every row on disk now.

        Raises:
            UserError: the disk is full or failed; no row is lost by that, the next flush tries again.
        """
        with self._busy:
            for table, rows in self._waiting.items():
                self._flush_table(table, rows)
            if isinstance(self.error, TransientError):
                self.error = None  # what had to wait is written

    def close(self) -> None:
        """Put everything on disk and end the run; no error if it is closed.

        Raises:
            UserError: something could not be written, now or earlier.
        """
        self._end(None)

    def abandon(self) -> None:
        """End the run and remove it, as if it had not begun; no error if it is closed."""
        if not self._stop():
            return
        for stream in self._streams.values():
            stream.close()
        traces = self.path / run_files.TRACES
        with contextlib.suppress(OSError):
            # what says that there is a run goes last
            for path in (*traces.iterdir(), *(self.path / f"{table}.arrow" for table in self._columns)):
                path.unlink(missing_ok=True)
            traces.rmdir()
            (self.path / run_files.RUN_FILE).unlink(missing_ok=True)
        self._lock.release()

    def _add(self, table: str, row: Mapping[str, Any]) -> None:
        if not row.keys() <= self._known[table]:
            raise run_columns.unknown_column(table, self._columns[table], row)
        if self._ends.is_set():
            self._require_open()
        self._waiting[table].append(dict(row))
        if not self._news.is_set():
            self._news.set()

    def _require_open(self) -> None:
        if self._ends.is_set():
            raise UserError(f"run {str(self.path)!r} is closed; nothing can be added to it")

    def _flush_table(self, table: str, waiting: deque[dict]) -> None:
        # rows leave `pending` when they are on disk, so neither a full disk nor an interrupt loses them
        pending = self._pending[table]
        while waiting:
            pending.append(waiting.popleft())
        if pending:
            self._streams[table].append(self._batch(table, pending))
            pending.clear()

    def _batch(self, table: str, rows: list[dict]) -> pa.RecordBatch:
        """Return the rows as a batch; one with a value that does not fit is left out, and the error is kept."""
        columns, fit = self._columns[table], []
        try:
            return run_columns.batch(table, columns, rows)
        except UserError:
            for row in rows:
                try:
                    run_columns.batch(table, columns, [row])
                    fit.append(row)
                except UserError as error:
                    self._note(error)
            return run_columns.batch(table, columns, fit)

    def _flush_often(self) -> None:
        while not self._ends.is_set():
            self._news.wait()
            self._news.clear()
            try:
                self.flush()
            except UserError as error:
                self._note(error)
            self._ends.wait(FLUSH_S)

    def _flush_quietly(self) -> None:
        """Save what is there when the interpreter ends with the run open; it counts as interrupted."""
        try:
            self.flush()
        except UserError as error:
            self._note(error)

    def _note(self, error: UserError) -> None:
        if self.error is None:
            self.error = error
            warnings.warn(f"run {str(self.path)!r}: {error}", stacklevel=2)

    def _stop(self) -> bool:
        """Take no more, and let the writing thread end; whether this call did. Interrupted, it may be called again."""
        with self._busy:
            if self._has_ended:
                return False
            self._ends.set()
            self._news.set()
        if self._thread.ident is not None:
            self._thread.join()
        with self._busy:
            if self._has_ended:
                return False
            self._has_ended = True
        atexit.unregister(self._flush_quietly)
        return True

    def _end(self, ended_by: str | None) -> None:
        if not self._stop():
            return
        try:
            self.flush()
            for stream in self._streams.values():
                stream.close()
            compact(self.path)
            closed = {"closed": _now()} | ({"ended_by": ended_by} if ended_by else {})
            run_files.write_json(self.path / run_files.RUN_FILE, self._facts | closed)
        finally:
            for stream in self._streams.values():
                stream.close()
            self._lock.release()
        if self.error is not None:
            raise type(self.error)(f"run {str(self.path)!r} is not whole: {self.error}")


def _facts(name: str, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `run.json` says from the beginning."""
    from workbench import __version__

    if not isinstance(meta, Mapping) or not all(isinstance(key, str) for key in meta):
        raise UserError("the metadata of a run is a dict with text as keys")
    if taken := [key for key in meta if key in _OURS]:
        raise UserError(f"the metadata of a run cannot have the key {names(taken)}: the run itself says that")
    meta = run_meta.without_secrets(run_meta.jsonable(meta, "the metadata of a run"))
    said = meta.pop("environment", None) or {}
    if not isinstance(said, dict):
        raise UserError(f"the environment in the metadata of a run is a dict, not {said!r}")
    machine = {**run_meta.environment(), **{key: value for key, value in said.items() if value is not None}}
    return {"format": run_files.FORMAT, "version": run_files.VERSION, "workbench": __version__, "name": name,
            "created": _now(), **meta, "environment": machine}  # fmt: skip


def _begin(folder: Path) -> run_lock.Lock:
    """Make the folder and take its lock."""
    with run_files.sentences(folder, "make the run folder"):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"cannot begin a run at {str(folder)!r}: it is a file")
        folder.mkdir(parents=True, exist_ok=True)
        _require_empty(folder)
        lock = run_lock.take(folder / run_files.WRITER_LOCK)
    if lock is None:
        raise UserError(f"cannot begin a run in {str(folder)!r}: another is just beginning there")
    try:
        _require_empty(folder)
        with run_files.sentences(folder, "make the run folder"):
            (folder / run_files.TRACES).mkdir(exist_ok=True)
    except BaseException:
        lock.release()
        raise
    return lock


def _require_empty(folder: Path) -> None:
    # a beginning that was killed leaves no more than its lock and an empty folder
    inside = sorted(
        each.name for each in folder.iterdir()
        if each.name != run_files.WRITER_LOCK and not (each.name == run_files.TRACES and _is_empty(each))
    )
    if run_files.RUN_FILE in inside:
        raise UserError(f"{str(folder)!r} holds a run already; give another folder, or delete that one first")
    if inside:
        raise UserError(f"a run begins in an empty folder, and {str(folder)!r} holds {names(inside, 4)}")


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
