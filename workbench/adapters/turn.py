"""Turn: whose turn it is to change an engine's slots, or to run a forward on them."""

from __future__ import annotations

import threading
from collections import deque


class Turn:
    """A lock that threads get in the order in which they asked for it; who holds it may take it again.

    A plain lock would go back to a loop of steps before any other thread woke up, and a load would never get in.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> Turn:
        me = threading.get_ident()
        with self._changed:
            if self._owner != me:
                self._wait_for_it()
                self._owner = me
            self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self._changed.notify_all()

    def _wait_for_it(self) -> None:
        ticket = object()
        self._waiting.append(ticket)
        try:
            self._changed.wait_for(lambda: self._owner is None and self._waiting[0] is ticket)
        finally:  # an interrupted wait gives its place up
            self._waiting.remove(ticket)
            self._changed.notify_all()
