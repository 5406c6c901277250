"""Attention over packed rows: each span of a batch attends to its own stream, and to nothing else.

Registered with transformers under `NAME`; the model hands the batch through as `step_batch`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.engine.batch import StepBatch

NAME = "lora_workbench"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step_batch: StepBatch,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Write the rows' keys and values into their streams and attend.

    Args:
        module: the attention layer; its `layer_idx` names the layer.
        query: `[1, head, row, head_dim]`.
        key, value: `[1, kv_head, row, head_dim]`.
        attention_mask: None; the batch says who sees whom.
        step_batch: the rows' owners.
        scaling: factor of the scores; None is 1/sqrt(head_dim).
        sliding_window: a row sees at most this many positions, its own included.
        softcap: scores become `softcap * tanh(scores / softcap)`.

    Returns:
        `[1, row, head, head_dim]` (zeros in padding rows) and None.
    """
    assert attention_mask is None, "a mask reached packed attention: positions alone decide who sees whom"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = query.new_zeros(query.shape[2], query.shape[1], value.shape[-1])
    for span in step_batch.spans:
        rows, first = slice(span.start, span.stop), span.plan.first
        keys, values = span.plan.stream.extend(module.layer_idx, key[0, :, rows], value[0, :, rows], first)
        attend = _by_row if step_batch.reference_attention else _by_span
        out[rows] = attend(query[0, :, rows], keys, values, scale, sliding_window, softcap).transpose(0, 1)
    return out[None], None


def _by_span(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    num_rows, length = query.shape[1], keys.shape[1]
    if softcap:
        return _explicit(query, keys, values, scale, softcap, _mask(num_rows, length, window, query.device))
    causal, mask = False, None
    if window is not None and window < length and num_rows == 1:
        keys, values = keys[:, length - window :], values[:, length - window :]
    elif num_rows == length and (window is None or window >= length):
        causal = num_rows > 1
    elif num_rows > 1:
        mask = _mask(num_rows, length, window, query.device)
    grouped = query.shape[0] != keys.shape[0]
    return F.scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )[0]


def _by_row(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    num_rows, length = query.shape[1], keys.shape[1]
    out = query.new_empty(query.shape[0], num_rows, values.shape[-1])
    for row in range(num_rows):
        stop = length - num_rows + row + 1
        start = 0 if window is None else max(0, stop - window)
        # copies: a product's rounding may depend on strides, and those on the buffer's capacity
        k, v = keys[:, start:stop].contiguous(), values[:, start:stop].contiguous()
        out[:, row : row + 1] = _explicit(query[:, row : row + 1], k, v, scale, softcap, None)
    return out


def _explicit(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None, mask: Tensor | None
) -> Tensor:
    groups = query.shape[0] // keys.shape[0]
    k = keys.repeat_interleave(groups, dim=0).float()
    v = values.repeat_interleave(groups, dim=0)
    scores = (query.float() @ k.transpose(1, 2)) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, dim=-1).to(v.dtype) @ v


def _mask(num_rows: int, length: int, window: int | None, device: torch.device) -> Tensor:
    rows = torch.arange(length - num_rows, length, device=device)[:, None]
    columns = torch.arange(length, device=device)[None]
    seen = columns <= rows
    return seen if window is None else seen & (columns > rows - window)
