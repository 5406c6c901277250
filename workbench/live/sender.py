"""Sender: what is new reaches the front end a few times a second, however often it changes.

Contract: `poke` never blocks and never sends; the thread that pokes (the engine's, inside a step) does not wait for a
front end. The state at the last poke is always sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

INTERVAL_S = 0.05


class Sender:
    """Calls `send` on a thread of its own: at once after a poke, but at most once per interval.

    Args:
        send: sends what is new and returns whether more may come; False ends the thread.
        interval_s: seconds between two calls.
    """

    def __init__(self, send: Callable[[], bool], interval_s: float = INTERVAL_S):
        self._send, self._interval_s = send, interval_s
        self._poked, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="lora-live", daemon=True)
        self._thread.start()

    def poke(self) -> None:
        """Something has changed."""
        self._poked.set()

    def close(self) -> None:
        """End the thread, after the call it is in; what has not been sent is not."""
        self._closed.set()
        self._poked.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._poked.wait()
            self._poked.clear()
            if self._closed.is_set() or not self._send():
                return
            self._closed.wait(self._interval_s)
