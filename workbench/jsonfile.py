"""Read a JSON file a user gave us: every way in which it can be wrong is a sentence with a place in it."""

from __future__ import annotations

import json
from pathlib import Path

from workbench.errors import TransientError, UserError, names, nearest


def read_json(path: str | Path, what: str) -> object:
    """Return the value in the file at `path`; `what` names it in errors ("ordering", "model config").

    Raises UserError when the file is missing, unreadable or malformed, or repeats a key in one object.
    """
    return parse_bytes(read_file(path, what), f"{what} {str(path)!r}")


def read_file(path: str | Path, what: str) -> bytes:
    """Return the bytes of the JSON file at `path`; `what` names it in errors."""
    path = Path(path)
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{what} {str(path)!r} does not exist{_nearest_sibling(path)}") from None
    except IsADirectoryError:
        inside = sorted(child.name for child in path.glob("*.json"))
        raise UserError(f"{what} {str(path)!r} is a folder, expected a JSON file; it holds {names(inside)}") from None
    except OSError as error:
        raise TransientError(f"{what} {str(path)!r} cannot be read: {error.strerror or error}") from None


def parse_bytes(content: bytes, where: str) -> object:
    """Return the JSON value in a file's `content`; `where` begins each error."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 text (byte {error.start}), expected JSON") from None
    return parse_json(text, where)


def parse_json(text: str, where: str) -> object:
    """Return the JSON value in `text`; a repeated key is an error, because a parser would keep only the last one."""
    repeated: list[str] = []

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        result: dict[str, object] = {}
        for key, value in items:
            if key in result and key not in repeated:
                repeated.append(key)
            result[key] = value
        return result

    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{where} is not valid JSON: {error.msg} at {place}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{where} is not usable JSON: it is nested too deeply or holds a number too long") from None
    if repeated:
        raise UserError(f"{where} gives the same key twice in one object: {names(repeated)}; keep one of each")
    return value


def _nearest_sibling(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f": there is no folder {str(folder)!r}"
    return nearest(path.name, [child.name for child in folder.iterdir()])
