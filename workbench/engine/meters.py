"""Meters: what an engine has done since it was made, as numbers and as a table."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from workbench.engine.batch import SCALING, StepBatch
from workbench.engine.request import Request

if TYPE_CHECKING:
    import pandas as pd

    from workbench.engine.engine import Engine

_MEANINGS = {
    "steps": ("", "forwards run, one a step"),
    "forwards": ("", "forwards run"),
    "failed_steps": ("", "forwards that raised an error"),
    "step_s": ("s", "time spent in them"),
    "rows": ("rows", "rows of these forwards"),
    "scaling_rows": ("rows", "rows of scaling passes among them"),
    "requests": ("", "requests made"),
    "requests_running": ("", "requests with a place in the batch now"),
    "requests_waiting": ("", "requests that wait for one"),
    "requests_ended": ("", "requests that have ended, however"),
    "requests_failed": ("", "requests that ended with an error"),
    "preemptions": ("", "times a request gave its KV up for others"),
    "prompt_tokens": ("tokens", "tokens of the prompts that were started"),
    "cached_prompt_tokens": ("tokens", "of these, tokens whose adapted KV was found in the prefix cache"),
    "cached_scaling_tokens": ("tokens", "tokens whose scaling pass was found there"),
    "generated_tokens": ("tokens", "tokens generated or scored by ended requests"),
    "scalings_computed": ("rows", "adapted rows of ended requests that used their own scalings"),
    "scalings_reused": ("rows", "adapted rows of ended requests that used another position's"),
    "drafts_accepted": ("", "drafted tokens that the adapted model chose"),
    "drafts_rejected": ("", "drafted tokens that it did not choose"),
    "kv_bytes": ("B", "KV held by requests"),
    "kv_cached_bytes": ("B", "KV kept for requests to come, free to be overwritten"),
    "kv_pool_bytes": ("B", "size of the KV pool"),
    "kv_evictions": ("blocks", "cached KV blocks that were overwritten"),
    "slot_hits": ("", "adapters that were in a slot when a request asked"),
    "slot_loads": ("", "adapters put into a slot"),
    "slot_evictions": ("", "adapters that left a slot for another"),
    "slot_bytes": ("B", "stacked factors of the slots"),
}


class Meters:
    """Counts of one engine.

    Attributes:
        last_step_s: what the last committed step took.
    """

    def __init__(self) -> None:
        self._counts = dict.fromkeys(
            ("steps", "rows", "scaling_rows", "requests_ended", "requests_failed", "generated_tokens",
             "scalings_computed", "scalings_reused", "drafts_accepted", "drafts_rejected", "failed_steps"), 0,
        )  # fmt: skip
        self._step_s, self._began_s, self.last_step_s = 0.0, 0.0, 0.0

    def begin(self) -> None:
        """A step's forward begins."""
        self._began_s = time.perf_counter()

    def end(self, batch: StepBatch) -> None:
        """A step has been committed."""
        self.last_step_s = time.perf_counter() - self._began_s
        self._step_s += self.last_step_s
        self._counts["steps"] += 1
        self._counts["rows"] += sum(span.stop - span.start for span in batch.spans)
        self._counts["scaling_rows"] += sum(span.stop - span.start for span in batch.spans_of(SCALING))

    def failed(self) -> None:
        """A step's forward has raised an error."""
        self._counts["failed_steps"] += 1

    def ended(self, request: Request) -> None:
        """A request has ended."""
        counts = self._counts
        counts["requests_ended"] += 1
        counts["requests_failed"] += request.finish_reason == "error"
        counts["generated_tokens"] += len(request.choices)
        counts["scalings_computed"] += request.scalings_computed
        counts["scalings_reused"] += request.scalings_reused
        counts["drafts_accepted"] += request.drafts.count(1)
        counts["drafts_rejected"] += request.drafts.count(0)

    def counters(self, engine: Engine) -> dict[str, float]:
        """Return every counter as a plain number, in the order of the table."""
        pool, scheduler = engine.memory.pool, engine.scheduler
        found = {
            **self._counts, **engine.memory.counts, **engine.adapters.counts,
            "forwards": self._counts["steps"], "step_s": self._step_s,
            "requests": engine.submissions.num_requests, "requests_running": len(scheduler.running),
            "requests_waiting": scheduler.num_waiting, "preemptions": scheduler.num_preemptions,
            "kv_bytes": pool.num_referenced * pool.shape.block_bytes,
            "kv_cached_bytes": pool.num_cached * pool.shape.block_bytes, "kv_pool_bytes": pool.num_bytes,
            "kv_evictions": pool.counts.evictions, "slot_bytes": engine.slots.num_bytes,
        }
        return {name: found[name] for name in _MEANINGS}

    def to_frame(self, engine: Engine) -> pd.DataFrame:
        """Return the counters with their units and meanings."""
        import pandas as pd

        rows = [(name, value, *_MEANINGS[name]) for name, value in self.counters(engine).items()]
        return pd.DataFrame(rows, columns=["name", "value", "unit", "meaning"]).set_index("name")
