"""Recorder: collects the traces of the requests that run while it is open.

Contract: observing changes nothing. A request keeps the scalings it used in any case (they are replayed when it is
recomputed); recording copies them out once, when the request ends.
"""

from __future__ import annotations

from collections.abc import Callable

from workbench.errors import UserError, names, nearest
from workbench.instrument.trace import Trace

KINDS = ("scalings",)


class Recorder:
    """Traces by request id; a context manager, closed on exit.

    Args:
        what: kinds of values, of `KINDS`.
        on_close: called with the recorder when it closes.
    """

    def __init__(self, what: tuple[str, ...], on_close: Callable[[Recorder], None]):
        for kind in what or ("",):
            if kind not in KINDS:
                raise UserError(f"cannot record {kind!r}{nearest(kind, KINDS)}; choose from {names(KINDS)}")
        self.what = what
        self.traces: dict[str, Trace] = {}
        self.untraced: dict[str, str] = {}
        self._on_close = on_close

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self._on_close(self)

    def add(self, request_id: str, make: Callable[[], Trace]) -> None:
        """Take a finished request's trace; a request without one (no mixture) is remembered with the reason."""
        try:
            self.traces[request_id] = make()
        except UserError as error:
            self.untraced[request_id] = str(error)

    def trace(self, request_id: str | None = None) -> Trace:
        """Return one request's trace; without an id, the only one.

        Raises:
            UserError: no such trace, or no id where there are several.
        """
        if request_id is None:
            if len(self.traces) != 1:
                raise UserError(f"{len(self.traces)} traces were recorded ({names(list(self.traces))}); name one")
            return next(iter(self.traces.values()))
        if request_id in self.traces:
            return self.traces[request_id]
        if request_id in self.untraced:
            raise UserError(self.untraced[request_id])
        raise UserError(
            f"no trace of request {request_id!r}{nearest(request_id, self.traces)}; "
            f"recorded: {names(list(self.traces))}"
        )
