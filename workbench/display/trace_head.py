"""The head of every figure of a trace: title, facts, what the scale means, and what must not be missed."""

from __future__ import annotations

from collections.abc import Iterable

from workbench.display.labels import badges, facts, scale_note
from workbench.display.sheet import Sheet, head
from workbench.errors import UserError
from workbench.instrument.trace import Trace


def trace_head(sheet: Sheet, trace: Trace, title: str, notes: Iterable[str] | None = None) -> float:
    """Write the head and return where the next thing may begin; `notes` None says what the scale means."""
    summary = " · ".join(f"{name}: {value}" for name, value in facts(trace) if name != "Created")
    return head(sheet, title, [summary, *([scale_note(trace)] if notes is None else notes)], badges(trace))


def require_scalings(trace: Trace) -> None:
    """Refuse a trace that has no scalings, or something that is no trace.

    Raises:
        UserError: says what to record.
    """
    require_trace(trace)
    if not trace.has_scalings:
        raise UserError(
            "this trace has no scalings to draw: record 'scalings' of a request with a mixture or an adapter "
            "(engine.record('scalings'))"
        )


def require_trace(trace: Trace) -> None:
    """Raise a UserError unless this is a trace."""
    if not isinstance(trace, Trace):
        kind = type(trace).__name__
        raise UserError(f"this figure is drawn from a Trace (rec.trace(request_id) or Trace.load(path)), not {kind}")
