"""What a user sees when something they gave us does not fit: one sentence, no traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class UserError(ValueError):
    """A mistake in what the user gave. The message names the thing, what was expected, and the fix.

    In a notebook it shows as its sentence alone; `traceback.print_last()` or `%debug` still say where it was raised.
    """

    def _render_traceback_(self) -> list[str]:
        # IPython's hook: what a cell shows in place of the traceback
        return [f"{type(self).__name__}: {self}"]


class ContentError(UserError):
    """What the user named was found, and is not what it should be."""


class TransientError(UserError):
    """Nothing that the user gave is wrong: a disk or a server failed, and the same may work later."""


def nearest(name: object, options: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the closest of `options`, or an empty string when none is close."""
    close = difflib.get_close_matches(str(name), [str(option) for option in options], n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def names(items: Iterable[object], limit: int = 8) -> str:
    """Return the items quoted and comma-separated, at most `limit` of them, then how many more there are."""
    items = items if isinstance(items, Sequence) else list(items)
    shown = ", ".join(repr(item) for item in items[:limit])
    return shown + (f" and {len(items) - limit} more" if len(items) > limit else "") if items else "none"
