"""Measure one point's throughput and latencies: checked and warmed up when its engine is new to it, then timed.

Contract: no figure exists unless the results were right: every request ended with its tokens, its scalings counted as
its policy says, and, once for each point in a process, some with the tokens they have alone.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.engine.result import Completion, completion_of
from workbench.instrument.run_meta import meta_of
from workbench.instrument.run_writer import RunWriter
from workbench.sweep.checking import CheckFailed, check
from workbench.sweep.machine import peak_bytes, reset_peak, synchronize
from workbench.sweep.memory import held_bytes, watched_peaks
from workbench.sweep.point import PointSettings
from workbench.sweep.synthetic import draw_adapters
from workbench.sweep.traffic import Arrival, Served, draws, serve, traffic
from workbench.xlora.policy import policy_named

if TYPE_CHECKING:
    import pandas as pd

    from workbench.engine import Engine

PERCENTILES = (50, 95, 99)
_MILLI = 1e3
_CHECKED = 8
_SHORT = (4, 2)  # prompt tokens and tokens of a request that only brings its adapter into a slot
_BEFORE = 4  # requests that came before, for each slot
_seen: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


class _Sample:
    """Some of a point's requests, as `checking.check` wants them: all at once."""

    def __init__(self, point: PointSettings, arrivals: Sequence[Arrival]):
        self.mode, self._arrivals = point.mode, list(arrivals)
        self.concurrency, self.tokens = len(self._arrivals), min(each.tokens for each in self._arrivals)

    def prompts(self, engine: Engine) -> list[list[int]]:
        return [each.prompt for each in self._arrivals]

    def options(self) -> dict[str, Any]:
        keys = {key for each in self._arrivals for key in each.options}
        return {key: [each.options.get(key) for each in self._arrivals] for key in keys}

    def options_of(self, number: int) -> dict[str, Any]:
        return dict(self._arrivals[number].options)


def measure_throughput(
    point: PointSettings, repeat: int, prepared: Any, folder: Path, is_alone: bool = False
) -> dict[str, Any]:
    """Run a point once with a clock and return its figures.

    `peak_bytes` is the process's most memory, allocated on a card or resident on the host; NaN unless `is_alone`.

    Writes its requests as a run, and `adapters.parquet`, a row per adapter, to `folder`. Every repeat begins with an
    empty prefix cache.

    Args:
        point: what.
        repeat: which time, from 0; it draws traffic of its own.
        prepared: its engine with what it needs loaded, see `tasks.Prepared`.
        folder: empty.
        is_alone: whether the process has held no other engine, so that its memory is this one's.

    Raises:
        CheckFailed: a wrong result.
        UserError: traffic that the engine cannot run.
    """
    engine = prepared.engine
    arrivals = traffic(point, engine, prepared.adapters, prepared.mixture, repeat)
    concurrency = point.concurrency
    # what the last unit left there would be found instead of computed
    engine.memory.pool.clear()
    if point.id not in _seen.setdefault(engine, set()):
        first = of_many_adapters(arrivals, _CHECKED)
        check(engine, _Sample(point, first))
        require_right(serve(engine, [_now(each) for each in first], concurrency), first, point)
        _seen[engine].add(point.id)
    fill_slots(point, repeat, prepared)
    engine.memory.pool.clear()
    is_peak_own = reset_peak(engine.device) and is_alone
    before = engine.counters()
    synchronize(engine.device)
    started = time.perf_counter()
    with watched_peaks(engine) as peaks:
        served = serve(engine, arrivals, concurrency)
    synchronize(engine.device)
    wall_s = time.perf_counter() - started
    after = engine.counters()
    require_right(served, arrivals, point)
    completions = [completion_of(each.request) for each in served]
    changed = {key: after[key] - before[key] for key in after}
    meta = {**meta_of(engine), "point": point.settings, "repeat": repeat}
    with RunWriter(folder / "run", name=point.id, meta=meta) as run:
        for each, done in zip(served, completions, strict=True):
            run.request(request_row(each, done))
    by_adapter(served, completions).to_parquet(folder / "adapters.parquet", index=False)
    return {
        **latencies(served, completions), **goodput(point, served, completions, wall_s),
        **counts(served, completions, changed, wall_s), "fairness": fairness(served, completions),
        "adapters_used": adapters_used(point, prepared, arrivals), "running_peak": peaks.running,
        **held_bytes(engine), "kv_peak_bytes": peaks.kv_bytes,
        "peak_bytes": peak_bytes(engine.device) if is_peak_own else math.nan,
    }  # fmt: skip


def adapters_used(point: PointSettings, prepared: Any, arrivals: Sequence[Arrival]) -> int:
    """Return how many different adapters a unit's requests use; those of a merge or a mixture are all of theirs."""
    if point.mode == "merged":
        return len(prepared.adapters)
    if point.mode == "xlora":
        return len(prepared.engine.mixtures[prepared.mixture].adapters)
    return len({each.options["adapter"] for each in arrivals if each.options.get("adapter") is not None})


def of_many_adapters(arrivals: Sequence[Arrival], most: int) -> list[Arrival]:
    """Return at most so many of the arrivals, of as many different adapters as possible, in their order."""
    first: dict[str | None, int] = {}
    for number, each in enumerate(arrivals):
        first.setdefault(each.options.get("adapter"), number)
    chosen = list(dict.fromkeys([*first.values(), *range(len(arrivals))]))[:most]
    return [arrivals[number] for number in sorted(chosen)]


def fill_slots(point: PointSettings, repeat: int, prepared: Any) -> None:
    """Bring adapters into all slots, by a short request each: those that traffic before this unit's would have left.

    Without it a unit's slots would hold what the unit before happened to use, or its own check.
    """
    slots, count = prepared.engine.adapters.config.max_num_loras, len(prepared.adapters)
    if point.mode != "lora":
        return
    random, popularity = draws(point, repeat, "slots"), point.popularity or "uniform"
    before = [each for each in draw_adapters(popularity, _BEFORE * slots, count, random) if each >= 0]
    newest = list(dict.fromkeys([*reversed(before), *random.permutation(count).tolist()]))[:slots]
    short = [Arrival(None, [0] * _SHORT[0], _SHORT[1], {"adapter": prepared.adapters[each]})
             for each in reversed(newest)]  # fmt: skip
    require_right(serve(prepared.engine, short), short, point)


def latencies(served: Sequence[Served], completions: Sequence[Completion]) -> dict[str, float]:
    """Return percentiles over requests, milliseconds: first token, token after the first, end to end.

    Times count from when the request was to arrive, a step that it had to wait for included.
    """
    late = np.array([each.late_s for each in served])
    usages = [done.usage for done in completions]
    found = {"ttft_ms": _MILLI * (late + [usage.prompt_time_s for usage in usages]),
             "total_ms": _MILLI * (late + [usage.total_time_s for usage in usages])}
    several = [usage for usage in usages if usage.completion_tokens > 1]
    per_token = [usage.completion_time_s / (usage.completion_tokens - 1) for usage in several]
    if per_token:
        found["time_per_token_ms"] = _MILLI * np.array(per_token)
    return {f"{key}_p{percentile}": float(np.percentile(values, percentile))
            for key, values in found.items() for percentile in PERCENTILES}


def goodput(
    point: PointSettings, served: Sequence[Served], completions: Sequence[Completion], wall_s: float
) -> dict[str, float]:
    """Return requests per second that kept the point's limits, and their share; nothing without limits."""
    limits = (point.slo_ttft_ms, point.slo_time_per_token_ms)
    if limits == (None, None):
        return {}
    kept = 0
    for each, done in zip(served, completions, strict=True):
        usage = done.usage
        ttft = _MILLI * (each.late_s + usage.prompt_time_s)
        per_token = _MILLI * usage.completion_time_s / max(1, usage.completion_tokens - 1)
        kept += all(limit is None or value <= limit for value, limit in zip((ttft, per_token), limits, strict=True))
    return {"goodput_requests_s": kept / wall_s, "slo_share": kept / len(served)}


def counts(
    served: Sequence[Served], completions: Sequence[Completion], changed: Mapping[str, float], wall_s: float
) -> dict[str, float]:
    """Return rates and counts of a timed run.

    `forwards_per_token` is the forwards that ran while a request was there over its tokens, mean over all tokens: what
    one request waits for, however many others run. `forward_ms` is the time of a step, waits between steps left out.
    """
    tokens = sum(len(done.token_ids) for done in completions)
    own = ("scalings_computed", "scalings_reused", "drafts_accepted", "drafts_rejected", "cached_tokens")
    summed = {key: sum(getattr(done, key) for done in completions) for key in own}
    kept = ("forwards", "rows", "scaling_rows", "preemptions", "slot_hits", "slot_loads", "slot_evictions")
    return {
        "wall_s": wall_s, "tok_s": tokens / wall_s, "requests_s": len(completions) / wall_s, "generated_tokens": tokens,
        "forwards_per_token": sum(each.forwards for each in served) / tokens,
        "forward_ms": _MILLI * changed["step_s"] / max(1, changed["forwards"]),
        **{key: changed[key] for key in kept}, **summed,
    }  # fmt: skip


def by_adapter(served: Sequence[Served], completions: Sequence[Completion]) -> pd.DataFrame:
    """Return a row per adapter, mixture or the base (no name): its requests, their tokens, medians and 95 % points."""
    import pandas as pd

    rows: dict[str | None, list[dict[str, float]]] = {}
    for each, done in zip(served, completions, strict=True):
        usage, late = done.usage, each.late_s
        rows.setdefault(each.request.key, []).append({
            "ttft_ms": _MILLI * (late + usage.prompt_time_s), "total_ms": _MILLI * (late + usage.total_time_s),
            "tok_s": len(done.token_ids) / (late + usage.total_time_s), "tokens": len(done.token_ids),
        })  # fmt: skip
    found = []
    for name, own in rows.items():
        values = {key: np.array([row[key] for row in own]) for key in own[0]}
        spread = {f"{key}_p{percentile}": float(np.percentile(values[key], percentile))
                  for key in ("ttft_ms", "total_ms") for percentile in (50, 95)}
        found.append({"name": name, "requests": len(own), "tokens": int(values["tokens"].sum()),
                      "tok_s_per_request": float(values["tok_s"].mean()), **spread})
    return pd.DataFrame(found)


def fairness(served: Sequence[Served], completions: Sequence[Completion]) -> float:
    """Return Jain's index of the adapters' mean tokens per second of a request, waiting included: 1 is alike for all.

    (sum x)² / (n sum x²), x one number for each adapter, mixture, or the base (Jain, Chiu and Hawe 1984).
    """
    rates: dict[str | None, list[float]] = {}
    for each, done in zip(served, completions, strict=True):
        rates.setdefault(each.request.key, []).append(len(done.token_ids) / (each.late_s + done.usage.total_time_s))
    means = np.array([np.mean(values) for values in rates.values()])
    return float(means.sum() ** 2 / (len(means) * (means**2).sum()))


def request_row(each: Served, done: Completion) -> dict[str, Any]:
    """Return a request as the run store keeps it."""
    request, usage = each.request, done.usage
    return {
        "request_id": done.request_id, "adapter": "+".join(request.names) or None,
        "mixture": request.mixture.name if request.mixture is not None else None,
        "policy": request.policy.name if request.policy is not None else None,
        "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens,
        "finish_reason": done.finish_reason, "error": done.error, "ttft_s": each.late_s + usage.prompt_time_s,
        "total_s": each.late_s + usage.total_time_s, "tok_s": usage.avg_compl_tok_per_sec,
        "scalings_computed": done.scalings_computed, "scalings_reused": done.scalings_reused,
        "drafts_accepted": done.drafts_accepted, "drafts_rejected": done.drafts_rejected,
        "cached_tokens": done.cached_tokens, "cached_scaling_tokens": done.cached_scaling_tokens,
        "preemptions": done.preemptions,
    }  # fmt: skip


def require_right(served: Sequence[Served], arrivals: Sequence[Arrival], point: PointSettings) -> None:
    """Raise CheckFailed unless every request ended with its tokens, and its scalings as its policy says."""
    if len(served) != len(arrivals):
        raise CheckFailed(f"{len(served)} of {len(arrivals)} requests ended")
    policy = policy_named(point.policy) if point.policy is not None else None
    for each in served:
        request = each.request
        if request.error or request.finish_reason != "length":
            raise CheckFailed(f"request {request.id} ended with {request.finish_reason}: {request.error}")
        if len(request.generated) != each.arrival.tokens:
            raise CheckFailed(f"request {request.id} has {len(request.generated)} tokens, not {each.arrival.tokens}")
        if policy is None:
            continue
        prompt, inputs = len(request.prompt_ids), len(request.tokens) - 1
        own = sum(policy.source(position, prompt) == position for position in range(inputs))
        if (request.scalings_computed, request.scalings_reused) != (own, inputs - own):
            raise CheckFailed(f"request {request.id} computed {request.scalings_computed} scalings and reused "
                              f"{request.scalings_reused}; {policy.name} asks for {own} and {inputs - own}")


def _now(arrival: Arrival) -> Arrival:
    return Arrival(None, arrival.prompt, arrival.tokens, arrival.options)
