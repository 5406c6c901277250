"""AttentionPlan: which slots of the pool each row of a forward writes and sees.

Made once per step; what depends on a layer's window is worked out once per window. Contract: a row attends to slots of
its own stream at its own position or before, and no other slot of the pool is ever read: it may hold anything.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lora_kernels.triton_support import runs_triton
from workbench.engine.attend import by_row, explicit, fused, visible_mask
from workbench.engine.blocks import BlockPool, KVShape
from workbench.engine.decode import ExtentRows, KernelRows, PaddedRows, SeenRow

_DECODE_ROWS = 2  # a span of so few rows is decoded: one row, or one and a draft
# longest sequence, in tokens, that is copied to attend to many at once: a copy then costs less than a call for each
# (experiments/engine/README.md)
_PADDED_TOKENS = 192


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Where the rows of one forward lie in the pool.

    Attributes:
        pool: the streams' blocks.
        spans: with `start`, `stop` (rows of the forward) and `plan.first`, `plan.stop`, `plan.stream`.
        rows: int64 `[row]`, the slot of every row that is not padding.
        reference: attend row by row on copies in token order: no bit then depends on blocks or neighbours.
    """

    pool: BlockPool
    spans: tuple[Any, ...]
    rows: Tensor
    reference: bool = False
    _layouts: dict[int | None, _Layout] = field(default_factory=dict)

    def keep_hidden(self, hidden: Tensor) -> None:
        """Keep the hidden rows `[row, hidden]` of a forward, padding left out, beside their KV."""
        self.pool.hidden.index_copy_(0, self.rows, hidden[: len(self.rows)])

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Write one layer's keys and values, `[kv_head, row, width]`, and return `[row, head, width]`.

        Args:
            layer: its index.
            query: `[head, row, width]`.
            key, value: what the rows add.
            scale: factor of the scores.
            window: a row sees at most this many positions, its own included; None for all.
            softcap: scores become `softcap * tanh(scores / softcap)`.
        """
        keys, values, num_rows = self.pool.keys[layer], self.pool.values[layer], len(self.rows)
        keys.index_copy_(1, self.rows, key[:, :num_rows])
        values.index_copy_(1, self.rows, value[:, :num_rows])
        if window not in self._layouts:
            self._layouts[window] = _Layout(self, window)
        layout = self._layouts[window]
        out = query.new_empty(query.shape[1], query.shape[0], value.shape[-1])
        out[num_rows:] = 0
        for rows in layout.decoded:
            rows.attend(out, query, keys, values, scale, softcap)
        for span in layout.spans:
            out[span.start : span.stop] = span.attend(query, keys, values, scale, softcap, self.reference)
        return out


def attention_plan(
    spans: Sequence[Any], pool: BlockPool, reference: bool = False, device: torch.device | str | None = None
) -> AttentionPlan:
    """Plan one forward; the spans' streams must have reserved their rows, in blocks of their own."""
    slots: list[int] = []
    for span in spans:
        assert span.start == len(slots), "spans do not follow one another"
        span.plan.stream.require_writable(span.plan.first, span.plan.stop)
        slots += span.plan.stream.rows(span.plan.first, span.plan.stop)
    rows = torch.tensor(slots, dtype=torch.int64, device=pool.device if device is None else device)
    return AttentionPlan(pool, tuple(spans), rows, reference)


class ShapeProbe:
    """Stands in for an `AttentionPlan` in a forward of one row, to learn what the layers' KV takes.

    Attributes:
        layers: layer index -> (KV heads, key width, value width).
        windows: layer index -> its sliding window, None without one.
    """

    def __init__(self) -> None:
        self.layers: dict[int, tuple[int, int, int]] = {}
        self.windows: dict[int, int | None] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Note the shapes and return zeros `[row, head, width]`."""
        self.layers[layer] = (key.shape[0], key.shape[-1], value.shape[-1])
        self.windows[layer] = window
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[-1])

    def keep_hidden(self, hidden: Tensor) -> None:
        """Nothing is kept."""

    def shape(self, hidden_size: int, dtype: torch.dtype) -> KVShape:
        """Return what a token takes."""
        return KVShape(dict(sorted(self.layers.items())), hidden_size, dtype)

    @property
    def window(self) -> int | None:
        """How many positions back any layer looks, if every layer has a window: KV before them can be dropped."""
        seen = list(self.windows.values())
        return None if not seen or None in seen else max(seen)


class _Layout:
    """What rows see through one window: decoded rows together, longer spans one at a time."""

    def __init__(self, plan: AttentionPlan, window: int | None):
        self.spans: list[_Span] = []
        decoded: list[SeenRow] = []
        pool = plan.pool
        has_kernel = runs_triton(pool.hidden)
        # products in halves would round the scores: there, each long row gets a call of its own
        is_exact = pool.shape.dtype == torch.float32
        for span in plan.spans:
            first, stop = span.plan.first, span.plan.stop
            is_copied = pool.device.type != "cpu" or stop - _start(first, window) <= _PADDED_TOKENS
            if plan.reference or stop - first > _DECODE_ROWS or not (has_kernel or is_copied or is_exact):
                self.spans.append(_Span.of(span, window, pool.device))
                continue
            for row, position in enumerate(range(first, stop), span.start):
                decoded.append(SeenRow(row, span.plan.stream, _start(position, window), position))
        self.decoded = _decoded(decoded, pool, window, has_kernel) if decoded else []


def _decoded(
    rows: list[SeenRow], pool: BlockPool, window: int | None, has_kernel: bool
) -> list[KernelRows | PaddedRows | ExtentRows]:
    if has_kernel:
        return [KernelRows(rows, window, pool.device)]
    most = _PADDED_TOKENS if pool.device.type == "cpu" else math.inf
    copied = [row for row in rows if row.length <= most]
    in_place = [row for row in rows if row.length > most]
    found: list[Any] = PaddedRows.of_all(copied, pool.shape.dtype, pool.device, _PADDED_TOKENS)
    return [*found, ExtentRows(in_place, pool.device)] if in_place else found


@dataclass(frozen=True, eq=False)
class _Span:
    """A span's rows and the slots they see: one range, read in place, or an index."""

    start: int
    stop: int
    window: int | None
    extent: tuple[int, int] | None
    index: Tensor | None
    seen: int
    device: torch.device

    @classmethod
    def of(cls, span: Any, window: int | None, device: torch.device) -> _Span:
        first = _start(span.plan.first, window)
        extents = span.plan.stream.extents(first, span.plan.stop)
        extent, index = extents[0], None
        if len(extents) > 1:
            extent, index = None, torch.cat([torch.arange(*each) for each in extents]).to(device)
        return cls(span.start, span.stop, window, extent, index, span.plan.stop - first, device)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None, reference: bool
    ) -> Tensor:
        """Return `[row, head, width]`."""
        query = query[:, self.start : self.stop]
        if self.index is None:
            keys, values = (side[:, self.extent[0] : self.extent[1]] for side in (keys, values))
        else:
            keys, values = (side.index_select(1, self.index) for side in (keys, values))
        if reference:
            return by_row(query, keys, values, scale, self.window, softcap).transpose(0, 1)
        num_rows = self.stop - self.start
        if softcap:
            return explicit(query, keys, values, scale, softcap, self._mask).transpose(0, 1)
        whole = num_rows == self.seen and (self.window is None or self.window >= self.seen)
        causal = whole and num_rows > 1
        mask = None if whole or num_rows == 1 else self._mask
        return fused(query, keys, values, scale, causal, mask).transpose(0, 1)

    @functools.cached_property
    def _mask(self) -> Tensor:
        return visible_mask(self.stop - self.start, self.seen, self.window, self.device)


def _start(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)
