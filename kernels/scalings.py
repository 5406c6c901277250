"""scalings: classifier outputs -> adapter weights, per token and site.

    S = softmax(logits / T)          over adapters, if softmax is on
    S = S masked to its k largest    per token and site, if top_k; not renormalised
    S = softmax over the survivors   if softmax_topk (no temperature)

Source: the X-LoRA paper's layer as PEFT computes it (softmax before top-k; the mask is not renormalised).
"""

from __future__ import annotations

import torch
from torch import Tensor


def scalings(
    logits: Tensor,
    *,
    softmax: bool = True,
    temperature: float = 1.0,
    top_k: int | None = None,
    softmax_topk: bool = False,
) -> Tensor:
    """Turn classifier outputs into scalings.

    Args:
        logits: `[..., adapter]`, any float dtype.
        softmax: normalise over adapters with `temperature`; off, the raw outputs are the weights.
        temperature: > 0.
        top_k: keep the k largest weights of each token and site, set the others to 0; None keeps all.
        softmax_topk: normalise the kept weights (all of them without `top_k`) by a softmax of their own.

    Returns:
        float32 `[..., adapter]`.

    Raises:
        ValueError: a temperature, `top_k` or combination that means nothing.
    """
    if not temperature > 0:
        raise ValueError(f"scalings: temperature must be above 0, not {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"scalings: top_k must be at least 1, not {top_k}")
    weights = logits.float()
    if softmax:
        weights = torch.softmax(weights / temperature, dim=-1)
    if top_k is not None or softmax_topk:
        weights = keep_top_k(weights, top_k or weights.shape[-1], softmax_topk)
    return weights


def keep_top_k(weights: Tensor, top_k: int, softmax_topk: bool = False) -> Tensor:
    """Keep the `top_k` largest of the last axis, zero the rest; with `softmax_topk` renormalise the kept ones."""
    top = weights.topk(min(top_k, weights.shape[-1]), dim=-1)
    # per token and site: a softmax over the whole masked tensor would mix tokens
    kept = torch.softmax(top.values, dim=-1) if softmax_topk else top.values
    return torch.zeros_like(weights).scatter_(-1, top.indices, kept)
