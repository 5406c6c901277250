"""Files: paths as they are given, and results that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.errors import UserError


def path_of(given: Any, what: str) -> Path:
    """Return a path that a user gave.

    Args:
        given: text or a path.
        what: begins the error, such as "the folder of a run".

    Raises:
        UserError: neither, or no file can be called that.
    """
    path = os.fspath(given) if isinstance(given, str | os.PathLike) else given
    if not isinstance(path, str):
        raise UserError(f"{what} is a path, as text or a pathlib.Path, not {given!r}")
    if "\0" in path:
        raise UserError(f"{what} is a path, and none can hold a NUL character: {path!r}")
    return Path(path)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file beside `path` to write to, and put it in its place if that succeeds; otherwise nothing is left.

    Raises:
        OSError: the disk is full or failed.
    """
    handle, made = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(made)
    try:
        yield temporary
        # mkstemp makes the file private; a result gets what the user's umask gives every other file
        temporary.chmod(0o666 & ~umask())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def umask() -> int:
    """Return the permissions that new files do not get."""
    found = os.umask(0)
    os.umask(found)
    return found
