"""Stream: the KV sequence of one kind of row of one request.

Contract: rows written past `length` do not exist until `length` grows over them. A forward writes, the commit grows
`length`; so a step that fails, and a draft that is rejected, leave the stream as it was.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST_CAPACITY = 64  # tokens; grows by doubling


class Stream:
    """Keys and values of one sequence, every layer.

    Attributes:
        length: tokens whose KV is valid.
        capacity_hint: tokens the sequence will have at most; buffers never grow past it.
    """

    def __init__(self, capacity_hint: int):
        self.length = 0
        self.capacity_hint = capacity_hint
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, keys: Tensor, values: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Write rows at positions `first...` of one layer and return all keys and values up to the last of them.

        Args:
            layer: the layer's index.
            keys, values: `[kv_head, row, head_dim]`.
            first: position of the first row; at most `length` plus rows written before in this step.

        Returns:
            Views `[kv_head, first + row, head_dim]`.
        """
        stop = first + keys.shape[1]
        held = self._layers.get(layer)
        if held is None or held[0].shape[1] < stop:
            held = self._layers[layer] = (self._grown(held, 0, keys, stop), self._grown(held, 1, values, stop))
        for buffer, rows in zip(held, (keys, values), strict=True):
            buffer[:, first:stop] = rows
        return held[0][:, :stop], held[1][:, :stop]

    def free(self) -> None:
        """Drop the buffers."""
        self._layers.clear()
        self.length = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers, unused capacity included."""
        return sum(t.numel() * t.element_size() for pair in self._layers.values() for t in pair)

    def _grown(self, held: tuple[Tensor, Tensor] | None, side: int, rows: Tensor, stop: int) -> Tensor:
        capacity = held[side].shape[1] if held else _FIRST_CAPACITY
        while capacity < stop:
            capacity *= 2
        capacity = max(stop, min(capacity, self.capacity_hint))
        buffer = torch.empty(rows.shape[0], capacity, rows.shape[2], dtype=rows.dtype, device=rows.device)
        if held:
            buffer[:, : held[side].shape[1]] = held[side]
        return buffer
