"""What a reuse policy loses against exact scalings, on given texts; and what it saves.

Each passage is scored twice, teacher-forced, by exact scalings and by the policy: the same tokens go in, so what
differs is the mixture alone. Then both continue its beginning freely.

    kl            mean over tokens of sum_v p(v) log(p(v) / q(v)), p exact, q the policy, nats per token
    top1          share of tokens at which both have the same likeliest next token
    loss          mean of -log q(next token of the text); `loss_exact` by exact scalings
    scalings_l1   mean over tokens and sites of sum_a |w(a) - w'(a)|, from 0 to 2 where weights sum to 1
    scalings_rank Spearman's correlation of the adapters' weights, mean over tokens and sites
    same_tokens   generated tokens before the two free texts part

The exact texts are scored together, the policy's one by one: for the policy "exact" this is the null pair, what another
batch shape alone changes. Intervals are of the mean over passages, by bootstrap.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.instrument.run_meta import meta_of
from workbench.instrument.run_writer import RunWriter
from workbench.instrument.trace import Trace
from workbench.sweep.checking import CheckFailed
from workbench.sweep.passages import Passage, passages_of
from workbench.sweep.point import PointSettings
from workbench.sweep.statistics import estimate

if TYPE_CHECKING:
    from workbench.engine import Completion, Engine

_TOGETHER = 4  # passages scored at once: each keeps `[token, vocabulary]` log-probabilities
COMPARED = ("kl", "top1", "loss", "loss_exact", "scalings_l1", "scalings_rank", "same_tokens")


def measure_fidelity(point: PointSettings, repeat: int, prepared: Any, folder: Path) -> dict[str, Any]:
    """Score a policy on a point's texts and return its figures, each with the interval of its mean over passages.

    Writes `passages.parquet` (a row per passage) and `tokens.parquet` (a row per token) to `folder`.

    Raises:
        CheckFailed: a request that failed.
        UserError: texts that are not there or too short.
    """
    import pandas as pd

    engine, mixture = prepared.engine, prepared.mixture
    passages = passages_of(point, engine)
    rows, tokens = [], []
    for first in range(0, len(passages), _TOGETHER):
        for passage, one, other in compared(engine, mixture, point.policy, passages[first : first + _TOGETHER]):
            per_token = differences(one, other)
            rows.append({"passage": passage.name, "domain": passage.domain, "tokens": len(passage.continuation),
                         **{key: float(np.nanmean(values)) for key, values in per_token.items()}})
            tokens.append(pd.DataFrame({"passage": passage.name, "domain": passage.domain,
                                        "place": np.arange(len(per_token["kl"])), **per_token}))
    cost, free = free_running(engine, mixture, point.policy, passages)
    for row, same in zip(rows, free, strict=True):
        row["same_tokens"] = same
    pd.DataFrame(rows).to_parquet(folder / "passages.parquet", index=False)
    pd.concat(tokens).to_parquet(folder / "tokens.parquet", index=False)
    meta = {**meta_of(engine), "point": point.settings, "repeat": repeat}
    RunWriter(folder / "run", name=point.id, meta=meta).close()
    return {**summary(rows), **cost}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return means over passages with their intervals, and the perplexities."""
    found: dict[str, float] = {"num_passages": len(rows)}
    for key in COMPARED:
        mean = estimate([row[key] for row in rows], lambda values: np.mean(values, axis=-1))
        found |= {key: mean.value, f"{key}_low": mean.low, f"{key}_high": mean.high}
    return {**found, "perplexity": float(np.exp(found["loss"])), "perplexity_exact": float(np.exp(found["loss_exact"]))}


def compared(
    engine: Engine, mixture: str, policy: str, passages: Sequence[Passage]
) -> list[tuple[Passage, tuple[Completion, Trace], tuple[Completion, Trace]]]:
    """Return each passage with what exact scalings and what the policy make of it."""
    with engine.record("scalings") as recorder:
        exact = engine.score([each.prompt for each in passages], [each.continuation for each in passages],
                             mixture=mixture, distributions=True)
        # one by one: another batch shape
        others = [engine.score(each.prompt, each.continuation, mixture=mixture, policy=policy, distributions=True)
                  for each in passages]
    for done in (*exact, *others):
        if done.error:
            raise CheckFailed(f"a passage was not scored: {done.error}")
    return [(passage, (one, recorder.trace(one.request_id)), (other, recorder.trace(other.request_id)))
            for passage, one, other in zip(passages, exact, others, strict=True)]


def differences(one: tuple[Completion, Trace], other: tuple[Completion, Trace]) -> dict[str, np.ndarray]:
    """Return float64 `[token]` of the continuation: how `other` differs from `one`, which is exact."""
    (exact, exact_trace), (policy, policy_trace) = one, other
    p, q = exact.distributions.astype(np.float64), policy.distributions.astype(np.float64)
    # a probability of 0 adds nothing, whatever the logarithm
    kl = np.where(np.isneginf(p), 0.0, np.exp(p) * (np.where(np.isneginf(p), 0.0, p) - q)).sum(1)
    # the row at a token says the next one: the prompt's last token's scalings made the first distribution
    start, stop = exact_trace.prompt_tokens - 1, exact_trace.num_tokens - 1
    mine, theirs = (trace.values[start:stop].astype(np.float64) for trace in (exact_trace, policy_trace))
    return {
        # rounding may leave a mean of logarithms a little below 0; it is no difference
        "kl": np.maximum(kl, 0.0), "top1": (p.argmax(1) == q.argmax(1)).astype(np.float64),
        "loss": -np.array(policy.logprobs), "loss_exact": -np.array(exact.logprobs),
        "scalings_l1": np.abs(mine - theirs).sum(2).mean(1), "scalings_rank": rank_correlation(mine, theirs),
    }  # fmt: skip


def rank_correlation(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return float64 `[token]`: Spearman's correlation over adapters of `[token, site, adapter]`, mean over sites.

    Equal weights share their mean rank. NaN where an adapter is alone, or all weights are equal.
    """
    if one.shape[2] < 2:
        return np.full(len(one), np.nan)
    first, second = (ranks - ranks.mean(2, keepdims=True) for ranks in (_ranks(one), _ranks(other)))
    scale = np.sqrt((first**2).sum(2) * (second**2).sum(2))
    found = np.divide((first * second).sum(2), scale, out=np.full(scale.shape, np.nan), where=scale > 0)
    missing = np.isnan(found)
    count = (~missing).sum(1)
    total = np.where(missing, 0.0, found).sum(1)
    return np.divide(total, count, out=np.full(len(found), np.nan), where=count > 0)


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return float64 ranks over the last axis, from 0; equal values share their mean rank."""
    below = (values[..., :, None] > values[..., None, :]).sum(-1)
    equal = (values[..., :, None] == values[..., None, :]).sum(-1)
    return below + (equal - 1) / 2


def free_running(
    engine: Engine, mixture: str, policy: str, passages: Sequence[Passage]
) -> tuple[dict[str, float], list[int]]:
    """Continue every passage's beginning greedily, one by one as a reader would wait for it, exactly and by the policy.

    Returns:
        The policy's cost: tok_s, forwards_per_token, scaling rows, computed and reused scalings; `tok_s_exact` and
        `forwards_per_token_exact` beside it. And for each passage how many tokens are the same.
    """
    costs = {"": _Cost(), "_exact": _Cost()}
    same = []
    for number, passage in enumerate(passages):
        texts = {}
        # by turns, so that what slows the machine down meets both
        for suffix in ("", "_exact") if number % 2 else ("_exact", ""):
            chosen = policy if not suffix else "exact"
            texts[suffix] = costs[suffix].generate(engine, passage, mixture, chosen)
        pairs = list(zip(texts[""], texts["_exact"], strict=True))
        same.append(next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs)))
    return {f"{key}{suffix}": value for suffix, cost in costs.items() for key, value in cost.figures().items()}, same


class _Cost:
    """What generating took, summed over passages."""

    def __init__(self) -> None:
        self.seconds, self.tokens = 0.0, 0
        self.counts = dict.fromkeys(("forwards", "scaling_rows"), 0)
        self.computed = self.reused = 0

    def generate(self, engine: Engine, passage: Passage, mixture: str, policy: str) -> tuple[int, ...]:
        before, started = engine.counters(), time.perf_counter()
        done = engine.generate(passage.prompt, mixture=mixture, policy=policy, max_tokens=len(passage.continuation),
                               ignore_eos=True)
        if done.error:
            raise CheckFailed(f"a passage was not continued: {done.error}")
        self.seconds += time.perf_counter() - started
        after = engine.counters()
        for key in self.counts:
            self.counts[key] += after[key] - before[key]
        self.tokens += len(done.token_ids)
        self.computed += done.scalings_computed
        self.reused += done.scalings_reused
        return done.token_ids

    def figures(self) -> dict[str, float]:
        return {
            "tok_s": self.tokens / self.seconds, "forwards_per_token": self.counts["forwards"] / self.tokens,
            "scaling_rows_per_token": self.counts["scaling_rows"] / self.tokens,
            "scalings_computed": self.computed, "scalings_reused": self.reused,
        }  # fmt: skip
