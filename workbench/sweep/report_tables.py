"""The tables of a report: a row per point, with intervals, and what stands against the baseline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from workbench.display.medians import interval_words
from workbench.sweep.document import Block
from workbench.sweep.grid import Grid
from workbench.sweep.point import PointSettings
from workbench.sweep.statistics import Estimate, estimate, ratio, ratio_apart

if TYPE_CHECKING:
    import pandas as pd

# figure -> (heading, digits after the point); the interval of fidelity's stands in the table already
THROUGHPUT = {
    "tok_s": ("tok/s", 1), "ttft_ms_p50": ("first token ms, median", 0), "ttft_ms_p95": ("first token ms, p95", 0),
    "time_per_token_ms_p50": ("ms/token, median", 1), "time_per_token_ms_p95": ("ms/token, p95", 1),
    "forwards_per_token": ("forwards/token", 2), "goodput_requests_s": ("goodput req/s", 2),
    "fairness": ("fairness", 3),
}  # fmt: skip
FIDELITY = {
    "kl": ("KL, nats/token", 5), "top1": ("same top token", 4), "perplexity": ("perplexity", 2),
    "perplexity_exact": ("by exact", 2), "scalings_l1": ("scalings L1", 4), "scalings_rank": ("rank corr.", 3),
    "same_tokens": ("same tokens, free", 1), "forwards_per_token": ("forwards/token", 2), "tok_s": ("tok/s", 1),
}  # fmt: skip
MEMORY = {
    "model_bytes": "weights of the base", "slots_bytes": "slots of adapters", "kv_peak_bytes": "largest KV cache",
}  # fmt: skip
_BY_DOMAIN = {"kl:": ("KL by domain, nats per token", 5), "perplexity:": ("perplexity by domain", 2)}
_EXACT = "perplexity_exact:"
AMOUNTS = ("requests", "passages")  # settings of how much is measured
_APART = " †"
_ENDS = ("value", "low", "high")


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
            cells.append("–" if found is None else _with_interval(found, 3) + _APART * (not found.is_paired))
        rows.append([*cells, _count(own)])
    note = _note(done[done["point"].isin({point.id for point in points})], figures is FIDELITY)
    is_apart = any(row[-2].endswith(_APART) for row in rows[1:]) if baselines else False
    return Block("table", rows, note + f"; {_APART[1:]}: of different sessions, resampled apart" * is_apart)


def _note(done: pd.DataFrame, is_fidelity: bool) -> str:
    """Return what the numbers in brackets are."""
    words = interval_words(done.groupby("point")["repeat"].nunique())
    repeats = f" (in brackets: {words})" if words else ""
    if not is_fidelity:
        return f"medians over repeats{repeats}" if words else "one repeat of each: no intervals, and no ratios"
    of = "texts" if "num_texts" in done and done["num_texts"].notna().any() else "passages"
    return (f"means over passages (in brackets: 95 % bootstrap interval, {of} resampled); forwards and tok/s are "
            + (f"medians over repeats{repeats}" if words else "of one repeat"))


def memory_table(grid: Grid, points: Sequence[PointSettings], done: pd.DataFrame) -> list[Block]:
    """Return a table of what each point's engine held, medians over repeats; none where the table does not say."""
    present = {key: words for key, words in MEMORY.items() if key in done and done[key].notna().any()}
    if not present:
        return []
    varied = _varied(grid, points)
    rows = [["point", *present.values()]]
    for point in points:
        own = done[done["point"] == point.id]
        rows.append([point.label(varied), *(_bytes(own[key].dropna().astype(float).tolist()) for key in present)])
    return [Block("table", rows, "memory of a point's engine, medians over repeats; the largest KV cache is what its "
                                 "requests held at once")]


def _bytes(values: Sequence[float]) -> str:
    """Return a median of bytes in MB or GB, with its interval where repeats differ."""
    if not values:
        return "–"
    found = estimate(values)
    scale, unit = (1e9, "GB") if found.value >= 1e9 else (1e6, "MB")
    return f"{_with_interval(replace(found, **{key: getattr(found, key) / scale for key in _ENDS}), 2)} {unit}"


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
    """Return the settings that tell the points of one table apart; one that follows from those before tells nothing.

    How much was measured comes last: where each rate has its number of requests, the rate is what a reader looks for.
    """
    chosen, kept, told = list(points), [], 1
    for key in sorted(grid.varied, key=AMOUNTS.__contains__):
        now = len({tuple(getattr(point, each) for each in (*kept, key)) for point in chosen})
        if now > told:
            kept, told = [*kept, key], now
    return kept


def against(frame: pd.DataFrame, point: PointSettings, baseline: PointSettings, figure: str) -> Estimate | None:
    """Return the ratio of two points' medians; None where fewer than two repeats say how far it may be off.

    Repeats of one session are compared round by round. Where no two rounds share their session (another day, another
    machine), each point is resampled alone, and the estimate says so: it is not `is_paired`.
    """
    own, base = (_rounds(frame[frame["point"] == each.id], figure) for each in (point, baseline))
    both = own.index.intersection(base.index)
    if len(own) < 2 or len(base) < 2 or not (base > 0).all():
        return None
    if len(both) > 1:
        return ratio(own[both].tolist(), base[both].tolist())
    return ratio_apart(own.tolist(), base.tolist())


def _rounds(rows: pd.DataFrame, figure: str) -> pd.Series:
    """Return a figure by session and repeat; a table that knows no sessions counts as one of a single one."""
    session = rows["session"].fillna("") if "session" in rows else ""
    return rows.assign(session=session).set_index(["session", "repeat"])[figure].dropna()


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
    value, low, high = (_number(each, digits) for each in (found.value, found.low, found.high))
    # an interval that the digits do not show says nothing
    return value if value == low == high else f"{value} ({low}–{high})"


def _number(value: Any, digits: int) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    # what the digits would call nothing is not nothing
    return f"{value:.1e}" if value and abs(value) < 0.5 * 10**-digits else f"{value:,.{digits}f}"


def _count(own: pd.DataFrame) -> str:
    passages = own["num_passages"].dropna() if "num_passages" in own else ()
    texts = own["num_texts"].dropna() if "num_texts" in own else ()
    of = f" of {int(texts.iloc[0])} texts" if len(texts) else ""
    tokens = own["passage_tokens"].dropna() if "passage_tokens" in own else ()
    of += f", {int(tokens.iloc[0])} tokens each" if len(tokens) else ""
    return f"{len(own)}" + (f" × {int(passages.iloc[0])} passages{of}" if len(passages) else "")
