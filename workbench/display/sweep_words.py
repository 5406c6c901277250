"""What the columns of a sweep's table are called on an axis: in words, with units."""

from __future__ import annotations

from workbench.display.labels import visible

_PERCENTILES = {"p50": "median", "p95": "95th percentile", "p99": "99th percentile"}
_TIMES = {
    "ttft_ms": "time to the first token", "time_per_token_ms": "time per token after the first",
    "total_ms": "time of a whole request",
}  # fmt: skip
_WORDS = {
    "tok_s": "tokens per second", "requests_s": "requests per second", "wall_s": "seconds in all",
    "forward_ms": "milliseconds per forward", "forwards_per_token": "forwards per token",
    "goodput_requests_s": "requests per second within the promise", "ttft_ms": "time to the first token, milliseconds",
    "request_ms": "time of a whole request, milliseconds", "request_tok_s": "tokens per second of one request",
    "reused_share": "share of inputs with reused scalings", "accepted_share": "share of drafts accepted",
    "cached_share": "share of prompt tokens from the cache", "kv_peak_mb": "largest KV cache, MB",
    "kl": "KL against exact scalings, nats per token", "top1": "share of tokens with the same likeliest next one",
    "loss": "loss, nats per token", "loss_exact": "loss by exact scalings, nats per token",
    "scalings_l1": "distance of the scalings (L1)", "scalings_rank": "rank correlation of the scalings",
    "same_tokens": "tokens before free texts part", "peak_bytes": "largest memory of the process, bytes",
    "model_bytes": "weights of the base, bytes", "slots_bytes": "slots of adapters, bytes",
    "kv_peak_bytes": "largest KV cache, bytes", "concurrency": "requests at once",
    "adapters": "adapters to choose from", "slots": "adapters that run at once (slots)", "rank": "rank of the adapters",
    "popularity": "popularity of the adapters", "rate": "arriving requests per second", "policy": "reuse policy",
    "cv": "coefficient of variation of arrivals", "prompt_tokens": "tokens of a prompt", "tokens": "generated tokens",
    "slo_ttft_ms": "promised time to the first token, milliseconds",
    "slo_time_per_token_ms": "promised time per token, milliseconds", "kv_bytes": "memory for KV, bytes",
    "max_rows_per_step": "rows per forward, at most", "max_requests": "requests at once, at most",
    "passage_tokens": "tokens of a passage", "prefix_tokens": "tokens of a passage that are given",
}  # fmt: skip


def axis_words(column: str) -> str:
    """Return what a column holds, in words with its unit; a column that nobody told of keeps its name."""
    name, _, percentile = column.rpartition("_")
    if percentile in _PERCENTILES and name in _TIMES:
        return f"{_TIMES[name]}, {_PERCENTILES[percentile]}, milliseconds"
    return _WORDS.get(column) or visible(column)
