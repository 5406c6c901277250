"""The files of a run folder: how they are written so that a killed process leaves them readable, and read back.

    run.json                          what the run is; written first, rewritten once, when the run ends
    steps | requests | tokens .arrow  rows as they come: an Arrow stream, whole messages at a time
    steps | requests | tokens .parquet   the same, once the run has ended; where both exist the Parquet file is complete
    steps | requests | tokens .cut    a stream whose end could not be read, kept as it was
    traces/00001-req-1.safetensors    one finished request each
    traces/index.jsonl                which request lies in which of them
    writer.lock                       held while the run is being written
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import TransientError, UserError, names
from workbench.instrument import run_columns
from workbench.instrument.files import replacing
from workbench.instrument.trace_file import SUFFIX
from workbench.jsonfile import read_json

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "lora-workbench-run"
VERSION = 1
RUN_FILE = "run.json"
TRACES = "traces"
INDEX = "index.jsonl"
WRITER_LOCK = "writer.lock"
COMPACT_LOCK = "compact.lock"
_ROWS_OF_A_GROUP = 1 << 16
_CONTINUES = b"\xff\xff\xff\xff"  # how every message of an Arrow stream begins


@contextlib.contextmanager
def sentences(path: Path, doing: str) -> Iterator[None]:
    """Turn a failing disk into a sentence; `doing` completes "cannot …"."""
    try:
        yield
    except OSError as error:
        why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or error
        raise TransientError(f"cannot {doing} {str(path)!r}: {why}") from None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    with sentences(path, "write"), replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_run_file(folder: Path) -> dict[str, Any]:
    """Return what `run.json` says.

    Raises:
        UserError: no run, another format, a newer version, or a damaged file.
    """
    if not folder.is_dir():
        kind = "a file; a run is a folder" if folder.exists() else "no such folder"
        raise UserError(f"no run at {str(folder)!r}: {kind}")
    path = folder / RUN_FILE
    if not path.is_file():
        inside = sorted(each.parent.name for each in folder.glob(f"*/{RUN_FILE}"))
        found = f"runs in it: {names(inside)}" if inside else f"it holds {names(_listed(folder))}"
        raise UserError(f"{str(folder)!r} is no run, it has no {RUN_FILE}; {found}")
    data = read_json(path, "run")
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UserError(f"{str(folder)!r} is no run of this workbench: its {RUN_FILE} does not say {FORMAT!r}")
    version = data.get("version")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise UserError(f"{str(path)!r} is damaged: its version is {version!r}, expected a whole number")
    if version > VERSION:
        raise UserError(f"{str(folder)!r} has run version {version}; this workbench reads up to {VERSION}: update it")
    return data


class Stream:
    """An Arrow stream that rows are appended to; a failed write leaves it as it was.

    Messages are written whole, each with one call: what a killed process has written is there for the next to read.
    """

    def __init__(self, path: Path, schema: pa.Schema):
        self.path = path
        with sentences(path, "write"):
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        self._size = 0
        self._append(schema.serialize())

    def append(self, batch: pa.RecordBatch) -> None:
        """Append rows.

        Raises:
            TransientError: the disk is full or failed.
        """
        self._append(batch.serialize())

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _append(self, message: pa.Buffer) -> None:
        left = memoryview(message).cast("B")
        size = self._size + len(left)
        with sentences(self.path, "write"):
            try:
                while left:
                    left = left[os.write(self._file, left) :]
            except BaseException:
                # half a message would hide all that came after it
                os.ftruncate(self._file, self._size)
                raise
        self._size = size


def read_table(folder: Path, table: str, is_complete: bool) -> pa.Table:
    """Return the rows of a table that are in the folder; of a stream, all of its whole messages.

    Raises:
        UserError: a file is damaged, or is missing from a complete run.
    """
    pa, parquet, stream = run_columns.arrow(), folder / f"{table}.parquet", folder / f"{table}.arrow"
    for _ in range(2):  # the stream may turn into a Parquet file between two looks
        with contextlib.suppress(FileNotFoundError):
            return _read_parquet(parquet)
        with contextlib.suppress(FileNotFoundError):
            schema, batches, _ = read_stream(stream)
            return pa.Table.from_batches(batches, schema or run_columns.schema(run_columns.TABLES[table]))
    if is_complete:
        raise UserError(f"run {str(folder)!r} is damaged: {parquet.name} is missing")
    return run_columns.schema(run_columns.TABLES[table]).empty_table()


def num_rows(folder: Path, table: str) -> int:
    """Return how many rows a table has; of a Parquet file only its end is read."""
    import pyarrow.parquet as pq

    pa, path = run_columns.arrow(), folder / f"{table}.parquet"
    try:
        return pq.read_metadata(path).num_rows
    except FileNotFoundError:
        return read_table(folder, table, is_complete=False).num_rows
    except (pa.ArrowException, OSError) as error:
        raise _no_parquet(path, error) from None


def read_stream(path: Path) -> tuple[pa.Schema | None, list[pa.RecordBatch], int]:
    """Return the schema and the whole batches of an Arrow stream, and how many bytes after them cannot be read.

    The schema is None where not even that was written whole. The last message of a killed process may be cut off.
    """
    pa = run_columns.arrow()
    content = path.read_bytes()
    if not content.startswith(_CONTINUES[: len(content)]):
        raise UserError(f"{str(path)!r} is damaged: it is no Arrow stream")
    source, batches, end = pa.BufferReader(content), [], 0
    try:
        reader = pa.ipc.open_stream(source)
    except (pa.ArrowException, OSError, EOFError):
        return None, batches, len(content)
    with contextlib.suppress(pa.ArrowException, OSError, EOFError, StopIteration):
        while True:
            end = source.tell()
            found = reader.read_next_batch()
            found.validate(full=True)
            batches.append(found)
    return reader.schema, batches, len(content) - end


def write_parquet(path: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
    """Write batches as a Parquet file, whole or not at all, in groups of rows that are worth reading."""
    import pyarrow.parquet as pq

    pa = run_columns.arrow()
    with sentences(path, "write"), replacing(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        waiting: list[pa.RecordBatch] = []
        for batch in batches:
            waiting.append(batch)
            if sum(each.num_rows for each in waiting) >= _ROWS_OF_A_GROUP:
                writer.write_table(pa.Table.from_batches(waiting, schema))
                waiting = []
        writer.write_table(pa.Table.from_batches(waiting, schema))


def read_index(folder: Path) -> dict[str, str]:
    """Return request id -> file name of the traces in a run, in the order in which they were finished."""
    found: dict[str, str] = {}
    try:
        lines = (folder / TRACES / INDEX).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        try:
            entry = json.loads(line)
            request_id, name = entry["request_id"], entry["file"]
        except (ValueError, KeyError, TypeError):
            continue  # cut off; the file says its request too
        if isinstance(request_id, str) and isinstance(name, str) and Path(name).name == name:
            found[request_id] = name
    known = set(found.values())
    for path in sorted((folder / TRACES).glob(f"[!.]*{SUFFIX}")):
        if path.name not in known:
            found[unused(_request_of(path), found)] = path.name
    return found


def unfinished(folder: Path) -> list[Path]:
    """Return the files of a run that a killed writer was still making: theirs alone, whatever else is hidden there."""
    wanted = [RUN_FILE, *(f"{table}.parquet" for table in run_columns.TABLES), f"{TRACES}/*{SUFFIX}"]
    patterns = [(parent, f".{name}.") for parent, _, name in (each.rpartition("/") for each in wanted)]
    found = [path for parent, name in patterns for path in (folder / parent).glob(f"{name}*")]
    # mkstemp's names end in 8 characters, none of them a dot
    return sorted(path for path in found if re.fullmatch(r"[a-z0-9_]{8}", path.name.rpartition(".")[2]))


def unused(name: str, taken: Container[str]) -> str:
    """Return a name that is not taken: itself, or with a number behind it."""
    numbered = (f"{name}#{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([name], numbered) if each not in taken)


def trace_name(number: int, request_id: str) -> str:
    """Return the file name of a run's `number`-th trace: safe in any file system, whatever the id is."""
    readable = re.sub(r"[^a-z0-9_]+", "-", request_id.lower()).strip("-")[:60]
    return f"{number:05d}-{readable or 'trace'}{SUFFIX}"


def _request_of(path: Path) -> str:
    """Return the request id in a trace's header; its file's name where there is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            found = json.loads((file.metadata() or {})["metadata"])["request_id"]
        return found if isinstance(found, str) else path.stem
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        return path.stem


def _read_parquet(path: Path) -> pa.Table:
    import pyarrow.parquet as pq

    pa = run_columns.arrow()
    try:
        return pq.read_table(path)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise _no_parquet(path, error) from None


def _no_parquet(path: Path, error: Exception) -> UserError:
    return UserError(f"{str(path)!r} is damaged: it cannot be read as a Parquet file ({error})")


def _listed(folder: Path) -> list[str]:
    try:
        return sorted(each.name for each in folder.iterdir())
    except OSError:
        return []
