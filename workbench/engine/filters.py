"""Drawing a token from what temperature, top-k, typical-p, top-p and min-p leave of a distribution.

A filter's cut lies near the top, so the likeliest few hundred tokens are looked at first; a row whose cut does not
provably lie among them looks at more, in the end at all. So the result never depends on how many were looked at, nor on
the other rows. Among equal scores the lower id comes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workbench.engine.noise import exponential
from workbench.engine.ranking import first_largest, likeliest, rows_of

if TYPE_CHECKING:
    from workbench.engine.choosing import Question
    from workbench.engine.sampling import Sampling

# how many of the likeliest tokens a row looks at, until its cut lies among them
_WIDTHS = (64, 1024)
_IN_CACHE = 2**16  # noise of that many tokens is made at once on a CPU: more would not stay in its cache
# beyond them differences of logits leave float32; below it is greedy already, and above all tokens are alike
_COLDEST, _HOTTEST = 1e-30, 1e30
_SMALLEST = torch.finfo(torch.float32).tiny
_NONE = float("-inf")
_ORDER = ("top_k", "typical_p", "top_p", "min_p")


def draw(scores: Tensor, peaks: Tensor, questions: Sequence[Question]) -> Tensor:
    """Return one token of each row, int64 `[row]`.

    Args:
        scores: float32 `[row, vocab]`: logits after penalties.
        peaks: float32 `[row]`: the largest score of each row.
        questions: of the rows; temperatures are above 0.
    """
    tokens = torch.zeros(len(questions), dtype=torch.int64, device=scores.device)
    by_filter: dict[str | None, list[int]] = {}
    vocab_size = scores.shape[1]
    for row, question in enumerate(questions):
        by_filter.setdefault(_first_filter(question.sampling, vocab_size), []).append(row)
    for first, rows in by_filter.items():
        for part, picked in _picked(first, rows, scores, peaks, questions):
            tokens[part] = picked
    return tokens


def _picked(
    first: str | None, rows: list[int], scores: Tensor, peaks: Tensor, questions: Sequence[Question]
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield rows and their tokens, until all `rows` are done."""
    vocab_size = scores.shape[1]
    if first is None:
        at_once = max(1, _IN_CACHE // vocab_size) if scores.device.type == "cpu" else len(rows)
        for start in range(0, len(rows), at_once):
            part = rows[start : start + at_once]
            yield part, _draw_from_all(rows_of(scores, part), peaks[part], [questions[row] for row in part])
        return
    for width in (*(width for width in _WIDTHS if width < vocab_size), vocab_size):
        part = [row for row in rows if first != "top_k" or questions[row].sampling.top_k < width or width == vocab_size]
        if not part:
            continue
        picked, is_exact = _draw_from_top(
            first, rows_of(scores, part), peaks[part], [questions[row] for row in part], width
        )
        yield part, picked
        done = {row for row, exact in zip(part, is_exact.tolist(), strict=True) if exact}
        rows = [row for row in rows if row not in done]


def _draw_from_all(scores: Tensor, peaks: Tensor, questions: Sequence[Question]) -> Tensor:
    relative = (scores - peaks[:, None]).div_(_temperatures(questions, scores.device))
    noise = exponential(torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device), _keys(questions))
    return first_largest(relative.exp_().div_(noise))[1]


def _draw_from_top(
    first: str, scores: Tensor, peaks: Tensor, questions: Sequence[Question], width: int
) -> tuple[Tensor, Tensor]:
    """Return each row's token, int64 `[row]`, and whether looking at more could not change it, bool `[row]`."""
    heat = _temperatures(questions, scores.device)
    values, ids = likeliest(scores, width)
    values = (values - peaks[:, None]).div_(heat)
    shares = entropy = None
    if first in ("typical_p", "top_p"):
        everything = (scores - peaks[:, None]).div_(heat).softmax(-1)
        shares = everything.gather(1, ids)
        entropy = _entropy(everything) if first == "typical_p" else None
    kept = torch.ones_like(values, dtype=torch.bool)
    for name in _ORDER[_ORDER.index(first) :]:
        amounts = [_amount(question.sampling, name) for question in questions]
        if all(amount is None for amount in amounts):
            continue
        if shares is None:
            shares = values.where(kept, _NONE).softmax(-1)
        kept &= _filtered(name, values, shares, kept, _column(amounts, values), entropy)
        if name == first:
            is_exact = _is_exact(name, values, shares, kept, entropy)
        # what is left shares the whole anew
        shares = entropy = None
    left = values.where(kept, _NONE)
    weights = (left - left.amax(-1, keepdim=True)).exp_().div_(exponential(ids, _keys(questions)))
    return ids.gather(1, weights.argmax(-1, keepdim=True))[:, 0], is_exact


def _filtered(
    name: str, values: Tensor, shares: Tensor, kept: Tensor, amounts: Tensor, entropy: Tensor | None
) -> Tensor:
    """Return which of the tokens one filter keeps, bool `[row, width]`.

    Args:
        name: the filter's.
        values: log-probabilities up to a constant per row, falling; `[row, width]`, like all that follow.
        shares: probabilities, of what earlier filters keep.
        kept: what they keep.
        amounts: the setting of each row, `[row, 1]`; NaN where it is off.
        entropy: of the rows, `[row, 1]`, when it is not that of `shares`.
    """
    is_off = amounts.isnan()
    if name == "top_k":
        return values >= values.gather(1, amounts.long() - 1)
    if name == "top_p":
        # the token that crosses p is kept
        return (shares.cumsum(-1) - shares < amounts.clamp(min=_SMALLEST)) | is_off
    if name == "min_p":
        likeliest = values.where(kept, _NONE).amax(-1, keepdim=True)
        return ~((values - likeliest).exp_() < amounts)
    distance = _surprise(shares).sub_(_entropy(shares) if entropy is None else entropy).abs_()
    distance = distance.where(kept, -_NONE)
    nearest, order = distance.sort(dim=-1, stable=True)
    below = shares.gather(1, order).cumsum(-1) < amounts
    crossing = below.sum(-1, keepdim=True).clamp_(max=values.shape[1] - 1)
    return (distance <= nearest.gather(1, crossing)) | is_off


def _is_exact(name: str, values: Tensor, shares: Tensor, kept: Tensor, entropy: Tensor | None) -> Tensor:
    """Whether the first filter surely drops every token that was not looked at, bool `[row]`.

    Those are at most as likely as the last one looked at.
    """
    if name == "typical_p":
        # less likely tokens are further from the entropy than the last one, if that is on their side of it
        dropped = ~kept[:, -1] & (_surprise(shares[:, -1:]) > entropy)[:, 0]
    else:
        dropped = values.where(kept, -_NONE).amin(-1) > values[:, -1]
    return dropped | (values[:, -1] == _NONE)


def _surprise(shares: Tensor) -> Tensor:
    return shares.log().neg_()


def _entropy(shares: Tensor) -> Tensor:
    # a sum over many rows at once may add in another order than a sum over one
    return torch.stack([row.sum() for row in torch.special.entr(shares)])[:, None]


def _first_filter(sampling: Sampling, vocab_size: int) -> str | None:
    for name in _ORDER:
        amount = _amount(sampling, name)
        if amount is not None and not (name == "top_k" and amount >= vocab_size):
            return name
    return None


def _amount(sampling: Sampling, name: str) -> float | None:
    """A filter's setting, None where it is off."""
    amount = getattr(sampling, name)
    off = 0 if name == "min_p" else 1
    return None if amount is None or (name != "top_k" and amount == off) else amount


def _column(amounts: Sequence[float | None], like: Tensor) -> Tensor:
    rows = [[float("nan") if amount is None else amount] for amount in amounts]
    return torch.tensor(rows, dtype=torch.float32, device=like.device)


def _temperatures(questions: Sequence[Question], device: torch.device) -> Tensor:
    rows = [[min(max(question.sampling.temperature, _COLDEST), _HOTTEST)] for question in questions]
    return torch.tensor(rows, dtype=torch.float32, device=device)


def _keys(questions: Sequence[Question]) -> list[tuple[int, int]]:
    return [(question.seed, question.position) for question in questions]
