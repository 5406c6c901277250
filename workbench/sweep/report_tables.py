"""The tables of a report: a row per point, with intervals, and what stands against the baseline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.sweep.document import Block
from workbench.sweep.grid import Grid
from workbench.sweep.point import PointSettings
from workbench.sweep.statistics import Estimate, estimate, ratio

if TYPE_CHECKING:
    import pandas as pd

# figure -> (heading, digits after the point); the interval of fidelity's stands in the table already
THROUGHPUT = {
    "tok_s": ("tok/s", 1), "ttft_ms_p50": ("first token ms, median", 0), "ttft_ms_p95": ("95 %", 0),
    "time_per_token_ms_p50": ("ms/token, median", 1), "time_per_token_ms_p95": ("95 %", 1),
    "forwards_per_token": ("forwards/token", 2), "goodput_requests_s": ("goodput req/s", 2),
    "fairness": ("fairness", 3),
}  # fmt: skip
FIDELITY = {
    "kl": ("KL, nats/token", 5), "top1": ("same top token", 4), "perplexity": ("perplexity", 2),
    "perplexity_exact": ("exact", 2), "scalings_l1": ("scalings L1", 4), "scalings_rank": ("rank corr.", 3),
    "same_tokens": ("same tokens, free", 1), "forwards_per_token": ("forwards/token", 2), "tok_s": ("tok/s", 1),
}  # fmt: skip
_BY_DOMAIN = {"kl:": ("KL by domain, nats per token", 5), "perplexity:": ("perplexity by domain", 2)}
_EXACT = "perplexity_exact:"


def main_table(grid: Grid, points: Sequence[PointSettings], done: pd.DataFrame, figures: Mapping[str, tuple]) -> Block:
    """Return a row per point: its figures, its speed against the baseline, and how often it ran.

    Args:
        grid: of the points.
        points: that have results, of one task.
        done: rows of the units that are done.
        figures: name -> heading and digits: `THROUGHPUT` or `FIDELITY`.
    """
    present = {key: form for key, form in figures.items() if key in done and done[key].notna().any()}
    varied = _varied(grid, points)
    baselines = [point for point in grid.baseline_points() if point in points]
    more = ["tok/s against baseline"] if baselines else []
    rows = [["point", *(heading for heading, _ in present.values()), *more, "n"]]
    for point in points:
        own = done[done["point"] == point.id]
        cells = [point.label(varied), *(cell(own, key, digits) for key, (_, digits) in present.items())]
        if baselines:
            found = against(done, point, baseline_of(grid, point, baselines), "tok_s")
            cells.append("–" if found is None else _with_interval(found, 3))
        rows.append([*cells, _count(own)])
    note = ("median over repeats (95 % bootstrap interval of it)" if figures is THROUGHPUT else
            "mean over passages (95 % bootstrap interval); costs are medians over repeats")
    return Block("table", rows, note)


def domain_tables(grid: Grid, points: Sequence[PointSettings], done: pd.DataFrame) -> list[Block]:
    """Return a policy's KL and perplexity for each domain, a table for each kind of text that has several."""
    blocks = []
    for texts in dict.fromkeys(point.texts for point in points):
        ids = {point.id: point for point in points if point.texts == texts}
        rows = done[done["point"].isin(ids)].drop_duplicates("point").dropna(axis=1, how="all")
        for prefix, (title, digits) in _BY_DOMAIN.items():
            domains = [key.removeprefix(prefix) for key in rows.columns if key.startswith(prefix)]
            if not domains:
                continue
            varied = _varied(grid, ids.values())
            table = [["point", *domains]]
            for row in rows.to_dict("records"):
                values = [_number(row[prefix + domain], digits) for domain in domains]
                table.append([ids[row["point"]].label(varied), *values])
            if prefix == "perplexity:":
                first = rows.iloc[0]
                table.append(["by exact scalings", *(_number(first[_EXACT + domain], digits) for domain in domains)])
            blocks.append(Block("table", table, f"texts {texts}: {title}"))
    return blocks


def _varied(grid: Grid, points: Iterable[PointSettings]) -> list[str]:
    """Return the settings in which the points of one table differ."""
    return [key for key in grid.varied if len({getattr(point, key) for point in points}) > 1]


def against(frame: pd.DataFrame, point: PointSettings, baseline: PointSettings, figure: str) -> Estimate | None:
    """Return the ratio of two points' medians over the repeats that both have; None without any."""
    own, base = (frame[frame["point"] == each.id].set_index("repeat")[figure].dropna() for each in (point, baseline))
    both = own.index.intersection(base.index)
    return ratio(own[both].tolist(), base[both].tolist()) if len(both) and (base[both] > 0).all() else None


def baseline_of(grid: Grid, point: PointSettings, baselines: Sequence[PointSettings]) -> PointSettings:
    """Return the baseline that a point is compared with: the one that differs from it in the fewest other settings."""
    said = {key for key, _ in grid.baseline}

    def distance(other: PointSettings) -> int:
        keys = (point.settings.keys() & other.settings.keys()) - said
        return sum(point.settings[key] != other.settings[key] for key in keys)

    return min(baselines, key=distance)


def cell(own: pd.DataFrame, key: str, digits: int) -> str:
    """Return a figure of one point with its interval: the one it came with, or that of its repeats' median."""
    values = own[key].dropna()
    if not len(values):
        return "–"
    if f"{key}_low" in own and own[f"{key}_low"].notna().any():
        first = own.loc[values.index[0]]
        return _with_interval(Estimate(first[key], first[f"{key}_low"], first[f"{key}_high"], len(values)), digits)
    return _with_interval(estimate(values.astype(float).tolist()), digits)


def _with_interval(found: Estimate, digits: int) -> str:
    if math.isclose(found.low, found.high, rel_tol=1e-9):
        return _number(found.value, digits)
    return f"{_number(found.value, digits)} ({_number(found.low, digits)}–{_number(found.high, digits)})"


def _number(value: Any, digits: int) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    # what the digits would call nothing is not nothing
    return f"{value:.1e}" if value and abs(value) < 0.5 * 10**-digits else f"{value:,.{digits}f}"


def _count(own: pd.DataFrame) -> str:
    passages = own["num_passages"].dropna() if "num_passages" in own else ()
    return f"{len(own)}" + (f" × {int(passages.iloc[0])} passages" if len(passages) else "")
