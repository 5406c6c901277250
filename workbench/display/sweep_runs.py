"""Runs as points of a sweep: a row per run, what it was asked for as axes, what it took as metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import UserError, names
from workbench.instrument.run import Run, open_run
from workbench.instrument.run_list import open_runs

if TYPE_CHECKING:
    import pandas

# of `run.json`, what is no setting: it differs from run to run, or is told elsewhere
_NO_AXES = (
    "format", "version", "created", "closed", "ended_by", "environment", "config", "lora", "mixtures",
    "mixture_settings", "adapters", "columns", "workbench", "id", "path",
)  # fmt: skip
_SETTINGS = ("settings", "point")
METRICS = (
    "tok_s", "ttft_ms", "request_ms", "request_tok_s", "forwards_per_token", "reused_share", "accepted_share",
    "cached_share", "kv_peak_mb", "requests", "failed_requests",
)  # fmt: skip


def from_folder(path: Path) -> tuple[pandas.DataFrame, list[str]]:
    """Return the points of a folder of runs, or of one run's folder.

    Raises:
        UserError: no runs there.
    """
    if (path / "run.json").is_file():
        return from_runs([open_run(path)])
    return from_runs(list(open_runs(path).values()))


def from_runs(runs: Sequence[Run]) -> tuple[pandas.DataFrame, list[str]]:
    """Return a row per run, and notes on those that are not complete or cannot be read."""
    import pandas as pd

    rows, notes, unfinished = [], [], []
    for run in runs:
        if run.status != "complete":
            unfinished.append(f"{run.name} ({run.status})")
        try:
            rows.append({**axes_of(run.meta), **metrics_of(run.requests, run.steps)})
        except UserError as error:
            notes.append(f"Left out: {run.name}: {error}")
    if unfinished:
        notes.append(f"Not complete: {names(unfinished, 4)}.")
    frame = pd.DataFrame(rows, columns=None if rows else [*METRICS])
    constant = [name for name in ("name", "run") if name in frame and frame[name].nunique() == len(frame)]
    # a name that no other run has splits nothing: with it every run would be a point of its own
    return frame.drop(columns=constant), notes


def axes_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run was asked for: its settings, and whatever else its maker said in plain values."""
    found: dict[str, Any] = {}
    for key, value in meta.items():
        if key in _SETTINGS and isinstance(value, Mapping):
            found |= dict(_flat(value, ""))
        elif key not in _NO_AXES and (value is None or isinstance(value, str | int | float | bool)):
            found[key] = value
    return found


def metrics_of(requests: pandas.DataFrame, steps: pandas.DataFrame) -> dict[str, float]:
    """Return what a run took; NaN where it was not recorded.

    tok_s: generated tokens per second of forwards. ttft_ms, request_ms, request_tok_s: means over requests.
    forwards_per_token; reused_share: of the inputs with scalings, those that reused some; accepted_share: of the
    drafts; cached_share: of the prompt tokens; kv_peak_mb; requests, failed_requests.
    """
    tokens, seconds = _total(steps, "tokens"), _total(steps, "duration_ms") / 1000
    computed, reused = _total(steps, "scalings_computed"), _total(steps, "scalings_reused")
    accepted, rejected = _total(steps, "drafts_accepted"), _total(steps, "drafts_rejected")
    return {
        "tok_s": _ratio(tokens, seconds),
        "ttft_ms": 1000 * _mean(requests, "ttft_s"),
        "request_ms": 1000 * _mean(requests, "total_s"),
        "request_tok_s": _mean(requests, "tok_s"),
        "forwards_per_token": _ratio(len(steps), tokens),
        "reused_share": _ratio(reused, computed + reused),
        "accepted_share": _ratio(accepted, accepted + rejected),
        "cached_share": _ratio(_total(requests, "cached_tokens"), _total(requests, "prompt_tokens")),
        "kv_peak_mb": float(steps["kv_bytes"].max()) / 1e6 if len(steps) and "kv_bytes" in steps else np.nan,
        "requests": float(len(requests)),
        "failed_requests": float((requests["finish_reason"] == "error").sum()),
    }  # fmt: skip


def _flat(settings: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            plain = value is None or isinstance(value, str | int | float | bool)
            yield f"{prefix}{key}", value if plain else str(value)


def _total(frame: pandas.DataFrame, column: str) -> float:
    return float(frame[column].sum()) if column in frame and len(frame) else np.nan


def _mean(frame: pandas.DataFrame, column: str) -> float:
    return float(frame[column].mean()) if column in frame and len(frame) else np.nan


def _ratio(above: float, below: float) -> float:
    return above / below if below and below > 0 else np.nan
