"""The picture of a run: what the engine did over time, how long requests took, and the list of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from workbench.display.picture import Picture
from workbench.display.sheet import cut
from workbench.display.static_html import box, head, table
from workbench.errors import UserError
from workbench.instrument.run import Run

MOST_REQUESTS = 500
COLUMNS = (
    *("request", "trace", "answered by", "prompt", "generated", "first token", "in all", "tokens/s", "ended", "text"),
)


class RunPicture(Picture):
    """The timeline as a figure; on the page also latencies, cache hits and the requests.

    Raises:
        UserError: neither steps nor requests were recorded.
    """

    def __init__(self, run: Run, title: str | None = None):
        from workbench.display.figures import latency, timeline

        self.run = run
        title = title or f"Run {run.name}"
        made = _first((timeline, latency), run)
        super().__init__(made.figure, title, f"{title}: {made.description}")
        self._drawn = made.description

    def __repr__(self) -> str:
        return f"{self.run!r}\n{super().__repr__()}"

    def _html(self, png: bytes) -> str:
        drawn = [super()._html(png), *(picture.html for picture in self._more)]
        return box([head(self.title, _facts(self.run)), *drawn, self._requests()])

    @cached_property
    def _more(self) -> list[Picture]:
        """The other figures that this run has something for."""
        from workbench.display.figures import cache_hits, latency

        made = []
        for draw in (latency, cache_hits):
            try:
                picture = draw(self.run)
            except UserError:  # nothing of the kind was recorded
                continue
            if picture.description != self._drawn:
                made.append(picture)
        return made

    def _requests(self) -> str:
        rows = self.run.table("requests").to_pylist()
        traced = set(self.run.trace_ids)
        caption = f"{len(rows)} requests, {len(traced)} with a trace"
        if len(rows) > MOST_REQUESTS:
            caption += f"; the first {MOST_REQUESTS} are listed, run.requests has all"
        return table(caption, COLUMNS, _lines(rows[:MOST_REQUESTS], traced))


def _first(draws: Sequence[Any], run: Run) -> Picture:
    """Return the first figure that can be drawn."""
    reasons = []
    for draw in draws:
        try:
            return draw(run)
        except UserError as error:
            reasons.append(str(error))
    still = " It is still being written: look again later." if run.status == "running" else ""
    raise UserError(f"there is nothing to show of the run {run.name!r}: {reasons[0]}.{still}")


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    yield "Status", run.status
    for key in ("base", "dtype", "device", "created"):
        if run.meta.get(key) is not None:
            yield key.capitalize(), str(run.meta[key])


def _lines(rows: list[dict[str, Any]], traced: set[str]) -> Iterator[list[object]]:
    for row in rows:
        said = row.get("error") or row.get("text")
        yield [
            row.get("request_id"),
            "yes" if row.get("request_id") in traced else "no",
            row.get("mixture") or row.get("adapter") or "base",
            row.get("prompt_tokens"),
            row.get("completion_tokens"),
            _number(row.get("ttft_s"), " s"),
            _number(row.get("total_s"), " s"),
            _number(row.get("tok_s"), ""),
            row.get("finish_reason") or ("error" if row.get("error") else None),
            cut(" ".join(said.split()), 160) if isinstance(said, str) else None,
        ]


def _number(value: Any, unit: str) -> str | None:
    return None if value is None or value != value else f"{value:.3g}{unit}"
