"""Ctrl-C during a step: held back while the engine's state changes, so that no interrupt leaves it half changed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def held_interrupts() -> Iterator[None]:
    """Deliver a SIGINT that arrives inside only at the end; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler, arrived = signal.getsignal(signal.SIGINT), []
    if not callable(handler):  # ignored, or not Python's
        yield
        return
    signal.signal(signal.SIGINT, lambda *args: arrived.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            handler(*arrived[-1])
