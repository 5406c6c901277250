"""Queries over the tables of runs, by DuckDB. Data reaches a query as values only, never as a part of its text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from workbench.errors import UserError, names, nearest

if TYPE_CHECKING:
    import pandas
    import pyarrow as pa

# a name in a query means a table of the run, never a variable of the caller; and nothing is fetched from a network
_SETTINGS = ("python_enable_replacements", "autoinstall_known_extensions", "autoload_known_extensions")


def query(text: str, tables: Mapping[str, Callable[[], pa.Table]]) -> pandas.DataFrame:
    """Return what a query gives; only the tables that it names are made.

    Raises:
        UserError: DuckDB is not installed, or does not take the query.
    """
    try:
        import duckdb
    except ModuleNotFoundError:
        raise UserError("queries over runs need DuckDB, which is not installed: pip install duckdb") from None
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"a query is SQL as text, not {text!r}; its tables are {names(list(tables))}")
    with duckdb.connect() as connection:
        for setting in _SETTINGS:
            connection.execute(f"SET {setting} = false")
        for name, make in tables.items():
            if re.search(rf"\b{name}\b", text, re.IGNORECASE):
                connection.register(name, make())
        try:
            return connection.execute(text).df()
        except duckdb.Error as error:
            raise UserError(_sentence(str(error), tables)) from None


def _sentence(said: str, tables: Mapping[str, object]) -> str:
    """Return DuckDB's reason as one line, with the nearest table where one is unknown."""
    missing = re.search(r"Table with name (\S+) does not exist", said)
    if missing:
        hint = nearest(missing[1], tables)
        return f"the query names a table {missing[1]!r}{hint}; the tables are {names(list(tables))}"
    reason = " ".join(line.strip() for line in said.splitlines() if line.strip(" ^"))
    return f"the query cannot be run: {reason}"
