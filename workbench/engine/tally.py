"""Tally: a step's and a request's numbers, as rows of the tables that a recorder keeps.

Contract: a tally's steps add up. What they say of requests is what `Engine.counters` says once these have ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from workbench.engine.batch import ADAPTED, SCALING, StepBatch
from workbench.engine.request import Request
from workbench.engine.result import completion_of

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

_OF_REQUESTS = ("tokens", "scalings_computed", "scalings_reused", "drafts_accepted", "drafts_rejected")
_OF_MEMORY = ("cached_prompt_tokens", "cached_scaling_tokens")
_OF_SLOTS = ("slot_hits", "slot_loads", "slot_evictions")


class Tally:
    """Counts what has happened since it was last asked.

    Args:
        engine: whose steps; what it has done so far does not count.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._known: dict[Request, tuple[int, int, int]] = {}
        self._counts = dict.fromkeys(_OF_REQUESTS, 0)
        self.catch_up(engine.scheduler.requests())
        self._counts = dict.fromkeys(_OF_REQUESTS, 0)
        self._totals = self._engine_totals()

    def catch_up(self, requests: Iterable[Request]) -> None:
        """Count what requests have done since they were last looked at."""
        for request in requests:
            choices, sources, drafts = self._known.get(request, (0, 0, 0))
            counts, own = self._counts, request.sources[sources:]
            computed = sum(source == position for position, source in enumerate(own, sources))
            counts["tokens"] += len(request.choices) - choices
            counts["scalings_computed"] += computed
            counts["scalings_reused"] += len(own) - computed
            counts["drafts_accepted"] += request.drafts[drafts:].count(1)
            counts["drafts_rejected"] += request.drafts[drafts:].count(0)
            self._known[request] = len(request.choices), len(request.sources), len(request.drafts)

    def ended(self, request: Request) -> None:
        """Count the last of a request, and forget it."""
        self.catch_up([request])
        del self._known[request]

    def step(self, batch: StepBatch) -> dict[str, float]:
        """Return the row of a step that has been committed."""
        engine = self._engine
        self.catch_up(request for request in batch.requests if request.finish_reason is None)
        counts, self._counts = self._counts, dict.fromkeys(_OF_REQUESTS, 0)
        totals = self._engine_totals()
        new = {name: total - self._totals[name] for name, total in totals.items()}
        self._totals = totals
        rows = {kind: sum(s.stop - s.start for s in batch.spans_of(kind)) for kind in (ADAPTED, SCALING)}
        pool = engine.memory.pool
        return {
            "duration_ms": engine.meters.last_step_s * 1000, "rows": sum(rows.values()),
            "adapted_rows": rows[ADAPTED], "scaling_rows": rows[SCALING],
            "running": len(engine.scheduler.running), "waiting": engine.scheduler.num_waiting,
            "kv_bytes": pool.num_referenced * pool.shape.block_bytes,
            "kv_cached_bytes": pool.num_cached * pool.shape.block_bytes, **counts, **new,
        }

    def _engine_totals(self) -> dict[str, float]:
        engine = self._engine
        found = {name: engine.memory.counts[name] for name in _OF_MEMORY}
        found |= {name: engine.adapters.counts[name] for name in _OF_SLOTS}
        return {**found, "preemptions": engine.scheduler.num_preemptions}


def request_row(request: Request, began_s: float, prompt: str) -> dict[str, Any]:
    """Return an ended request's row.

    Args:
        request: the request.
        began_s: when the recording began, by `time.perf_counter`.
        prompt: its prompt as text.
    """
    done = completion_of(request)
    times = request.token_times_s
    return {
        "request_id": request.id, "adapter": "+".join(request.names) or None,
        "mixture": request.mixture.name if request.mixture is not None else None,
        "policy": getattr(request.policy, "name", None),
        "tgt_non_granular_index": getattr(request.policy, "k", None),
        "prompt_tokens": done.usage.prompt_tokens, "completion_tokens": done.usage.completion_tokens,
        "finish_reason": done.finish_reason, "error": done.error, "submitted_s": request.submitted_s - began_s,
        "ttft_s": times[0] if times else None, "total_s": done.usage.total_time_s,
        "tok_s": done.usage.avg_compl_tok_per_sec, "scalings_computed": done.scalings_computed,
        "scalings_reused": done.scalings_reused, "drafts_accepted": done.drafts_accepted,
        "drafts_rejected": done.drafts_rejected, "cached_tokens": done.cached_tokens,
        "cached_scaling_tokens": done.cached_scaling_tokens, "preemptions": done.preemptions,
        "edits": done.edits, "prompt": prompt, "text": done.text,
    }
