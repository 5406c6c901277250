"""Attention over packed rows: each span of a batch attends to its own stream, and to nothing else.

Registered with transformers under `NAME`; the model hands the batch through as `step_batch`, whose `attention` is the
plan of this forward.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

NAME = "lora_workbench"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step_batch: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Write the rows' keys and values into their streams and attend.

    Args:
        module: the attention layer; its `layer_idx` names the layer.
        query: `[1, head, row, width]`.
        key, value: `[1, kv_head, row, width]`.
        attention_mask: None; the batch says who sees whom.
        step_batch: the batch; its `attention` says where the rows lie.
        scaling: factor of the scores; None is 1/sqrt(width).
        sliding_window: a row sees at most this many positions, its own included.
        softcap: scores become `softcap * tanh(scores / softcap)`.

    Returns:
        `[1, row, head, width]` (zeros in padding rows) and None.
    """
    assert attention_mask is None, "a mask reached packed attention: positions alone decide who sees whom"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    plan = step_batch.attention
    return plan.attend(module.layer_idx, query[0], key[0], value[0], scale, sliding_window, softcap)[None], None
