"""Traces: what a finished request and a recorder's watch over it become."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.adapters.merge import constant_weights
from workbench.engine.batch import ADAPTED
from workbench.engine.request import Request
from workbench.engine.text import token_texts
from workbench.errors import UserError, names
from workbench.instrument.recorded import Recorded
from workbench.instrument.trace import Trace
from workbench.instrument.wanted import Wanted


@dataclass(frozen=True)
class TraceLabels:
    """What a trace says about where it came from, beside the request's own facts."""

    base: str
    dtype: str
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ran:
    """What a request ran with, and how far, as its steps showed it.

    Attributes:
        adapters: names, in the order of the weights.
        sites: the sites that its weights are for, as far as they are recorded.
        keys: adapter -> content hash.
        num_inputs: how many of its positions were inputs of the model.
        unmeasured: why values are missing, in sentences.
    """

    adapters: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    num_inputs: int = 0
    unmeasured: tuple[str, ...] = ()


def require_traceable(request: Request, ran: Ran, wanted: Wanted, extras: Mapping[str, Recorded]) -> None:
    """Raise unless something was recorded of a request's tokens; the UserError says what is lacking."""
    if extras or _has_scalings(ran, wanted):
        return
    if not wanted.has_values:
        raise UserError(
            f"request {request.id!r} has no trace: only {names(wanted.kinds)} was recorded, which is of steps; "
            "record 'scalings' too"
        )
    is_base = request.adapter is None and request.merged is None and request.mixture is None
    why = f" ({request.error})" if request.error else ""
    reason = f"has no trace: it ended before any of its rows was recorded{why}"
    if is_base and not wanted.measures:
        reason = "ran the base model alone: it has no scalings to trace; name a mixture, or record 'entropy'"
    elif ran.adapters and not wanted.measures:
        reason = f"has no scalings to trace: none of its sites matches {names(wanted.patterns or ())}"
    raise UserError(f"request {request.id!r} {reason}")


def trace_of(
    request: Request, tokenizer: Any, labels: TraceLabels, ran: Ran, wanted: Wanted, extras: Mapping[str, Recorded]
) -> Trace:
    """Return the trace of a request that has ended: of a mixture, the scalings that every input used.

    An adapter alone has the weight 1 at every input, adapters in constant proportions have theirs; the base model has
    no scalings.

    Args:
        request: the request.
        tokenizer: for the tokens' texts; None shows their ids.
        labels: where it ran.
        ran: what it ran with.
        wanted: what was recorded.
        extras: what was measured.
    """
    num_tokens, prompt = len(request.tokens), len(request.prompt_ids)
    values, source = _scalings(request, ran, wanted)
    return Trace(
        values=values,
        adapters=ran.adapters if values.size else (),
        sites=ran.sites if values.size else (),
        token_ids=np.asarray(request.tokens, dtype=np.int64),
        tokens=token_texts(tokenizer, request.tokens) if tokenizer else tuple(f"<{i}>" for i in request.tokens),
        positions=np.arange(num_tokens, dtype=np.int64),
        generated=np.arange(num_tokens) >= prompt,
        source=source,
        draft=np.asarray([-1] * prompt + request.drafts + [-1] * num_tokens, dtype=np.int8)[:num_tokens],
        time_s=np.asarray(([0.0] * prompt + request.token_times_s + [0.0] * num_tokens)[:num_tokens]),
        metadata=_metadata(request, labels, ran),
        extras=extras,
    )


def _has_scalings(ran: Ran, wanted: Wanted) -> bool:
    return "scalings" in wanted.kinds and bool(ran.sites)


def _scalings(request: Request, ran: Ran, wanted: Wanted) -> tuple[np.ndarray, np.ndarray]:
    """Return values `[token, site, adapter]` and source `[token]`."""
    num_tokens, mixture = len(request.tokens), request.mixture
    source = np.full(num_tokens, -1, dtype=np.int64)
    if not _has_scalings(ran, wanted):
        return np.empty((num_tokens, 0, 0), dtype=np.float32), source
    values = np.full((num_tokens, len(ran.sites), len(ran.adapters)), np.nan, dtype=np.float32)
    rows = len(request.sources) if mixture is not None else min(ran.num_inputs, num_tokens)
    if mixture is None:
        weights = constant_weights(request.merged) if request.merged is not None else [1.0]
        values[:rows], source[:rows] = np.asarray(weights, dtype=np.float32), np.arange(rows)
        return values, source
    used, source[:rows] = request.used(0, rows).numpy(), request.sources
    if ran.sites != mixture.sites:
        index = {site: place for place, site in enumerate(mixture.sites)}
        used = used[:, [index[site] for site in ran.sites]]
    values[:rows] = used
    return values, source


def _metadata(request: Request, labels: TraceLabels, ran: Ran) -> dict[str, Any]:
    mixture, config = request.mixture, request.mixture.config if request.mixture is not None else None
    found = {
        "request_id": request.id, "base": labels.base, "mixture": mixture.name if mixture is not None else None,
        "adapter": request.adapter, "dtype": labels.dtype, "policy": getattr(request.policy, "name", None),
        "tgt_non_granular_index": getattr(request.policy, "k", None), "seed": request.seed,
        "temperature": request.sampling.temperature, "finish_reason": request.finish_reason,
        "cached_tokens": request.cached.get(ADAPTED, 0), "preemptions": request.num_preemptions,
        "mixture_key": mixture.content_key if mixture is not None else None, "adapter_keys": dict(ran.keys),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip
    if config is not None:
        found |= {
            "scaling_pass_value": config.scaling_pass_value, "top_k_lora": config.top_k_lora,
            "global_scaling_weight": config.global_scaling_weight, "softmax": config.enable_softmax,
        }
    if request.merged is not None:
        weights = constant_weights(request.merged)
        found["merged_adapters"] = dict(zip(request.merged.ids, map(float, weights), strict=True))
    if request.error:
        found["error"] = request.error
    if request.edits:
        found["edits"] = list(request.edits)
    if ran.unmeasured:
        found["unmeasured"] = list(ran.unmeasured)
    return {**found, **labels.extra}
