"""A comparison in words and in one table: what each setting changed, and what cannot be said to be its doing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench.instrument.trace import Trace

if TYPE_CHECKING:
    import pandas

    from workbench.instrument.comparison import Comparison

# what else than its scalings may make a setting choose other tokens
_CHOOSING = ("seed", "temperature", "edits")


def setting_sentence(comparison: Comparison, label: str) -> str:
    """Return what a setting changed against the first: scalings, then text."""
    if label == comparison.first:
        counts = comparison.counts(label)
        instead = "" if comparison.was_first is None else f", as {comparison.was_first!r} failed"
        return f"what the others are compared with{instead}; {counts['computed']} computed, {counts['reused']} reused"
    return f"{_scalings(comparison, label)}; {_text(comparison, label)}"


def stand_in_sentence(comparison: Comparison) -> str:
    """Return what stands in for a first setting that failed; "" where it did not."""
    if comparison.was_first is None:
        return ""
    return f"{comparison.was_first!r}, the first setting, failed: the others are compared with {comparison.first!r}"


def floor_sentence(comparison: Comparison) -> str:
    """Return what the null pair shows, and what follows for the settings."""
    floor = comparison.floor
    if floor is None:
        return "none was run, so what batch shape alone does is unknown: every difference is shown, and none is proven"
    said = f"{comparison.first!r} in another batch shape"
    if np.isnan(floor.l1).all():
        said += " has no scalings to compare"
    elif floor.level == 0:
        said += " has the same scalings, bit by bit"
    else:
        said += f" differs by up to {floor.level:.2g} per token; nothing up to that is shown"
    if floor.divergence is None:
        return said + ", and the same text"
    return (
        f"{said}, and its own text parts at token {floor.divergence}: from there on nothing is attributed to a setting"
    )


def _scalings(comparison: Comparison, label: str) -> str:
    shown, l1 = comparison.shown_difference(label), comparison.l1(label)
    compared = int((~np.isnan(l1)).sum())
    if not compared:
        return "no token with scalings to compare"
    tokens = int((~np.isnan(shown)).sum())
    if not tokens:
        above = "above the floor " if comparison.floor is not None else ""
        return f"scalings: no difference {above}in {compared} tokens"
    at = int(np.nanargmax(shown))
    return (
        f"scalings differ at {tokens} of {compared} tokens, by {np.nanmean(shown):.2g} on average, most at token {at} "
        f"({shown[at]:.2g})"
    )


def _text(comparison: Comparison, label: str) -> str:
    one, other = comparison.trace(comparison.first), comparison.trace(label)
    at = comparison.divergence(label)
    if at is None:
        if one.num_tokens == other.num_tokens:
            return "the same text"
        count = min(one.num_tokens, other.num_tokens)
        longer = "it ends earlier" if other.num_tokens < one.num_tokens else "it goes on"
        return f"the same text for {count} tokens, then {longer}"
    said = f"another text from token {at} on ({_token(other, one, at)} instead of {_token(one, other, at)})"
    if not comparison.is_attributed(label):
        return f"{said}, which the null pair does by itself: not attributed"
    if comparison.floor is not None and not _is_explained(comparison, label, one, other):
        return f"{said}, with no difference of scalings above the floor before it: perhaps a near tie"
    return said


def _token(trace: Trace, other: Trace, at: int) -> str:
    """Return a token's text, with its id where the text does not tell it from the other trace's."""
    text = trace.tokens[at]
    if text and text != other.tokens[at]:
        return repr(text)
    number = f"token id {int(trace.token_ids[at])}"
    return f"{text!r}, {number}" if text else number


def _is_explained(comparison: Comparison, label: str, one: Trace, other: Trace) -> bool:
    """Whether something before the divergence, or in how tokens are chosen, differs."""
    chosen = any(one.metadata.get(key) != other.metadata.get(key) for key in _CHOOSING)
    return chosen or not np.isnan(comparison.shown_difference(label)).all()


def summary(comparison: Comparison) -> pandas.DataFrame:
    """Return the table of `Comparison.summary`."""
    import pandas as pd

    lines = [_line(comparison, label) for label in comparison.labels]
    floor, null = comparison.floor, comparison.null
    if floor is not None and null is not None:
        lines.append({
            "setting": comparison.first, "is_null": True, "tokens": null.num_tokens,
            "computed": int(null.computed.sum()), "reused": int(null.reused.sum()),
            "divergence": floor.divergence, "attributed": False, "l1_mean": _mean(floor.l1), "l1_max": floor.level,
            "tokens_shown": 0, **{f"share:{name}": share for name, share in null.share().items()},
        })  # fmt: skip
    lines += [
        {"setting": label, "is_null": False, "tokens": 0, "attributed": False,
         "error": _error(comparison, label, reason)}
        for label, reason in comparison.failed.items()
    ]
    columns = ["setting", "is_null", "tokens", "computed", "reused", "divergence", "attributed", "l1_mean", "l1_max"]
    columns += ["tokens_shown", "error", *(f"share:{name}" for name in comparison.adapters)]
    frame = pd.DataFrame(lines, columns=columns)
    counts = dict.fromkeys(("computed", "reused", "divergence", "tokens_shown"), "Int64")
    return frame.astype({**counts, "is_null": bool, "attributed": bool})


def _line(comparison: Comparison, label: str) -> dict:
    l1, shown = comparison.l1(label), comparison.shown_difference(label)
    return {
        "setting": label, "is_null": False, "tokens": comparison.trace(label).num_tokens, **comparison.counts(label),
        "divergence": comparison.divergence(label), "attributed": comparison.is_attributed(label),
        "l1_mean": _mean(l1), "l1_max": np.nan if np.isnan(l1).all() else float(np.nanmax(l1)),
        "tokens_shown": int((~np.isnan(shown)).sum()),
        **{f"share:{name}": share for name, share in comparison.shares(label).items()},
    }  # fmt: skip


def _error(comparison: Comparison, label: str, reason: str) -> str:
    return f"{reason} ({comparison.stand_in()})" if label == comparison.was_first else reason


def _mean(values: np.ndarray) -> float:
    return float("nan") if np.isnan(values).all() else float(np.nanmean(values))
