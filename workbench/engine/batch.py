"""StepBatch: everything one forward needs to know about its rows.

Contract: frozen, built once per step by the scheduler, passed down as an argument. Row order is token order within a
span; every per-row tensor has length `num_rows`, padding included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_kernels.segments import BASE_SLOT, segments
from workbench.adapters.linear import EVERY_SITE, MixtureSegment, RowWeights
from workbench.adapters.merge import constant_weights
from workbench.engine.attention_plan import AttentionPlan, attention_plan

if TYPE_CHECKING:
    from workbench.engine.blocks import BlockPool
    from workbench.engine.paged import PagedStream
    from workbench.engine.request import Request

SCALING, ADAPTED = "scaling", "adapted"


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """Rows one request wants in the next forward, all of one of its streams.

    Attributes:
        request: whose rows.
        kind: "scaling" or "adapted".
        first: position of the first row.
        token_ids: one per row.
        drafted: the last row is a drafted token, not yet chosen by the adapted model.
        num_logits: how many of the last rows need logits: 1 to choose or draft a token, more to score given ones.
    """

    request: Request
    kind: str
    first: int
    token_ids: tuple[int, ...]
    drafted: bool = False
    num_logits: int = 0

    @property
    def stop(self) -> int:
        """Position after the last row."""
        return self.first + len(self.token_ids)

    @property
    def stream(self) -> PagedStream:
        """The KV sequence these rows extend."""
        return self.request.streams[self.kind]


@dataclass(frozen=True, slots=True)
class RowSpan:
    """A `SpanPlan` placed in a forward: rows `start:stop`."""

    plan: SpanPlan
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """Rows of one forward.

    Attributes:
        token_ids, positions: int64 `[row]`.
        spans: which rows are whose; rows after the last span are padding.
        weights: every row's weights over adapter slots.
        attention: where the rows' keys and values go, and what each row sees.
        row_padding: pad every other product (classifier, logits) to this many rows too; 0 is off.
    """

    token_ids: Tensor
    positions: Tensor
    spans: tuple[RowSpan, ...]
    weights: RowWeights
    attention: AttentionPlan
    row_padding: int = 0

    @property
    def num_rows(self) -> int:
        """Rows, padding included."""
        return len(self.token_ids)

    @property
    def requests(self) -> tuple[Request, ...]:
        """Whose rows these are, each once."""
        return tuple(dict.fromkeys(span.plan.request for span in self.spans))

    @property
    def logit_spans(self) -> tuple[RowSpan, ...]:
        """Spans with rows that need logits, in row order."""
        return tuple(span for span in self.spans if span.plan.num_logits)

    @property
    def logit_rows(self) -> list[int]:
        """Rows that need logits, in row order."""
        return [row for span in self.logit_spans for row in range(span.stop - span.plan.num_logits, span.stop)]

    def spans_of(self, kind: str) -> tuple[RowSpan, ...]:
        """Spans of one kind of stream."""
        return tuple(span for span in self.spans if span.plan.kind == kind)


def build_batch(
    plans: Iterable[SpanPlan], pool: BlockPool, row_padding: int = 0, reference_attention: bool = False
) -> StepBatch:
    """Place plans in one forward; rows of one slot, and rows of one mixture, end up side by side.

    Args:
        plans: their streams have blocks for their rows.
        pool: the streams'.
        row_padding: pad to a multiple of this many rows; 0 is off.
        reference_attention: attend row by row, so that a row's numbers do not depend on its neighbours.
    """
    device = pool.device
    placed: list[RowSpan] = []
    token_ids: list[int] = []
    positions: list[int] = []
    for plan in sorted(plans, key=_group):
        start = len(token_ids)
        token_ids += plan.token_ids
        positions += range(plan.first, plan.stop)
        placed.append(RowSpan(plan, start, len(token_ids)))
    padding = -len(token_ids) % row_padding if row_padding else 0
    token_ids += [0] * padding
    positions += [0] * padding
    return StepBatch(
        torch.tensor(token_ids, dtype=torch.int64, device=device),
        torch.tensor(positions, dtype=torch.int64, device=device),
        tuple(placed),
        _row_weights(placed, len(token_ids), device, bool(row_padding)),
        attention_plan(placed, pool, reference_attention, device),
        row_padding,
    )


def _group(plan: SpanPlan) -> tuple:
    mixture, slot = plan.request.mixture, plan.request.slot
    if plan.request.merged is not None:
        return (2, plan.request.merged_slots, plan.kind)
    if mixture is None:
        return (0,) if slot == BASE_SLOT else (1, slot)
    return (2, mixture.slots, plan.kind)


def _row_weights(spans: list[RowSpan], num_rows: int, device: torch.device, fixed_shape: bool) -> RowWeights:
    slots = [BASE_SLOT] * num_rows
    mixtures: list[MixtureSegment] = []
    for span in spans:
        request, (start, stop) = span.plan.request, (span.start, span.stop)
        if request.merged is not None:
            weights = torch.tensor(constant_weights(request.merged), device=device)[None, None]
            _join_mixture(mixtures, MixtureSegment(start, stop, request.merged_slots, weights, EVERY_SITE))
        elif request.mixture is None:
            slots[start:stop] = [request.slot] * (stop - start)
        elif (weights := request.row_weights(span.plan.kind, span.plan.first, span.plan.stop)) is not None:
            mixture = request.mixture
            segment = MixtureSegment(start, stop, mixture.slots, weights.to(device), mixture.site_index)
            _join_mixture(mixtures, segment)
    return RowWeights(num_rows, segments(slots), tuple(mixtures), fixed_shape)


def _join_mixture(placed: list[MixtureSegment], new: MixtureSegment) -> None:
    last = placed[-1] if placed else None
    if last and last.stop == new.start and last.slots == new.slots and last.site_index is new.site_index:
        weights = _joined(last, new)
        if weights is not None:
            placed[-1] = MixtureSegment(last.start, new.stop, new.slots, weights, new.site_index)
            return
    placed.append(new)


def _joined(left: MixtureSegment, right: MixtureSegment) -> Tensor | None:
    """Return the weights of two neighbours as one segment; None when one is constant and the other is not."""
    one, other = left.weights, right.weights
    if one.shape[:2] == other.shape[:2] == (1, 1) and torch.equal(one, other):
        return one
    by_row = len(one) == left.stop - left.start and len(other) == right.stop - right.start
    return torch.cat([one, other]) if by_row and one.shape[1] == other.shape[1] else None
