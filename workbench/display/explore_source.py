"""Where the traces of an explore view come from: one trace, or those of a run, opened one at a time when asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.display.labels import short
from workbench.errors import UserError, names, nearest
from workbench.instrument.comparison_file import is_comparison
from workbench.instrument.run import Run, open_run
from workbench.instrument.trace import Trace

ONE = "trace"
MAX_PROBED = 50  # traces of a run that are looked at for the first with scalings


@dataclass(frozen=True)
class Source:
    """Traces by id.

    Args:
        texts: id -> what the picker says.
        load: returns the trace of an id.
    """

    texts: Mapping[str, str]
    load: Callable[[str], Trace]

    def require(self, request: str) -> str:
        """Return `request`.

        Raises:
            UserError: there is no such trace.
        """
        if request not in self.texts:
            has = names(list(self.texts))
            raise UserError(f"no trace of request {request!r}{nearest(request, self.texts)}; there are {has}")
        return request

    def first(self) -> str:
        """Return the id of the first trace that has scalings, or of the first where none has."""
        ids = list(self.texts)
        for request in ids[:MAX_PROBED] if len(ids) > 1 else []:
            if self.load(request).has_scalings:
                return request
        return ids[0]


def source_of(what: Trace | Run | str | Path) -> Source:
    """Return the traces of a trace, a run, or the path of either.

    Raises:
        UserError: something else, a path that is neither, or a run without a trace.
    """
    if isinstance(what, str | Path):
        path = Path(what)
        if is_comparison(path):
            how = "show(Comparison.load(path)) draws it, explore(….trace(label)) one of its traces"
            raise UserError(f"{path} is a comparison: {how}")
        what = open_run(path) if path.is_dir() else Trace.load(path, lazy=True)
    if isinstance(what, Trace):
        trace = what
        return Source({str(trace.metadata.get("request_id") or ONE): ""}, lambda _: trace)
    if not isinstance(what, Run):
        raise UserError(
            "explore() takes a Trace (rec.trace(request_id)), a Run (open_run(folder)), or the path of one, "
            f"not {type(what).__name__}"
        )
    ids = what.trace_ids
    if not ids:
        hint = "; it is still being written: look again later" if what.status == "running" else ""
        made = "engine.record('scalings', run=…) writes them"
        raise UserError(f"the run {what.name!r} has no trace to explore{hint}; {made}")
    return Source(_texts(what, ids), what.trace)


def _texts(run: Run, ids: tuple[str, ...]) -> dict[str, str]:
    """Return what the picker says of each request: its id, and how its text begins."""
    texts = dict.fromkeys(ids, "")
    for row in run.table("requests").to_pylist():
        request, prompt = row.get("request_id"), row.get("prompt")
        if request in texts and isinstance(prompt, str):
            texts[request] = _text(request, row, prompt)
    return {request: text or request for request, text in texts.items()}


def _text(request: str, row: Mapping[str, Any], prompt: str) -> str:
    who = row.get("mixture") or row.get("adapter") or "base"
    return f"{request} · {who} · {short(prompt, 40)}"
