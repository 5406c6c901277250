"""Writing a picture to a file: the suffix chooses the form, and a reader never sees half of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from workbench.errors import UserError, nearest

SUFFIXES = (".html", ".png", ".svg", ".pdf")


def save(path: str | Path, content: Callable[[str], bytes], suffixes: tuple[str, ...] = SUFFIXES) -> Path:
    """Write what `content` returns for the path's suffix (".png") and return the path.

    Raises:
        UserError: another suffix, or a folder that does not exist.
    """
    path = Path(path)
    if path.suffix not in suffixes:
        hint = nearest(path.suffix, suffixes)
        raise UserError(f"cannot save {path}: a picture is one of {', '.join(suffixes)}{hint}")
    if not path.parent.is_dir():
        raise UserError(f"cannot save {path}: the folder {path.parent} does not exist")
    made = content(path.suffix)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(made)
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot save {path}: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return path
