"""sgmv: y[t] += B[s(t)] (A[s(t)] x[t]) for rows that each use one adapter.

s(t) is the slot of row t, given as segments of consecutive rows. An adapter is rows `start:stop` of the stacked
factors: a `[rank, in]` holds A, b `[rank, out]` holds B transposed with alpha/r folded in, so adapters of any rank
lie side by side and each costs its own rank. The op is punica's segmented gather matrix-vector product (SGMV).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lora_kernels.checks import Cost, check_rows
from lora_kernels.segments import Segment, check_segments

Spans = Mapping[int, tuple[int, int]]


def sgmv_reference(y: Tensor, x: Tensor, a: Tensor, b: Tensor, segments: tuple[Segment, ...], spans: Spans) -> Tensor:
    """Return y plus the deltas in float32; the specification of `sgmv`."""
    out = y.float()
    for start, stop, slot in segments:
        first, last = spans.get(slot, (0, 0))
        out[start:stop] += (x[start:stop].float() @ a[first:last].float().T) @ b[first:last].float()
    return out


def sgmv(y: Tensor, x: Tensor, a: Tensor, b: Tensor, segments: tuple[Segment, ...], spans: Spans) -> Tensor:
    """Add each row's adapter delta to y in place and return y.

    Args:
        y: `[row, out]`, the base layer's output.
        x: `[row, in]`, its input.
        a: `[rank, in]`, stacked A factors of the site's adapters.
        b: `[rank, out]`, stacked B factors, transposed and scaled.
        segments: sorted, disjoint; rows in none of them are left alone.
        spans: slot -> `(first, last)` rank rows of a and b. A slot without a span has no delta at this site.

    Raises:
        ValueError: operands or segments that do not fit.
    """
    check_rows("sgmv", y, x, a, b)
    check_segments("sgmv", segments, x.shape[0])
    for start, stop, slot in segments:
        first, last = spans.get(slot, (0, 0))
        if not 0 <= first <= last <= a.shape[0]:
            raise ValueError(f"sgmv: slot {slot} spans rank rows {first} to {last}, but a has {a.shape[0]}")
        if first < last:
            shrunk = x[start:stop] @ a[first:last].T  # [row, rank]
            y[start:stop].addmm_(shrunk, b[first:last])
    return y


def cost(num_rows: int, rank: int, in_features: int, out_features: int, itemsize: int, num_adapters: int = 1) -> Cost:
    """Return the least work of `num_rows` rows spread over `num_adapters` adapters of one rank."""
    factors = num_adapters * rank * (in_features + out_features)
    rows = num_rows * (in_features + 2 * out_features)
    return Cost(2 * num_rows * rank * (in_features + out_features), (factors + rows) * itemsize)
