"""The formulas of attention: one fast, one written out, and one row by row that every other is held against.

Shapes are `[..., head, row, width]` for queries and `[..., kv_head, token, width]` for what they see; the last row sees
the last token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def fused(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool, mask: Tensor | None) -> Tensor:
    """Return torch's fused attention, `[..., head, row, width]`."""
    if query.dim() == 3:
        return fused(query[None], keys[None], values[None], scale, causal, mask)[0]
    grouped = query.shape[-3] != keys.shape[-3]
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def explicit(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None, mask: Tensor | None
) -> Tensor:
    """Return softmax attention written out, with scores in float32 and, optionally, capped."""
    groups = query.shape[-3] // keys.shape[-3]
    k = keys.repeat_interleave(groups, dim=-3).float()
    v = values.repeat_interleave(groups, dim=-3)
    scores = (query.float() @ k.transpose(-1, -2)) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, dim=-1).to(v.dtype) @ v


def by_row(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Return `explicit` of each row on copies of what it sees: no bit depends on neighbours or on where KV lies."""
    num_rows, length = query.shape[1], keys.shape[1]
    out = query.new_empty(query.shape[0], num_rows, values.shape[-1])
    for row in range(num_rows):
        stop = length - num_rows + row + 1
        start = 0 if window is None else max(0, stop - window)
        # copies: a product's rounding may depend on strides, and those on where the stream lies
        k, v = keys[:, start:stop].contiguous(), values[:, start:stop].contiguous()
        out[:, row : row + 1] = explicit(query[:, row : row + 1], k, v, scale, softcap, None)
    return out


def visible_mask(num_rows: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """Return `[row, token]`: whether each of the last `num_rows` of `length` positions sees each position."""
    rows = torch.arange(length - num_rows, length, device=device)[:, None]
    columns = torch.arange(length, device=device)[None]
    seen = columns <= rows
    return seen if window is None else seen & (columns > rows - window)
