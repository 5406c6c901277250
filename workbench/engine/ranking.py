"""The largest scores of each row, found fast and always in the same order: equal scores by rising token id."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_CHUNK = 256  # tokens whose largest score is found at once: many times faster than argmax on a CPU


def rows_of(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Return `values[rows]`, rows rising; a view where they lie together."""
    first, count = rows[0], len(rows)
    if rows[-1] - first + 1 == count:
        return values[first : first + count]
    return values.index_select(0, torch.tensor(rows, device=values.device))


def first_largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest score of each row and its first place, both `[row]`.

    Args:
        scores: `[row, vocab]`.
    """
    size = scores.shape[1]
    if scores.device.type != "cpu" or size < 8 * _CHUNK:
        return scores.max(-1)
    whole = size - size % _CHUNK
    largest = scores[:, :whole].unflatten(1, (-1, _CHUNK)).amax(-1)
    if whole < size:
        largest = torch.cat([largest, scores[:, whole:].amax(-1, keepdim=True)], dim=1)
    peaks, chunks = largest.max(-1)
    # past the end the last token is looked at again, which cannot be the first
    places = (chunks[:, None] * _CHUNK + torch.arange(_CHUNK)).clamp_(max=size - 1)
    return peaks, places.gather(1, scores.gather(1, places).argmax(-1, keepdim=True))[:, 0]


def likeliest(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the `width` largest scores of each row, falling, and their ids; both `[row, width]`.

    Which of several scores equal to the last one are among them is not defined, unless all are.
    """
    if width == scores.shape[1]:
        return scores.sort(dim=-1, descending=True, stable=True)
    values, ids = scores.topk(width, dim=-1)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)
