"""What an engine's caches saved: tokens, adapters and scalings that were found instead of computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from workbench.display.palette import LIGHT
from workbench.display.picture import Picture
from workbench.display.run_figures import GAP_IN, LEFT_IN, PANEL_IN, RIGHT_IN, finish, name_lines, time_axis
from workbench.display.sheet import Sheet, head, styled
from workbench.display.tables import in_time, numbers, run_facts, table

LINES = ("-", (0, (5, 1.6)), (0, (1.4, 1.2)), (0, (6, 1.6, 1.4, 1.6)))
SHADES = (LIGHT.scale[5], LIGHT.below, LIGHT.scale[3], LIGHT.muted)


@dataclass(frozen=True)
class _Cache:
    """One panel of `cache_hits`: totals over time, and what they say together."""

    heading: str
    unit: str
    columns: tuple[str, ...]
    names: tuple[str, ...]
    says: Callable[..., str]


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "–"


def _part(part: float, rest: float, what: str, did: str) -> str:
    whole = part + rest
    return f"{_share(part, whole)} of {whole:.0f} {what} {did}" if whole else f"no {what}"


_CACHES = (
    _Cache("prefix cache: tokens found instead of computed", "tokens",
           ("cached_prompt_tokens", "cached_scaling_tokens"), ("adapted pass", "scaling pass"),
           lambda adapted, scaling: f"{adapted:.0f} of adapted passes, {scaling:.0f} of scaling passes"),
    _Cache("slots: adapters that were there, loaded, or had to leave", "count",
           ("slot_hits", "slot_loads", "slot_evictions"), ("hits", "loads", "evictions"),
           lambda hits, loads, evictions: _part(hits, loads, "asks", "hit")),
    _Cache("scalings: own, or of an earlier token", "rows",
           ("scalings_computed", "scalings_reused"), ("computed", "reused"),
           lambda computed, reused: _part(reused, computed, "rows", "reused")),
)  # fmt: skip


def cache_hits(steps: Any, title: str | None = None) -> Picture:
    """Draw what the prefix cache, the slots and the reuse of scalings saved: totals over time.

    What counted nothing at all is not drawn, but said in one line.

    Args:
        steps: a table of steps, a run, or a recorder. Of a run, the prefix cache's share of its prompts is told too.
        title: above the figure.

    Raises:
        UserError: it is none of these, or nothing was recorded.
    """
    wanted = ("time_s", *(column for cache in _CACHES for column in cache.columns))
    frame = table(steps, "steps", wanted, "cache")
    frame, left_out = in_time(frame)
    time_s = numbers(frame, "time_s")
    title = title or "What was found instead of computed"
    totals = [[np.cumsum(np.nan_to_num(numbers(frame, column))) for column in cache.columns] for cache in _CACHES]
    drawn = [(cache, lines) for cache, lines in zip(_CACHES, totals, strict=True) if any(line.any() for line in lines)]
    nothing = _nothing([cache for cache in _CACHES if all(cache is not known for known, _ in drawn)])
    note = f"{'Running totals since the recording began.' if drawn else ''}{left_out}{_prompts(steps)}".strip()
    with styled():
        sheet = Sheet()
        top = head(sheet, title, [*run_facts(steps), *filter(None, (note, nothing.strip()))]) + (0.25 if drawn else 0)
        for number, (cache, lines) in enumerate(drawn):
            _panel(sheet, top, cache, time_s, lines, is_last=number == len(drawn) - 1)
            top += PANEL_IN + GAP_IN
        words = [f"{cache.heading.partition(':')[0]}: {_said(cache, lines)}." for cache, lines in drawn]
        return Picture(sheet.close(top + 0.05), title, f"{title}. {' '.join(words)}{_prompts(steps)}{nothing}")


def _panel(
    sheet: Sheet, top: float, cache: _Cache, time_s: np.ndarray, totals: Sequence[np.ndarray], is_last: bool
) -> None:
    axes = sheet.axes(LEFT_IN, top, sheet.width_in - LEFT_IN - RIGHT_IN, PANEL_IN)
    for total, dash, shade in zip(totals, LINES, SHADES, strict=False):
        axes.step(time_s, total, where="post", color=shade, linestyle=dash, linewidth=1.4)
    finish(axes, f"{cache.heading}: {_said(cache, totals)}", cache.unit, np.concatenate(totals))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10], integer=True))
    ends = [f"{name}: {total[-1]:.0f}" for name, total in zip(cache.names, totals, strict=True)]
    name_lines(axes, ends, LINES[: len(ends)], SHADES[: len(ends)])
    time_axis(axes, float(time_s.min()), float(time_s.max()), is_last)


def _said(cache: _Cache, totals: Sequence[np.ndarray]) -> str:
    return cache.says(*(float(total[-1]) for total in totals))


def _nothing(caches: Sequence[_Cache]) -> str:
    """Return what has no panel because all it counts stayed at 0, as a sentence."""
    if not caches:
        return ""
    said = "; ".join(f"{cache.heading.partition(':')[0]} ({', '.join(cache.names)})" for cache in caches)
    return f" 0 throughout, so not drawn: {said}."


def _prompts(source: Any) -> str:
    """Return the share of all prompts' tokens that was found, where the requests are known too."""
    requests = getattr(source, "requests", None)
    requests = requests() if callable(requests) else requests
    if requests is None or not {"prompt_tokens", "cached_tokens"} <= set(requests.columns) or not len(requests):
        return ""
    prompt, found = (float(np.nansum(numbers(requests, name))) for name in ("prompt_tokens", "cached_tokens"))
    return f" Of the {prompt:.0f} prompt tokens of {len(requests)} requests, {_share(found, prompt)} were found."
