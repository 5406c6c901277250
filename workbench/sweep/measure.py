"""Measure an engine's throughput on workloads: checked first, warmed up, interleaved, with intervals.

    measure(engine, Workload("lora", adapters=("a", "b")))          # one
    measure_all([Point("base", ...), Point("lora", ...)])           # several, by turns

Contract: no figure of a point exists unless `check` passed on the same engine, and unless every request of every
repeat ended with its tokens and its scalings counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError, names
from workbench.sweep.checking import Checked, check, generate, require_counts
from workbench.sweep.machine import load_average, peak_bytes, reset_peak, synchronize
from workbench.sweep.memory import watched_peaks
from workbench.sweep.plan import require_at_least, require_baseline
from workbench.sweep.statistics import Estimate, estimate, ratio
from workbench.sweep.workload import Workload

if TYPE_CHECKING:
    from workbench.engine import Completion, Engine

TIMED = ("tok_s", "decode_tok_s", "ttft_ms", "time_per_token_ms", "forward_ms")
_MILLI = 1e3


@dataclass(frozen=True)
class Point:
    """One thing to measure: a workload on an engine. Points may share an engine."""

    name: str
    engine: Engine
    workload: Workload


@dataclass
class Measurement:
    """What the repeats of one point gave.

    Attributes:
        name, workload: of the point.
        checked: what was compared before measuring.
        samples: figure -> its value in each repeat:
            tok_s: generated tokens of all requests over the time from the first submission to the last end.
            decode_tok_s: sum over requests of tokens after the first over the time they took.
            ttft_ms: median over requests of the time from submission to the first token.
            time_per_token_ms: median over requests of the time of one token after the first.
            forward_ms: wall time over forwards.
        counts: count -> its values in the repeats.
        kv_bytes: most bytes of keys and values seen in the warm-up.
        peak_bytes: most memory of a repeat: of the process, or allocated on the card; None where nobody says.
        is_peak_own: False where the peak is the process's since its start.
    """

    name: str
    workload: Workload
    checked: Checked
    samples: dict[str, list[float]] = field(default_factory=lambda: {key: [] for key in TIMED})
    counts: dict[str, list[int]] = field(default_factory=dict)
    kv_bytes: int = 0
    peak_bytes: int | None = None
    is_peak_own: bool = True

    def estimate(self, figure: str) -> Estimate:
        """Return the median of a figure with its interval."""
        return estimate(self.samples[figure])

    def to_dict(self) -> dict[str, Any]:
        """Return one flat record: settings, medians, intervals, counts; `values` holds every repeat."""
        workload = asdict(self.workload)
        record: dict[str, Any] = {"name": self.name, **workload, "adapters": len(workload["adapters"])}
        if self.workload.mode != "lora":
            record["popularity"] = None
        for figure in TIMED:
            found = self.estimate(figure)
            record |= {figure: found.value, f"{figure}_low": found.low, f"{figure}_high": found.high}
        counts = {key: statistics.median_low(values) for key, values in self.counts.items()}
        tokens = self.workload.tokens
        return {
            **record, **counts, "forwards_per_token": counts["forwards"] / tokens,
            "rows_per_forward": counts["rows"] / max(1, counts["forwards"]),
            "peak_bytes": self.peak_bytes, "peak_is_of_this_point": self.is_peak_own, "kv_bytes": self.kv_bytes,
            "repeats": len(self.samples["tok_s"]), "checked": asdict(self.checked),
            "values": {**self.samples, "forwards": self.counts["forwards"]},
        }  # fmt: skip


@dataclass(frozen=True)
class Results:
    """Points measured by turns, and how busy the machine was."""

    points: tuple[Measurement, ...]
    load_before: float | None
    load_after: float | None
    seconds: float

    def ratios(self, baseline: str) -> dict[str, dict[str, Estimate]]:
        """Return point -> figure -> its median over the baseline's, by rounds, with an interval.

        Raises:
            UserError: no point has that name.
        """
        of = {point.name: point for point in self.points}
        require_baseline(baseline, list(of))
        against = of.pop(baseline).samples
        return {
            name: {figure: ratio(point.samples[figure], against[figure]) for figure in TIMED}
            for name, point in of.items()
        }


def measure(engine: Engine, workload: Workload, *, repeats: int = 5) -> Measurement:
    """Measure one workload; see `measure_all`."""
    return measure_all([Point(workload.mode, engine, workload)], repeats=repeats).points[0]


def measure_all(
    points: Sequence[Point], *, repeats: int = 5, progress: Callable[[str], None] = lambda done: None
) -> Results:
    """Check every point, warm it up, then run all of them by turns, each round in the other order.

    Args:
        points: with different names; their engines' prefix caches off, as every repeat has the same prompts.
        repeats: rounds, at least 1; with fewer than 5 an interval says little.
        progress: called `num_runs(points, repeats)` times with what was done.

    Raises:
        CheckFailed: a wrong result; nothing is measured then.
        UserError: repeats or names that mean nothing.
    """
    require_at_least("repeats", repeats, 1)
    if len({point.name for point in points}) < len(points) or not points:
        raise UserError(f"points to measure need names of their own, not {names([point.name for point in points])}")
    started, before = time.perf_counter(), load_average()
    found = [_prepared(point, progress) for point in points]
    for number in range(repeats):
        pairs = list(zip(points, found, strict=True))
        # what slows down or speeds up in a line meets the points alike
        for point, measurement in pairs if number % 2 == 0 else reversed(pairs):
            _repeat(point, measurement)
            progress(f"{point.name} {number + 1}/{repeats}")
    return Results(tuple(found), before, load_average(), time.perf_counter() - started)


def num_runs(points: Sequence[Point], repeats: int) -> int:
    """Return how often `measure_all` reports progress."""
    return len(points) * (2 + repeats)


def _prepared(point: Point, progress: Callable[[str], None]) -> Measurement:
    """Check a point and run it once without a clock."""
    engine, workload = point.engine, point.workload
    checked = check(engine, workload)
    progress(f"{point.name} checked")
    measurement = Measurement(point.name, workload, checked)
    with watched_peaks(engine) as peaks:
        require_counts(generate(engine, workload.prompts(engine), workload.tokens, **workload.options()), workload)
    measurement.kv_bytes = peaks.kv_bytes
    progress(f"{point.name} warm")
    return measurement


def _repeat(point: Point, measurement: Measurement) -> None:
    """Run a point once with a clock and add what it gave."""
    engine, workload = point.engine, point.workload
    prompts, options = workload.prompts(engine), workload.options()
    is_own = reset_peak(engine.device)
    before = _counted(engine)
    synchronize(engine.device)
    started = time.perf_counter()
    done = generate(engine, prompts, workload.tokens, **options)
    synchronize(engine.device)
    wall_s = time.perf_counter() - started
    changed = {key: value - before.get(key, 0) for key, value in _counted(engine).items()}
    require_counts(done, workload)
    for key, value in _timed(done, wall_s, changed["forwards"]).items():
        measurement.samples[key].append(value)
    for key, value in {**changed, **_summed(done)}.items():
        measurement.counts.setdefault(key, []).append(value)
    peaks = [peak for peak in (measurement.peak_bytes, peak_bytes(engine.device)) if peak is not None]
    measurement.peak_bytes = max(peaks, default=None)
    measurement.is_peak_own = measurement.is_peak_own and is_own


def _counted(engine: Engine) -> dict[str, int]:
    counters = engine.counters()
    kept = {key: counters[key] for key in ("steps", "forwards", "rows", "scaling_rows")}
    return {**kept, **engine.adapters.counts}


def _timed(done: Sequence[Completion], wall_s: float, forwards: int) -> dict[str, float]:
    usages = [each.usage for each in done]
    each_s = [usage.completion_time_s / (usage.completion_tokens - 1) for usage in usages]
    return {
        "tok_s": sum(usage.completion_tokens for usage in usages) / wall_s,
        "decode_tok_s": sum(usage.avg_compl_tok_per_sec for usage in usages),
        "ttft_ms": _MILLI * statistics.median(usage.prompt_time_s for usage in usages),
        "time_per_token_ms": _MILLI * statistics.median(each_s),
        "forward_ms": _MILLI * wall_s / max(1, forwards),
    }


def _summed(done: Sequence[Completion]) -> dict[str, int]:
    keys = ("scalings_computed", "scalings_reused", "drafts_accepted", "drafts_rejected")
    return {key: sum(getattr(each, key) for each in done) for key in keys}
