"""Ctrl-C during a step: held back while the engine's state changes, so that no interrupt leaves it half changed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_HELD: list[tuple[Any, list[tuple]]] = []  # handler and what arrived, of each `held_interrupts` that is entered


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
    _HELD.append((handler, arrived))
    signal.signal(signal.SIGINT, lambda *args: arrived.append(args))
    try:
        yield
    finally:
        _HELD.pop()
        signal.signal(signal.SIGINT, handler)
        if arrived:
            handler(*arrived[-1])


@contextlib.contextmanager
def let_interrupts() -> Iterator[None]:
    """Inside `held_interrupts`, deliver a SIGINT at once: around a call that may take for ever and changes nothing."""
    if threading.current_thread() is not threading.main_thread() or not _HELD:
        yield
        return
    holding, (handler, _) = signal.getsignal(signal.SIGINT), _HELD[0]
    try:
        signal.signal(signal.SIGINT, handler)
        for _, arrived in _HELD:
            while arrived:
                handler(*arrived.pop())
        yield
    finally:
        signal.signal(signal.SIGINT, holding)
