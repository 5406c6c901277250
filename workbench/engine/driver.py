"""Driver: the thread that steps an engine while requests run that nobody waits for.

It starts with the first submitted request, sleeps when there is nothing to do, holds no reference to an idle engine,
and ends when the engine is closed or collected.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

_started: weakref.WeakSet[Driver] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # a thread inside torch when the interpreter goes would end the process in an abort
    for driver in list(_started):
        driver.close()


class Driver:
    """Steps one engine on a thread of its own."""

    def __init__(self, engine: Engine):
        self._engine = weakref.ref(engine, self._collected)
        self._wake = threading.Event()
        self._closing = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Step until nothing is left to do."""
        with self._lock:
            if self._closing:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lora-engine", daemon=True)
                self._thread.start()
                _started.add(self)
        self._wake.set()

    def close(self) -> None:
        """End the thread, after the step it is in."""
        with self._lock:
            self._closing = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def _collected(self, _: object) -> None:
        self._closing = True
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while not self._closing and self._step_once():
                pass
            if self._closing:
                return

    def _step_once(self) -> bool:
        """Run one step; whether there may be more to do. The engine is held no longer than that."""
        engine = self._engine()
        if engine is None or not engine.scheduler.has_work():
            return False
        engine.step()
        return True
