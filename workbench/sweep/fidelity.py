"""What a reuse policy loses against exact scalings, on given texts; and what it saves.

Each passage is scored twice, teacher-forced, by exact scalings and by the policy: the same tokens go in, so what
differs is the mixture alone. Then both continue its beginning freely.

    kl            mean over tokens of sum_v p(v) log(p(v) / q(v)), p exact, q the policy, nats per token
    top1          share of tokens at which both have the same likeliest next token
    loss          mean of -log q(next token of the text); `loss_exact` by exact scalings
    scalings_l1   mean over tokens and sites of sum_a |w(a) - w'(a)|, from 0 to 2 where weights sum to 1
    scalings_rank Spearman's correlation of the adapters' weights, mean over tokens and sites
    same_tokens   generated tokens before the two free texts part

Null pair: the exact texts run a few together, the policy's scored one by one and continued all together. So for the
policy "exact" these are what another batch shape alone changes. Intervals are of the mean over passages, by bootstrap
over the texts that they were cut from: passages of one text are no independent ones.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.engine.result import completion_of
from workbench.errors import UserError
from workbench.instrument.run_meta import meta_of
from workbench.instrument.run_writer import RunWriter
from workbench.instrument.trace import Trace
from workbench.sweep.checking import CheckFailed
from workbench.sweep.passages import Passage, passages_of, switch_place
from workbench.sweep.point import PointSettings
from workbench.sweep.statistics import mean_over
from workbench.sweep.tasks import memory_bytes
from workbench.sweep.traffic import Arrival, serve

if TYPE_CHECKING:
    import pandas as pd

    from workbench.engine import Completion, Engine

_TOGETHER = 3  # exact passages that run at once
_SHARE = 0.25  # of the memory, for distributions
_MOST_DOMAINS = 16  # that have figures of their own
COMPARED = ("kl", "top1", "loss", "loss_exact", "scalings_l1", "scalings_rank", "same_tokens")
_SOURCES = ("text", "other_text")  # columns of passages.parquet: what a passage is of, and what it switches to
Scored = tuple["Completion", Trace]


@dataclass(frozen=True)
class Reference:
    """What exact scalings make of some passages.

    Attributes:
        scored: of each passage, its scores with all distributions, and its trace.
        generated: of each passage, the tokens that exact scalings go on with.
    """

    scored: tuple[Scored, ...]
    generated: tuple[tuple[int, ...], ...]


# the last of each engine: policies of one set of texts follow each other, and distributions are large
_references: weakref.WeakKeyDictionary[Any, tuple[Any, Reference]] = weakref.WeakKeyDictionary()


def measure_fidelity(point: PointSettings, repeat: int, prepared: Any, folder: Path) -> dict[str, Any]:
    """Score a policy on a point's texts and return its figures, each with the interval of its mean over passages.

    Writes `passages.parquet` (a row per passage) and `tokens.parquet` (a row per token) to `folder`.

    Raises:
        CheckFailed: a request that failed.
        UserError: texts that are not there or too short.
    """
    engine, mixture = prepared.engine, prepared.mixture
    passages = passages_of(point, engine)
    require_memory(engine, passages)
    reference = reference_of(engine, mixture, passages)
    rows, tokens, cost = compared(engine, mixture, point.policy, passages, reference)
    rows.to_parquet(folder / "passages.parquet", index=False)
    tokens.assign(switch_at=switch_place(point)).to_parquet(folder / "tokens.parquet", index=False)
    meta = {**meta_of(engine), "point": point.settings, "repeat": repeat}
    RunWriter(folder / "run", name=point.id, meta=meta).close()
    return {**summary(rows), **cost}


def compared(
    engine: Engine, mixture: str, policy: str, passages: Sequence[Passage], reference: Reference
) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, float]]:
    """Score and continue passages under a policy; return a row per passage, a row per token, and what it took."""
    import pandas as pd

    cost, generated = free_running(engine, mixture, policy, passages)
    rows, tokens = [], []
    for passage, exact, continued, own in zip(passages, reference.scored, reference.generated, generated, strict=True):
        per_token = differences(exact, scored(engine, mixture, policy, [passage])[0])
        facts = {"passage": passage.name, "domain": passage.domain}
        texts = dict(zip(_SOURCES, passage.sources or (passage.name,), strict=False))
        means = {key: _mean(values) for key, values in per_token.items()}
        rows.append({**facts, **texts, "tokens": len(passage.continuation), **means,
                     "same_tokens": same_tokens(continued, own)})
        tokens.append(pd.DataFrame({**facts, "place": np.arange(len(passage.continuation)), **per_token}))
    return pd.DataFrame(rows), pd.concat(tokens, ignore_index=True), cost


def summary(rows: pd.DataFrame) -> dict[str, float]:
    """Return means over passages with their intervals, the perplexities, and those of each domain where there are few.

    `num_texts` is how many distinct texts the passages are of: intervals resample those.

    A figure that no passage has (ranks of a mixture of one adapter) is left out.
    """
    sources = sources_of(rows)
    texts = {one for each in sources for one in each}
    found: dict[str, float] = {"num_passages": len(rows), "num_texts": len(texts)}
    for key in COMPARED:
        held = rows[key].notna().tolist()
        if any(held):
            mean = mean_over(rows[key].dropna().tolist(), list(itertools.compress(sources, held)))
            found |= {key: mean.value, f"{key}_low": mean.low, f"{key}_high": mean.high}
    found |= {"perplexity": float(np.exp(found["loss"])), "perplexity_exact": float(np.exp(found["loss_exact"]))}
    parts = rows.groupby("domain", sort=False)
    if 1 < len(parts) <= _MOST_DOMAINS:
        for domain, own in parts:
            found[f"kl:{domain}"] = float(own["kl"].mean())
            found[f"perplexity:{domain}"] = float(np.exp(own["loss"].mean()))
            found[f"perplexity_exact:{domain}"] = float(np.exp(own["loss_exact"].mean()))
    return found


def sources_of(rows: pd.DataFrame) -> list[tuple[str, ...]]:
    """Return of each passage the text, or the two, that it is of; where that was not said, each is of its own."""
    if _SOURCES[0] not in rows:
        return [(str(number),) for number in range(len(rows))]
    columns = [rows[key] for key in _SOURCES if key in rows]
    return [tuple(one for one in each if isinstance(one, str)) for each in zip(*columns, strict=True)]


def num_that_fit(engine: Engine, passages: Sequence[Passage]) -> int:
    """Return how many passages' distributions, of the longest of them, fit well into memory at once; at least one."""
    longest, vocab = max(len(each.continuation) for each in passages), engine.model.vocab_size
    return max(1, int(memory_bytes() * _SHARE / (longest * vocab * 4)))


def require_memory(engine: Engine, passages: Sequence[Passage]) -> None:
    """Raise unless all distributions of the passages fit well into memory: they are kept from policy to policy."""
    if len(passages) > num_that_fit(engine, passages):
        tokens, vocab = sum(len(each.continuation) for each in passages), engine.model.vocab_size
        raise UserError(f"{len(passages)} passages have {tokens} tokens, whose distributions over {vocab} tokens take "
                        f"{tokens * vocab * 4 / 1e9:.1f} GB, more than a quarter of the memory; lower passages or "
                        "passage_tokens")


def _mean(values: np.ndarray) -> float:
    held = values[~np.isnan(values)]
    return float(held.mean()) if len(held) else float("nan")


def reference_of(engine: Engine, mixture: str, passages: Sequence[Passage]) -> Reference:
    """Return what exact scalings make of passages; the last answer of each engine is kept.

    It is that of the mixture as it is loaded now: another of that name is another.
    """
    key = [mixture, engine.mixtures[mixture].content_key, *((each.prompt, each.continuation) for each in passages)]
    if engine in _references and _references[engine][0] == key:
        return _references[engine][1]
    found: list[Scored] = []
    generated: list[tuple[int, ...]] = []
    for first in range(0, len(passages), _TOGETHER):
        part = passages[first : first + _TOGETHER]
        found += scored(engine, mixture, "exact", part)
        generated += free_running(engine, mixture, "exact", part)[1]
    _references[engine] = (key, Reference(tuple(found), tuple(generated)))
    return _references[engine][1]


def scored(engine: Engine, mixture: str, policy: str, passages: Sequence[Passage]) -> list[Scored]:
    """Score passages together; return each one's scores with all distributions, and its trace."""
    with engine.record("scalings") as recorder:
        done = engine.score([each.prompt for each in passages], [each.continuation for each in passages],
                            mixture=mixture, policy=policy, distributions=True)
    for each in done:
        if each.error:
            raise CheckFailed(f"a passage was not scored: {each.error}")
    return [(each, recorder.trace(each.request_id)) for each in done]


def differences(one: Scored, other: Scored) -> dict[str, np.ndarray]:
    """Return float64 `[token]` of the continuation: how `other` differs from `one`, which is exact."""
    (exact, exact_trace), (policy, policy_trace) = one, other
    p, q = exact.distributions.astype(np.float64), policy.distributions.astype(np.float64)
    # the row at a token says the next one: the prompt's last token's scalings made the first distribution
    start, stop = exact_trace.prompt_tokens - 1, exact_trace.num_tokens - 1
    mine, theirs = (trace.values[start:stop].astype(np.float64) for trace in (exact_trace, policy_trace))
    return {
        "kl": divergence(p, q), "top1": (p.argmax(1) == q.argmax(1)).astype(np.float64),
        "loss": -np.array(policy.logprobs), "loss_exact": -np.array(exact.logprobs),
        "scalings_l1": np.abs(mine - theirs).sum(2).mean(1), "scalings_rank": rank_correlation(mine, theirs),
    }  # fmt: skip


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return float64 `[token]`: KL(p ‖ q) of log-probabilities `[token, vocab]`, nats.

    sum p log(p / q) - p + q: the last two cancel for distributions, and take out what rounding leaves of their sums;
    every term is at least 0.
    """
    there = ~np.isneginf(p)
    # a probability of 0 adds nothing to the first term, whatever the other is
    gap = np.subtract(p, q, out=np.zeros_like(p), where=there)
    return np.maximum(np.exp(p) * gap - np.exp(p) + np.exp(q), 0.0).sum(1)


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
) -> tuple[dict[str, float], list[tuple[int, ...]]]:
    """Continue the passages' beginnings greedily, all together; return what it took, and the tokens of each.

    Of the figures, `tok_s` is of all of them together, prompts included; `forwards_per_token` is the forwards that one
    of them waits for, over its tokens; the others are summed.
    """
    options = {"mixture": mixture, "policy": policy}
    arrivals = [Arrival(None, each.prompt, len(each.continuation), options) for each in passages]
    # what others left in the prefix cache would be found instead of computed
    engine.memory.pool.clear()
    before, started = engine.counters(), time.perf_counter()
    served = serve(engine, arrivals, engine.config.max_requests)
    seconds = time.perf_counter() - started
    for each in served:
        if each.request.error:
            raise CheckFailed(f"a passage was not continued: {each.request.error}")
    ended = {id(each.arrival): completion_of(each.request) for each in served}
    done = [ended[id(arrival)] for arrival in arrivals]
    tokens = sum(len(each.token_ids) for each in done)
    figures = {
        "tok_s": tokens / seconds, "forwards_per_token": sum(each.forwards for each in served) / tokens,
        "scaling_rows": engine.counters()["scaling_rows"] - before["scaling_rows"],
        **{key: sum(getattr(each, key) for each in done) for key in ("scalings_computed", "scalings_reused")},
    }  # fmt: skip
    return figures, [each.token_ids for each in done]


def same_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two texts have in common before they part."""
    pairs = list(zip(one, other, strict=False))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))
